// ldmatrix, movmatrix and mma against plain loops over matrices, and cp.async against its definition.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "common/device.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

constexpr int MATRIX_ROWS = 8, NUM_ROWS = 32;

uint16_t element_of(uint32_t packed, int idx) {
  return static_cast<uint16_t>(idx == 0 ? packed : packed >> 16);
}

// Rows of 8 elements, row r of the warp holding 100 * r + column, at the place that `offset_of` gives each
// row.
template <int NUM_MATRICES, bool TRANSPOSED, class OffsetOf>
void check_ldmatrix(OffsetOf offset_of) {
  uint32_t loaded[32][NUM_MATRICES] = {};
  const cudaError_t error = run_grid({1, 32, 8192}, [&] {
    const int lane = static_cast<int>(threadIdx.x);
    auto* row = reinterpret_cast<uint16_t*>(shared_memory() + offset_of(lane));
    for (int column = 0; column < 8; ++column) row[column] = static_cast<uint16_t>(100 * lane + column);
    __syncwarp();
    ldmatrix<NUM_MATRICES, TRANSPOSED>(loaded[lane], row);
  });
  CHECK(error == cudaSuccess);
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < NUM_MATRICES; ++matrix) {
      for (int idx = 0; idx < 2; ++idx) {
        const int major = lane / 4, minor = lane % 4 * 2 + idx;
        const int row = TRANSPOSED ? minor : major, column = TRANSPOSED ? major : minor;
        CHECK(element_of(loaded[lane][matrix], idx) == 100 * (matrix * MATRIX_ROWS + row) + column);
      }
    }
  }
}

TEST(ldmatrix_distributes_rows) {
  const auto contiguous = [](int lane) { return 16 * lane; };
  check_ldmatrix<1, false>(contiguous);
  check_ldmatrix<2, false>(contiguous);
  check_ldmatrix<4, false>(contiguous);
  check_ldmatrix<1, true>(contiguous);
  check_ldmatrix<2, true>(contiguous);
  check_ldmatrix<4, true>(contiguous);
  check_ldmatrix<4, false>([](int lane) { return 256 * (31 - lane); });
}

TEST(ldmatrix_ignores_addresses_beyond_its_matrices) {
  uint32_t loaded[1];
  const cudaError_t error = run_grid({1, 32, 128}, [&] {
    uint32_t own[1];
    ldmatrix<1, false>(own, threadIdx.x < 8 ? shared_memory() + 16 * threadIdx.x : nullptr);
    if (threadIdx.x == 0) loaded[0] = own[0];
  });
  CHECK(error == cudaSuccess && loaded[0] == 0xffffffffu);
}

TEST(ldmatrix_counts_bank_conflicts) {
  const auto wavefronts = [](auto offset_of) {
    reset_counters();
    check_ldmatrix<4, false>(offset_of);
    CHECK(counters().ldmatrix == 1);
    return counters().ldmatrix_wavefronts;
  };
  CHECK(wavefronts([](int lane) { return 16 * lane; }) == 4);
  CHECK(wavefronts([](int lane) { return 256 * lane; }) == 32);
  CHECK(wavefronts([](int lane) { return 256 * lane + 16 * (lane % 8); }) == 4);  // swizzled
  CHECK(wavefronts([](int lane) { return 32 * lane; }) == 8);
}

TEST(movmatrix_transposes) {
  uint32_t moved[32];
  const auto value = [](int row, int column) { return static_cast<uint16_t>(1000 * row + column); };
  const cudaError_t error = run_grid({1, 32, 0}, [&] {
    const int group = static_cast<int>(threadIdx.x) / 4, pair = static_cast<int>(threadIdx.x) % 4 * 2;
    moved[threadIdx.x] = movmatrix_transposed(value(group, pair) | uint32_t{value(group, pair + 1)} << 16);
  });
  CHECK(error == cudaSuccess);
  for (int lane = 0; lane < 32; ++lane) {
    for (int idx = 0; idx < 2; ++idx)
      CHECK(element_of(moved[lane], idx) == value(lane % 4 * 2 + idx, lane / 4));
  }
}

// Small integers are exact in both formats, so sums over k = 16 are exact in float32 in any order.
uint16_t narrow(MmaElement element, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (element == MmaElement::bfloat16) return static_cast<uint16_t>(bits >> 16);
  if (value == 0) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | (((bits >> 23 & 0xffu) - 112) << 10) |
                               (bits >> 13 & 0x3ffu));
}

void check_mma(MmaElement element) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> small(-8, 8);
  float a[16][16], b[16][8], c[16][8], d[16][8];
  for (auto& row : a)
    for (float& value : row) value = static_cast<float>(small(random));
  for (auto& row : b)
    for (float& value : row) value = static_cast<float>(small(random));
  for (auto& row : c)
    for (float& value : row) value = static_cast<float>(small(random)) * 0.25f;
  const auto pack = [&](float low, float high) {
    return narrow(element, low) | uint32_t{narrow(element, high)} << 16;
  };
  reset_counters();
  const cudaError_t error = run_grid({1, 32, 0}, [&] {
    const int group = static_cast<int>(threadIdx.x) / 4, pair = static_cast<int>(threadIdx.x) % 4 * 2;
    uint32_t lane_a[4], lane_b[2];
    float lane_d[4];
    for (int half = 0; half < 2; ++half) {  // of k
      const int k = pair + 8 * half;
      lane_a[2 * half] = pack(a[group][k], a[group][k + 1]);
      lane_a[2 * half + 1] = pack(a[group + 8][k], a[group + 8][k + 1]);
      lane_b[half] = pack(b[k][group], b[k + 1][group]);
    }
    for (int idx = 0; idx < 4; ++idx) lane_d[idx] = c[group + idx / 2 * 8][pair + idx % 2];
    mma_m16n8k16(element, lane_d, lane_a, lane_b, lane_d);
    for (int idx = 0; idx < 4; ++idx) d[group + idx / 2 * 8][pair + idx % 2] = lane_d[idx];
  });
  CHECK(error == cudaSuccess && counters().mma == 1);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float expected = c[m][n];
      for (int k = 0; k < 16; ++k) expected += a[m][k] * b[k][n];
      CHECK(d[m][n] == expected);
    }
  }
}

TEST(mma_float16) { check_mma(MmaElement::float16); }
TEST(mma_bfloat16) { check_mma(MmaElement::bfloat16); }

// One product of a[0][0] and b[0][0] = 1, to see how every kind of float16 is widened.
float mma_widened_float16(uint16_t bits) {
  float result = 0;
  const cudaError_t error = run_grid({1, 32, 0}, [&] {
    constexpr uint32_t ONE = 0x3c00u;
    const uint32_t lane_a[4] = {threadIdx.x == 0 ? bits : 0u, 0, 0, 0},
                   lane_b[2] = {threadIdx.x == 0 ? ONE : 0u, 0};
    const float zero[4] = {};
    float lane_d[4];
    mma_m16n8k16(MmaElement::float16, lane_d, lane_a, lane_b, zero);
    if (threadIdx.x == 0) result = lane_d[0];
  });
  CHECK(error == cudaSuccess);
  return result;
}

TEST(mma_widens_every_kind_of_float16) {
  CHECK(mma_widened_float16(0x0001) == 0x1p-24f &&
        mma_widened_float16(0x83ff) == -0x1.ff8p-15f);  // subnormal
  CHECK(mma_widened_float16(0x0400) == 0x1p-14f && mma_widened_float16(0x7bff) == 65504.0f);
  CHECK(std::isnan(mma_widened_float16(0x7e00)));
  CHECK(mma_widened_float16(0x7c00) == INFINITY && mma_widened_float16(0xfc00) == -INFINITY);
}

TEST(async_copy_delivers_at_the_wait_and_not_before) {
  alignas(16) float source[4] = {1, 2, 3, 4};
  float before = 0, after_first = 0, second_before = 0, after_all = 0;
  const cudaError_t error = run_grid({1, 1, 64}, [&] {
    auto* shared = reinterpret_cast<float*>(shared_memory());
    shared[0] = 7;
    async_copy<16>(shared, source);
    async_copy_commit();
    async_copy<16>(shared + 4, source);
    async_copy_commit();
    before = shared[0];
    async_copy_wait(1);
    after_first = shared[3];
    second_before = shared[7];
    async_copy_wait(0);
    after_all = shared[7];
  });
  CHECK(error == cudaSuccess);
  CHECK(std::isnan(before) && after_first == 4 && std::isnan(second_before) && after_all == 4);
}

TEST(async_copy_fills_with_zeros) {
  alignas(16) const uint32_t source[4] = {1, 2, 3, 4};
  uint32_t copied[10] = {};
  const cudaError_t error = run_grid({1, 1, 48}, [&] {
    async_copy<16>(shared_memory(), source, 8);
    async_copy<16>(shared_memory() + 16, nullptr, 0);
    async_copy<8>(shared_memory() + 32, source + 2);
    async_copy_wait_all();
    std::memcpy(copied, shared_memory(), sizeof(copied));
  });
  CHECK(error == cudaSuccess);
  const uint32_t expected[10] = {1, 2, 0, 0, 0, 0, 0, 0, 3, 4};
  CHECK(std::memcmp(copied, expected, sizeof(expected)) == 0);
}

TEST(async_copy_off_by_one_wait_leaves_nan) {
  alignas(16) float source[4] = {1, 2, 3, 4};
  float seen = 0;
  const cudaError_t error = run_grid({1, 1, 64}, [&] {
    auto* shared = reinterpret_cast<float*>(shared_memory());
    for (int stage = 0; stage < 2; ++stage) {
      async_copy<16>(shared + 4 * stage, source);
      async_copy_commit();
    }
    async_copy_wait(2);  // one too many may stay under way
    seen = shared[0];
    async_copy_wait(0);
  });
  CHECK(error == cudaSuccess && std::isnan(seen));
}

}  // namespace
}  // namespace pagedkv::emulator
