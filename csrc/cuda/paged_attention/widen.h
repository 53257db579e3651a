// Four 8-bit cache elements become two registers of float16, exactly: every route gives the same bytes.
#pragma once

#include "cuda/primitives.h"
#include "params.h"

namespace pagedkv::cuda {

// What the tensor cores multiply. An 8-bit format goes into float16 in fewer instructions than into bfloat16,
// so that with such caches queries and weights become float16 too.
template <class Query, int CACHE_BYTES>
using Operand = std::conditional_t<CACHE_BYTES == 1, float16, Query>;

// How a register's bytes pair up: (0, 1) and (2, 3), or (0, 2) and (1, 3) as ldmatrix leaves them when it
// transposes pairs of bytes.
enum class Pairing { neighbours, transposed };

class Widener {
 public:
  PAGEDKV_DEVICE explicit Widener(DType dtype)
      : is_int8_(dtype == DType::int8), is_e4m3_(dtype == DType::float8_e4m3fn) {}

  PAGEDKV_DEVICE bool is_int8() const { return is_int8_; }

  // Of each register the first pair to `low`, the other to `high`. IS_INT8 is is_int8(), asked once a tile.
  template <bool IS_INT8, Pairing PAIRING>
  PAGEDKV_DEVICE void widen(const uint32_t (&packed)[4], uint32_t (&low)[4], uint32_t (&high)[4]) const {
    if constexpr (IS_INT8) {
      for (int i = 0; i < 4; ++i) widen_int8<PAIRING>(packed[i], low[i], high[i]);
    } else if (!is_e4m3_) {
      for (int i = 0; i < 4; ++i) widen_e5m2<PAIRING>(packed[i], low[i], high[i]);
    } else if constexpr (HAS_FLOAT8_CONVERSION) {
      for (int i = 0; i < 4; ++i) convert_e4m3<PAIRING>(packed[i], low[i], high[i]);
    } else {
      widen_e4m3<PAIRING>(packed, low, high);
    }
  }

 private:
  // 0x6400 is 1024 with units of 1: with x + 128 in its lower half it is 1152 + x, and 1152 is taken off
  // again.
  template <Pairing PAIRING>
  PAGEDKV_DEVICE static void widen_int8(uint32_t four, uint32_t& low, uint32_t& high) {
    constexpr uint32_t LOW = PAIRING == Pairing::neighbours ? 0x5140 : 0x5240;
    constexpr uint32_t HIGH = PAIRING == Pairing::neighbours ? 0x5342 : 0x5341;
    four ^= 0x80808080u;
    low = fma_float16_pairs(byte_permute(four, 0x64646464u, LOW), 0x3c003c00u, 0xe480e480u);
    high = fma_float16_pairs(byte_permute(four, 0x64646464u, HIGH), 0x3c003c00u, 0xe480e480u);
  }

  // A pair's bytes as the upper halves of a register's halves, with zeros below.
  template <Pairing PAIRING>
  PAGEDKV_DEVICE static void to_upper_halves(uint32_t four, uint32_t& low, uint32_t& high) {
    low = byte_permute(four, 0, PAIRING == Pairing::neighbours ? 0x1404 : 0x2404);
    high = byte_permute(four, 0, PAIRING == Pairing::neighbours ? 0x3424 : 0x3414);
  }

  // float8_e5m2 is the upper half of a float16.
  template <Pairing PAIRING>
  PAGEDKV_DEVICE static void widen_e5m2(uint32_t four, uint32_t& low, uint32_t& high) {
    to_upper_halves<PAIRING>(four, low, high);
  }

  template <Pairing PAIRING>
  PAGEDKV_DEVICE static void convert_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
    if constexpr (PAIRING == Pairing::transposed) four = byte_permute(four, 0, 0x3120);
    low = convert_e4m3_pair(static_cast<uint16_t>(four));
    high = convert_e4m3_pair(static_cast<uint16_t>(four >> 16));
  }

  // Exponent and mantissa move to those of float16, and a multiplication by 2 ** 8 corrects the exponent's
  // bias, of subnormals too. That makes a number of the largest code, which is NaN.
  template <Pairing PAIRING>
  PAGEDKV_DEVICE static void widen_e4m3(const uint32_t (&packed)[4], uint32_t (&low)[4],
                                        uint32_t (&high)[4]) {
    uint32_t any_nan = 0;
    for (int i = 0; i < 4; ++i) {
      to_upper_halves<PAIRING>(packed[i], low[i], high[i]);
      low[i] = rescaled(low[i]);
      high[i] = rescaled(high[i]);
      any_nan |= nan_codes(packed[i]);
    }
    if (any_nan == 0) return;
    for (int i = 0; i < 4; ++i) {
      uint32_t low_nans, high_nans;
      to_upper_halves<PAIRING>(nan_codes(packed[i]), low_nans, high_nans);
      low[i] |= low_nans - (low_nans >> 5);  // all bits of the exponent where the highest bit is set
      high[i] |= high_nans - (high_nans >> 5);
    }
  }

  PAGEDKV_DEVICE static uint32_t rescaled(uint32_t pair) {
    const uint32_t sign = pair & 0x80008000u, magnitude = pair & 0x7f007f00u;
    return fma_float16_pairs(sign | magnitude >> 1, 0x5c005c00u, 0x80008000u);
  }

  // Bit 7 of each byte that holds NaN.
  PAGEDKV_DEVICE static uint32_t nan_codes(uint32_t four) {
    return ((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  }

  bool is_int8_, is_e4m3_;
};

}  // namespace pagedkv::cuda
