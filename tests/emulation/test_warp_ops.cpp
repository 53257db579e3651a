// Shuffles, votes, reductions and arithmetic against scalar definitions.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/device.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

// results[lane] = body(lane) of a whole warp.
template <class Value, class Body>
std::vector<Value> run_warp(Body body, unsigned num_lanes = 32) {
  std::vector<Value> results(num_lanes);
  const cudaError_t error =
      run_grid({1, num_lanes, 1024}, [&] { results[threadIdx.x] = body(static_cast<int>(threadIdx.x)); });
  if (!CHECK(error == cudaSuccess)) std::printf("%s\n", cudaGetErrorString(error));
  return results;
}

TEST(shuffles_move_values_of_up_to_eight_bytes) {
  const auto doubles = run_warp<double>([](int lane) { return __shfl_sync(~0u, lane + 0.5, 7); });
  const auto halves =
      run_warp<uint16_t>([](int lane) { return __shfl_xor_sync(~0u, static_cast<uint16_t>(lane), 3); });
  for (int lane = 0; lane < 32; ++lane) {
    CHECK(doubles[static_cast<size_t>(lane)] == 7.5);
    CHECK(halves[static_cast<size_t>(lane)] == (lane ^ 3));
  }
}

TEST(shuffles_read_the_lane_of_the_definition) {
  for (int width = 1; width <= 32; width *= 2) {
    for (int operand = 0; operand < 32; ++operand) {
      const auto index = run_warp<int>([&](int lane) { return __shfl_sync(~0u, lane, operand, width); });
      const auto up = run_warp<int>(
          [&](int lane) { return __shfl_up_sync(~0u, lane, static_cast<unsigned>(operand), width); });
      const auto down = run_warp<int>(
          [&](int lane) { return __shfl_down_sync(~0u, lane, static_cast<unsigned>(operand), width); });
      const auto exclusive_or =
          run_warp<int>([&](int lane) { return __shfl_xor_sync(~0u, lane, operand, width); });
      for (int lane = 0; lane < 32; ++lane) {
        const int segment = lane / width * width;
        const auto idx = static_cast<size_t>(lane);
        CHECK(index[idx] == segment + operand % width);
        CHECK(up[idx] == (lane - operand >= segment ? lane - operand : lane));
        CHECK(down[idx] == (lane + operand < segment + width ? lane + operand : lane));
        CHECK(exclusive_or[idx] == ((lane ^ operand) < segment + width ? lane ^ operand : lane));
      }
    }
  }
}

TEST(parts_of_a_warp_meet_on_their_own) {
  // Halves of different length of life: the lower one shuffles twice before the whole warp meets.
  const auto results = run_warp<int>([](int lane) {
    int value = lane;
    if (lane < 16) {
      value = __shfl_xor_sync(0xffffu, value, 1);
      value = __shfl_xor_sync(0xffffu, value, 2);
    } else if (lane >= 24) {
      value = __shfl_down_sync(0xff000000u, value, 1, 8);
    }
    return value * 100 + __shfl_xor_sync(~0u, lane, 16);
  });
  for (int lane = 0; lane < 32; ++lane) {
    const int value = lane < 16 ? lane ^ 3 : (lane >= 24 && lane < 31 ? lane + 1 : lane);
    CHECK(results[static_cast<size_t>(lane)] == value * 100 + (lane ^ 16));
  }
}

TEST(the_last_warp_may_be_partial) {
  const auto results = run_warp<int>([](int) { return __popc(__ballot_sync(~0u, 1)); }, 40);
  for (size_t thread = 0; thread < 40; ++thread) CHECK(results[thread] == (thread < 32 ? 32 : 8));
}

TEST(votes_and_matches) {
  const auto ballots = run_warp<uint32_t>([](int lane) { return __ballot_sync(~0u, lane % 5 == 0); });
  const auto any =
      run_warp<int>([](int lane) { return __any_sync(~0u, lane == 9) * 2 + __any_sync(~0u, 0); });
  const auto all =
      run_warp<int>([](int lane) { return __all_sync(~0u, 1) * 2 + __all_sync(~0u, lane != 9); });
  const auto masked = run_warp<int>([](int lane) { return lane < 8 ? __all_sync(0xffu, lane < 8) : 1; });
  const auto matches =
      run_warp<uint32_t>([](int lane) { return __match_any_sync(~0u, lane % 4 == 0 ? -1 : lane); });
  for (size_t lane = 0; lane < 32; ++lane) {
    CHECK(ballots[lane] == 0x42108421u && any[lane] == 2 && all[lane] == 2 && masked[lane] == 1);
    CHECK(matches[lane] == (lane % 4 == 0 ? 0x11111111u : 1u << lane));
  }
}

TEST(warp_reductions_follow_the_sign_of_the_type) {
  constexpr uint32_t ODD_LANES = 0xaaaaaaaau;
  const auto sums =
      run_warp<int>([](int lane) { return lane % 2 ? __reduce_add_sync(ODD_LANES, lane) : 256; });
  const auto wrapped = run_warp<unsigned>([](int) { return __reduce_add_sync(~0u, 0x80000001u); });
  const auto lows = run_warp<int>([](int lane) { return __reduce_min_sync(~0u, lane - 16); });
  const auto unsigned_lows =
      run_warp<unsigned>([](int lane) { return __reduce_min_sync(~0u, static_cast<unsigned>(lane - 16)); });
  const auto highs =
      run_warp<unsigned>([](int lane) { return __reduce_max_sync(~0u, static_cast<unsigned>(lane - 16)); });
  const auto bits = run_warp<unsigned>([](int lane) {
    const unsigned own = 1u << lane;
    return (__reduce_or_sync(~0u, own) == ~0u) + (__reduce_and_sync(~0u, ~0u ^ (own & 1)) == ~1u) * 2 +
           (__reduce_xor_sync(~0u, own | 1) == ~1u) * 4;
  });
  for (size_t lane = 0; lane < 32; ++lane) {
    CHECK(sums[lane] == 256 && wrapped[lane] == 32 && lows[lane] == -16 && unsigned_lows[lane] == 0);
    CHECK(highs[lane] == 0xffffffffu && bits[lane] == 7);
  }
}

TEST(arithmetic_is_that_of_the_device) {
  CHECK(__ffs(0) == 0 && __ffs(1) == 1 && __ffs(1 << 31) == 32 && __clz(0) == 32 && __clz(1) == 31 &&
        __clz(-1) == 0);
  CHECK(__popc(0xf0f0f0f0u) == 16 && __popcll(~0ull) == 64);
  CHECK(min(1, 2) == 1 && max(1, int64_t{1} << 40) == int64_t{1} << 40 && min(2.0f, 1.0f) == 1.0f);
  CHECK(__float_as_uint(1.0f) == 0x3f800000u && __uint_as_float(0x7f800000u) == INFINITY);
  CHECK(__float_as_int(-0.0f) == INT32_MIN && __int_as_float(0) == 0.0f && __float2int_rn(2.5f) == 2);
  CHECK(rsqrtf(4.0f) == 0.5f && __expf(0.0f) == 1.0f && __logf(1.0f) == 0.0f &&
        __fdividef(1.0f, 4.0f) == 0.25f);
}

TEST(vector_types_have_the_alignment_of_the_device) {
  CHECK(alignof(uint2) == 8 && alignof(uint4) == 16 && alignof(float3) == 4 && sizeof(float3) == 12);
  CHECK(alignof(ushort4) == 8 && alignof(char4) == 4 && alignof(longlong2) == 16 && alignof(double4) == 16);
  CHECK(make_int4(1, 2, 3, 4).w == 4 && make_uint2(5, 6).y == 6 && dim3(7).z == 1);
}

TEST(vector_accesses_reach_shared_and_global_memory) {
  alignas(16) const uint32_t source[4] = {1, 2, 3, 4};
  const auto results = run_warp<uint32_t>([&](int lane) {
    unsigned char* slot = shared_memory() + 16 * lane;
    store_vector(slot, load_vector<uint4>(source));
    const uint2 back = load_vector<uint2>(slot + 8);
    return back.x * 10 + back.y + __ldg(&source[0]) * 100;
  });
  for (size_t lane = 0; lane < 32; ++lane) CHECK(results[lane] == 134);
}

}  // namespace
}  // namespace pagedkv::emulator
