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
#include "common/online_softmax.h"
#include "cpu/paged_attention/block_products.h"
#include "cpu/paged_attention/scores.h"
#include "cpu/paged_attention/store.h"
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
  static constexpr int LINE_ELEMENTS = 64 / sizeof(Cache);

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
    int32_t seen_begin, seen_end;  // keys that some row sees
    int32_t sure_begin, sure_end;  // keys that every row sees
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
      next_->find(p_, task_, begin, tile_end(begin));
      fetch_next(0, PREFILL_TOKENS);
    }
    for (int i = 0; i < num_blocks_; ++i) start(blocks_[i], task_.row_begin + i * BLOCK_ROWS);
    while (begin < task_.keys_end) {
      const int32_t end = tile_end(begin);
      std::swap(current_, next_);
      next_->num_tokens = 0;
      if (end < task_.keys_end) next_->find(p_, task_, end, tile_end(end));
      load_keys_and_values();
      bool all_sure = true;
      for (int i = 0; i < num_blocks_; ++i) all_sure &= is_sure(blocks_[i], begin, end);
      has_specials_ = false;
      if (!all_sure) take_specials_out();
      for (int i = 0; i < num_blocks_; ++i) attend_tile(blocks_[i], begin, end, i == 0);
      begin = end;
    }
    for (int i = 0; i < num_blocks_; ++i) {
      if (partial_rows != nullptr) {
        store_partial(blocks_[i], partial_rows + i * BLOCK_ROWS * PartialRows::stride(p_));
      } else {
        store_whole(blocks_[i], task_.row_begin + i * BLOCK_ROWS);
      }
    }
  }

  // Tiles begin and end at even tokens, so that the two of a pair are the same for every task.
  int32_t tile_end(int32_t begin) const {
    return min_of(begin / PREFILL_TOKENS * PREFILL_TOKENS + PREFILL_TOKENS, (task_.keys_end + 1) & ~1);
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
    for (int row = 0; row < block.num_rows && p_.alibi_slopes != nullptr; ++row) {
      block.slope[row] = p_.alibi_slopes[task_.kv_head_idx * group + (first_row + row) % group];
    }
    for (int row = 0; row < block.num_rows; ++row) fetch_query(first_row + row);
    std::memset(block.acc, 0, padded_value_dim_ * BLOCK_ROWS * sizeof(float));
    for (int row = 0; row < BLOCK_ROWS; row += WIDTH) load_query(block, first_row + row, row);
  }

  // All rows of a block at once, as they may lie far apart.
  void fetch_query(int64_t row) const {
    const int64_t group = p_.num_heads / p_.num_kv_heads, head_idx = task_.kv_head_idx * group + row % group;
    const int64_t size = p_.query_dtype == DType::float32 ? 4 : 2;
    const char* query =
        static_cast<const char*>(p_.query) +
        ((task_.query_begin + row / group) * p_.query_token_stride + head_idx * p_.query_head_stride) * size;
    for (int64_t byte = 0; byte < p_.head_dim * size; byte += 64) _mm_prefetch(query + byte, _MM_HINT_T0);
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

  // The next tile's rows for the tokens [begin, end) of it, into the L2 cache.
  void fetch_next(int begin, int end) const {
    const auto* keys = static_cast<const Cache*>(p_.key_cache) + task_.kv_head_idx * p_.key_cache_head_stride;
    const auto* values =
        static_cast<const Cache*>(p_.value_cache) + task_.kv_head_idx * p_.value_cache_head_stride;
    for (int token = begin; token < min_of(end, next_->num_tokens); ++token) {
      if (next_->key[token] < 0) continue;
      for (int64_t i = 0; i < p_.head_dim; i += LINE_ELEMENTS) {
        _mm_prefetch(keys + next_->key[token] + i, _MM_HINT_T1);
      }
      for (int64_t i = 0; i < p_.value_head_dim; i += LINE_ELEMENTS) {
        _mm_prefetch(values + next_->value[token] + i, _MM_HINT_T1);
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

  void attend_tile(Block& block, int32_t tile_begin, int32_t tile_end, bool fetches) {
    // Of the tile, what the block's rows see; still pairs.
    const int begin = max_of(0, (block.seen_begin & ~1) - tile_begin);
    const int end = min_of(tile_end, (block.seen_end + 1) & ~1) - tile_begin;
    if (begin >= end) return;
    alignas(64) float factor[BLOCK_ROWS], largest[BLOCK_ROWS];
    std::fill_n(largest, BLOCK_ROWS, NEG_INF);
    constexpr int SLICE = 8;
    for (int token = begin; token < end; token += SLICE) {
      Products::multiply_keys(keys_ + token * padded_key_dim_ / PACK, padded_key_dim_ / PACK, key_dwords_,
                              min_of(SLICE, end - token), block.query, score_ + token * BLOCK_ROWS, largest);
      if (fetches) fetch_next(token, token + SLICE);
    }
    const bool masks = !is_sure(block, tile_begin + begin, tile_begin + end);
    if (rule_.adjusts) adjust_scores(block, tile_begin, begin, end);
    if (masks) mask_scores(block, tile_begin, begin, end);
    if (rule_.adjusts || masks) find_largest(begin, end, largest);
    for (int lane = 0; lane < BLOCK_ROWS; lane += WIDTH) weigh(block, lane, begin, end, largest, factor);
    Products::multiply_values(values_ + begin / PACK * value_stride_, value_stride_, (end - begin) / PACK,
                              p_.value_head_dim, weight_ + begin / PACK * BLOCK_ROWS, factor, block.acc);
    if (has_specials_) add_specials(block, begin, end);
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

  void find_largest(int begin, int end, float* largest) const {
    for (int lane = 0; lane < BLOCK_ROWS; lane += WIDTH) {
      Float most = Isa::set(NEG_INF);
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

  // The rows of the whole sequence: out and lse.
  template <class Query>
  void store(const Block& block, int64_t first_row) const {
    const int64_t group = p_.num_heads / p_.num_kv_heads;
    const float value_scale = scale_of(p_.v_scale, p_.v_scale_value, task_.kv_head_idx);
    alignas(64) float multiplier[BLOCK_ROWS] = {}, divisor[BLOCK_ROWS];
    Query* out[BLOCK_ROWS];
    for (int row = 0; row < block.num_rows; ++row) {
      const int64_t token_idx = task_.query_begin + (first_row + row) / group;
      const int64_t head_idx = task_.kv_head_idx * group + (first_row + row) % group;
      const Normaliser end =
          end_row<Isa, Query>(p_, token_idx, head_idx, rule_.exported(block.largest[row]), block.sum[row]);
      multiplier[row] = end.multiplier * value_scale;
      divisor[row] = end.divisor;
      out[row] = out_row<Query>(p_, token_idx, head_idx);
    }
    std::fill(divisor + block.num_rows, divisor + BLOCK_ROWS, 1.0f);
    for_turned(
        block,
        [&](int row_begin, int64_t dim, Float(&x)[WIDTH]) {
          const Float m = Isa::load(multiplier + row_begin), d = Isa::load(divisor + row_begin);
          for (int i = 0; i < WIDTH; ++i) x[i] = normalised<Isa, Query>(x[i], m, d);
        },
        [&](int row, int64_t dim, Float x) { Isa::narrow(out[row] + dim, x, p_.value_head_dim - dim); });
  }

  void store_whole(const Block& block, int64_t first_row) const {
    if constexpr (PACK == 2) {
      store<bfloat16>(block, first_row);
    } else {
      dispatch_float_dtype(p_.query_dtype, [&]<class Query>() { store<Query>(block, first_row); });
    }
  }

  // What is known of the rows after one of several chunks.
  void store_partial(const Block& block, float* partial_rows) const {
    const int64_t stride = PartialRows::stride(p_);
    const Float scale = Isa::set(scale_of(p_.v_scale, p_.v_scale_value, task_.kv_head_idx));
    for_turned(
        block,
        [&](int, int64_t, Float(&x)[WIDTH]) {
          for (int i = 0; i < WIDTH; ++i) x[i] = Isa::mul(x[i], scale);
        },
        [&](int row, int64_t dim, Float x) {
          Isa::narrow(partial_rows + row * stride + dim, x, p_.value_head_dim - dim);
        });
    for (int row = 0; row < block.num_rows; ++row) {
      partial_rows[row * stride + p_.value_head_dim] = rule_.exported(block.largest[row]);
      partial_rows[row * stride + p_.value_head_dim + 1] = block.sum[row];
    }
  }

  // acc, turned back so that a vector is WIDTH dimensions of a row: before(row_begin, dim, x) while a row is
  // still a lane, then after(row, dim, x).
  template <class Before, class After>
  void for_turned(const Block& block, Before&& before, After&& after) const {
    for (int row_begin = 0; row_begin < block.num_rows; row_begin += WIDTH) {
      const int num_rows = min_of(WIDTH, block.num_rows - row_begin);
      for (int64_t dim = 0; dim < p_.value_head_dim; dim += WIDTH) {
        Float x[WIDTH];
        for (int i = 0; i < WIDTH; ++i) x[i] = Isa::load(block.acc + (dim + i) * BLOCK_ROWS + row_begin);
        before(row_begin, dim, x);
        Isa::transpose(x);
        for (int i = 0; i < num_rows; ++i) after(row_begin + i, dim, x[i]);
      }
    }
  }

  const PagedAttentionParams& p_;
  const AttentionTask& task_;
  const ScoreRule<Isa> rule_;
  // A row of values is a line longer than a power of two: a column of them then fits the L1 cache.
  int64_t padded_key_dim_, padded_value_dim_, value_stride_, memory_;
  int key_dwords_, num_blocks_;
  bool has_specials_ = false;
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
