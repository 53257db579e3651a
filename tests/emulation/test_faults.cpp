// What a kernel may do wrong, and the report that the launch returns for it: both places, the CTA and the
// thread.
#include <cmath>
#include <vector>

#include "common/device.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

// The report of a kernel that must fail, under three schedules; that of ascending order is returned.
template <class Body>
std::string fault_of(const LaunchShape& shape, const Body& body) {
  for (const Schedule schedule : {Schedule::descending, Schedule::random, Schedule::ascending}) {
    set_options(Options{.schedule = schedule});
    CHECK(run_grid(shape, body) == cudaErrorLaunchFailure);
  }
  return cudaGetErrorString(cudaErrorLaunchFailure);
}

std::string at_line(int line) { return "test_faults.cpp:" + std::to_string(line); }

TEST(fault_divergent_shuffle) {
  constexpr int LINE = __LINE__;
  const std::string text = fault_of({2, 32, 0}, [] {
    if (threadIdx.x < 16) {
      __shfl_xor_sync(~0u, 1, 1);  // LINE + 3
    } else {
      __shfl_xor_sync(~0u, 1, 2);  // LINE + 5
    }
  });
  CHECK_CONTAINS(text, at_line(LINE + 5));
  CHECK_CONTAINS(text, "CTA (0,0,0), thread (16,0,0) (warp 0, lane 16): divergent __shfl_xor_sync");
  CHECK_CONTAINS(text, "lanes 0x0000ffff of the warp wait in __shfl_xor_sync");
  CHECK_CONTAINS(text, at_line(LINE + 3));
}

TEST(fault_masks_that_differ) {
  const std::string text = fault_of({1, 32, 0}, [] { __ballot_sync(threadIdx.x < 16 ? ~0u : ~1u, 1); });
  CHECK_CONTAINS(text,
                 "divergent __ballot_sync with mask 0xfffffffe: lanes 0x0000ffff of the warp wait in "
                 "__ballot_sync with mask 0xffffffff");
}

TEST(fault_lane_outside_the_mask) {
  CHECK_CONTAINS(fault_of({1, 32, 0}, [] { __syncwarp(0xfffeu); }),
                 "__syncwarp: the calling lane 0 is not in mask 0x0000fffe");
  const std::string text = fault_of({1, 32, 0}, [] {
    if (threadIdx.x < 16) __shfl_down_sync(0xffffu, 1, 1);
  });
  CHECK_CONTAINS(text, "lane 15 reads from lane 16, which is not in mask 0x0000ffff");
}

TEST(fault_shuffle_of_a_partial_warp) {
  CHECK_CONTAINS(fault_of({1, 40, 0}, [] { __shfl_xor_sync(~0u, 1, 16); }),
                 "reads from lane 16, which is not in mask 0x000000ff");
}

TEST(fault_shuffle_width) {
  CHECK_CONTAINS(fault_of({1, 32, 0}, [] { __shfl_sync(~0u, 1, 0, 12); }),
                 "width 12; supported: 1, 2, 4, 8, 16, 32");
}

TEST(fault_barrier_at_two_places) {
  constexpr int LINE = __LINE__;
  const std::string text = fault_of({1, 64, 0}, [] {
    if (threadIdx.x < 32) {
      __syncthreads();  // LINE + 3
    } else {
      __syncthreads();  // LINE + 5
    }
  });
  CHECK_CONTAINS(text, at_line(LINE + 5));
  CHECK_CONTAINS(text, "divergent __syncthreads: 32 threads of the CTA wait in __syncthreads at");
  CHECK_CONTAINS(text, at_line(LINE + 3));
}

TEST(fault_return_before_a_barrier) {
  const std::string text = fault_of({{3, 2}, 128, 0}, [] {
    if (blockIdx.x == 2 && threadIdx.x >= 100) return;
    __syncthreads();
  });
  CHECK_CONTAINS(text, "deadlock in CTA (2,0,0):\n  thread 0 to 99: waiting in __syncthreads at");
  CHECK_CONTAINS(text, "\n  thread 100 to 127: returned from the kernel");
}

TEST(fault_return_before_a_shuffle) {
  const std::string text = fault_of({1, 32, 0}, [] {
    if (threadIdx.x != 31) __shfl_sync(~0u, 1, 0);
  });
  CHECK_CONTAINS(text, "thread 0 to 30: waiting in __shfl_sync");
  CHECK_CONTAINS(text, "thread 31: returned from the kernel");
}

TEST(fault_deadlock_between_a_barrier_and_a_shuffle) {
  const std::string text = fault_of({1, 64, 0}, [] {
    if (threadIdx.x == 40) __syncwarp();
    __syncthreads();
  });
  CHECK_CONTAINS(text, "thread 0 to 39: waiting in __syncthreads");
  CHECK_CONTAINS(text, "thread 40: waiting in __syncwarp");
}

TEST(fault_misaligned_vector) {
  alignas(16) unsigned char bytes[64] = {};
  CHECK_CONTAINS(fault_of({1, 1, 0}, [&] { load_vector<uint4>(bytes + 8); }), "load_vector: address");
  CHECK_CONTAINS(cudaGetErrorString(cudaErrorLaunchFailure), "is not aligned to 16 bytes");
  CHECK_CONTAINS(fault_of({1, 1, 0}, [&] { store_vector(bytes + 2, 1.0f); }), "is not aligned to 4 bytes");
  CHECK_CONTAINS(fault_of({1, 1, 0}, [&] { __ldg(reinterpret_cast<const float2*>(bytes + 4)); }), "__ldg");
}

TEST(fault_vector_across_the_end_of_shared_memory) {
  CHECK_CONTAINS(fault_of({1, 1, 24}, [] { load_vector<uint4>(shared_memory() + 16); }),
                 "load_vector: 16 bytes at offset 16 are not inside the 24 bytes of shared memory");
}

TEST(fault_async_copy) {
  alignas(16) unsigned char source[64] = {};
  CHECK_CONTAINS(fault_of({1, 1, 64}, [&] { async_copy<16>(shared_memory() + 8, source); }),
                 "cp.async: shared memory offset 8 is not aligned to 16 bytes");
  CHECK_CONTAINS(fault_of({1, 1, 64}, [&] { async_copy<16>(shared_memory(), source + 4); }),
                 "is not aligned to 16");
  CHECK_CONTAINS(fault_of({1, 1, 64}, [&] { async_copy<16>(shared_memory() + 64, source); }),
                 "16 bytes at offset 64 are not inside the 64 bytes of shared memory");
  CHECK_CONTAINS(fault_of({1, 1, 64}, [&] { async_copy<8>(source, source + 8); }), "are not inside");
  CHECK_CONTAINS(fault_of({1, 1, 64}, [&] { async_copy<8>(shared_memory(), source, 9); }),
                 "source size 9 outside 0 to 8");
}

TEST(fault_async_copy_that_nobody_waits_for) {
  alignas(16) unsigned char source[16] = {};
  const auto copy_without_wait = [&] {
    async_copy<16>(shared_memory() + 16 * threadIdx.x, source);
    async_copy_commit();
  };
  CHECK_CONTAINS(fault_of({1, 2, 32}, copy_without_wait),
                 "the thread returned with 1 cp.async copies that no wait covers");
}

TEST(fault_ldmatrix) {
  uint32_t registers[4];
  CHECK_CONTAINS(
      fault_of({1, 32, 512}, [&] { ldmatrix<4, false>(registers, shared_memory() + 16 * threadIdx.x + 8); }),
      "ldmatrix: shared memory offset 8 is not aligned to 16 bytes");
  CHECK_CONTAINS(
      fault_of({1, 32, 256}, [&] { ldmatrix<4, false>(registers, shared_memory() + 16 * threadIdx.x); }),
      "ldmatrix: 16 bytes at offset 256 are not inside the 256 bytes of shared memory");
  CHECK_CONTAINS(fault_of({1, 40, 256},
                          [&] {
                            if (threadIdx.x >= 32) movmatrix_transposed(0);
                          }),
                 "movmatrix needs a whole warp, and the last one of a CTA of 40 threads is not");
}

TEST(fault_write_past_shared_memory) {
#if !defined(__SANITIZE_ADDRESS__)  // which stops the program at the write
  CHECK_CONTAINS(fault_of({1, 1, 20}, [] { shared_memory()[20] = 0; }),
                 "wrote past the end of the 20 bytes of shared memory");
#endif
}

TEST(faults_leave_the_machine_in_order) {
  for (int repeat = 0; repeat < 10; ++repeat) {
    CHECK(run_grid({3, 96, 64}, [] {
            if (threadIdx.x == 95 && blockIdx.x == 1) return;
            __syncthreads();
          }) == cudaErrorLaunchFailure);
    std::vector<int> results(96);
    CHECK(run_grid({1, 96, 0}, [&] {
            __syncthreads();
            results[threadIdx.x] = __popc(__ballot_sync(~0u, 1));
          }) == cudaSuccess);
    for (const int result : results) CHECK(result == 32);
  }
}

}  // namespace
}  // namespace pagedkv::emulator
