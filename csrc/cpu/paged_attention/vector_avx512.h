// Sixteen float32 at a time (AVX-512 F, BW, DQ, VL): the words that decode.h and prefill.h are written in.
// vector_avx2.h has the same words for eight. Included after the translation unit has chosen its target.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "common/dtypes.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

struct Avx512 {
  using Float = __m512;
  static constexpr int WIDTH = 16;
  static constexpr int LANES = WIDTH / 4;  // of 128 bits
  static constexpr int DECODE_ROWS = 4;    // of a register tile: 4 x 4 accumulators, and room for operands
  static constexpr int MAX_ROW_VECTORS = 4;

  static Float set(float x) { return _mm512_set1_ps(x); }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  // 16 bytes in every lane of 128 bits.
  static Float load_in_lanes(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static float first_lane(Float x) { return _mm512_cvtss_f32(x); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float fms(Float a, Float b, Float c) { return _mm512_fmsub_ps(a, b, c); }
  // Of a NaN and a number the second argument is returned.
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float round(Float x) { return _mm512_roundscale_ps(x, 0); }
  static Float abs(Float x) { return _mm512_abs_ps(x); }
  static Float copy_sign(Float magnitude, Float sign) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_set1_epi32(0x7fffffff), _mm512_castps_si512(magnitude), _mm512_castps_si512(sign), 0xca));
  }
  static Float select_less(Float a, Float b, Float if_less, Float otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, if_less);
  }
  // x * 2**n for a whole n; 0 below the smallest subnormal.
  static constexpr float SMALLEST_EXPONENT = -160.0f;
  static Float scale_by_power(Float x, Float n) { return _mm512_scalef_ps(x, n); }
  // The float32 whose exponent is the low 8 bits of x; y, or 0 where x < limit.
  static Float power_in_low_bits(Float x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23));
  }
  static Float zero_below(Float x, float limit, Float y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(limit), _CMP_NLT_UQ), y);
  }
  static Float iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  // 0 to 3 in every lane of 128 bits.
  static Float iota_in_lanes() { return _mm512_broadcast_f32x4(_mm_setr_ps(0, 1, 2, 3)); }
  // x - p[lane].
  static Float difference(int32_t x, const int32_t* p) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(x), _mm512_loadu_si512(p)));
  }

  // The scores whose row sees the token, -inf for the others; a row sees [begin, end).
  static Float keep_visible(Float score, const int32_t* begin, const int32_t* end, int32_t token) {
    const __m512i t = _mm512_set1_epi32(token);
    const __mmask16 visible = _mm512_cmple_epi32_mask(_mm512_loadu_si512(begin), t) &
                              _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(end), t);
    return _mm512_mask_blend_ps(visible, set(-std::numeric_limits<float>::infinity()), score);
  }

  // Whether x has an infinity or a NaN.
  static bool any_special(Float x) { return _mm512_fpclass_ps_mask(x, 0x99) != 0; }

  static float sum(Float x) { return _mm512_reduce_add_ps(x); }
  static float largest(Float x) { return _mm512_reduce_max_ps(x); }

  // Of each lane of 128 bits the largest element, in all four of them.
  static Float largest_in_lanes(Float x) {
    x = max(x, _mm512_shuffle_ps(x, x, 0x4e));
    return max(x, _mm512_shuffle_ps(x, x, 0xb1));
  }

  // Sums of vectors 0 to 3 over each 128-bit lane, side by side in that lane.
  static Float sum_quads(Float a, Float b, Float c, Float d) {
    const Float ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Float cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  // Of WIDTH / 4 results of sum_quads, the sums of the WIDTH vectors in order.
  static Float join_quads(const Float (&quad)[4]) {
    const Float ab =
        add(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    const Float cd =
        add(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
    return add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }

  static void transpose(Float (&x)[16]) {
    Float t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
      const __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
      x[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      x[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      x[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      x[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0x88);
      t[4 + i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0xdd);
      t[8 + i] = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0x88);
      t[12 + i] = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
      x[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
      x[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
      x[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
    }
  }

  // `count` (at most WIDTH) elements of a row as float32, zero beyond them.
  static Float widen(const float* p, int64_t count) {
    return count >= WIDTH ? load(p) : _mm512_maskz_loadu_ps(first(count), p);
  }
  static Float widen(const float16* p, int64_t count) { return _mm512_cvtph_ps(load_words(p, count)); }
  static Float widen(const bfloat16* p, int64_t count) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p, count)), 16));
  }
  static Float widen(const float8_e5m2* p, int64_t count) {  // the upper half of a float16
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_bytes(p, count)), 8));
  }
  // As a float16 with the same mantissa, which is 2**-8 of the value; the code of NaN would be 480.
  static Float widen(const float8_e4m3fn* p, int64_t count) {
    const __m256i bits = _mm256_cvtepu8_epi16(load_bytes(p, count));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    const __m256i half = _mm256_mask_mov_epi16(_mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7)), is_nan,
                                               _mm256_set1_epi16(0x7e00));
    return mul(_mm512_cvtph_ps(half), set(256.0f));
  }
  static Float widen(const int8_t* p, int64_t count) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p, count)));
  }

  // Stores the first `count` (at most WIDTH) lanes, rounded to nearest even.
  static void narrow(float* p, Float x, int64_t count) { _mm512_mask_storeu_ps(p, first(count), x); }
  static void narrow(float16* p, Float x, int64_t count) {
    _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void narrow(bfloat16* p, Float x, int64_t count) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet_nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_blend_epi32(is_nan, rounded, quiet_nan);
    _mm256_mask_storeu_epi16(p, first(count), _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
  }

 private:
  static __mmask16 first(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
  }
  static __m256i load_words(const void* p, int64_t count) {
    return count >= WIDTH ? _mm256_loadu_si256(static_cast<const __m256i*>(p))
                          : _mm256_maskz_loadu_epi16(first(count), p);
  }
  static __m128i load_bytes(const void* p, int64_t count) {
    return count >= WIDTH ? _mm_loadu_si128(static_cast<const __m128i*>(p))
                          : _mm_maskz_loadu_epi8(first(count), p);
  }
};

}  // namespace
}  // namespace pagedkv::cpu
