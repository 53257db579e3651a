// The two matrix products of prefill.h, in registers.
#pragma once

#include <cstdint>

#include "cpu/paged_attention/fetch.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// The matrix products of one block of ROW_VECTORS vectors of rows.
template <class Math, int ROW_VECTORS>
struct BlockProducts {
  using Isa = typename Math::Isa;
  using Float = typename Isa::Float;
  using Operand = typename Math::Operand;
  static constexpr int WIDTH = Isa::WIDTH;
  static constexpr int ROWS = ROW_VECTORS * WIDTH;
  // score[token][row] for the tokens [token_begin, token_end) (an even number) of keys, num_dwords each;
  // query is [num_dwords][ROWS]. Raises largest[row] to the largest score. Vector i of rows sees the tokens
  // before ends[i], which do not fall; what it gets for later ones means nothing. Fetches `fetched`
  // meanwhile.
  static void multiply_keys(const uint32_t* const* keys, int num_dwords, int token_begin, int token_end,
                            const int* ends, const uint32_t* query, const FetchList& fetched, float* score,
                            float* largest) {
    int token = token_begin, num_fetched = 0;
    const auto multiply = [&]<int NUM_TOKENS, int FIRST>() {
      key_tile<NUM_TOKENS, ROW_VECTORS - FIRST>(
          keys + token, num_dwords, query + FIRST * WIDTH, fetched.line + num_fetched,
          fetched.size - num_fetched, score + token * ROWS + FIRST * WIDTH, largest + FIRST * WIDTH);
    };
    while (token < token_end) {
      const int num_tokens = token + TILE <= token_end ? TILE : 2;
      for_first(ends, token, [&]<int FIRST>() {
        num_tokens == TILE ? multiply.template operator()<TILE, FIRST>()
                           : multiply.template operator()<2, FIRST>();
      });
      token += num_tokens;
      num_fetched = num_fetched + num_dwords < fetched.size ? num_fetched + num_dwords : fetched.size;
    }
    fetched.fetch_from(num_fetched);
  }

  // acc[dim][row] = acc[dim][row] * factor[row] + sum over the dwords i from `begin` on of values[i][dim] *
  // weight[i][row]: those of the tokens before ends[vector]. factor null: what acc holds does not count.
  static void multiply_values(const uint32_t* values, int64_t value_stride, int begin, const int* ends,
                              int64_t num_dims, const uint32_t* weight, const float* factor, float* acc) {
    for (int64_t dim = 0; dim + TILE <= num_dims; dim += TILE) {
      value_tile(values + dim, value_stride, begin, ends, weight, factor, acc + dim * ROWS);
    }
  }

 private:
  // Tokens, or dimensions, of a register tile: enough accumulators to keep the multipliers busy.
  static constexpr int TILE = ROW_VECTORS == 4 ? 4 : WIDTH == 16 ? 8 : 4;

  // Calls body<FIRST>() with the first vector of rows that sees the token.
  template <int FIRST = 0, class Body>
  static void for_first(const int* ends, int token, Body&& body) {
    if constexpr (FIRST + 1 < ROW_VECTORS) {
      if (ends[FIRST] <= token) return for_first<FIRST + 1>(ends, token, body);
    }
    body.template operator()<FIRST>();
  }

  // Not inlined: in a function of their own, all operands find a register.
  template <int NUM_TOKENS, int NUM_VECTORS>
  [[gnu::noinline]] static void key_tile(const uint32_t* const* keys, int num_dwords, const uint32_t* query,
                                         const char* const* fetched, int num_fetched, float* score,
                                         float* largest) {
    const uint32_t* key[NUM_TOKENS];
    for (int t = 0; t < NUM_TOKENS; ++t) {
      key[t] = keys[t];
      fetch_to_l1(score + t * ROWS, NUM_VECTORS * WIDTH * sizeof(float));
    }
    Float sum[NUM_TOKENS][NUM_VECTORS];
    clear(sum);
    for (int i = 0; i < num_dwords; ++i, query += ROWS) {
      if (i < num_fetched) _mm_prefetch(fetched[i], _MM_HINT_T1);
      Operand q[NUM_VECTORS];
#pragma GCC unroll 4
      for (int r = 0; r < NUM_VECTORS; ++r) q[r] = Math::load_dwords(query + r * WIDTH);
#pragma GCC unroll 8
      for (int t = 0; t < NUM_TOKENS; ++t) {
        const Operand k = Math::broadcast(key[t] + i);
#pragma GCC unroll 4
        for (int r = 0; r < NUM_VECTORS; ++r) sum[t][r] = Math::multiply_add(q[r], k, sum[t][r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < NUM_VECTORS; ++r) {
      Float most = Isa::load(largest + r * WIDTH);
#pragma GCC unroll 8
      for (int t = 0; t < NUM_TOKENS; ++t) {
        most = Isa::max(most, sum[t][r]);
        Isa::store(score + t * ROWS + r * WIDTH, sum[t][r]);
      }
      Isa::store(largest + r * WIDTH, most);
    }
  }

  [[gnu::noinline]] static void value_tile(const uint32_t* values, int64_t value_stride, int begin,
                                           const int* ends, const uint32_t* weight, const float* factor,
                                           float* acc) {
    fetch_to_l1(acc, TILE * ROWS * sizeof(float));
    Float sum[TILE][ROW_VECTORS];
    clear(sum);
    add_values<0>(values, value_stride, begin, ends, weight, sum);
#pragma GCC unroll 4
    for (int r = 0; r < ROW_VECTORS; ++r) {
#pragma GCC unroll 8
      for (int d = 0; d < TILE; ++d) {
        float* place = acc + d * ROWS + r * WIDTH;
        if (factor != nullptr)
          sum[d][r] = Isa::fma(Isa::load(place), Isa::load(factor + r * WIDTH), sum[d][r]);
        Isa::store(place, sum[d][r]);
      }
    }
  }

  // The tokens that vector FIRST sees, for it and later ones; then those that it does not.
  template <int FIRST>
  [[gnu::always_inline]] static void add_values(const uint32_t* values, int64_t value_stride, int begin,
                                                const int* ends, const uint32_t* weight,
                                                Float (&sum)[TILE][ROW_VECTORS]) {
    const int end = ends[FIRST] / Math::PACK;
    for (int i = begin; i < end; ++i) {
      Operand w[ROW_VECTORS];
#pragma GCC unroll 4
      for (int r = FIRST; r < ROW_VECTORS; ++r) w[r] = Math::load_dwords(weight + i * ROWS + r * WIDTH);
#pragma GCC unroll 8
      for (int d = 0; d < TILE; ++d) {
        const Operand v = Math::broadcast(values + i * value_stride + d);
#pragma GCC unroll 4
        for (int r = FIRST; r < ROW_VECTORS; ++r) sum[d][r] = Math::multiply_add(w[r], v, sum[d][r]);
      }
    }
    if constexpr (FIRST + 1 < ROW_VECTORS) {
      add_values<FIRST + 1>(values, value_stride, end > begin ? end : begin, ends, weight, sum);
    }
  }

  template <int N, int NUM_VECTORS>
  static void clear(Float (&sum)[N][NUM_VECTORS]) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < NUM_VECTORS; ++r) sum[i][r] = Isa::set(0.0f);
    }
  }
};

}  // namespace
}  // namespace pagedkv::cpu
