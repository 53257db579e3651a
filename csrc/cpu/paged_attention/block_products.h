// The two matrix products of prefill.h, in registers.
#pragma once

#include <cstdint>

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
  // Tokens, or dimensions, of a register tile: enough accumulators to keep the multipliers busy.
  static constexpr int TILE = ROW_VECTORS == 4 ? 4 : WIDTH == 16 ? 8 : 4;

  // score[token][row] for `num_tokens` (even) keys of num_dwords each; query is [num_dwords][ROWS]. Raises
  // largest[row] to the largest score.
  static void multiply_keys(const uint32_t* keys, int64_t key_stride, int num_dwords, int num_tokens,
                            const uint32_t* query, float* score, float* largest) {
    int token = 0;
    for (; token + TILE <= num_tokens; token += TILE) {
      key_tile<TILE>(keys + token * key_stride, key_stride, num_dwords, query, score + token * ROWS, largest);
    }
    for (; token < num_tokens; token += 2) {
      key_tile<2>(keys + token * key_stride, key_stride, num_dwords, query, score + token * ROWS, largest);
    }
  }

  // acc[dim][row] = acc[dim][row] * factor[row] + sum over num_dwords of values[.][dim] * weight[.][row]
  static void multiply_values(const uint32_t* values, int64_t value_stride, int num_dwords, int64_t num_dims,
                              const uint32_t* weight, const float* factor, float* acc) {
    int64_t dim = 0;
    for (; dim + TILE <= num_dims; dim += TILE) {
      value_tile(values + dim, value_stride, num_dwords, weight, factor, acc + dim * ROWS);
    }
  }

 private:
  // Not inlined: in a function of their own, all operands find a register.
  template <int NUM_TOKENS>
  [[gnu::noinline]] static void key_tile(const uint32_t* keys, int64_t key_stride, int num_dwords,
                                         const uint32_t* query, float* score, float* largest) {
    Float sum[NUM_TOKENS][ROW_VECTORS];
    clear(sum);
    for (int i = 0; i < num_dwords; ++i, query += ROWS) {
      Operand q[ROW_VECTORS];
#pragma GCC unroll 4
      for (int r = 0; r < ROW_VECTORS; ++r) q[r] = Math::load_dwords(query + r * WIDTH);
#pragma GCC unroll 8
      for (int t = 0; t < NUM_TOKENS; ++t) {
        const Operand k = Math::broadcast(keys + t * key_stride + i);
#pragma GCC unroll 4
        for (int r = 0; r < ROW_VECTORS; ++r) sum[t][r] = Math::multiply_add(q[r], k, sum[t][r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROW_VECTORS; ++r) {
      Float most = Isa::load(largest + r * WIDTH);
#pragma GCC unroll 8
      for (int t = 0; t < NUM_TOKENS; ++t) {
        most = Isa::max(most, sum[t][r]);
        Isa::store(score + t * ROWS + r * WIDTH, sum[t][r]);
      }
      Isa::store(largest + r * WIDTH, most);
    }
  }

  [[gnu::noinline]] static void value_tile(const uint32_t* values, int64_t value_stride, int num_dwords,
                                           const uint32_t* weight, const float* factor, float* acc) {
    Float sum[TILE][ROW_VECTORS];
    clear(sum);
    for (int i = 0; i < num_dwords; ++i, values += value_stride, weight += ROWS) {
      Operand w[ROW_VECTORS];
#pragma GCC unroll 4
      for (int r = 0; r < ROW_VECTORS; ++r) w[r] = Math::load_dwords(weight + r * WIDTH);
#pragma GCC unroll 8
      for (int d = 0; d < TILE; ++d) {
        const Operand v = Math::broadcast(values + d);
#pragma GCC unroll 4
        for (int r = 0; r < ROW_VECTORS; ++r) sum[d][r] = Math::multiply_add(w[r], v, sum[d][r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROW_VECTORS; ++r) {
      const Float f = Isa::load(factor + r * WIDTH);
#pragma GCC unroll 8
      for (int d = 0; d < TILE; ++d) {
        float* place = acc + d * ROWS + r * WIDTH;
        Isa::store(place, Isa::fma(Isa::load(place), f, sum[d][r]));
      }
    }
  }

  template <int N>
  static void clear(Float (&sum)[N][ROW_VECTORS]) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < ROW_VECTORS; ++r) sum[i][r] = Isa::set(0.0f);
    }
  }
};

}  // namespace
}  // namespace pagedkv::cpu
