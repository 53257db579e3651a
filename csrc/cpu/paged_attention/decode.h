// A task of few rows that all see the same keys: the query heads of one KV head, or of several, at one token.
//
// Vectors run along head_dim, so that K and V are used as they lie in the cache, unpacked and once. Keys come
// in tiles of TOKENS. The scores of 4 tokens and DECODE_ROWS rows are a register tile of dot products, summed
// across lanes once they are whole; values are added up for DECODE_ROWS rows and a few vectors of head_dim.
//
// Bytes: K and V once. Random pieces of memory come at half the speed of a stream, so a task takes the heads
// that lie side by side, and while it works on a tile it fetches the next one in the order of memory, a line
// at a time, into the L2 cache (the T1 hint: the L1 cache is too small to run ahead in).
#pragma once

#include <cstring>

#include "common/paging.h"
#include "cpu/paged_attention/scores.h"
#include "cpu/paged_attention/store.h"
#include "cpu/paged_attention/task.h"
#include "cpu/paged_attention/tile_rows.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// Fetches the rows of a tile, [num_tokens, num_heads], one after the other in the order in which they lie.
class Fetcher {
 public:
  Fetcher() = default;
  template <class Cache>
  Fetcher(const Cache* cache, const int64_t* token_offsets, int num_tokens, int64_t token_stride,
          int64_t head_stride, int64_t num_heads, int64_t head_dim)
      : token_offsets_(token_offsets),
        element_size_(sizeof(Cache)),
        head_stride_(head_stride * element_size_),
        row_bytes_(head_dim * element_size_),
        heads_first_(head_stride < token_stride),
        num_inner_(heads_first_ ? static_cast<int>(num_heads) : num_tokens),
        num_outer_(num_tokens == 0 ? 0
                   : heads_first_  ? num_tokens
                                   : static_cast<int>(num_heads)),
        head_(reinterpret_cast<const char*>(cache)) {
    if (num_outer_ > 0) row_ = head_ + token_offsets_[0] * element_size_;
  }

  void fetch_row() {
    if (outer_ == num_outer_) return;
    for (int64_t byte = 0; byte < row_bytes_; byte += 64) _mm_prefetch(row_ + byte, _MM_HINT_T1);
    const bool wraps = ++inner_ == num_inner_;
    if (wraps) {
      inner_ = 0;
      if (++outer_ == num_outer_) return;
      if (!heads_first_) head_ += head_stride_;
    }
    if (heads_first_ && !wraps) {
      row_ += head_stride_;
    } else {
      row_ = head_ + token_offsets_[heads_first_ ? outer_ : inner_] * element_size_;
    }
  }
  void fetch_all() {
    while (outer_ < num_outer_) fetch_row();
  }

 private:
  const int64_t* token_offsets_ = nullptr;  // [num_tokens] of the first head
  int64_t element_size_ = 0, head_stride_ = 0, row_bytes_ = 0;
  bool heads_first_ = false;
  int num_inner_ = 0, num_outer_ = 0, inner_ = 0, outer_ = 0;
  const char *head_ = nullptr, *row_ = nullptr;
};

template <class Math>
class Decode {
  using Isa = typename Math::Isa;
  using Cache = typename Math::Cache;
  using Float = typename Isa::Float;
  using Operand = typename Math::Operand;
  static constexpr int WIDTH = Isa::WIDTH;
  static constexpr int TOKENS = 32;
  static constexpr int ROWS = Isa::DECODE_ROWS;
  static constexpr int MAX_ROWS = AttentionKernels::DECODE_ROWS;
  static constexpr int64_t TILE_BYTES = 256 * 1024;  // of K and V of all heads: two tiles are in the L2 cache

  using TileRows = cpu::TileRows<TOKENS>;
  // The rows of one KV head in a tile; beyond num_tokens, rows of zeros.
  struct Rows {
    int num_padded;  // tokens, to a whole vector of them
    const Cache *key[TOKENS], *value[TOKENS];
  };

 public:
  static void run(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows) {
    const int64_t memory = Decode(p, task, nullptr).memory_;
    Decode(p, task, thread_scratch(memory)).attend(partial_rows);
  }

 private:
  Decode(const PagedAttentionParams& p, const AttentionTask& task, unsigned char* memory)
      : p_(p), task_(task), group_(static_cast<int>(p.num_heads / p.num_kv_heads)) {
    const auto pad = [](int64_t dim) { return ceil_div(dim, 64) * 64; };
    padded_key_dim_ = pad(p.head_dim);
    padded_value_dim_ = pad(p.value_head_dim);
    const int64_t token_bytes = task.num_kv_heads * (p.head_dim + p.value_head_dim) * sizeof(Cache);
    tile_tokens_ = TOKENS * token_bytes <= TILE_BYTES ? TOKENS : TOKENS / 2;
    const int64_t num_rows = task.num_kv_heads * group_;
    Arena arena(memory);
    query_ = arena.take<uint32_t>(num_rows * padded_key_dim_ / Math::PACK);
    acc_ = arena.take<float>(num_rows * padded_value_dim_);
    largest_ = arena.take<float>(num_rows);
    sum_ = arena.take<float>(num_rows);
    zeros_ = arena.take<Cache>(max_of(p.head_dim, p.value_head_dim));
    whole_rows_ = arena.take<float>(num_rows * PartialRows::stride(p));
    memory_ = arena.used();
  }

  void attend(float* partial_rows) {
    start();
    TileRows tiles[2];
    const auto find_rows = [&](int32_t token, TileRows& rows) {
      rows.find(p_, task_, token, min_of(token + tile_tokens_, task_.keys_end));
    };
    int32_t token = task_.keys_begin;
    if (token < task_.keys_end) {
      find_rows(token, tiles[0]);
      fetch_from(tiles[0]);
      next_keys_.fetch_all();
      next_values_.fetch_all();
    }
    for (int current = 0; token < task_.keys_end; token += tile_tokens_, current ^= 1) {
      TileRows& next = tiles[current ^ 1];
      next.num_tokens = 0;
      if (token + tile_tokens_ < task_.keys_end) find_rows(token + tile_tokens_, next);
      fetch_from(next);
      for (int64_t head = 0; head < task_.num_kv_heads; ++head) attend_tile(head, token, tiles[current]);
    }
    finish(partial_rows != nullptr ? partial_rows : whole_rows_);
    if (partial_rows == nullptr) store_whole();
  }

  void fetch_from(const TileRows& tile) {
    next_keys_ = Fetcher(key_cache(0), tile.key, tile.num_tokens, p_.key_cache_token_stride,
                         p_.key_cache_head_stride, task_.num_kv_heads, p_.head_dim);
    next_values_ = Fetcher(value_cache(0), tile.value, tile.num_tokens, p_.value_cache_token_stride,
                           p_.value_cache_head_stride, task_.num_kv_heads, p_.value_head_dim);
  }

  void start() {
    const int64_t num_rows = task_.num_kv_heads * group_;
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t head_idx = task_.kv_head_idx * group_ + row;
      load_query_row<Math>(p_, task_.query_begin, head_idx, padded_key_dim_,
                           query_ + row * padded_key_dim_ / Math::PACK);
      largest_[row] = PartialRows::NO_SCORE;
      sum_[row] = 0.0f;
    }
    std::memset(acc_, 0, num_rows * padded_value_dim_ * sizeof(float));
    std::memset(static_cast<void*>(zeros_), 0, max_of(p_.head_dim, p_.value_head_dim) * sizeof(Cache));
  }

  const Cache* key_cache(int64_t head) const {
    return static_cast<const Cache*>(p_.key_cache) + (task_.kv_head_idx + head) * p_.key_cache_head_stride;
  }
  const Cache* value_cache(int64_t head) const {
    return static_cast<const Cache*>(p_.value_cache) +
           (task_.kv_head_idx + head) * p_.value_cache_head_stride;
  }

  void attend_tile(int64_t head, int32_t token, const TileRows& tile) {
    Rows rows;
    rows.num_padded = static_cast<int>(ceil_div(tile.num_tokens, WIDTH)) * WIDTH;
    const Cache *keys = key_cache(head), *values = value_cache(head);
    for (int i = 0; i < tile.num_tokens; ++i) {
      rows.key[i] = keys + tile.key[i];
      rows.value[i] = values + tile.value[i];
    }
    for (int i = tile.num_tokens; i < rows.num_padded; ++i) rows.key[i] = rows.value[i] = zeros_;

    alignas(64) float score[MAX_ROWS][TOKENS];
    alignas(64) uint32_t weight[MAX_ROWS][TOKENS / Math::PACK];
    float factor[MAX_ROWS];
    const int64_t first_row = head * group_;
    const uint32_t* query = query_ + first_row * padded_key_dim_ / Math::PACK;
    for_rows([&]<int NUM_ROWS>(int row) {
      multiply_keys<NUM_ROWS>(rows, query + row * padded_key_dim_ / Math::PACK, score + row, row == 0);
    });
    const ScoreRule<Isa> rule(p_, task_.kv_head_idx + head);
    for (int row = 0; row < group_; ++row) {
      factor[row] = weigh(first_row + row, rule, token, tile.num_tokens, score[row], weight[row]);
    }
    for_rows([&]<int NUM_ROWS>(int row) {
      multiply_values<NUM_ROWS>(rows, weight + row, factor + row,
                                acc_ + (first_row + row) * padded_value_dim_, row == 0);
    });
  }

  // Calls body<NUM_ROWS>(row) for the group's rows, as evenly as ROWS at a time allow.
  template <class Body>
  void for_rows(Body&& body) const {
    const int num_passes = (group_ + ROWS - 1) / ROWS;
    for (int pass = 0, row = 0; pass < num_passes; ++pass) {
      const int num_rows = (group_ - row + num_passes - pass - 1) / (num_passes - pass);
      if (num_rows == 1) body.template operator()<1>(row);
      if (num_rows == 2) body.template operator()<2>(row);
      if constexpr (ROWS > 2) {
        if (num_rows == 3) body.template operator()<3>(row);
        if (num_rows == 4) body.template operator()<4>(row);
      }
      row += num_rows;
    }
  }

  // score[row][token] = query row . key
  template <int NUM_ROWS>
  void multiply_keys(const Rows& rows, const uint32_t* query, float (*score)[TOKENS], bool fetches) {
    const int64_t query_stride = padded_key_dim_ / Math::PACK;
    for (int token = 0; token < rows.num_padded; token += WIDTH) {
      Float quad[NUM_ROWS][WIDTH / 4];
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH / 4; ++i) {
        const Cache* const* key = rows.key + token + 4 * i;
        if (fetches) {
          for (int t = 0; t < 4; ++t) next_keys_.fetch_row();
        }
        Float dot[NUM_ROWS][4];
#pragma GCC unroll 4
        for (int row = 0; row < NUM_ROWS; ++row) {
#pragma GCC unroll 4
          for (int t = 0; t < 4; ++t) dot[row][t] = Isa::set(0.0f);
        }
        int64_t dim = 0;
        for (; dim + Math::STEP <= p_.head_dim; dim += Math::STEP) {
          multiply_key_step<NUM_ROWS>(key, query, query_stride, dim, Math::STEP, dot);
        }
        if (dim < p_.head_dim) {
          multiply_key_step<NUM_ROWS>(key, query, query_stride, dim, p_.head_dim - dim, dot);
        }
#pragma GCC unroll 4
        for (int row = 0; row < NUM_ROWS; ++row) {
          quad[row][i] = Isa::sum_quads(dot[row][0], dot[row][1], dot[row][2], dot[row][3]);
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < NUM_ROWS; ++row) Isa::store(score[row] + token, Isa::join_quads(quad[row]));
    }
  }

  template <int NUM_ROWS>
  static void multiply_key_step(const Cache* const* key, const uint32_t* query, int64_t query_stride,
                                int64_t dim, int64_t count, Float (&dot)[NUM_ROWS][4]) {
    Operand x[4][Math::OPERANDS];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) Math::load(key[t] + dim, count, x[t]);
#pragma GCC unroll 2
    for (int i = 0; i < Math::OPERANDS; ++i) {
#pragma GCC unroll 4
      for (int row = 0; row < NUM_ROWS; ++row) {
        const Operand q = Math::load_dwords(query + row * query_stride + dim / Math::PACK + i * WIDTH);
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) dot[row][t] = Math::multiply_add(q, x[t][i], dot[row][t]);
      }
    }
  }

  // The softmax step of one row: its weights, and the factor for what was summed before.
  float weigh(int64_t row, const ScoreRule<Isa>& rule, int32_t first_token, int num_tokens,
              const float (&score)[TOKENS], uint32_t (&weight)[TOKENS / Math::PACK]) {
    constexpr int VECTORS = TOKENS / WIDTH;
    const int num_vectors = static_cast<int>(ceil_div(num_tokens, WIDTH));
    const Float hidden = Isa::set(-std::numeric_limits<float>::infinity());
    Float x[VECTORS], tile_largest = hidden;
    const float slope = p_.alibi_slopes != nullptr ? p_.alibi_slopes[task_.kv_head_idx * group_ + row] : 0.0f;
    const auto position = p_.context_lens[task_.seq_idx] - 1;
#pragma GCC unroll 4
    for (int i = 0; i < num_vectors; ++i) {
      x[i] = Isa::load(score + i * WIDTH);
      if (rule.adjusts) {
        const auto distance = static_cast<float>(first_token + i * WIDTH - position);
        x[i] = rule.adjust(x[i], Isa::set(slope), Isa::add(Isa::iota(), Isa::set(distance)));
      }
      x[i] = Isa::keep_first(x[i], num_tokens - i * WIDTH, hidden);
      tile_largest = Isa::max(tile_largest, x[i]);
    }
    const float before = largest_[row];
    const float largest = max_of(before, Isa::largest(tile_largest));
    Float tile_sum = Isa::set(0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < num_vectors; ++i) {
      const Float y =
          weight_of<Isa, Math::EXP_DEGREE>(Isa::sub(x[i], Isa::set(largest)), Isa::set(rule.factor()));
      tile_sum = Isa::add(tile_sum, y);
      Math::pack_tokens(weight + i * WIDTH / Math::PACK, y);
    }
    const float factor = before == largest ? 1.0f : exp2_of<Isa>((before - largest) * rule.factor());
    largest_[row] = largest;
    sum_[row] = sum_[row] * factor + Isa::sum(tile_sum);
    return factor;
  }

  // acc[row] = acc[row] * factor + sum of weight * value. The tile is summed up apart, so that a long context
  // loses no digits to a running sum.
  template <int NUM_ROWS>
  void multiply_values(const Rows& rows, const uint32_t (*weight)[TOKENS / Math::PACK], const float* factor,
                       float* acc, bool fetches) {
    constexpr int MANY = NUM_ROWS <= 2 && WIDTH == 16 ? 8 : 4;
    constexpr int FEW = 4;
    const auto num_passes = static_cast<int>(ceil_div(p_.value_head_dim, MANY * WIDTH));
    int64_t dim = 0;
    for (int pass = 0; dim < p_.value_head_dim; ++pass) {
      // As many rows with each step as bring in PACK rows for PACK tokens by the last pass.
      const int fetched = fetches ? Math::PACK * (pass + 1) / num_passes - Math::PACK * pass / num_passes : 0;
      if (dim + MANY * WIDTH <= p_.value_head_dim) {
        multiply_value_vectors<NUM_ROWS, MANY, true>(rows, weight, factor, acc, dim, fetched);
        dim += MANY * WIDTH;
      } else if (dim + FEW * WIDTH <= p_.value_head_dim) {
        multiply_value_vectors<NUM_ROWS, FEW, true>(rows, weight, factor, acc, dim, fetched);
        dim += FEW * WIDTH;
      } else {
        multiply_value_vectors<NUM_ROWS, FEW, false>(rows, weight, factor, acc, dim, fetched);
        dim += FEW * WIDTH;
      }
    }
  }

  template <int NUM_ROWS, int VECTORS, bool WHOLE>
  void multiply_value_vectors(const Rows& rows, const uint32_t (*weight)[TOKENS / Math::PACK],
                              const float* factor, float* acc, int64_t dim, int fetched) {
    constexpr int LOADED = Math::OPERANDS * Math::PACK;  // vectors of one load of PACK tokens
    static_assert(VECTORS % LOADED == 0);
    Float sum[NUM_ROWS][VECTORS];
#pragma GCC unroll 4
    for (int row = 0; row < NUM_ROWS; ++row) {
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) sum[row][i] = Isa::set(0.0f);
    }
    for (int token = 0; token < rows.num_padded; token += Math::PACK) {
      for (int i = 0; i < fetched; ++i) next_values_.fetch_row();
      Operand x[VECTORS / LOADED][LOADED];
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS / LOADED; ++i) {
        const int64_t begin = dim + i * Math::STEP;
        Operand loaded[Math::PACK][Math::OPERANDS];
#pragma GCC unroll 2
        for (int t = 0; t < Math::PACK; ++t) {
          const int64_t count = WHOLE ? Math::STEP : p_.value_head_dim - begin;
          Math::load(rows.value[token + t] + begin, count, loaded[t]);
        }
        Math::interleave(loaded, x[i]);
      }
#pragma GCC unroll 4
      for (int row = 0; row < NUM_ROWS; ++row) {
        const Operand w = Math::broadcast(weight[row] + token / Math::PACK);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) {
          sum[row][i] = Math::multiply_add(x[i / LOADED][i % LOADED], w, sum[row][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < NUM_ROWS; ++row) {
      float* row_acc = acc + row * padded_value_dim_ + dim;
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) {
        Isa::store(row_acc + i * WIDTH,
                   Isa::fma(Isa::load(row_acc + i * WIDTH), Isa::set(factor[row]), sum[row][i]));
      }
    }
  }

  void finish(float* partial_rows) {
    constexpr int LOADED = Math::OPERANDS * Math::PACK;
    const int64_t num_rows = task_.num_kv_heads * group_;
    for (int64_t row = 0; row < num_rows; ++row, partial_rows += PartialRows::stride(p_)) {
      const int64_t kv_head_idx = task_.kv_head_idx + row / group_;
      const ScoreRule<Isa> rule(p_, kv_head_idx);
      const Float scale = Isa::set(scale_of(p_.v_scale, p_.v_scale_value, kv_head_idx));
      for (int64_t dim = 0; dim < p_.value_head_dim; dim += LOADED * WIDTH) {
        Float x[LOADED];
        for (int i = 0; i < LOADED; ++i) x[i] = Isa::load(acc_ + row * padded_value_dim_ + dim + i * WIDTH);
        Math::restore_order(x);
        for (int i = 0; i < LOADED; ++i) {
          const int64_t begin = dim + i * WIDTH;
          Isa::narrow(partial_rows + begin, Isa::mul(x[i], scale), p_.value_head_dim - begin);
        }
      }
      partial_rows[p_.value_head_dim] = rule.exported(largest_[row]);
      partial_rows[p_.value_head_dim + 1] = sum_[row];
    }
  }

  void store_whole() const {
    if constexpr (Math::PACK == 2) {
      store_rows<Isa, bfloat16>(p_, task_, whole_rows_, 1);
    } else {
      dispatch_float_dtype(p_.query_dtype,
                           [&]<class Query>() { store_rows<Isa, Query>(p_, task_, whole_rows_, 1); });
    }
  }

  const PagedAttentionParams& p_;
  const AttentionTask& task_;
  int group_, tile_tokens_;
  Fetcher next_keys_, next_values_;  // of the next tile
  int64_t padded_key_dim_, padded_value_dim_, memory_;
  uint32_t* query_;        // [num_kv_heads * group, padded_key_dim / PACK]
  float* acc_;             // [num_kv_heads * group, padded_value_dim], in the order of interleave
  float *largest_, *sum_;  // [num_kv_heads * group]
  float* whole_rows_;      // the partial rows of a task that has all keys
  Cache* zeros_;           // [max(head_dim, value_head_dim)]
};

}  // namespace
}  // namespace pagedkv::cpu
