// The two matrix products of decode.h, in registers.
#pragma once

#include <cstdint>

#include "common/paging.h"
#include "cpu/paged_attention/fetch.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

template <class Math, int LANE_ROWS>
struct DecodeProducts {
  using Isa = typename Math::Isa;
  using Cache = typename Math::Cache;
  using Float = typename Isa::Float;
  using Operand = typename Math::Operand;
  static constexpr int WIDTH = Isa::WIDTH;
  static constexpr int PACK = Math::PACK;
  // Of an item, at most: many where arithmetic binds, as each item's softmax step is waited for.
  static constexpr int TOKENS = sizeof(Cache) == 1 || (sizeof(Cache) == 2 && LANE_ROWS > 1) ? 64 : 32;
  static constexpr int LANE_TOKENS = WIDTH / LANE_ROWS;  // of a vector of scores
  static_assert(LANE_ROWS == 1 || LANE_TOKENS == 4);
  // Register tiles of scores: of multiply_keys, and of key_tile.
  static constexpr int KEY_TOKENS = 4, KEY_ROWS = LANE_ROWS == 1 ? 2 : LANE_ROWS;
  static constexpr int LANE_KEY_TOKENS = 8, KEY_VECTORS = WIDTH == 16 ? 2 : 1;
  static constexpr int LINE_DWORDS = 16;  // of keys that key_tile takes: they are whole cache lines
  // Dwords of weights from a row vector to the next, and from a row to the next in it.
  static constexpr int WEIGHT_VECTOR_STRIDE = TOKENS * LANE_ROWS / PACK;
  static constexpr int WEIGHT_ROW_STRIDE = LANE_ROWS == 1 ? WEIGHT_VECTOR_STRIDE : LANE_TOKENS / PACK;

  // The rows of a tile of one KV head; beyond its tokens, rows of zeros. num_padded: to a whole vector of
  // tokens.
  struct Item {
    int num_tokens, num_padded;
    const Cache *key[TOKENS], *value[TOKENS];
  };

  // Rows that are fetched, and as many that are asked for again, evenly over num_passes passes through as
  // many tokens.
  struct RowFetch {
    const Cache *const *row, *const *again;
    int64_t row_bytes;
    int num_passes, due = 0;

    void step(int num_tokens) {
      for (due += num_tokens; due >= num_passes; due -= num_passes) {
        fetch_to_l2(*row++, row_bytes);
        fetch_to_l2(*again++, row_bytes);
      }
    }
  };

  // STEP dimensions of multiply_keys, or with WHOLE = false, those that are left.
  template <bool WHOLE, int NUM_ROWS>
  [[gnu::always_inline]] static void add_key_step(const Cache* const* keys, RowFetch& fetch, int64_t num_dims,
                                                  int64_t dim, const uint32_t* query,
                                                  int64_t query_row_stride,
                                                  Float (&dot)[NUM_ROWS][KEY_TOKENS]) {
    fetch.step(KEY_TOKENS);
    Operand k[KEY_TOKENS][Math::OPERANDS];
#pragma GCC unroll 4
    for (int t = 0; t < KEY_TOKENS; ++t) {
      Math::load_key(keys[t] + dim, WHOLE ? Math::STEP : num_dims - dim, k[t]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < Math::OPERANDS; ++i) {
#pragma GCC unroll 4
      for (int row = 0; row < NUM_ROWS; ++row) {
        const Operand q = Math::load_dwords(query + row * query_row_stride + i * WIDTH);
#pragma GCC unroll 4
        for (int t = 0; t < KEY_TOKENS; ++t) dot[row][t] = Math::multiply_add(q, k[t][i], dot[row][t]);
      }
    }
  }

  // For keys that are widened, once for all rows. Scores of NUM_ROWS rows of queries for the item's tokens:
  // score[row][token / 4] = the sums over each lane's dwords where a row has vectors of its own, otherwise
  // score[token / 4] = a row a lane. Not inlined: in a function of its own, all operands find a register.
  template <int NUM_ROWS>
  [[gnu::noinline]] static void multiply_keys(const Item& item, RowFetch fetch, int64_t num_dims,
                                              const uint32_t* query, int64_t query_row_stride, float* score) {
    for (int token = 0; token < item.num_padded; token += KEY_TOKENS, score += WIDTH) {
      Float dot[NUM_ROWS][KEY_TOKENS];
#pragma GCC unroll 4
      for (int row = 0; row < NUM_ROWS; ++row) {
#pragma GCC unroll 4
        for (int t = 0; t < KEY_TOKENS; ++t) dot[row][t] = Isa::set(0.0f);
      }
      int64_t dim = 0;
      const uint32_t* q = query;
      for (; dim + Math::STEP <= num_dims; dim += Math::STEP, q += Math::OPERANDS * WIDTH) {
        add_key_step<true>(item.key + token, fetch, num_dims, dim, q, query_row_stride, dot);
      }
      if (dim < num_dims)
        add_key_step<false>(item.key + token, fetch, num_dims, dim, q, query_row_stride, dot);
      Float sums[LANE_ROWS == 1 ? NUM_ROWS : LANE_ROWS];
#pragma GCC unroll 4
      for (int row = 0; row < NUM_ROWS; ++row) {
        sums[row] = Isa::sum_quads(dot[row][0], dot[row][1], dot[row][2], dot[row][3]);
        if (LANE_ROWS == 1) Isa::store(score + row * TOKENS / 4 * WIDTH, sums[row]);
      }
      if constexpr (LANE_ROWS > 1) {
#pragma GCC unroll 4
        for (int row = NUM_ROWS; row < LANE_ROWS; ++row) sums[row] = Isa::set(0.0f);
        Isa::store(score, Isa::join_quads(sums));
      }
    }
  }

  // For keys that are used as they lie in the cache. score[v][token / 4] = the sums over each lane's dwords
  // of query . key, for VECTORS vectors of rows and LANE_KEY_TOKENS tokens. Fetches as many rows of
  // row_bytes, evenly, and asks for as many again. NUM_LINES: of a key, where the compiler may know it and
  // make one run of instructions of all; otherwise 0. Not inlined: in a function of its own, all operands
  // find a register.
  template <int VECTORS, int NUM_LINES>
  [[gnu::noinline]] static void key_tile(const uint32_t* const* keys, const Cache* const* fetched,
                                         const Cache* const* again, int64_t row_bytes, int num_lines,
                                         const uint32_t* query, int query_vector_stride, float* score) {
    constexpr int STEP_DWORDS = LANE_ROWS == 1 ? WIDTH : 4, LINE_STEPS = LINE_DWORDS / STEP_DWORDS;
    Float dot[VECTORS][LANE_KEY_TOKENS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 8
      for (int t = 0; t < LANE_KEY_TOKENS; ++t) dot[v][t] = Isa::set(0.0f);
    }
    const auto multiply = [&](int step) __attribute__((always_inline)) {
      Operand q[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        q[v] = Math::load_dwords(query + v * query_vector_stride + step * WIDTH);
#pragma GCC unroll 8
      for (int t = 0; t < LANE_KEY_TOKENS; ++t) {
        const uint32_t* key = keys[t] + step * STEP_DWORDS;
        const Operand k = LANE_ROWS == 1 ? Math::load_dwords(key) : Math::load_in_lanes(key);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) dot[v][t] = Math::multiply_add(q[v], k, dot[v][t]);
      }
    };
    if constexpr (NUM_LINES > 0) {
      constexpr int NUM_STEPS = NUM_LINES * LINE_STEPS;
      constexpr int ROW_LINES = max_of(1, NUM_LINES * PACK * int{sizeof(Cache)} / int{sizeof(uint32_t)});
#pragma GCC unroll 16
      for (int step = 0; step < NUM_STEPS; ++step) {
        const int end = (step + 1) * LANE_KEY_TOKENS * ROW_LINES / NUM_STEPS;
#pragma GCC unroll 8
        for (int i = step * LANE_KEY_TOKENS * ROW_LINES / NUM_STEPS; i < end && row_bytes > 0; ++i) {
          for (const Cache* row : {fetched[i / ROW_LINES], again[i / ROW_LINES]}) {
            fetch_to_l2(reinterpret_cast<const char*>(row) + i % ROW_LINES * 64, 64);
          }
        }
        multiply(step);
      }
    } else {
      const int num_steps = num_lines * LINE_STEPS;
      for (int row = 0, step = 0; row < LANE_KEY_TOKENS; ++row) {
        fetch_to_l2(fetched[row], row_bytes);
        fetch_to_l2(again[row], row_bytes);
        for (; step < num_steps * (row + 1) / LANE_KEY_TOKENS; ++step) multiply(step);
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 2
      for (int t = 0; t < LANE_KEY_TOKENS; t += 4) {
        Isa::store(score + v * TOKENS / 4 * WIDTH + t / 4 * WIDTH,
                   Isa::sum_quads(dot[v][t], dot[v][t + 1], dot[v][t + 2], dot[v][t + 3]));
      }
    }
  }

  // Vectors of values that are added up together: many for few rows, but for what is left over.
  static constexpr int FEW_VALUES = 4;
  static constexpr int many_values(int num_rows) { return num_rows <= 2 && WIDTH == 16 ? 8 : FEW_VALUES; }

  // How often multiply_values goes through the tokens.
  static int num_value_passes(int num_rows, int64_t num_dims) {
    const int64_t many = many_values(num_rows) * WIDTH;
    return static_cast<int>(num_dims / many + ceil_div(num_dims % many, FEW_VALUES * WIDTH));
  }

  // acc[row] = acc[row] * fade + sum of weight * value. The item is summed up apart, so that a long context
  // loses no digits to a running sum.
  template <int NUM_ROWS>
  static void multiply_values(const Item& item, RowFetch& fetch, const uint32_t* weight, const float* fade,
                              float* acc, int64_t acc_row_stride, int64_t num_dims) {
    constexpr int MANY = many_values(NUM_ROWS), FEW = FEW_VALUES;
    int64_t dim = 0;
    for (; dim + MANY * WIDTH <= num_dims; dim += MANY * WIDTH) {
      value_tile<NUM_ROWS, MANY, true>(item, fetch, weight, fade, acc, acc_row_stride, num_dims, dim);
    }
    for (; dim < num_dims; dim += FEW * WIDTH) {
      if (dim + FEW * WIDTH <= num_dims) {
        value_tile<NUM_ROWS, FEW, true>(item, fetch, weight, fade, acc, acc_row_stride, num_dims, dim);
      } else {
        value_tile<NUM_ROWS, FEW, false>(item, fetch, weight, fade, acc, acc_row_stride, num_dims, dim);
      }
    }
  }

  template <int NUM_ROWS, int VECTORS, bool WHOLE>
  [[gnu::noinline]] static void value_tile(const Item& item, RowFetch& item_fetch, const uint32_t* weight,
                                           const float* fade, float* acc, int64_t acc_row_stride,
                                           int64_t num_dims, int64_t dim) {
    RowFetch fetch = item_fetch;
    constexpr int LOADED = Math::OPERANDS * PACK;  // vectors of one load of PACK tokens
    static_assert(VECTORS % LOADED == 0);
    Float sum[NUM_ROWS][VECTORS];
#pragma GCC unroll 4
    for (int row = 0; row < NUM_ROWS; ++row) {
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) sum[row][i] = Isa::set(0.0f);
    }
    for (int token = 0; token < item.num_padded; token += PACK) {
      fetch.step(PACK);
      Operand x[VECTORS / LOADED][LOADED];
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS / LOADED; ++i) {
        const int64_t begin = dim + i * Math::STEP;
        Math::load_values(item.value + token, begin, WHOLE ? Math::STEP : num_dims - begin, x[i]);
      }
#pragma GCC unroll 4
      for (int row = 0; row < NUM_ROWS; ++row) {
        const Operand w = Math::broadcast(weight + row / LANE_ROWS * WEIGHT_VECTOR_STRIDE +
                                          row % LANE_ROWS * WEIGHT_ROW_STRIDE);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) {
          sum[row][i] = Math::multiply_add(w, x[i / LOADED][i % LOADED], sum[row][i]);
        }
      }
      // The next tokens' weights are the next dword, or lie in the next vector of them.
      ++weight;
      if ((token + PACK) % LANE_TOKENS == 0) weight += (WIDTH - LANE_TOKENS) / PACK;
    }
    item_fetch = fetch;
#pragma GCC unroll 4
    for (int row = 0; row < NUM_ROWS; ++row) {
      float* row_acc = acc + row * acc_row_stride + dim;
      const Float row_fade = Isa::set(fade[row * LANE_TOKENS]);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) {
        Isa::store(row_acc + i * WIDTH, Isa::fma(Isa::load(row_acc + i * WIDTH), row_fade, sum[row][i]));
      }
    }
  }
};

}  // namespace
}  // namespace pagedkv::cpu
