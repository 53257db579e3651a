// Scores and values by float32 multiply-adds: a dword of an operand holds one element, of any cache dtype.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/dispatch.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

template <class IsaType, class CacheType>
struct FloatMath {
  using Isa = IsaType;
  using Cache = CacheType;
  using Float = typename Isa::Float;
  using Operand = Float;
  static constexpr int PACK = 1;           // elements in a dword
  static constexpr int OPERANDS = 1;       // of one load
  static constexpr int STEP = Isa::WIDTH;  // elements of one load

  static constexpr bool IS_STORED = std::is_same_v<Cache, float>;  // rows of a cache are dwords as they lie
  static constexpr int EXP_DEGREE = 5;

  // `count` elements of a row from p on (all of STEP where there are more), zero beyond them.
  static void load(const Cache* p, int64_t count, Operand (&x)[1]) { x[0] = Isa::widen(p, count); }
  static void load_key(const Cache* p, int64_t count, Operand (&x)[1]) { load(p, count, x); }
  static void load_values(const Cache* const* rows, int64_t begin, int64_t count, Operand (&x)[1]) {
    load(rows[0] + begin, count, x);
  }
  static void restore_values(Operand (&)[1]) {}
  static Operand load_dwords(const uint32_t* p) { return Isa::load(reinterpret_cast<const float*>(p)); }
  // Four dwords in every lane of 128 bits.
  static Operand load_in_lanes(const uint32_t* p) {
    return Isa::load_in_lanes(reinterpret_cast<const float*>(p));
  }
  static void store_dwords(uint32_t* p, Operand x) { Isa::store(reinterpret_cast<float*>(p), x); }
  static Operand broadcast(const uint32_t* p) { return Isa::set(*reinterpret_cast<const float*>(p)); }
  static Float multiply_add(Operand a, Operand b, Float c) { return Isa::fma(a, b, c); }

  // The dwords of PACK tokens' values: here one token's. In the order of load.
  static void interleave(const Operand (&tokens)[1][1], Operand (&x)[1]) { x[0] = tokens[0][0]; }
  // Undoes the order in which interleave leaves dimensions.
  static void restore_order(Operand (&)[1]) {}

  // The weights of two tokens, a row a lane, as 2 / PACK vectors of dwords.
  static void store_weights(uint32_t* p, int64_t stride, const Float (&weight)[2]) {
    store_dwords(p, weight[0]);
    store_dwords(p + stride, weight[1]);
  }
  // WIDTH tokens' weights of one row as WIDTH / PACK dwords.
  static void pack_tokens(uint32_t* p, Float weight) { store_dwords(p, weight); }

  template <class Query>
  static void load_query(const Query* query, int64_t head_dim, int64_t padded_dim, uint32_t* dwords) {
    for (int64_t i = 0; i < padded_dim; i += STEP)
      store_dwords(dwords + i, Isa::widen(query + i, head_dim - i));
  }

  // WIDTH elements of a query, zero beyond `count`.
  template <class Query>
  static Float load_query_vector(const Query* query, int64_t count) {
    return Isa::widen(query, count);
  }

  // Whether an element is an infinity or a NaN.
  static bool any_special(Operand x) { return Isa::any_special(x); }
  static float element(uint32_t dword, int) { return std::bit_cast<float>(dword); }
  static uint32_t without_element(uint32_t, int) { return 0; }
};

// Everything in float32.
template <class Isa>
struct FloatMathOf {
  template <class Body>
  static void dispatch(const PagedAttentionParams& p, Body&& body) {
    dispatch_dtype(p.cache_dtype, [&]<class Cache>() { body.template operator()<FloatMath<Isa, Cache>>(); });
  }
};

}  // namespace
}  // namespace pagedkv::cpu
