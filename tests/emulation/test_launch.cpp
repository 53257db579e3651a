// What a launcher sees: errors of a launch, the environment, counters, and the runtime calls on host memory.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/device.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

void do_nothing(const void*) {}

std::string refusal_of(const LaunchShape& shape) {
  CHECK(run_grid(shape, do_nothing, nullptr) == cudaErrorInvalidConfiguration);
  return cudaGetErrorString(cudaErrorInvalidConfiguration);
}

TEST(launch_refuses_what_a_device_refuses) {
  CHECK_CONTAINS(refusal_of({0, 32, 0}), "grid (0,1,1)");
  CHECK_CONTAINS(refusal_of({{1, 65536}, 32, 0}),
                 "grid (1,65536,1); supported: (1 to 2147483647, 1 to 65535, ");
  CHECK_CONTAINS(refusal_of({{1, 1, 65536}, 32, 0}), "grid (1,1,65536)");
  CHECK_CONTAINS(refusal_of({1, 1025, 0}), "CTA (1025,1,1)");
  CHECK_CONTAINS(refusal_of({1, {64, 32}, 0}), "at most 1024 threads");
  CHECK_CONTAINS(refusal_of({1, {1, 1, 65}, 0}), "CTA (1,1,65)");
  CHECK_CONTAINS(refusal_of({1, 32, MAX_SHARED_BYTES + 1}),
                 "232449 bytes of shared memory; supported: up to 232448");
  CHECK(run_grid({{1, 65535, 1}, 1, MAX_SHARED_BYTES}, do_nothing, nullptr) == cudaSuccess);
}

TEST(launch_error_is_returned_once_and_the_next_launch_works) {
  CHECK(run_grid({2, 32, 0}, [] { __trap(); }) == cudaErrorLaunchFailure);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorLaunchFailure), "kernel fault: ");
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorLaunchFailure), "__trap()");
  int num_threads = 0;
  CHECK(run_grid({2, 32, 0}, [&] { atomicAdd(&num_threads, 1); }) == cudaSuccess);
  CHECK(num_threads == 64);
}

TEST(environment_chooses_the_schedule) {
  set_options(std::nullopt);
  const auto first_thread = [](const char* schedule) {
    setenv("PAGEDKV_EMULATOR_SCHEDULE", schedule, 1);
    int first = -1;
    const cudaError_t error =
        run_grid({1, 64, 0}, [&] { atomicCAS(&first, -1, static_cast<int>(threadIdx.x)); });
    return error == cudaSuccess ? first : -1;
  };
  CHECK(first_thread("ascending") == 0);
  CHECK(first_thread("descending") == 63);
  CHECK(first_thread("random:7") >= 0);
  for (const char* wrong : {"", "random", "random:", "random:x", "random:-1", "sideways"}) {
    CHECK(first_thread(wrong) == -1);
    CHECK_CONTAINS(cudaGetErrorString(cudaErrorInvalidValue),
                   "supported: ascending, descending, random:SEED");
  }
  unsetenv("PAGEDKV_EMULATOR_SCHEDULE");
  setenv("PAGEDKV_EMULATOR_WORKERS", "0", 1);
  CHECK(run_grid({1, 1, 0}, do_nothing, nullptr) == cudaErrorInvalidValue);
  setenv("PAGEDKV_EMULATOR_WORKERS", "2", 1);
  CHECK(run_grid({9, 1, 0}, do_nothing, nullptr) == cudaSuccess);
  unsetenv("PAGEDKV_EMULATOR_WORKERS");
}

TEST(a_fault_on_any_worker_ends_the_launch) {
  set_options(Options{.num_workers = 3});
  const cudaError_t error = run_grid({100, 32, 0}, [] {
    if (blockIdx.x == 42 && threadIdx.x == 3) __trap();
  });
  CHECK(error == cudaErrorLaunchFailure);
  CHECK_CONTAINS(cudaGetErrorString(error), "CTA (42,0,0), thread (3,0,0) (warp 0, lane 3): __trap()");
}

TEST(counters_count) {
  alignas(16) float source[4] = {};
  for (const int num_workers : {1, 2}) {
    set_options(Options{.num_workers = num_workers});
    reset_counters();
    const cudaError_t error = run_grid({4, 64, 1024}, [&] {
      __syncwarp();
      load_vector<float4>(source);
      async_copy<16>(shared_memory() + threadIdx.x * 16, source, 12);
      async_copy_wait_all();
      __syncthreads();
    });
    CHECK(error == cudaSuccess);
    const Counters count = counters();
    CHECK(count.ctas == 4 && count.barriers == 4 && count.warp_collectives == 8);
    CHECK(count.vector_bytes == 4 * 64 * 16 && count.async_copies == 256 &&
          count.async_copy_bytes_read == 256 * 12);
  }
}

TEST(runtime_copies_host_memory) {
  int source[6] = {1, 2, 3, 4, 5, 6}, destination[6] = {};
  CHECK(cudaMemcpyAsync(destination, source, sizeof(source), cudaMemcpyDefault) == cudaSuccess);
  CHECK(std::memcmp(destination, source, sizeof(source)) == 0);
  CHECK(cudaMemsetAsync(destination, 0, sizeof(destination)) == cudaSuccess);
  // Two rows of two, from rows of three into rows of two.
  CHECK(cudaMemcpy2DAsync(destination, 8, source, 12, 8, 2, cudaMemcpyDeviceToHost) == cudaSuccess);
  const int expected[6] = {1, 2, 4, 5, 0, 0};
  CHECK(std::memcmp(destination, expected, sizeof(expected)) == 0);
  CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess && cudaGetLastError() == cudaSuccess);
}

TEST(runtime_reports_wrong_arguments) {
  int value = 0;
  CHECK(cudaMemcpyAsync(nullptr, &value, 4, cudaMemcpyDefault) == cudaErrorInvalidValue);
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorInvalidValue), "cudaMemcpyAsync: null pointer");
  CHECK(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess);
  CHECK(cudaMemcpy2DAsync(&value, 4, &value, 4, 8, 1, cudaMemcpyDefault) == cudaErrorInvalidValue);
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorInvalidValue), "width 8 exceeds a pitch");
  CHECK(cudaMemsetAsync(nullptr, 0, 1) == cudaErrorInvalidValue);
  CHECK(cudaMemcpyAsync(nullptr, nullptr, 0, cudaMemcpyDefault) == cudaSuccess);
  CHECK(std::string(cudaGetErrorString(cudaSuccess)) == "no error");
}

}  // namespace
}  // namespace pagedkv::emulator
