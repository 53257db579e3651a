// Eight float32 at a time (AVX2, FMA, F16C): the same words as vector_avx512.h. Head dimensions are multiples
// of 8, so a vector of a row is always whole or beyond its end.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "common/dtypes.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

struct Avx2 {
  using Float = __m256;
  static constexpr int WIDTH = 8;
  static constexpr int LANES = WIDTH / 4;
  static constexpr int DECODE_ROWS = 2;
  static constexpr int MAX_ROW_VECTORS = 2;

  static Float set(float x) { return _mm256_set1_ps(x); }
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float load_in_lanes(const float* p) {
    return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static float first_lane(Float x) { return _mm256_cvtss_f32(x); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float fms(Float a, Float b, Float c) { return _mm256_fmsub_ps(a, b, c); }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Float round(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Float abs(Float x) { return _mm256_andnot_ps(set(-0.0f), x); }
  static Float copy_sign(Float magnitude, Float sign) {
    return _mm256_or_ps(abs(magnitude), _mm256_and_ps(set(-0.0f), sign));
  }
  static Float select_less(Float a, Float b, Float if_less, Float otherwise) {
    return _mm256_blendv_ps(otherwise, if_less, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  // x * 2**n for a whole n; 0 below the smallest subnormal. In two steps, as 2**-160 is no float32.
  static constexpr float SMALLEST_EXPONENT = -160.0f;
  static Float scale_by_power(Float x, Float n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return mul(mul(x, power(half)), power(_mm256_sub_epi32(whole, half)));
  }
  static Float power_in_low_bits(Float x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
  }
  static Float zero_below(Float x, float limit, Float y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, set(limit), _CMP_NLT_UQ), y);
  }
  static Float iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
  static Float iota_in_lanes() { return _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3); }
  // x - p[lane].
  static Float difference(int32_t x, const int32_t* p) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(x), load_int_vector(p)));
  }

  static Float keep_visible(Float score, const int32_t* begin, const int32_t* end, int32_t token) {
    const __m256i t = _mm256_set1_epi32(token);
    const __m256i hidden = _mm256_cmpgt_epi32(load_int_vector(begin), t);
    const __m256i before_end = _mm256_cmpgt_epi32(load_int_vector(end), t);
    return _mm256_blendv_ps(set(-std::numeric_limits<float>::infinity()), score,
                            _mm256_castsi256_ps(_mm256_andnot_si256(hidden, before_end)));
  }

  static bool any_special(Float x) {
    const Float difference = sub(x, x);  // 0, or NaN
    return _mm256_movemask_ps(_mm256_cmp_ps(difference, difference, _CMP_UNORD_Q)) != 0;
  }

  static float sum(Float x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  static float largest(Float x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }

  static Float largest_in_lanes(Float x) {
    x = max(x, _mm256_shuffle_ps(x, x, 0x4e));
    return max(x, _mm256_shuffle_ps(x, x, 0xb1));
  }

  static Float sum_quads(Float a, Float b, Float c, Float d) {
    return _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  }
  static Float join_quads(const Float (&quad)[2]) {
    return add(_mm256_permute2f128_ps(quad[0], quad[1], 0x20),
               _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
  }

  static void transpose(Float (&x)[8]) {
    Float t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      x[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      x[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      x[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      x[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(x[i], x[4 + i], 0x20);
      t[4 + i] = _mm256_permute2f128_ps(x[i], x[4 + i], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = t[i];
  }

  // 8 elements of a row as float32; zeros where `count` says that the row has ended.
  template <class T>
  static Float widen(const T* p, int64_t count) {
    return count > 0 ? widen_all(p) : set(0.0f);
  }

  // Stores 8 lanes, rounded to nearest even, or none where the row has ended.
  template <class T>
  static void narrow(T* p, Float x, int64_t count) {
    if (count > 0) narrow_all(p, x);
  }

 private:
  static Float power(__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  }
  static Float widen_all(const float* p) { return load(p); }
  static Float widen_all(const float16* p) { return _mm256_cvtph_ps(load_words(p)); }
  static Float widen_all(const bfloat16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(p)), 16));
  }
  static Float widen_all(const float8_e5m2* p) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(as_words(p))), 8));
  }
  static Float widen_all(const float8_e4m3fn* p) {
    const __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64(as_words(p)));
    const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x80)), 8);
    const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    const __m128i half =
        _mm_blendv_epi8(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7)), _mm_set1_epi16(0x7e00), is_nan);
    return mul(_mm256_cvtph_ps(half), set(256.0f));
  }
  static Float widen_all(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(as_words(p))));
  }

  static void narrow_all(float* p, Float x) { store(p, x); }
  static void narrow_all(float16* p, Float x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void narrow_all(bfloat16* p, Float x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet_nan, is_nan), 16);
    const __m256i words = _mm256_packus_epi32(result, result);  // each half twice
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08)));
  }

  static __m256i load_int_vector(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static const __m128i* as_words(const void* p) { return static_cast<const __m128i*>(p); }
  static __m128i load_words(const void* p) { return _mm_loadu_si128(as_words(p)); }
};

}  // namespace
}  // namespace pagedkv::cpu
