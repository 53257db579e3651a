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

#include "cpu/paged_attention/block_products.h"
#include "cpu/paged_attention/block_store.h"
#include "cpu/paged_attention/fetch.h"
#include "cpu/paged_attention/prefill_block.h"
#include "cpu/paged_attention/prefill_fetcher.h"
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

  using Block = PrefillBlock<ROW_VECTORS, WIDTH>;
  using Seen = SeenTile<ROW_VECTORS>;
  static constexpr int AHEAD_TOKENS = 8;  // between asking for memory of a token and using it

 public:
  static constexpr int MAX_BLOCKS = 256 / BLOCK_ROWS;

  static void run(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows) {
    const int64_t memory = Prefill(p, task, nullptr).memory_;
    Prefill(p, task, thread_scratch(memory)).attend(partial_rows);
  }

 private:
  Prefill(const PagedAttentionParams& p, const AttentionTask& task, unsigned char* memory)
      : p_(p), task_(task), rule_(p, task.kv_head_idx), fetcher_(p) {
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
    for (int i = 0; i < num_blocks_; ++i) {
      Block& block = blocks_[i];
      block.query = arena.take<uint32_t>(padded_key_dim_ / PACK * BLOCK_ROWS);
      block.acc = arena.take<float>(padded_value_dim_ * BLOCK_ROWS);
    }
    memory_ = arena.used();
  }

  void attend(float* partial_rows) {
    for (int i = 0; i < num_blocks_; ++i) blocks_[i].start(p_, task_, task_.row_begin + i * BLOCK_ROWS);
    int32_t begin = task_.keys_begin & ~1;
    if (begin >= task_.keys_end) {
      for (int i = 0; i < num_blocks_; ++i) store(blocks_[i], partial_rows);
      return;
    }
    find_next(task_, begin);
    fetcher_.plan_tile(task_, *next_, 1);
    fetcher_.plan_queries(task_, blocks_[0].row_begin, blocks_[0].row_end(), 1);
    fetcher_.step().fetch_from(0);
    for (bool is_first = true; begin < task_.keys_end; is_first = false) {
      const int32_t end = tile_end(task_, begin);
      const bool is_last = end >= task_.keys_end;
      std::swap(current_, next_);
      int num_slices = 0;
      for (int i = 0; i < num_blocks_; ++i) num_slices += blocks_[i].tile(begin, end).num_slices();
      if (!is_last) {
        find_next(task_, end);
        fetcher_.plan_tile(task_, *next_, num_slices);
      } else if (task_.next != nullptr) {
        find_next(*task_.next, task_.next->keys_begin & ~1);
        fetcher_.plan_tile(*task_.next, *next_, num_slices);
      }
      load_keys_and_values();
      bool all_sure = true;
      for (int i = 0; i < num_blocks_; ++i) all_sure &= blocks_[i].is_sure(begin, end);
      has_specials_ = false;
      if (!all_sure) take_specials_out();
      for (int i = 0; i < num_blocks_; ++i) {
        if (is_first) load_queries(blocks_[i]);
        const Seen seen = blocks_[i].tile(begin, end);
        plan_queries(i, is_first, is_last, seen.num_slices());
        if (is_last && partial_rows == nullptr) {
          fetcher_.plan_out(task_, blocks_[i].row_begin, blocks_[i].row_end(), seen.num_slices());
        }
        attend_tile(blocks_[i], seen, begin);
        if (is_last) store(blocks_[i], partial_rows);
      }
      begin = end;
    }
  }

  // During the work on block i, the queries of the next block or task are fetched.
  void plan_queries(int i, bool is_first, bool is_last, int num_steps) {
    if (is_first && i + 1 < num_blocks_) {
      fetcher_.plan_queries(task_, blocks_[i + 1].row_begin, blocks_[i + 1].row_end(), num_steps);
    } else if (is_last && i + 1 == num_blocks_ && task_.next != nullptr) {
      const AttentionTask& next = *task_.next;
      fetcher_.plan_queries(next, next.row_begin, min_of(next.row_end, next.row_begin + BLOCK_ROWS),
                            num_steps);
    }
  }

  void find_next(const AttentionTask& task, int32_t begin) {
    next_->num_tokens = 0;
    if (begin < task.keys_end) next_->find(p_, task, begin, tile_end(task, begin));
  }

  // Tiles begin and end at even tokens, so that the two of a pair are the same for every task.
  static int32_t tile_end(const AttentionTask& task, int32_t begin) {
    return min_of(begin / PREFILL_TOKENS * PREFILL_TOKENS + PREFILL_TOKENS, (task.keys_end + 1) & ~1);
  }

  void load_queries(Block& block) {
    fetch_to_l1(block.query, padded_key_dim_ / PACK * BLOCK_ROWS * sizeof(uint32_t));
    for (int lane = 0; lane < BLOCK_ROWS; lane += WIDTH) {
      if constexpr (PACK == 2) {
        load_query<bfloat16>(block, lane);
      } else {
        dispatch_float_dtype(p_.query_dtype, [&]<class Query>() { load_query<Query>(block, lane); });
      }
    }
  }

  // WIDTH rows of queries, turned so that a row is a lane.
  template <class Query>
  void load_query(Block& block, int lane_begin) {
    const int64_t group = p_.num_heads / p_.num_kv_heads;
    const int num_rows = min_of(WIDTH, block.num_rows - lane_begin);
    const Query* rows[WIDTH];
    for (int i = 0; i < num_rows; ++i) {
      const int64_t row = block.row_begin + lane_begin + i,
                    head_idx = task_.kv_head_idx * group + row % group;
      rows[i] = static_cast<const Query*>(p_.query) +
                (task_.query_begin + row / group) * p_.query_token_stride + head_idx * p_.query_head_stride;
    }
    for (int64_t dword = 0; dword < padded_key_dim_ / PACK; dword += WIDTH) {
      Float x[WIDTH];
      for (int i = 0; i < WIDTH; ++i) {
        x[i] = i < num_rows ? Math::load_query_vector(rows[i] + dword * PACK, p_.head_dim - dword * PACK)
                            : Isa::set(0.0f);
      }
      Isa::transpose(x);
      for (int i = 0; i < WIDTH; ++i) {
        Isa::store(reinterpret_cast<float*>(block.query + (dword + i) * BLOCK_ROWS + lane_begin), x[i]);
      }
    }
  }

  static bool is_aligned(const Cache* row) {
    return reinterpret_cast<uintptr_t>(row) % alignof(uint32_t) == 0;
  }

  // The tile in the operands' form: key_rows_ [token] -> [dim / PACK], values_ [token / PACK][dim].
  void load_keys_and_values() {
    constexpr int LOADED = Math::OPERANDS * PACK;
    const auto* keys = static_cast<const Cache*>(p_.key_cache) + task_.kv_head_idx * p_.key_cache_head_stride;
    const auto* values =
        static_cast<const Cache*>(p_.value_cache) + task_.kv_head_idx * p_.value_cache_head_stride;
    const int num_tokens = current_->num_tokens;
    for (int token = 0; token < num_tokens; ++token) {
      const int64_t offset = current_->key[token];
      if (Math::IS_STORED && offset >= 0 && is_aligned(keys + offset)) {  // used as it lies in the cache
        key_rows_[token] = reinterpret_cast<const uint32_t*>(keys + offset);
        continue;
      }
      uint32_t* row = keys_ + token * padded_key_dim_ / PACK;
      for (int64_t dim = 0; dim < p_.head_dim; dim += Math::STEP) {
        Operand x[Math::OPERANDS];
        Math::load(keys + offset + dim, offset < 0 ? 0 : p_.head_dim - dim, x);
        for (int i = 0; i < Math::OPERANDS; ++i) Math::store_dwords(row + dim / PACK + i * WIDTH, x[i]);
      }
      key_rows_[token] = row;
    }
    for (int token = 0; token < num_tokens; token += PACK) {
      uint32_t* row = values_ + token / PACK * value_stride_;
      fetch_to_l1(row + AHEAD_TOKENS / PACK * value_stride_, p_.value_head_dim * sizeof(uint32_t));
      for (int t = token + AHEAD_TOKENS; t < min_of(token + AHEAD_TOKENS + PACK, num_tokens); ++t) {
        const int64_t offset = current_->value[t];
        if (offset >= 0) fetch_to_l1(values + offset, p_.value_head_dim * sizeof(Cache));
      }
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

  void add_specials(Block& block, int32_t tile_begin, int token_begin, int token_end) {
    for (int token = token_begin; token < token_end; ++token) {
      const uint32_t* stored = values_as_stored_ + token / PACK * value_stride_;
      const uint32_t* weights = weight_ + token / PACK * BLOCK_ROWS;
      for (int64_t dim = 0; dim < p_.value_head_dim; ++dim) {
        const float value = Math::element(stored[dim], token % PACK);
        if (std::isfinite(value)) continue;
        for (int row = 0; row < block.num_rows; ++row) {
          if (!block.masks[row].visible(tile_begin + token)) continue;
          block.acc[dim * BLOCK_ROWS + row] += Math::element(weights[row], token % PACK) * value;
        }
      }
    }
  }

  void attend_tile(Block& block, const Seen& seen, int32_t tile_begin) {
    const int begin = seen.begin, last_end = seen.last_end();
    if (begin >= last_end) return;
    alignas(64) float factor[BLOCK_ROWS], largest[BLOCK_ROWS], unused[BLOCK_ROWS];
    std::fill_n(largest, BLOCK_ROWS, NEG_INF);
    std::fill_n(unused, BLOCK_ROWS, NEG_INF);
    for (int token = begin; token < last_end; token += Seen::SLICE) {
      const int slice_end = min_of(token + Seen::SLICE, last_end);
      for (int t = slice_end; t < min_of(slice_end + Seen::SLICE, last_end); ++t) {
        fetch_to_l1(key_rows_[t], key_dwords_ * sizeof(uint32_t));
      }
      const bool is_plain = block.is_sure(tile_begin + token, tile_begin + slice_end);
      Products::multiply_keys(key_rows_, key_dwords_, token, slice_end, seen.end, block.query,
                              fetcher_.step(), score_, is_plain && !rule_.adjusts ? largest : unused);
      if (rule_.adjusts) adjust_scores(block, tile_begin, token, slice_end);
      if (!is_plain) mask_scores(block, tile_begin, token, slice_end);
      if (rule_.adjusts || !is_plain) raise_largest(token, slice_end, largest);
    }
    for (int vector = 0; vector < ROW_VECTORS; ++vector) {
      weigh(block, vector * WIDTH, begin, seen.end[vector], largest, factor);
    }
    Products::multiply_values(values_, value_stride_, begin / PACK, seen.end, p_.value_head_dim, weight_,
                              block.has_acc ? factor : nullptr, block.acc);
    block.has_acc = true;
    if (has_specials_) add_specials(block, tile_begin, begin, last_end);
  }

  void adjust_scores(const Block& block, int32_t tile_begin, int begin, int end) {
    for (int lane = 0; lane < BLOCK_ROWS; lane += WIDTH) {
      const Float slope = Isa::load(block.slope + lane);
      for (int token = begin; token < end; ++token) {
        float* score = score_ + token * BLOCK_ROWS + lane;
        const Float distance = Isa::difference(tile_begin + token, block.position + lane);
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
      fetch_to_l1(weight_ + (token + AHEAD_TOKENS) / PACK * BLOCK_ROWS + lane, WIDTH * sizeof(float));
      Math::store_weights(weight_ + token / PACK * BLOCK_ROWS + lane, BLOCK_ROWS, weight);
    }
    Isa::store(factor + lane, fade);
    Isa::store(block.largest + lane, largest);
    Isa::store(block.sum + lane, Isa::fma(Isa::load(block.sum + lane), fade, Isa::add(sum[0], sum[1])));
  }

  void store(const Block& block, float* partial_rows) const {
    if (!block.has_acc) std::memset(block.acc, 0, padded_value_dim_ * BLOCK_ROWS * sizeof(float));
    const BlockStore<Math, BLOCK_ROWS> stored{
        p_, task_, rule_, block.row_begin, block.num_rows, block.acc, block.largest, block.sum};
    if (partial_rows != nullptr) {
      stored.partial(partial_rows + (block.row_begin - task_.row_begin) * PartialRows::stride(p_));
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
  PrefillFetcher<Cache, PREFILL_TOKENS> fetcher_;
  TileRows<PREFILL_TOKENS> tiles_[2], *current_ = &tiles_[0], *next_ = &tiles_[1];
  const uint32_t* key_rows_[PREFILL_TOKENS];
  uint32_t* keys_;    // [PREFILL_TOKENS, padded_key_dim / PACK], for those that key_rows_ does not find
  uint32_t* values_;  // [PREFILL_TOKENS / PACK, value_stride]
  uint32_t* values_as_stored_;  // the same, with infinities and NaN
  float* score_;                // [PREFILL_TOKENS, BLOCK_ROWS]
  uint32_t* weight_;            // [PREFILL_TOKENS / PACK, BLOCK_ROWS]
  Block blocks_[MAX_BLOCKS];
};

}  // namespace
}  // namespace pagedkv::cpu
