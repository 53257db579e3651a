// Four 8-bit cache elements become two registers of 16-bit ones, exactly: every route gives the same bytes.
#pragma once

#include "cuda/primitives.h"
#include "params.h"

namespace pagedkv::cuda {

// How a register's bytes pair up: (0, 1) and (2, 3), or (0, 2) and (1, 3) as ldmatrix leaves them when it
// transposes pairs of bytes.
enum class Pairing { neighbours, transposed };

template <class Query>
class Widener {
  static constexpr bool IS_BFLOAT16 = std::is_same_v<Query, bfloat16>;

 public:
  PAGEDKV_DEVICE explicit Widener(DType dtype)
      : is_int8_(dtype == DType::int8), is_e4m3_(dtype == DType::float8_e4m3fn) {}

  PAGEDKV_DEVICE bool is_int8() const { return is_int8_; }

  // Of each register the first pair to `low`, the other to `high`. IS_INT8 is is_int8(), asked once a tile.
  template <bool IS_INT8, Pairing PAIRING>
  PAGEDKV_DEVICE void widen(const uint32_t (&packed)[4], uint32_t (&low)[4], uint32_t (&high)[4]) const {
    if constexpr (IS_INT8) {
      for (int i = 0; i < 4; ++i) widen_int8<PAIRING>(packed[i], low[i], high[i]);
    } else if constexpr (HAS_FLOAT8_CONVERSION && !IS_BFLOAT16) {
      for (int i = 0; i < 4; ++i) convert_float8<PAIRING>(packed[i], low[i], high[i]);
    } else {
      widen_float8<PAIRING>(packed, low, high);
    }
  }

 private:
  // Each pair's bytes become the lower halves of float constants, whose value is then taken off again.
  template <Pairing PAIRING>
  PAGEDKV_DEVICE static void widen_int8(uint32_t four, uint32_t& low, uint32_t& high) {
    constexpr uint32_t LOW = PAIRING == Pairing::neighbours ? 0x5140 : 0x5240;
    constexpr uint32_t HIGH = PAIRING == Pairing::neighbours ? 0x5342 : 0x5341;
    if constexpr (IS_BFLOAT16) {
      // 0x4300 is 128 with units of 1: with the lower seven bits it is 128 + x, or 256 + x where x < 0; with
      // the sign bit alone, 128 or 256.
      const auto without_sign = [](uint32_t pair) {
        return fma_pairs<Query>(pair & 0xff80ff80u, 0xbf80bf80u, pair & 0xff7fff7fu);  // * -1
      };
      low = without_sign(byte_permute(four, 0x43434343u, LOW));
      high = without_sign(byte_permute(four, 0x43434343u, HIGH));
    } else {
      // 0x6400 is 1024 with units of 1: with x + 128 in its lower half it is 1152 + x.
      four ^= 0x80808080u;
      low = fma_pairs<Query>(byte_permute(four, 0x64646464u, LOW), 0x3c003c00u, 0xe480e480u);
      high = fma_pairs<Query>(byte_permute(four, 0x64646464u, HIGH), 0x3c003c00u, 0xe480e480u);
    }
  }

  template <Pairing PAIRING>
  PAGEDKV_DEVICE void convert_float8(uint32_t four, uint32_t& low, uint32_t& high) const {
    if constexpr (PAIRING == Pairing::transposed) four = byte_permute(four, 0, 0x3120);
    if (is_e4m3_) {
      low = convert_e4m3_pair(static_cast<uint16_t>(four));
      high = convert_e4m3_pair(static_cast<uint16_t>(four >> 16));
    } else {  // float8_e5m2 is the upper half of a float16
      low = byte_permute(four, 0, 0x1404);
      high = byte_permute(four, 0, 0x3424);
    }
  }

  template <Pairing PAIRING>
  PAGEDKV_DEVICE void widen_float8(const uint32_t (&packed)[4], uint32_t (&low)[4],
                                   uint32_t (&high)[4]) const {
    constexpr uint32_t LOW = PAIRING == Pairing::neighbours ? 0x1404 : 0x2404;
    constexpr uint32_t HIGH = PAIRING == Pairing::neighbours ? 0x3424 : 0x3414;
    uint32_t any_special = 0;
    for (int i = 0; i < 4; ++i) {
      low[i] = rescaled(byte_permute(packed[i], 0, LOW));
      high[i] = rescaled(byte_permute(packed[i], 0, HIGH));
      any_special |= special_codes(packed[i]);
    }
    if (any_special == 0) return;
    for (int i = 0; i < 4; ++i) {
      low[i] |= special_exponent(byte_permute(special_codes(packed[i]), 0, LOW));
      high[i] |= special_exponent(byte_permute(special_codes(packed[i]), 0, HIGH));
    }
  }

  // Bit 7 of each byte that holds one of the largest codes, NaN or e5m2's infinity, which rescaled() makes a
  // number.
  PAGEDKV_DEVICE uint32_t special_codes(uint32_t four) const {
    return ((four & 0x7f7f7f7fu) + (is_e4m3_ ? 0x01010101u : 0x04040404u)) & 0x80808080u;
  }

  // Two float8 in the upper halves: their exponent and mantissa move to those of Query, and a multiplication
  // corrects the exponent's bias, of subnormals too.
  PAGEDKV_DEVICE uint32_t rescaled(uint32_t pair) const {
    const uint32_t sign = pair & 0x80008000u, magnitude = pair & 0x7f007f00u;
    if constexpr (IS_BFLOAT16) {
      const uint32_t shifted = is_e4m3_ ? magnitude >> 4 : magnitude >> 3;
      const uint32_t factor = is_e4m3_ ? 0x7b807b80u : 0x77807780u;  // 2 ** 120, 2 ** 112
      return fma_pairs<Query>(sign | shifted, factor, 0x80008000u);
    } else {
      if (!is_e4m3_) return pair;
      return fma_pairs<Query>(sign | magnitude >> 1, 0x5c005c00u, 0x80008000u);  // 2 ** 8
    }
  }

  // All bits of the exponent, in each half whose highest bit is set.
  PAGEDKV_DEVICE static uint32_t special_exponent(uint32_t high_bits) {
    return high_bits - (high_bits >> (IS_BFLOAT16 ? 8 : 5));
  }

  bool is_int8_, is_e4m3_;
};

}  // namespace pagedkv::cuda
