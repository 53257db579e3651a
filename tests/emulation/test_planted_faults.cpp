// Faults that only a sanitizer names, one for each argument: run under it, the program must end with its
// report, which CMakeLists.txt looks for. "none" does all of it properly and must stay silent.
#include <cstdio>
#include <cstring>
#include <memory>

#include "common/device.h"

namespace pagedkv::emulator {
namespace {

constexpr unsigned CTA_SIZE = 64;
constexpr size_t SHARED_BYTES = CTA_SIZE * sizeof(int);

struct Params {
  int* values;  // [CTA_SIZE]
};

template <class Body>
int run(Body body) {
  const auto values = std::make_unique<int[]>(CTA_SIZE);
  const Params params{values.get()};
  const cudaError_t error = run_grid({2, CTA_SIZE, SHARED_BYTES}, [&] { body(params); });
  if (error != cudaSuccess) std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}

int* shared_ints() { return reinterpret_cast<int*>(shared_memory()); }

// A value goes to the neighbour through shared memory and back into global memory.
void exchange(const Params& params, bool barrier_before_read, bool barrier_before_reuse) {
  int* shared = shared_ints();
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (barrier_before_read) __syncthreads();
  const int received = shared[threadIdx.x ^ 63];
  if (barrier_before_reuse) __syncthreads();
  shared[threadIdx.x] = received;
  params.values[threadIdx.x] = received;
}

void exchange_in_warp(const Params& params, bool barrier) {
  int* shared = shared_ints();
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  __shfl_xor_sync(0xffffffffu, 1, 1);  // meets the lanes, but orders no memory
  if (barrier) __syncwarp();
  params.values[threadIdx.x] = shared[threadIdx.x ^ 1];
}

void copy_async(const Params& params, bool barrier) {
  alignas(16) static const int source[4] = {1, 2, 3, 4};
  if (threadIdx.x % 4 == 0) async_copy<16>(shared_ints() + threadIdx.x, source);
  async_copy_wait_all();
  if (barrier) __syncthreads();
  params.values[threadIdx.x] = shared_ints()[threadIdx.x];
}

// A value is read before its place becomes the destination of another thread's copy.
void reuse_for_async_copy(const Params& params, bool barrier) {
  alignas(16) static const int source[4] = {1, 2, 3, 4};
  shared_ints()[threadIdx.x] = 0;
  __syncthreads();
  params.values[threadIdx.x] = shared_ints()[threadIdx.x ^ 1];
  if (barrier) __syncthreads();
  if (threadIdx.x % 4 == 0) async_copy<16>(shared_ints() + threadIdx.x, source);
  async_copy_wait_all();
}

int run_properly() {
  return run([](const Params& params) {
    exchange(params, true, true);
    __syncthreads();
    exchange_in_warp(params, true);
    __syncthreads();
    copy_async(params, true);
    __syncthreads();
    reuse_for_async_copy(params, true);
    __syncthreads();
    atomicAdd(params.values, 1);
  });
}

int run_fault(const char* name) {
  const auto is = [&](const char* fault_name) { return std::strcmp(name, fault_name) == 0; };
  if (is("none")) return run_properly();
  if (is("shared_overrun")) return run([](const Params&) { shared_ints()[threadIdx.x + 1] = 0; });
  if (is("shared_underrun")) return run([](const Params&) { shared_memory()[int(threadIdx.x) - 1] = 0; });
  if (is("global_overrun")) return run([](const Params& params) { params.values[threadIdx.x + 1] = 0; });
  if (is("misaligned_vector")) {
    return run([](const Params& params) { reinterpret_cast<int4*>(params.values + 1)->x = 0; });
  }
  if (is("no_barrier_before_read")) return run([](const Params& params) { exchange(params, false, true); });
  if (is("no_barrier_before_reuse")) return run([](const Params& params) { exchange(params, true, false); });
  if (is("no_syncwarp")) return run([](const Params& params) { exchange_in_warp(params, false); });
  if (is("no_barrier_after_async_copy")) return run([](const Params& params) { copy_async(params, false); });
  if (is("no_barrier_before_async_copy")) {
    return run([](const Params& params) { reuse_for_async_copy(params, false); });
  }
  if (is("plain_add")) return run([](const Params& params) { ++params.values[0]; });
  std::printf("no such fault: %s\n", name);
  return 2;
}

}  // namespace
}  // namespace pagedkv::emulator

int main(int argument_count, char** arguments) {
  return pagedkv::emulator::run_fault(argument_count > 1 ? arguments[1] : "none");
}
