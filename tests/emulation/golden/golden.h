// What the primitives of the kernels give on a GPU, recorded in golden.txt: a kernel of one warp that calls
// each of them on inputs of its own, and how closely the emulator has to agree with the record.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/primitives.h"

namespace pagedkv::golden {

inline constexpr int LANES = 32;

// How two words of a section are compared; NaN equals NaN.
enum class Kind { bits, float32_pair_sums, float32_exp2, float16_pairs, bfloat16_pairs };

struct Section {
  const char* name;
  int words;  // of a lane
  Kind kind;
};

inline constexpr Section SECTIONS[] = {
    {"ldmatrix_x4", 4, Kind::bits},
    {"ldmatrix_x4_trans", 4, Kind::bits},
    {"movmatrix_trans", 1, Kind::bits},
    {"cp_async_16", 8, Kind::bits},
    {"mma_m16n8k16 bfloat16", 4, Kind::float32_pair_sums},
    {"mma_m16n8k16 float16", 4, Kind::float32_pair_sums},
    {"exp2_approx", 8, Kind::float32_exp2},
    {"byte_permute", 4, Kind::bits},
    {"fma_float16_pairs", 4, Kind::float16_pairs},
    {"convert_e4m3_pair", 4, Kind::float16_pairs},
    {"pack2 bfloat16", 4, Kind::bfloat16_pairs},
    {"pack2 float16", 4, Kind::float16_pairs},
};

inline constexpr int num_words() {
  int sum = 0;
  for (const Section& section : SECTIONS) sum += section.words;
  return sum;
}

struct Params {
  uint32_t* out;          // [num_words(), LANES]
  const uint32_t* input;  // [64, LANES] of any bits
};

// The same numbers wherever they are made.
PAGEDKV_HD uint32_t random_bits(uint32_t seed) {
  seed = (seed ^ seed >> 16) * 0x7feb352du;
  seed = (seed ^ seed >> 15) * 0x846ca68bu;
  return seed ^ seed >> 16;
}

// Between -2 and 2, of few bits.
PAGEDKV_HD float small_float(uint32_t seed) {
  return static_cast<float>(static_cast<int>(random_bits(seed) >> 23) - 256) / 128.0f;
}

// Every kind of float32: bits at random, and those around the edges of the 16-bit formats.
PAGEDKV_HD float any_float(uint32_t seed) {
  constexpr float EDGES[] = {0.0f,    -0.0f,   1.0f,    65504.0f, 65519.0f, 65520.0f, 1e38f,    3.4e38f,
                             6.0e-8f, 2.9e-8f, 6.1e-5f, 1e-40f,   1.00195f, 1.00586f, 2.00049f, 2049.0f};
  if (seed % 3 == 0) return EDGES[seed / 3 % 16] * ((seed & 64) != 0 ? -1.0f : 1.0f);
  const uint32_t bits = random_bits(seed);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

PAGEDKV_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

template <class T>
PAGEDKV_DEVICE void multiply(uint32_t seed, float (&d)[4]) {
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    const uint32_t at = seed + i * 64 + threadIdx.x * 2;
    a[i] = cuda::pack2<T>(small_float(at), small_float(at + 1));
    if (i < 2) b[i] = cuda::pack2<T>(small_float(at + 1000), small_float(at + 1001));
    d[i] = small_float(at + 2000);
  }
  cuda::mma_m16n8k16<T>(d, a, b);
}

static __global__ void golden_kernel(const Params params) {
  PAGEDKV_SHARED(shared);
  const int lane = threadIdx.x;
  int word = 0;
  const auto record = [&](uint32_t value) { params.out[word++ * LANES + lane] = value; };
  // 32 rows of 16 bytes, 8 further apart than an ldmatrix needs.
  unsigned char* row = shared + lane * 48;
  for (int i = 0; i < 4; ++i) reinterpret_cast<uint32_t*>(row)[i] = random_bits(lane * 4 + i);
  __syncwarp();
  uint32_t loaded[4];
  cuda::ldmatrix_x4(loaded, row);
  for (const uint32_t x : loaded) record(x);
  cuda::ldmatrix_x4_trans(loaded, row);
  for (const uint32_t x : loaded) record(x);
  record(cuda::movmatrix_trans(random_bits(lane)));

  __syncwarp();
  // One copy and one that reads nothing, over what was there.
  cuda::cp_async_16(row, params.input + lane * 4, true);
  cuda::cp_async_16(row + 16, params.input + lane * 4, false);
  cuda::cp_async_commit();
  cuda::cp_async_wait<0>();
  __syncwarp();
  for (int i = 0; i < 8; ++i) record(reinterpret_cast<const uint32_t*>(row)[i]);

  float d[4];
  multiply<bfloat16>(100, d);
  for (const float x : d) record(bits_of(x));
  multiply<float16>(200, d);
  for (const float x : d) record(bits_of(x));
  for (int i = 0; i < 8; ++i) {
    const float x =
        i == 0 && lane == 0 ? -INFINITY : -160.0f * static_cast<float>(lane * 8 + i) / 256.0f + 8.0f;
    record(bits_of(cuda::exp2_approx(x)));
  }
  for (int i = 0; i < 4; ++i) {
    const uint32_t seed = 300 + lane * 16 + i * 3;
    record(cuda::byte_permute(random_bits(seed), random_bits(seed + 1), random_bits(seed + 2) & 0x7777u));
  }
  for (int i = 0; i < 4; ++i) {
    const uint32_t seed = 3000 + lane * 16 + i * 3;
    record(cuda::fma_float16_pairs(random_bits(seed), random_bits(seed + 1), random_bits(seed + 2)));
  }
  for (int i = 0; i < 4; ++i) {
    const int code = lane * 8 + i * 2;
    record(cuda::convert_e4m3_pair(static_cast<uint16_t>(code | (code + 1) << 8)));
  }
  for (int i = 0; i < 4; ++i) {
    record(cuda::pack2<bfloat16>(any_float(lane * 8 + i * 2), any_float(lane * 8 + i * 2 + 1)));
  }
  for (int i = 0; i < 4; ++i) {
    record(cuda::pack2<float16>(any_float(lane * 8 + i * 2), any_float(lane * 8 + i * 2 + 1)));
  }
}

inline constexpr int SHARED_BYTES = LANES * 48;

inline std::vector<uint32_t> make_input() {
  std::vector<uint32_t> input(64 * LANES);
  for (uint32_t i = 0; i < input.size(); ++i) input[i] = random_bits(i + 77);
  return input;
}

}  // namespace pagedkv::golden
