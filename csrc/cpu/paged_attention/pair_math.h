// Scores and values by dot products of bfloat16 pairs (AVX-512 BF16): a dword of an operand holds two
// elements, of bfloat16 or of a cache dtype whose every value is a bfloat16. 8-bit elements are widened by
// table (AVX-512 VBMI).
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "cpu/paged_attention/vector_avx512.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// bfloat16 bits of the magnitudes 0 to 127 of an 8-bit dtype, low and high bytes apart.
struct WideningTable {
  alignas(64) std::array<uint8_t, 128> low, high;
};

template <class Cache>
constexpr WideningTable make_widening_table() {
  WideningTable table{};
  for (int i = 0; i < 128; ++i) {
    const auto wide = from_float<bfloat16>(to_float(std::bit_cast<Cache>(static_cast<uint8_t>(i))));
    table.low[i] = static_cast<uint8_t>(wide.bits);
    table.high[i] = static_cast<uint8_t>(wide.bits >> 8);
  }
  if (std::is_same_v<Cache, int8_t>) table.high[0] = 0x43;  // -128: see widen
  return table;
}

// Computed by the compiler: nothing of this file may run before the instruction set is known to be there.
template <class Cache>
inline constexpr WideningTable WIDENING_TABLE = make_widening_table<Cache>();

// AVX-512 with the instruction that rounds to bfloat16.
struct Avx512Bf16 : Avx512 {
  using Avx512::narrow;
  static void narrow(bfloat16* p, Float x, int64_t count) {
    const auto words = (__m256i)_mm512_cvtneps_pbh(x);
    if (count >= WIDTH) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
    } else if (count > 0) {
      _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1), words);
    }
  }
};

template <class CacheType>
struct PairMath {
  using Isa = Avx512Bf16;
  using Cache = CacheType;
  using Float = __m512;
  using Operand = __m512i;
  static constexpr int PACK = 2;
  static constexpr int OPERANDS = sizeof(Cache) == 2 ? 1 : 2;
  static constexpr int STEP = 32 * OPERANDS;
  static constexpr bool IS_STORED = std::is_same_v<Cache, bfloat16>;
  static constexpr int EXP_DEGREE = 4;

  static void load(const bfloat16* p, int64_t count, Operand (&x)[1]) {
    x[0] = count >= 32 ? _mm512_loadu_si512(p)
                       : _mm512_maskz_loadu_epi16(count <= 0 ? 0 : (uint32_t{1} << count) - 1, p);
  }
  template <class Byte>
  static void load(const Byte* p, int64_t count, Operand (&x)[2]) {
    // Quads in the order that makes widen's work on 128-bit lanes come out in order.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    widen(_mm512_permutexvar_epi64(order, load_bytes(p, count)), x);
  }
  // What keys and queries are multiplied by: in an order of their own.
  static void load_key(const Cache* p, int64_t count, Operand (&x)[OPERANDS]) {
    if constexpr (OPERANDS == 1) {
      load(p, count, x);
    } else {
      widen(load_bytes(p, count), x);
    }
  }
  // Pairs of two tokens' values, from element `begin` of their rows on.
  static void load_values(const Cache* const* rows, int64_t begin, int64_t count,
                          Operand (&x)[2 * OPERANDS]) {
    if constexpr (OPERANDS == 1) {
      Operand tokens[2][1];
      load(rows[0] + begin, count, tokens[0]);
      load(rows[1] + begin, count, tokens[1]);
      interleave(tokens, x);
    } else {
      const __m512i first = load_bytes(rows[0] + begin, count), second = load_bytes(rows[1] + begin, count);
      Operand low[2], high[2];
      widen(_mm512_unpacklo_epi8(first, second), low);
      widen(_mm512_unpackhi_epi8(first, second), high);
      x[0] = low[0], x[1] = low[1], x[2] = high[0], x[3] = high[1];
    }
  }
  static Operand load_dwords(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static Operand load_in_lanes(const uint32_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_dwords(uint32_t* p, Operand x) { _mm512_storeu_si512(p, x); }
  static Operand broadcast(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  static Float multiply_add(Operand a, Operand b, Float c) {
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
  }

  static void interleave(const Operand (&tokens)[2][OPERANDS], Operand (&x)[2 * OPERANDS]) {
#pragma GCC unroll 2
    for (int i = 0; i < OPERANDS; ++i) {
      x[2 * i] = _mm512_unpacklo_epi16(tokens[0][i], tokens[1][i]);
      x[2 * i + 1] = _mm512_unpackhi_epi16(tokens[0][i], tokens[1][i]);
    }
  }
  // interleave works on 128-bit lanes: x[0] holds dimensions 0-3, 8-11, 16-19, 24-27 and x[1] those between.
  template <class Vector>
  static void restore_order(Vector (&x)[2 * OPERANDS]) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 2
    for (int i = 0; i < 2 * OPERANDS; i += 2) {
      const __m512i low = (__m512i)x[i], high = (__m512i)x[i + 1];
      x[i] = (Vector)_mm512_permutex2var_epi32(low, first, high);
      x[i + 1] = (Vector)_mm512_permutex2var_epi32(low, second, high);
    }
  }

  // Undoes the order of load_values: of 8-bit elements, x[i] holds dimensions 4 * i to 4 * i + 3 of each 16.
  static void restore_values(Float (&x)[2 * OPERANDS]) {
    if constexpr (OPERANDS == 1) {
      restore_order(x);
    } else {
      const Float a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
      const Float c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
      x[0] = _mm512_shuffle_f32x4(a, c, 0x88);
      x[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
      x[2] = _mm512_shuffle_f32x4(b, d, 0x88);
      x[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
  }

  // Pairs, rounded: `low` in the low halves of the dwords.
  static Operand pack(Float low, Float high) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    const __m512i order =
        _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                          0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    return _mm512_permutexvar_epi16(order, halves);
  }
  static void store_weights(uint32_t* p, int64_t, const Float (&weight)[2]) {
    store_dwords(p, pack(weight[0], weight[1]));
  }
  static void pack_tokens(uint32_t* p, Float weight) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(weight));
  }

  // In the order of load_key.
  static void load_query(const bfloat16* query, int64_t head_dim, int64_t padded_dim, uint32_t* dwords) {
    for (int64_t i = 0; i < padded_dim; i += 64) {
      Operand first[1], second[1];
      load(query + i, head_dim - i, first);
      load(query + i + 32, head_dim - i - 32, second);
      if constexpr (OPERANDS == 2) {
        const Operand low = first[0], high = second[0];
        first[0] = _mm512_shuffle_i32x4(low, high, 0x88);
        second[0] = _mm512_shuffle_i32x4(low, high, 0xdd);
      }
      store_dwords(dwords + i / 2, first[0]);
      store_dwords(dwords + i / 2 + 16, second[0]);
    }
  }

  // 32 elements of a query, zero beyond `count`.
  static Float load_query_vector(const bfloat16* query, int64_t count) {
    return (Float)(count >= 32
                       ? _mm512_loadu_si512(query)
                       : _mm512_maskz_loadu_epi16(count <= 0 ? 0 : (uint32_t{1} << count) - 1, query));
  }

  static bool any_special(Operand x) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent) != 0;
  }
  static float element(uint32_t dword, int i) {
    return std::bit_cast<float>(i == 0 ? dword << 16 : dword & 0xffff0000u);
  }
  static uint32_t without_element(uint32_t dword, int i) { return dword & (i == 0 ? 0xffff0000u : 0xffffu); }

 protected:
  static __m512i load_bytes(const void* p, int64_t count) {
    return count >= 64 ? _mm512_loadu_si512(p)
                       : _mm512_maskz_loadu_epi8(count <= 0 ? 0 : (uint64_t{1} << count) - 1, p);
  }

  // 64 bytes to 2 x 32 bfloat16: the sign is the top bit, the magnitude indexes the table. Of each 128-bit
  // lane the first 8 bytes go to x[0].
  static void widen(__m512i bytes, Operand (&x)[2]) {
    constexpr const WideningTable& table = WIDENING_TABLE<Cache>;
    __m512i index = bytes;
    if constexpr (std::is_same_v<Cache, int8_t>) index = _mm512_abs_epi8(bytes);
    const auto look_up = [&](const std::array<uint8_t, 128>& bits, __mmask64 mask) {
      return _mm512_maskz_permutex2var_epi8(mask, _mm512_load_si512(bits.data()), index,
                                            _mm512_load_si512(bits.data() + 64));
    };
    __mmask64 mask = ~__mmask64{0};
    // Of the magnitude of -128 the table sees 0, for which it has the bits of 128.
    if constexpr (std::is_same_v<Cache, int8_t>) mask = _mm512_test_epi8_mask(bytes, bytes);
    const __m512i low = look_up(table.low, ~__mmask64{0});
    __m512i high = look_up(table.high, mask);
    high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(-128), 0xf8);  // high | (bytes & sign)
    x[0] = _mm512_unpacklo_epi8(low, high);
    x[1] = _mm512_unpackhi_epi8(low, high);
  }
};

}  // namespace
}  // namespace pagedkv::cpu
