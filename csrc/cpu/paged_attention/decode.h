// A task of few rows that all see the same keys: the query heads of one KV head, or of several, at one token.
//
// Vectors run along head_dim, so that K and V are used as they lie in the cache, and once. A score vector is
// split into 128-bit lanes. With LANE_ROWS = 1 all lanes work on one row, otherwise each has a row of its
// own. Scores of one vector of rows, or of K that must be widened first, are sums over the lanes of registers
// of K times registers of Q. For two vectors of rows it is faster to let 16 bytes of K in every lane meet 16
// bytes of each row's Q. Either way 4 tokens make up a quad, in which the sums over the 4 dwords of a lane
// end. The softmax step works on vectors of LANE_ROWS rows by LANE_TOKENS tokens. Values are added up for
// DECODE_ROWS rows and a few vectors of head_dim.
//
// Bytes: K and V once. Keys come in tiles; an item is a tile of one KV head. Hardware does not know where the
// next page lies, so while the task works on an item it fetches another, of the next task where that is
// known, AHEAD_BYTES early. When memory is busy, some of those requests get lost. So each line is asked for
// twice, the second time half an item later.
#pragma once

#include <cstring>
#include <utility>

#include "common/paging.h"
#include "cpu/paged_attention/decode_products.h"
#include "cpu/paged_attention/fetch.h"
#include "cpu/paged_attention/scores.h"
#include "cpu/paged_attention/store.h"
#include "cpu/paged_attention/task.h"
#include "cpu/paged_attention/tile_rows.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

template <class Math, int LANE_ROWS>
class Decode {
  using Isa = typename Math::Isa;
  using Cache = typename Math::Cache;
  using Float = typename Isa::Float;
  static constexpr int WIDTH = Isa::WIDTH;
  static constexpr int PACK = Math::PACK;
  using Products = DecodeProducts<Math, LANE_ROWS>;
  using Item = typename Products::Item;
  static constexpr int TOKENS = Products::TOKENS;
  static constexpr int LANE_TOKENS = Products::LANE_TOKENS;
  static constexpr int KEY_VECTORS = Products::KEY_VECTORS;
  static constexpr int ROWS = Isa::DECODE_ROWS;
  static constexpr int64_t AHEAD_BYTES = 64 * 1024;  // of K and V that are fetched ahead
  static constexpr int MAX_TILES = 8;                // that are found and not yet worked on
  static constexpr int MAX_VECTORS = AttentionKernels::DECODE_ROWS / LANE_ROWS;  // of rows

 public:
  static void run(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows) {
    const int64_t memory = Decode(p, task, nullptr).memory_;
    Decode(p, task, thread_scratch(memory)).attend(partial_rows);
  }

 private:
  Decode(const PagedAttentionParams& p, const AttentionTask& task, unsigned char* memory)
      : p_(p), task_(task), group_(static_cast<int>(p.num_heads / p.num_kv_heads)) {
    const auto pad = [](int64_t dim) { return ceil_div(dim, 64) * 64; };
    num_vectors_ = static_cast<int>(ceil_div(group_, LANE_ROWS));
    key_dwords_ = static_cast<int>(pad(p.head_dim) / PACK);
    padded_value_dim_ = pad(p.value_head_dim);
    keys_are_operands_ = Math::IS_STORED && (LANE_ROWS == 1 || num_vectors_ > 1) &&
                         p.head_dim % (Products::LINE_DWORDS * PACK) == 0;
    const int64_t item_bytes = TOKENS * (p.head_dim + p.value_head_dim) * int64_t{sizeof(Cache)};
    // As many as MAX_TILES have, of this task and the next.
    const int64_t num_heads =
        task.next == nullptr ? task.num_kv_heads : min_of(task.num_kv_heads, task.next->num_kv_heads);
    items_ahead_ = max_of<int64_t>(1, min_of(AHEAD_BYTES / item_bytes, (MAX_TILES - 1) * num_heads));
    const int64_t num_rows = task.num_kv_heads * group_, num_vectors = task.num_kv_heads * num_vectors_;
    Arena arena(memory);
    query_ = arena.take<uint32_t>(num_vectors * LANE_ROWS * key_dwords_);
    query_row_ = arena.take<uint32_t>(key_dwords_);
    acc_ = arena.take<float>(num_rows * padded_value_dim_);
    largest_ = arena.take<float>(num_vectors * WIDTH);
    sum_ = arena.take<float>(num_vectors * WIDTH);
    slope_ = arena.take<float>(num_vectors * WIDTH);
    zeros_ = arena.take<Cache>(max_of(p.head_dim, p.value_head_dim));
    whole_rows_ = arena.take<float>(num_rows * PartialRows::stride(p));
    memory_ = arena.used();
  }

  void attend(float* partial_rows) {
    start();
    TileRows<TOKENS> tiles[MAX_TILES];
    Item item, items[2], *fetched = &items[0], *before = &items[1];
    Lookahead ahead{&task_, task_.keys_begin};
    for (int64_t i = 0; i < items_ahead_; ++i) {
      find_next(ahead, tiles, *before);
      for (int t = 0; t < TOKENS; ++t) {
        fetch_to_l2(before->key[t], p_.head_dim * sizeof(Cache));
        fetch_to_l2(before->value[t], p_.value_head_dim * sizeof(Cache));
      }
    }
    int tile_idx = 0;
    for (int32_t token = task_.keys_begin; token < task_.keys_end; token += TOKENS, ++tile_idx) {
      for (int64_t head = 0; head < task_.num_kv_heads; ++head) {
        find_item(tiles[tile_idx % MAX_TILES], task_.kv_head_idx + head, item);
        find_next(ahead, tiles, *fetched);
        attend_item(head, token, item, *fetched, *before);
        std::swap(fetched, before);
      }
    }
    finish(partial_rows != nullptr ? partial_rows : whole_rows_);
    if (partial_rows == nullptr) store_whole();
  }

  void start() {
    const int64_t num_vectors = task_.num_kv_heads * num_vectors_;
    std::memset(query_, 0, num_vectors * LANE_ROWS * key_dwords_ * sizeof(uint32_t));
    std::fill_n(largest_, num_vectors * WIDTH, PartialRows::NO_SCORE);
    std::fill_n(sum_, num_vectors * WIDTH, 0.0f);
    std::fill_n(slope_, num_vectors * WIDTH, 0.0f);
    std::memset(acc_, 0, task_.num_kv_heads * group_ * padded_value_dim_ * sizeof(float));
    std::memset(static_cast<void*>(zeros_), 0, max_of(p_.head_dim, p_.value_head_dim) * sizeof(Cache));
    for (int64_t head = 0; head < task_.num_kv_heads; ++head) {
      for (int row = 0; row < group_; ++row) {
        const int64_t vector = head * num_vectors_ + row / LANE_ROWS, lane = row % LANE_ROWS;
        const int64_t head_idx = (task_.kv_head_idx + head) * group_ + row;
        load_query_row<Math>(p_, task_.query_begin, head_idx, key_dwords_ * PACK, query_row_);
        const int piece = !keys_are_operands_ ? key_dwords_ : LANE_ROWS == 1 ? WIDTH : 4;
        uint32_t* query = query_ + vector * LANE_ROWS * key_dwords_ + lane * piece;
        for (int i = 0; i < key_dwords_; i += piece) {
          std::memcpy(query + i * LANE_ROWS, query_row_ + i, piece * sizeof(uint32_t));
        }
        if (p_.alibi_slopes == nullptr) continue;
        std::fill_n(slope_ + vector * WIDTH + lane * LANE_TOKENS, LANE_TOKENS, p_.alibi_slopes[head_idx]);
      }
    }
  }

  const Cache* key_cache(int64_t kv_head_idx) const {
    return static_cast<const Cache*>(p_.key_cache) + kv_head_idx * p_.key_cache_head_stride;
  }
  const Cache* value_cache(int64_t kv_head_idx) const {
    return static_cast<const Cache*>(p_.value_cache) + kv_head_idx * p_.value_cache_head_stride;
  }

  void find_item(const TileRows<TOKENS>& tile, int64_t kv_head_idx, Item& item) const {
    const Cache *keys = key_cache(kv_head_idx), *values = value_cache(kv_head_idx);
    item.num_tokens = tile.num_tokens;
    item.num_padded = static_cast<int>(ceil_div(tile.num_tokens, WIDTH)) * WIDTH;
    const auto find_rows = [&](int num_tokens) __attribute__((always_inline)) {
      for (int i = 0; i < num_tokens; ++i) item.key[i] = keys + tile.key[i];
      for (int i = 0; i < num_tokens; ++i) item.value[i] = values + tile.value[i];
    };
    if (tile.num_tokens == TOKENS) return find_rows(TOKENS);  // by whole vectors
    find_rows(tile.num_tokens);
    for (int i = tile.num_tokens; i < TOKENS; ++i) item.key[i] = item.value[i] = zeros_;
  }

  // The next item to fetch. After this task's come the next task's, then none.
  struct Lookahead {
    const AttentionTask* task;
    int32_t token;
    int64_t head = 0;
    int num_tiles = 0;  // that were found
  };

  void find_next(Lookahead& ahead, TileRows<TOKENS> (&tiles)[MAX_TILES], Item& fetched) const {
    if (ahead.task != nullptr && ahead.token >= ahead.task->keys_end) {
      ahead.task = ahead.task == &task_ ? task_.next : nullptr;
      if (ahead.task != nullptr) ahead.token = ahead.task->keys_begin;
    }
    if (ahead.task == nullptr || ahead.token >= ahead.task->keys_end) {
      for (int t = 0; t < TOKENS; ++t) fetched.key[t] = fetched.value[t] = zeros_;
      return;
    }
    const AttentionTask& task = *ahead.task;
    if (ahead.head == 0) {
      const int32_t tile_end = min_of(ahead.token + TOKENS, task.keys_end);
      tiles[ahead.num_tiles++ % MAX_TILES].find(p_, task, ahead.token, tile_end);
    }
    find_item(tiles[(ahead.num_tiles - 1) % MAX_TILES], task.kv_head_idx + ahead.head, fetched);
    if (++ahead.head == task.num_kv_heads) {
      ahead.head = 0;
      ahead.token += TOKENS;
    }
  }

  // Meanwhile fetches the item `fetched`, and asks again for what was fetched half an item before: for values
  // while it is the turn of keys, and the other way round.
  void attend_item(int64_t head, int32_t token, const Item& item, const Item& fetched, const Item& before) {
    // [row vector][token / 4][WIDTH]: the sums of a quad, one lane after the other
    alignas(64) float score[MAX_VECTORS][TOKENS / 4][WIDTH];
    alignas(64) uint32_t weight[MAX_VECTORS * Products::WEIGHT_VECTOR_STRIDE];
    alignas(64) float fade[MAX_VECTORS * WIDTH];
    if (keys_are_operands_) {
      int vector = 0;
      for (; vector + KEY_VECTORS <= num_vectors_; vector += KEY_VECTORS) {
        multiply_stored_keys<KEY_VECTORS>(item, fetched, before, head, vector, score);
      }
      for (; vector < num_vectors_; ++vector) {
        multiply_stored_keys<1>(item, fetched, before, head, vector, score);
      }
    } else {
      for (int row = 0; row < group_; row += Products::KEY_ROWS) {
        multiply_keys(item, fetched, before, head, row, score[row / LANE_ROWS][0]);
      }
    }
    const ScoreRule<Isa> rule(p_, task_.kv_head_idx + head);
    for (int i = 0; i < num_vectors_; ++i) {
      weigh(head * num_vectors_ + i, rule, token, item.num_tokens, score[i],
            weight + i * Products::WEIGHT_VECTOR_STRIDE, fade + i * WIDTH);
    }
    int num_passes = 0;
    for (int row = 0; row < group_; row += ROWS) {
      num_passes += Products::num_value_passes(min_of(ROWS, group_ - row), p_.value_head_dim);
    }
    typename Products::RowFetch fetch{fetched.value, fetched.key, p_.value_head_dim * int64_t{sizeof(Cache)},
                                      num_passes};
    for (int row = 0; row < group_; row += ROWS) {
      const uint32_t* row_weight = weight + row / LANE_ROWS * Products::WEIGHT_VECTOR_STRIDE +
                                   row % LANE_ROWS * Products::WEIGHT_ROW_STRIDE;
      float* acc = acc_ + (head * group_ + row) * padded_value_dim_;
      const int num_rows = min_of(ROWS, group_ - row);
      const auto values = [&]<int NUM_ROWS>() {
        Products::template multiply_values<NUM_ROWS>(item, fetch, row_weight, fade + row * LANE_TOKENS, acc,
                                                     padded_value_dim_, p_.value_head_dim);
      };
      if (num_rows == 1) values.template operator()<1>();
      if (num_rows == 2) values.template operator()<2>();
      if constexpr (ROWS > 2) {
        if (num_rows == 3) values.template operator()<3>();
        if (num_rows == 4) values.template operator()<4>();
      }
    }
  }

  // Scores of VECTORS vectors of rows: score[row vector][token / 4] = the sums over each lane's dwords. The
  // first call fetches.
  template <int VECTORS>
  void multiply_stored_keys(const Item& item, const Item& fetched, const Item& before, int64_t head,
                            int vector, float (*score)[TOKENS / 4][WIDTH]) const {
    if constexpr (Math::IS_STORED) {
      const auto num_lines = static_cast<int>(p_.head_dim / (Products::LINE_DWORDS * PACK));
      const int64_t row_bytes = vector == 0 ? p_.head_dim * sizeof(Cache) : 0;
      constexpr bool LANES_OF_ROWS = LANE_ROWS > 1;
      const auto key_tile = LANES_OF_ROWS && num_lines == 4   ? &Products::template key_tile<VECTORS, 4>
                            : LANES_OF_ROWS && num_lines == 2 ? &Products::template key_tile<VECTORS, 2>
                                                              : &Products::template key_tile<VECTORS, 0>;
      const uint32_t* query = query_ + (head * num_vectors_ + vector) * LANE_ROWS * key_dwords_;
      constexpr int TILE = Products::LANE_KEY_TOKENS;
      for (int token = 0; token < item.num_padded; token += TILE) {
        const uint32_t* keys[TILE];
        for (int t = 0; t < TILE; ++t) keys[t] = reinterpret_cast<const uint32_t*>(item.key[token + t]);
        key_tile(keys, fetched.key + token, before.value + token, row_bytes, num_lines, query,
                 LANE_ROWS * key_dwords_, score[vector][token / 4]);
      }
    }
  }

  // Scores of the rows from `row` on that a call of Products takes. The first call fetches.
  void multiply_keys(const Item& item, const Item& fetched, const Item& before, int64_t head, int row,
                     float* score) const {
    const auto num_steps = static_cast<int>(ceil_div(p_.head_dim, Math::STEP));
    const int64_t row_bytes = row == 0 ? p_.head_dim * int64_t{sizeof(Cache)} : 0;
    const uint32_t* query = query_ + (head * num_vectors_ * LANE_ROWS + row) * key_dwords_;
    const auto multiply = [&]<int NUM_ROWS>() {
      Products::template multiply_keys<NUM_ROWS>(item, {fetched.key, before.value, row_bytes, num_steps},
                                                 p_.head_dim, query, key_dwords_, score);
    };
    const int num_rows = min_of(Products::KEY_ROWS, group_ - row);
    if (num_rows == 1) multiply.template operator()<1>();
    if (num_rows == 2) multiply.template operator()<2>();
    if constexpr (Products::KEY_ROWS > 2) {
      if (num_rows == 3) multiply.template operator()<3>();
      if (num_rows == 4) multiply.template operator()<4>();
    }
  }

  static Float token_iota() { return LANE_ROWS == 1 ? Isa::iota() : Isa::iota_in_lanes(); }

  // The largest of each row, for each of its tokens.
  static Float largest_of_rows(Float x) {
    return LANE_ROWS == 1 ? Isa::set(Isa::largest(x)) : Isa::largest_in_lanes(x);
  }

  // Of sums over each lane's dwords, vectors of scores: vector i in score[i * LANE_TOKENS / 4].
  void finish_scores(const ScoreRule<Isa>& rule, Float slope, int32_t first_token, int num_tokens,
                     float (*score)[WIDTH]) const {
    const Float hidden = Isa::set(-std::numeric_limits<float>::infinity());
    const auto position = p_.context_lens[task_.seq_idx] - 1;
    for (int token = 0; token < TOKENS; token += LANE_TOKENS) {
      float* place = score[token / 4];
      Float x = Isa::load(place);
      if constexpr (LANE_ROWS == 1) {
        Float quad[WIDTH / 4];
        for (int i = 0; i < WIDTH / 4; ++i) quad[i] = Isa::load(score[token / 4 + i]);
        x = Isa::join_quads(quad);
      }
      if (rule.adjusts) {
        const auto distance = static_cast<float>(first_token + token - position);
        x = rule.adjust(x, slope, Isa::add(token_iota(), Isa::set(distance)));
      }
      x = Isa::select_less(token_iota(), Isa::set(static_cast<float>(num_tokens - token)), x, hidden);
      Isa::store(place, x);
    }
  }

  // The softmax step of a row vector: its weights, and how much what was summed up before fades.
  void weigh(int64_t vector, const ScoreRule<Isa>& rule, int32_t first_token, int num_tokens,
             float (*score)[WIDTH], uint32_t* weight, float* fade) {
    constexpr int VECTORS = TOKENS / LANE_TOKENS;
    if (LANE_ROWS == 1 || rule.adjusts || num_tokens < TOKENS) {
      finish_scores(rule, Isa::load(slope_ + vector * WIDTH), first_token, num_tokens, score);
    }
    Float x[VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) x[i] = Isa::load(score[i * LANE_TOKENS / 4]);
    const Float before = Isa::load(largest_ + vector * WIDTH);
    Float largest = x[0];
#pragma GCC unroll 16
    for (int i = 1; i < VECTORS; ++i) largest = Isa::max(largest, x[i]);
    largest = Isa::max(before, largest_of_rows(largest));
    const Float scale = Isa::set(rule.factor());
    Float sum = Isa::set(0.0f);
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) {
      const Float y = weight_of<Isa, Math::EXP_DEGREE>(Isa::sub(x[i], largest), scale);
      sum = Isa::add(sum, y);
      Math::pack_tokens(weight + i * WIDTH / PACK, y);
    }
    const Float old_fade = exp2_of<Isa>(Isa::mul(Isa::sub(before, largest), scale));
    Isa::store(fade, old_fade);
    Isa::store(largest_ + vector * WIDTH, largest);
    Isa::store(sum_ + vector * WIDTH, Isa::fma(Isa::load(sum_ + vector * WIDTH), old_fade, sum));
  }

  void finish(float* partial_rows) {
    constexpr int LOADED = Math::OPERANDS * PACK;
    const int64_t num_rows = task_.num_kv_heads * group_;
    for (int64_t row = 0; row < num_rows; ++row, partial_rows += PartialRows::stride(p_)) {
      const int64_t head = row / group_, row_of_head = row % group_;
      const ScoreRule<Isa> rule(p_, task_.kv_head_idx + head);
      const Float scale = Isa::set(scale_of(p_.v_scale, p_.v_scale_value, task_.kv_head_idx + head));
      for (int64_t dim = 0; dim < p_.value_head_dim; dim += LOADED * WIDTH) {
        Float x[LOADED];
        for (int i = 0; i < LOADED; ++i) x[i] = Isa::load(acc_ + row * padded_value_dim_ + dim + i * WIDTH);
        Math::restore_values(x);
        for (int i = 0; i < LOADED; ++i) {
          const int64_t begin = dim + i * WIDTH;
          Isa::narrow(partial_rows + begin, Isa::mul(x[i], scale), p_.value_head_dim - begin);
        }
      }
      const int64_t first = head * num_vectors_ * WIDTH + row_of_head * LANE_TOKENS;
      partial_rows[p_.value_head_dim] = rule.exported(largest_[first]);
      float sum = 0.0f;
      for (int i = 0; i < LANE_TOKENS; ++i) sum += sum_[first + i];
      partial_rows[p_.value_head_dim + 1] = sum;
    }
  }

  void store_whole() const {
    if constexpr (PACK == 2) {
      store_rows<Isa, bfloat16>(p_, task_, whole_rows_, 1);
    } else {
      dispatch_float_dtype(p_.query_dtype,
                           [&]<class Query>() { store_rows<Isa, Query>(p_, task_, whole_rows_, 1); });
    }
  }

  const PagedAttentionParams& p_;
  const AttentionTask& task_;
  int group_, num_vectors_;  // rows of a KV head, and vectors of them
  int key_dwords_;           // of a padded row
  bool keys_are_operands_;   // as they lie in the cache; otherwise they are widened
  int64_t items_ahead_;      // between asking for one and working on it
  int64_t padded_value_dim_, memory_;
  // [num_kv_heads, num_vectors, key_dwords / 4, LANE_ROWS, 4], or with widened keys [.., LANE_ROWS,
  // key_dwords]
  uint32_t* query_;
  uint32_t* query_row_;  // [key_dwords]
  float* acc_;           // [num_kv_heads * group, padded_value_dim], in the order of load_values
  // [num_kv_heads, num_vectors, LANE_ROWS, LANE_TOKENS]: the largest score, sums, and ALiBi's slope
  float *largest_, *sum_, *slope_;
  float* whole_rows_;  // the partial rows of a task that has all keys
  Cache* zeros_;       // [max(head_dim, value_head_dim)]
};

}  // namespace
}  // namespace pagedkv::cpu
