// The storage types of the contract, with conversions that give the same bytes on every back-end.
//
// to_float(x) is exact. from_float<T>(f) rounds to nearest, ties to even; float16 and bfloat16 overflow to
// infinity, the float8 types saturate at their largest finite value (infinity too) and keep NaN, int8 clamps
// to +-127 and maps NaN to 0. Formats: IEEE 754-2019 section 3.6 (float16), Micikevicius et al. 2022, "FP8
// formats for deep learning", section 3.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/device.h"

namespace pagedkv {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct float8_e4m3fn {
  uint8_t bits;
};
struct float8_e5m2 {
  uint8_t bits;
};

template <class T>
inline constexpr bool is_quantised_v =
    std::is_same_v<T, float8_e4m3fn> || std::is_same_v<T, float8_e5m2> || std::is_same_v<T, int8_t>;

namespace detail {

PAGEDKV_HD constexpr uint32_t float_bits(float value) { return std::bit_cast<uint32_t>(value); }
PAGEDKV_HD constexpr float bits_float(uint32_t bits) { return std::bit_cast<float>(bits); }

// Widens a binary format with EXPONENT_BITS and MANTISSA_BITS whose bits, sign excluded, are `magnitude`: the
// bits are moved to float32's place and the exponent bias is corrected by one exact multiplication, which
// handles subnormals too.
template <int EXPONENT_BITS, int MANTISSA_BITS>
PAGEDKV_HD constexpr float widen_magnitude(uint32_t magnitude) {
  constexpr int BIAS = (1 << (EXPONENT_BITS - 1)) - 1;
  constexpr uint32_t BIAS_CORRECTION = static_cast<uint32_t>(127 + 127 - BIAS) << 23;  // 2 ** (127 - BIAS)
  return bits_float(magnitude << (23 - MANTISSA_BITS)) * bits_float(BIAS_CORRECTION);
}

// Rounds |value| to the same format, to nearest even. The caller handles NaN and values beyond the largest
// finite one.
template <int EXPONENT_BITS, int MANTISSA_BITS>
PAGEDKV_HD constexpr uint32_t narrow_magnitude(uint32_t magnitude_bits) {
  constexpr int BIAS = (1 << (EXPONENT_BITS - 1)) - 1;
  constexpr int SHIFT = 23 - MANTISSA_BITS;
  constexpr uint32_t SMALLEST_NORMAL = static_cast<uint32_t>(128 - BIAS) << 23;
  if (magnitude_bits < SMALLEST_NORMAL) {
    // Adding a power of two whose unit in the last place is the smallest subnormal makes the FPU round for
    // us.
    constexpr uint32_t ROUNDER = static_cast<uint32_t>(127 + 23 + 1 - BIAS - MANTISSA_BITS) << 23;
    return float_bits(bits_float(magnitude_bits) + bits_float(ROUNDER)) - ROUNDER;
  }
  const uint32_t odd = (magnitude_bits >> SHIFT) & 1;
  const uint32_t rounded = magnitude_bits + ((1u << (SHIFT - 1)) - 1) + odd;
  return (rounded - (static_cast<uint32_t>(127 - BIAS) << 23)) >> SHIFT;
}

template <class To>
struct FromFloat;

template <>
struct FromFloat<float> {
  PAGEDKV_HD static constexpr float convert(float value) { return value; }
};

template <>
struct FromFloat<bfloat16> {
  PAGEDKV_HD static constexpr bfloat16 convert(float value) {
    const uint32_t bits = float_bits(value);
    // Rounding could carry a NaN's payload into infinity, so a NaN only has its quiet bit set.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
  }
};

template <>
struct FromFloat<float16> {
  PAGEDKV_HD static constexpr float16 convert(float value) {
    const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    constexpr uint32_t OVERFLOW = 0x477ff000u;  // 65520, the first value that rounds to infinity
    if (magnitude >= OVERFLOW) return {static_cast<uint16_t>(sign | 0x7c00u)};
    return {static_cast<uint16_t>(sign | narrow_magnitude<5, 10>(magnitude))};
  }
};

// Both float8 formats: saturate at MAX_FINITE, which also answers every value that would round beyond it.
template <int EXPONENT_BITS, int MANTISSA_BITS, uint32_t MAX_FINITE, uint8_t MAX_CODE, uint8_t NAN_CODE>
PAGEDKV_HD constexpr uint8_t narrow_float8(float value) {
  const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | NAN_CODE);
  if (magnitude >= MAX_FINITE) return static_cast<uint8_t>(sign | MAX_CODE);
  return static_cast<uint8_t>(sign | narrow_magnitude<EXPONENT_BITS, MANTISSA_BITS>(magnitude));
}

template <>
struct FromFloat<float8_e4m3fn> {
  PAGEDKV_HD static constexpr float8_e4m3fn convert(float value) {
    return {narrow_float8<4, 3, 0x43e00000u, 0x7e, 0x7f>(value)};  // largest finite 448
  }
};

template <>
struct FromFloat<float8_e5m2> {
  PAGEDKV_HD static constexpr float8_e5m2 convert(float value) {
    return {narrow_float8<5, 2, 0x47600000u, 0x7b, 0x7f>(value)};  // largest finite 57344
  }
};

template <>
struct FromFloat<int8_t> {
  PAGEDKV_HD static int8_t convert(float value) {
    constexpr float ROUNDER = 3 << 22;  // a float32 this large has no fraction: adding it rounds, to even
    const float number = value != value ? 0.0f : value;
    const float clamped = number < -127.0f ? -127.0f : (number > 127.0f ? 127.0f : number);
    return static_cast<int8_t>((clamped + ROUNDER) - ROUNDER);
  }
};

}  // namespace detail

template <class T>
PAGEDKV_HD constexpr T from_float(float value) {
  return detail::FromFloat<T>::convert(value);
}

PAGEDKV_HD constexpr float to_float(float value) { return value; }

PAGEDKV_HD constexpr float to_float(int8_t value) { return static_cast<float>(value); }

PAGEDKV_HD constexpr float to_float(bfloat16 value) {
  return detail::bits_float(static_cast<uint32_t>(value.bits) << 16);
}

PAGEDKV_HD constexpr float to_float(float16 value) {
  const uint32_t magnitude = value.bits & 0x7fffu, sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t widened = magnitude >= 0x7c00u
                               ? 0x7f800000u | (magnitude & 0x3ffu) << 13  // infinity, NaN
                               : detail::float_bits(detail::widen_magnitude<5, 10>(magnitude));
  return detail::bits_float(sign | widened);
}

PAGEDKV_HD constexpr float to_float(float8_e4m3fn value) {
  const uint32_t magnitude = value.bits & 0x7fu, sign = static_cast<uint32_t>(value.bits & 0x80u) << 24;
  const uint32_t widened = magnitude == 0x7fu ? 0x7fc00000u  // the only NaN; there is no infinity
                                              : detail::float_bits(detail::widen_magnitude<4, 3>(magnitude));
  return detail::bits_float(sign | widened);
}

PAGEDKV_HD constexpr float to_float(float8_e5m2 value) {
  return to_float(float16{static_cast<uint16_t>(value.bits << 8)});  // the upper half of a float16
}

}  // namespace pagedkv
