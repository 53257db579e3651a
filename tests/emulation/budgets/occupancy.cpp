// Reads lines of "<architecture> <registers> <threads> <shared bytes>" and answers each with how many such
// CTAs an SM holds, by CUDA's own calculation.
#include <cuda_occupancy.h>

#include <cstdio>
#include <cstring>

namespace {

struct Architecture {
  const char* name;
  int major, minor, max_threads_per_sm, shared_kib_per_sm;
};

// CUDA C++ Programming Guide, "Compute Capabilities": technical specifications.
constexpr Architecture ARCHITECTURES[] = {
    {"sm_80", 8, 0, 2048, 164}, {"sm_86", 8, 6, 1536, 100},   {"sm_89", 8, 9, 1536, 100},
    {"sm_90", 9, 0, 2048, 228}, {"sm_100", 10, 0, 2048, 228}, {"sm_120", 12, 0, 1536, 100},
};

int ctas_per_sm(const Architecture& architecture, int registers, int threads, size_t shared_bytes) {
  constexpr size_t RESERVED_BYTES = 1024;  // of shared memory, for every CTA
  cudaOccDeviceProp device;
  device.computeMajor = architecture.major;
  device.computeMinor = architecture.minor;
  device.maxThreadsPerBlock = 1024;
  device.maxThreadsPerMultiprocessor = architecture.max_threads_per_sm;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536;
  device.warpSize = 32;
  device.sharedMemPerBlock = 48 * 1024;
  device.sharedMemPerMultiprocessor = static_cast<size_t>(architecture.shared_kib_per_sm) * 1024;
  device.sharedMemPerBlockOptin = device.sharedMemPerMultiprocessor - RESERVED_BYTES;
  device.reservedSharedMemPerBlock = RESERVED_BYTES;
  device.numSms = 1;
  cudaOccFuncAttributes kernel;
  kernel.maxThreadsPerBlock = threads;
  kernel.numRegs = registers;
  kernel.sharedSizeBytes = 0;
  kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  kernel.maxDynamicSharedSizeBytes = shared_bytes;
  kernel.numBlockBarriers = 1;
  cudaOccDeviceState state;
  state.cacheConfig = CACHE_PREFER_NONE;
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult result;
  const cudaOccError error =
      cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared_bytes);
  return error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1;
}

}  // namespace

int main() {
  char name[16];
  int registers, threads;
  size_t shared_bytes;
  while (std::scanf("%15s %d %d %zu", name, &registers, &threads, &shared_bytes) == 4) {
    int answer = -1;
    for (const Architecture& architecture : ARCHITECTURES) {
      if (std::strcmp(architecture.name, name) == 0) {
        answer = ctas_per_sm(architecture, registers, threads, shared_bytes);
      }
    }
    std::printf("%d\n", answer);
  }
}
