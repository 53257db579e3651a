// A task of any rows: a prompt's, a chunk's, a draft's, or the heads of a large group at one token.
//
// Vectors run along the rows, so that a row's arithmetic is its lane's: it never depends on the other rows.
// Rows are taken by blocks of BLOCK_ROWS. K and V come in tiles of TOKENS that are cut at absolute multiples
// of it, and are copied once for all blocks of the task, in the operands' form. Then, for each block:
//   scores   S[token][row] += K[token][dim] (one dword for all lanes) * Q[dim][row]
//   softmax  vertical, a row a lane, to weights P[token][row]
//   values   O[dim][row]   += V[token][dim] (one dword for all lanes) * P[token][row]
// Nothing is summed across lanes. A dword is one float32, or a pair of bfloat16 (two dimensions of K and Q,
// two tokens of V and P).
//
// Bytes: K and V once per task; the tile, S, P, Q and O stay in the L2 cache.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>

#include "common/masks.h"
#include "cpu/paged_attention/block_products.h"
#include "cpu/paged_attention/block_store.h"
#include "cpu/paged_attention/scores.h"
#include "cpu/paged_attention/task.h"
#include "cpu/paged_attention/tile_rows.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

inline constexpr int PREFILL_TOKENS = 128;

template <class Math, int ROW_VECTORS>
class Prefill {
  using Products = BlockProducts<Math, ROW_VECTORS>;
  using Isa = typename Math::Isa;
  using Cache = typename Math::Cache;
  using Float = typename Isa::Float;
  using Operand = typename Math::Operand;
  static constexpr int WIDTH = Isa::WIDTH;
  static constexpr int PACK = Math::PACK;
  static constexpr int BLOCK_ROWS = Products::ROWS;

  // A block of rows and what is known of them.
  struct Block {
    uint32_t* query;       // [padded_key_dim / PACK, BLOCK_ROWS]
    float* acc;            // [padded_value_dim, BLOCK_ROWS]
    float *largest, *sum;  // [BLOCK_ROWS]
    float* slope;          // [BLOCK_ROWS] of ALiBi
    int32_t *begin, *end;  // [BLOCK_ROWS] the keys a row sees; with a tree, those that it may see
    int32_t* position;     // [BLOCK_ROWS]
    RowMask* masks;        // [BLOCK_ROWS]
    int num_rows;
    int32_t seen_begin, seen_end;     // keys that some row sees
    int32_t sure_begin, sure_end;     // keys that every row sees
    int32_t vector_end[ROW_VECTORS];  // keys that some row of these or earlier vectors of rows sees end here
  };

 public:
  static constexpr int MAX_BLOCKS = 256 / BLOCK_ROWS;

  static void run(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows) {
    const int64_t memory = Prefill(p, task, nullptr).memory_;
    Prefill(p, task, thread_scratch(memory)).attend(partial_rows);
  }

 private:
  Prefill(const PagedAttentionParams& p, const AttentionTask& task, unsigned char* memory)
      : p_(p), task_(task), rule_(p, task.kv_head_idx) {
    const auto pad = [](int64_t dim) { return ceil_div(dim, 64) * 64; };
    padded_key_dim_ = pad(p.head_dim);
    padded_value_dim_ = pad(p.value_head_dim);
    value_stride_ = padded_value_dim_ + WIDTH;
    key_dwords_ = static_cast<int>(p.head_dim / PACK);
    num_blocks_ = static_cast<int>(ceil_div(task.row_end - task.row_begin, BLOCK_ROWS));
    Arena arena(memory);
    keys_ = arena.take<uint32_t>(PREFILL_TOKENS * padded_key_dim_ / PACK);
    values_ = arena.take<uint32_t>(PREFILL_TOKENS / PACK * value_stride_);
    values_as_stored_ = arena.take<uint32_t>(PREFILL_TOKENS / PACK * value_stride_);
    score_ = arena.take<float>(PREFILL_TOKENS * BLOCK_ROWS);
    weight_ = arena.take<uint32_t>(PREFILL_TOKENS / PACK * BLOCK_ROWS);
    query_rows_ = arena.take<uint32_t>(WIDTH * padded_key_dim_ / PACK);
    for (int i = 0; i < num_blocks_; ++i) {
      Block& block = blocks_[i];
      block.query = arena.take<uint32_t>(padded_key_dim_ / PACK * BLOCK_ROWS);
      block.acc = arena.take<float>(padded_value_dim_ * BLOCK_ROWS);
      for (float** row_floats : {&block.largest, &block.sum, &block.slope}) {
        *row_floats = arena.take<float>(BLOCK_ROWS);
      }
      for (int32_t** row_ints : {&block.begin, &block.end, &block.position}) {
        *row_ints = arena.take<int32_t>(BLOCK_ROWS);
      }
      block.masks = arena.take<RowMask>(BLOCK_ROWS);
    }
    memory_ = arena.used();
  }

  void attend(float* partial_rows) {
    int32_t begin = task_.keys_begin & ~1;
    if (begin < task_.keys_end) {
      plan_fetches(&task_, begin, 1);
      fetch_some();
    }
    for (int i = 0; i < num_blocks_; ++i) start(blocks_[i], task_.row_begin + i * BLOCK_ROWS);
    while (begin < task_.keys_end) {
      const int32_t end = tile_end(task_, begin);
      const bool is_last = end >= task_.keys_end;
      std::swap(current_, next_);
      int num_slices = 0;
      for (int i = 0; i < num_blocks_; ++i) num_slices += tile_of(blocks_[i], begin, end).num_slices();
      if (is_last) {
        plan_fetches(task_.next, task_.next == nullptr ? 0 : task_.next->keys_begin & ~1, num_slices);
      } else {
        plan_fetches(&task_, end, num_slices);
      }
      load_keys_and_values();
      bool all_sure = true;
      for (int i = 0; i < num_blocks_; ++i) all_sure &= is_sure(blocks_[i], begin, end);
      has_specials_ = false;
      if (!all_sure) take_specials_out();
      for (int i = 0; i < num_blocks_; ++i) attend_tile(blocks_[i], begin, end);
      begin = end;
    }
    for (int i = 0; i < num_blocks_; ++i) {
      store(blocks_[i], task_.row_begin + i * BLOCK_ROWS, partial_rows);
      if (partial_rows != nullptr) partial_rows += BLOCK_ROWS * PartialRows::stride(p_);
    }
  }

  // Tiles begin and end at even tokens, so that the two of a pair are the same for every task.
  static int32_t tile_end(const AttentionTask& task, int32_t begin) {
    return min_of(begin / PREFILL_TOKENS * PREFILL_TOKENS + PREFILL_TOKENS, (task.keys_end + 1) & ~1);
  }

  static bool is_sure(const Block& block, int32_t begin, int32_t end) {
    return block.sure_begin <= begin && end <= block.sure_end;
  }

  void start(Block& block, int64_t first_row) {
    const int64_t group = p_.num_heads / p_.num_kv_heads;
    block.num_rows = static_cast<int>(min_of<int64_t>(BLOCK_ROWS, task_.row_end - first_row));
    block.seen_begin = block.sure_end = std::numeric_limits<int32_t>::max();
    block.seen_end = block.sure_begin = 0;
    int64_t query_idx = -1;
    RowMask mask;
    for (int row = 0; row < BLOCK_ROWS; ++row) {
      if (row >= block.num_rows) {
        mask = RowMask{};  // a lane without a row sees nothing
      } else if (query_idx < 0 || (first_row + row) % group == 0) {
        query_idx = (first_row + row) / group;
        mask = row_mask(p_, task_.seq_idx, task_.query_len, query_idx, task_.query_begin + query_idx);
        block.sure_begin = max_of(block.sure_begin, mask.begin);
        block.sure_end = min_of(block.sure_end, min_of(mask.end, min_of(mask.causal_end, mask.tree_begin)));
      }
      block.masks[row] = mask;
      block.begin[row] = mask.begin;
      block.end[row] = mask.tree_row != nullptr ? mask.end : min_of(mask.end, mask.causal_end);
      block.position[row] = mask.position;
      block.slope[row] = 0.0f;
      block.largest[row] = PartialRows::NO_SCORE;
      block.sum[row] = 0.0f;
      if (block.begin[row] < block.end[row]) {
        block.seen_begin = min_of(block.seen_begin, block.begin[row]);
        block.seen_end = max_of(block.seen_end, block.end[row]);
      }
    }
    int32_t vector_end = 0;
    for (int vector = 0; vector < ROW_VECTORS; ++vector) {
      for (int row = vector * WIDTH; row < (vector + 1) * WIDTH; ++row) {
        if (block.begin[row] < block.end[row]) vector_end = max_of(vector_end, block.end[row]);
      }
      block.vector_end[vector] = vector_end;
    }
    for (int row = 0; row < block.num_rows && p_.alibi_slopes != nullptr; ++row) {
      block.slope[row] = p_.alibi_slopes[task_.kv_head_idx * group + (first_row + row) % group];
    }
    std::memset(block.acc, 0, padded_value_dim_ * BLOCK_ROWS * sizeof(float));
    for (int row = 0; row < BLOCK_ROWS; row += WIDTH) load_query(block, first_row + row, row);
  }

  // WIDTH rows of queries, turned so that a row is a lane.
  void load_query(Block& block, int64_t first_row, int lane_begin) {
    const int64_t group = p_.num_heads / p_.num_kv_heads, num_dwords = padded_key_dim_ / PACK;
    for (int i = 0; i < WIDTH; ++i) {
      uint32_t* dwords = query_rows_ + i * num_dwords;
      if (lane_begin + i >= block.num_rows) {
        std::memset(dwords, 0, num_dwords * sizeof(uint32_t));
        continue;
      }
      const int64_t row = first_row + i, head_idx = task_.kv_head_idx * group + row % group;
      load_query_row<Math>(p_, task_.query_begin + row / group, head_idx, padded_key_dim_, dwords);
    }
    for (int64_t dword = 0; dword < num_dwords; dword += WIDTH) {
      Float x[WIDTH];
      for (int i = 0; i < WIDTH; ++i) {
        x[i] = Isa::load(reinterpret_cast<const float*>(query_rows_ + i * num_dwords + dword));
      }
      Isa::transpose(x);
      for (int i = 0; i < WIDTH; ++i) {
        Isa::store(reinterpret_cast<float*>(block.query + (dword + i) * BLOCK_ROWS + lane_begin), x[i]);
      }
    }
  }

  // The tile in the operands' form: keys_ [token][dim / PACK], values_ [token / PACK][dim].
  void load_keys_and_values() {
    constexpr int LOADED = Math::OPERANDS * PACK;
    const auto* keys = static_cast<const Cache*>(p_.key_cache) + task_.kv_head_idx * p_.key_cache_head_stride;
    const auto* values =
        static_cast<const Cache*>(p_.value_cache) + task_.kv_head_idx * p_.value_cache_head_stride;
    for (int token = 0; token < current_->num_tokens; ++token) {
      const int64_t offset = current_->key[token];
      uint32_t* row = keys_ + token * padded_key_dim_ / PACK;
      for (int64_t dim = 0; dim < p_.head_dim; dim += Math::STEP) {
        Operand x[Math::OPERANDS];
        Math::load(keys + offset + dim, offset < 0 ? 0 : p_.head_dim - dim, x);
        for (int i = 0; i < Math::OPERANDS; ++i) Math::store_dwords(row + dim / PACK + i * WIDTH, x[i]);
      }
    }
    for (int token = 0; token < current_->num_tokens; token += PACK) {
      uint32_t* row = values_ + token / PACK * value_stride_;
      for (int64_t dim = 0; dim < p_.value_head_dim; dim += Math::STEP) {
        Operand loaded[PACK][Math::OPERANDS], x[LOADED];
        for (int t = 0; t < PACK; ++t) {
          const int64_t offset = current_->value[token + t];
          Math::load(values + offset + dim, offset < 0 ? 0 : p_.value_head_dim - dim, loaded[t]);
        }
        Math::interleave(loaded, x);
        Math::restore_order(x);
        for (int i = 0; i < LOADED; ++i) Math::store_dwords(row + dim + i * WIDTH, x[i]);
      }
    }
  }

  // What is fetched into the L2 cache while the current tile is worked on, in num_steps steps: the tile of
  // the task's keys from `begin` on; where that is another task's, also its queries, and this task's out.
  void plan_fetches(const AttentionTask* task, int32_t begin, int num_steps) {
    fetched_task_ = task;
    fetched_token_ = fetched_row_ = 0;
    tokens_per_step_ = rows_per_step_ = 0;
    next_->num_tokens = 0;
    if (task == nullptr || begin >= task->keys_end) return;
    next_->find(p_, *task, begin, tile_end(*task, begin));
    tokens_per_step_ = static_cast<int>(ceil_div(next_->num_tokens, max_of(1, num_steps)));
    const int64_t num_rows = max_of(task->row_end - task->row_begin, task_.row_end - task_.row_begin);
    if (task != &task_ || num_steps == 1) {
      rows_per_step_ = static_cast<int>(ceil_div(num_rows, max_of(1, num_steps)));
    }
  }

  void fetch_some() {
    const auto fetch = [](const auto* row, int64_t count) {
      for (int64_t i = 0; i < count; i += 64 / sizeof(*row)) _mm_prefetch(row + i, _MM_HINT_T1);
    };
    if (fetched_task_ == nullptr) return;
    const int64_t kv_head_idx = fetched_task_->kv_head_idx;
    const auto* keys = static_cast<const Cache*>(p_.key_cache) + kv_head_idx * p_.key_cache_head_stride;
    const auto* values = static_cast<const Cache*>(p_.value_cache) + kv_head_idx * p_.value_cache_head_stride;
    const int token_end = min_of(fetched_token_ + tokens_per_step_, next_->num_tokens);
    for (; fetched_token_ < token_end; ++fetched_token_) {
      if (next_->key[fetched_token_] < 0) continue;
      fetch(keys + next_->key[fetched_token_], p_.head_dim);
      fetch(values + next_->value[fetched_token_], p_.value_head_dim);
    }
    const int64_t group = p_.num_heads / p_.num_kv_heads, size = p_.query_dtype == DType::float32 ? 4 : 2;
    const auto fetch_row = [&](const AttentionTask& task, const void* tensor, int64_t token_stride,
                               int64_t head_stride, int64_t dim) {
      const int64_t row = task.row_begin + fetched_row_;
      if (row >= task.row_end) return;
      const int64_t token_idx = task.query_begin + row / group,
                    head_idx = task.kv_head_idx * group + row % group;
      fetch(static_cast<const char*>(tensor) + (token_idx * token_stride + head_idx * head_stride) * size,
            dim * size);
    };
    for (int i = 0; i < rows_per_step_; ++i, ++fetched_row_) {
      fetch_row(*fetched_task_, p_.query, p_.query_token_stride, p_.query_head_stride, p_.head_dim);
      if (fetched_task_ != &task_) {
        fetch_row(task_, p_.out, p_.out_token_stride, p_.out_head_stride, p_.value_head_dim);
      }
    }
  }

  // Where a row does not see all of a tile, its weight for the others is 0, and 0 * infinity is NaN:
  // infinities and NaN are taken out of the tile, and added for the rows that do see them.
  void take_specials_out() {
    const int64_t size = current_->num_tokens / PACK * value_stride_;
    has_specials_ = false;
    for (int token = 0; token < current_->num_tokens; token += PACK) {
      const uint32_t* row = values_ + token / PACK * value_stride_;
      for (int64_t dim = 0; dim < p_.value_head_dim; dim += WIDTH) {
        has_specials_ |= Math::any_special(Math::load_dwords(row + dim));
      }
    }
    if (!has_specials_) return;
    std::memcpy(values_as_stored_, values_, size * sizeof(uint32_t));
    for (int64_t i = 0; i < size; ++i) {
      for (int t = 0; t < PACK; ++t) {
        if (!std::isfinite(Math::element(values_[i], t))) values_[i] = Math::without_element(values_[i], t);
      }
    }
  }

  void add_specials(Block& block, int token_begin, int token_end) {
    for (int token = token_begin; token < token_end; ++token) {
      const uint32_t* stored = values_as_stored_ + token / PACK * value_stride_;
      const uint32_t* weights = weight_ + token / PACK * BLOCK_ROWS;
      for (int64_t dim = 0; dim < p_.value_head_dim; ++dim) {
        const float value = Math::element(stored[dim], token % PACK);
        if (std::isfinite(value)) continue;
        for (int row = 0; row < block.num_rows; ++row) {
          if (score_[token * BLOCK_ROWS + row] == NEG_INF) continue;
          block.acc[dim * BLOCK_ROWS + row] += Math::element(weights[row], token % PACK) * value;
        }
      }
    }
  }

  // Of a tile, the tokens that each vector of a block's rows sees; still pairs.
  struct SeenTile {
    static constexpr int SLICE = 8;
    int begin, end[ROW_VECTORS];
    int last_end() const { return end[ROW_VECTORS - 1]; }
    int num_slices() const { return max_of(0, (last_end() - begin + SLICE - 1) / SLICE); }
  };

  static SeenTile tile_of(const Block& block, int32_t tile_begin, int32_t tile_end) {
    SeenTile seen;
    seen.begin = max_of(0, (block.seen_begin & ~1) - tile_begin);
    for (int vector = 0; vector < ROW_VECTORS; ++vector) {
      seen.end[vector] = min_of(tile_end, (block.vector_end[vector] + 1) & ~1) - tile_begin;
    }
    return seen;
  }

  void attend_tile(Block& block, int32_t tile_begin, int32_t tile_end) {
    const SeenTile seen = tile_of(block, tile_begin, tile_end);
    const int begin = seen.begin, last_end = seen.last_end();
    if (begin >= last_end) return;
    alignas(64) float factor[BLOCK_ROWS], largest[BLOCK_ROWS], unused[BLOCK_ROWS];
    std::fill_n(largest, BLOCK_ROWS, NEG_INF);
    std::fill_n(unused, BLOCK_ROWS, NEG_INF);
    for (int token = begin; token < last_end; token += SeenTile::SLICE) {
      const int slice_end = min_of(token + SeenTile::SLICE, last_end);
      const bool is_plain = is_sure(block, tile_begin + token, tile_begin + slice_end);
      Products::multiply_keys(keys_, padded_key_dim_ / PACK, key_dwords_, token, slice_end, seen.end,
                              block.query, score_, is_plain && !rule_.adjusts ? largest : unused);
      fetch_some();
      if (rule_.adjusts) adjust_scores(block, tile_begin, token, slice_end);
      if (!is_plain) mask_scores(block, tile_begin, token, slice_end);
      if (rule_.adjusts || !is_plain) raise_largest(token, slice_end, largest);
    }
    for (int vector = 0; vector < ROW_VECTORS; ++vector) {
      weigh(block, vector * WIDTH, begin, seen.end[vector], largest, factor);
    }
    Products::multiply_values(values_, value_stride_, begin / PACK, seen.end, p_.value_head_dim, weight_,
                              factor, block.acc);
    if (has_specials_) add_specials(block, begin, last_end);
  }

  void adjust_scores(const Block& block, int32_t tile_begin, int begin, int end) {
    for (int lane = 0; lane < BLOCK_ROWS; lane += WIDTH) {
      const Float slope = Isa::load(block.slope + lane), position = Isa::load_ints(block.position + lane);
      for (int token = begin; token < end; ++token) {
        float* score = score_ + token * BLOCK_ROWS + lane;
        const Float distance = Isa::sub(Isa::set(static_cast<float>(tile_begin + token)), position);
        Isa::store(score, rule_.adjust(Isa::load(score), slope, distance));
      }
    }
  }

  void mask_scores(const Block& block, int32_t tile_begin, int begin, int end) {
    for (int token = begin; token < end; ++token) {
      float* score = score_ + token * BLOCK_ROWS;
      for (int lane = 0; lane < BLOCK_ROWS; lane += WIDTH) {
        Isa::store(score + lane, Isa::keep_visible(Isa::load(score + lane), block.begin + lane,
                                                   block.end + lane, tile_begin + token));
      }
      if (p_.tree_mask == nullptr) continue;
      for (int row = 0; row < block.num_rows; ++row) {
        if (!block.masks[row].visible(tile_begin + token)) score[row] = NEG_INF;
      }
    }
  }

  void raise_largest(int begin, int end, float* largest) const {
    for (int lane = 0; lane < BLOCK_ROWS; lane += WIDTH) {
      Float most = Isa::load(largest + lane);
      for (int token = begin; token < end; ++token) {
        most = Isa::max(most, Isa::load(score_ + token * BLOCK_ROWS + lane));
      }
      Isa::store(largest + lane, most);
    }
  }

  // The softmax step of WIDTH rows: their weights, and the factors for what was summed before.
  void weigh(Block& block, int lane, int begin, int end, const float* tile_largest, float* factor) {
    const Float scale = Isa::set(rule_.factor()), before = Isa::load(block.largest + lane);
    const Float largest = Isa::max(before, Isa::load(tile_largest + lane));
    const Float fade = exp2_of<Isa>(Isa::mul(Isa::sub(before, largest), scale));
    Float sum[2] = {Isa::set(0.0f), Isa::set(0.0f)};  // of even and of odd tokens
    for (int token = begin; token < end; token += 2) {
      Float weight[2];
#pragma GCC unroll 2
      for (int t = 0; t < 2; ++t) {
        const Float score = Isa::load(score_ + (token + t) * BLOCK_ROWS + lane);
        weight[t] = weight_of<Isa, Math::EXP_DEGREE>(Isa::sub(score, largest), scale);
        sum[t] = Isa::add(sum[t], weight[t]);
      }
      Math::store_weights(weight_ + token / PACK * BLOCK_ROWS + lane, BLOCK_ROWS, weight);
    }
    Isa::store(factor + lane, fade);
    Isa::store(block.largest + lane, largest);
    Isa::store(block.sum + lane, Isa::fma(Isa::load(block.sum + lane), fade, Isa::add(sum[0], sum[1])));
  }

  void store(const Block& block, int64_t first_row, float* partial_rows) const {
    const BlockStore<Isa, BLOCK_ROWS> stored{p_,        task_,         rule_,    first_row, block.num_rows,
                                             block.acc, block.largest, block.sum};
    if (partial_rows != nullptr) {
      stored.partial(partial_rows);
    } else if constexpr (PACK == 2) {
      stored.template whole<bfloat16>();
    } else {
      dispatch_float_dtype(p_.query_dtype, [&]<class Query>() { stored.template whole<Query>(); });
    }
  }

  const PagedAttentionParams& p_;
  const AttentionTask& task_;
  const ScoreRule<Isa> rule_;
  // A row of values is a line longer than a power of two: a column of them then fits the L1 cache.
  int64_t padded_key_dim_, padded_value_dim_, value_stride_, memory_;
  int key_dwords_, num_blocks_;
  bool has_specials_ = false;
  const AttentionTask* fetched_task_;  // of plan_fetches
  int fetched_token_, fetched_row_, tokens_per_step_, rows_per_step_;
  TileRows<PREFILL_TOKENS> tiles_[2], *current_ = &tiles_[0], *next_ = &tiles_[1];
  uint32_t* keys_;              // [PREFILL_TOKENS, padded_key_dim / PACK]
  uint32_t* values_;            // [PREFILL_TOKENS / PACK, value_stride]
  uint32_t* values_as_stored_;  // the same, with infinities and NaN
  float* score_;                // [PREFILL_TOKENS, BLOCK_ROWS]
  uint32_t* weight_;            // [PREFILL_TOKENS / PACK, BLOCK_ROWS]
  uint32_t* query_rows_;        // [WIDTH, padded_key_dim / PACK]
  Block blocks_[MAX_BLOCKS];
};

}  // namespace
}  // namespace pagedkv::cpu
