// The portable attention kernel: plain C++ for every processor, and the oracle of the faster ones.
//
// Work: a task is (sequence, KV head, tile of query rows); a row is one query token and one head of the KV
// head's group, so the whole group shares each K and V row that is loaded. A task walks its keys in tiles
// that are cut at absolute multiples of TILE_TOKENS and folds each into the row's softmax state in order. A
// row's arithmetic thus depends on its own keys alone, never on the batch, the other rows or the number of
// threads: every split_size gives the same bits.
//
// Bytes: K and V once per task, converted to float32 in a tile that stays in the L1 or L2 cache; out once.
#include <array>
#include <vector>

#include "common/dispatch.h"
#include "common/masks.h"
#include "common/online_softmax.h"
#include "common/paging.h"
#include "cpu/paged_attention/isa.h"
#include "cpu/parallel.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t TILE_TOKENS = 64;
constexpr int64_t TILE_ROWS = 16;
constexpr int64_t LANES = 8;  // head dimensions are multiples of it; the compiler makes vectors of it

// One query row of a task.
struct Row {
  int64_t token_idx, head_idx;
  RowMask mask;
  OnlineSoftmax softmax;
};

// The task's memory, reused by every task of a thread.
struct Scratch {
  std::vector<float> query;     // [TILE_ROWS, head_dim]
  std::vector<float> key;       // [TILE_TOKENS, head_dim]
  std::vector<float> value;     // [TILE_TOKENS, value_head_dim]
  std::vector<float> acc;       // [TILE_ROWS, value_head_dim] sum of weight * value
  std::vector<float> tile_acc;  // [value_head_dim] the same of one row and tile
  std::array<float, TILE_TOKENS> score;

  void resize(const PagedAttentionParams& p) {
    query.resize(TILE_ROWS * p.head_dim);
    key.resize(TILE_TOKENS * p.head_dim);
    value.resize(TILE_TOKENS * p.value_head_dim);
    acc.resize(TILE_ROWS * p.value_head_dim);
    tile_acc.resize(p.value_head_dim);
  }
};

// The sum of a[i] * b[i], in LANES partial sums whose order never changes.
float dot(const float* a, const float* b, int64_t size) {
  float lane[LANES] = {};
  for (int64_t i = 0; i < size; i += LANES) {
    for (int64_t j = 0; j < LANES; ++j) lane[j] += a[i + j] * b[i + j];
  }
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

template <class Cache>
void load_tile(const PagedAttentionParams& p, const int32_t* block_table, int64_t kv_head_idx,
               int64_t token_begin, int64_t load_begin, int64_t load_end, Scratch& scratch) {
  const float k_scale = scale_of(p.k_scale, p.k_scale_value, kv_head_idx);
  const float v_scale = scale_of(p.v_scale, p.v_scale_value, kv_head_idx);
  for (int64_t token = load_begin; token < load_end; ++token) {
    const int64_t block = block_table[token / p.block_size], token_in_block = token % p.block_size;
    const auto* key_row = static_cast<const Cache*>(p.key_cache) +
                          cache_offset(key_cache_strides(p), block, token_in_block, kv_head_idx);
    const auto* value_row = static_cast<const Cache*>(p.value_cache) +
                            cache_offset(value_cache_strides(p), block, token_in_block, kv_head_idx);
    float* key = scratch.key.data() + (token - token_begin) * p.head_dim;
    float* value = scratch.value.data() + (token - token_begin) * p.value_head_dim;
    for (int64_t i = 0; i < p.head_dim; ++i) key[i] = to_float(key_row[i]) * k_scale;
    for (int64_t i = 0; i < p.value_head_dim; ++i) value[i] = to_float(value_row[i]) * v_scale;
  }
}

// Scores of one row against the tile, in the contract's order: scale, softcap, ALiBi, mask. Returns the
// largest.
float score_tile(const PagedAttentionParams& p, const Row& row, const float* query, int64_t token_begin,
                 int64_t token_end, Scratch& scratch) {
  float max = NEG_INF;
  for (int64_t token = token_begin; token < token_end; ++token) {
    float& score = scratch.score[token - token_begin];
    score = NEG_INF;
    if (!row.mask.visible(token)) continue;
    score = dot(query, scratch.key.data() + (token - token_begin) * p.head_dim, p.head_dim) * p.softmax_scale;
    if (p.softcap > 0.0f) score = p.softcap * std::tanh(score / p.softcap);
    if (p.alibi_slopes != nullptr) {
      score += p.alibi_slopes[row.head_idx] * static_cast<float>(token - row.mask.position);
    }
    if (score > max) max = score;
  }
  return max;
}

// acc = acc * factor + sum of weight * value, and the same for the softmax's sum. The tile is summed up
// apart, so that a long context loses no digits to a running sum.
void accumulate_tile(const PagedAttentionParams& p, Row& row, float* acc, int64_t token_begin,
                     int64_t token_end, float tile_max, Scratch& scratch) {
  const float factor = row.softmax.raise_max(tile_max);
  float tile_sum = 0.0f;
  float* tile_acc = scratch.tile_acc.data();
  std::fill_n(tile_acc, p.value_head_dim, 0.0f);
  for (int64_t token = token_begin; token < token_end; ++token) {
    if (!row.mask.visible(token)) continue;  // a masked slot may hold NaN, and 0 * NaN is NaN
    const float score = scratch.score[token - token_begin];
    const float weight = row.softmax.weight(score);
    tile_sum += weight;
    const float* value = scratch.value.data() + (token - token_begin) * p.value_head_dim;
    for (int64_t i = 0; i < p.value_head_dim; ++i) tile_acc[i] += weight * value[i];
  }
  row.softmax.sum += tile_sum;
  for (int64_t i = 0; i < p.value_head_dim; ++i) acc[i] = acc[i] * factor + tile_acc[i];
}

// Adds the sink to the denominator, normalises and stores. A row that saw no key gives 0, and its lse is the
// sink's.
template <class Query>
void store_row(const PagedAttentionParams& p, Row& row, float* acc) {
  const bool empty = row.softmax.sum == 0.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[row.head_idx];
    const float factor = row.softmax.raise_max(sink);
    for (int64_t i = 0; i < p.value_head_dim; ++i) acc[i] *= factor;
    row.softmax.sum += row.softmax.weight(sink);
  }
  auto* out =
      static_cast<Query*>(p.out) + row.token_idx * p.out_token_stride + row.head_idx * p.out_head_stride;
  for (int64_t i = 0; i < p.value_head_dim; ++i) {
    out[i] = from_float<Query>(empty ? 0.0f : acc[i] / row.softmax.sum);
  }
  if (p.lse != nullptr) p.lse[row.token_idx * p.num_heads + row.head_idx] = row.softmax.lse();
}

// One task: rows [row_begin, row_end) of the sequence's query_len * group rows, token-major.
template <class Query, class Cache>
void attend_rows(const PagedAttentionParams& p, int64_t seq_idx, int64_t kv_head_idx, int64_t query_begin,
                 int64_t query_len, int64_t row_begin, int64_t row_end, Scratch& scratch) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t num_rows = row_end - row_begin;
  std::array<Row, TILE_ROWS> rows;
  int64_t keys_begin = RowMask::NO_TREE, keys_end = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t query_idx = (row_begin + r) / group;
    rows[r].token_idx = query_begin + query_idx;
    rows[r].head_idx = kv_head_idx * group + (row_begin + r) % group;
    rows[r].mask = row_mask(p, seq_idx, query_len, query_idx, rows[r].token_idx);
    if (rows[r].mask.begin < rows[r].mask.end) {
      keys_begin = std::min<int64_t>(keys_begin, rows[r].mask.begin);
      keys_end = std::max<int64_t>(keys_end, rows[r].mask.end);
    }
    const auto* query = static_cast<const Query*>(p.query) + rows[r].token_idx * p.query_token_stride +
                        rows[r].head_idx * p.query_head_stride;
    for (int64_t i = 0; i < p.head_dim; ++i) scratch.query[r * p.head_dim + i] = to_float(query[i]);
  }
  std::fill_n(scratch.acc.begin(), num_rows * p.value_head_dim, 0.0f);

  const int32_t* block_table = p.block_tables + seq_idx * p.block_tables_seq_stride;
  for (int64_t token_begin = keys_begin / TILE_TOKENS * TILE_TOKENS; token_begin < keys_end;
       token_begin += TILE_TOKENS) {
    const int64_t load_begin = std::max(token_begin, keys_begin);
    const int64_t load_end = std::min(token_begin + TILE_TOKENS, keys_end);
    load_tile<Cache>(p, block_table, kv_head_idx, token_begin, load_begin, load_end, scratch);
    for (int64_t r = 0; r < num_rows; ++r) {
      const float tile_max =
          score_tile(p, rows[r], scratch.query.data() + r * p.head_dim, token_begin, load_end, scratch);
      accumulate_tile(p, rows[r], scratch.acc.data() + r * p.value_head_dim, token_begin, load_end, tile_max,
                      scratch);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r)
    store_row<Query>(p, rows[r], scratch.acc.data() + r * p.value_head_dim);
}

// The tasks of every sequence, as a list: sequences may differ much in length.
struct Task {
  int64_t seq_idx, kv_head_idx, row_begin;
};

std::vector<Task> list_tasks(const PagedAttentionParams& p) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  std::vector<Task> tasks;
  tasks.reserve(p.num_seqs * p.num_kv_heads);
  for (int64_t seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
    const int64_t query_len =
        p.query_start_loc != nullptr ? p.query_start_loc[seq_idx + 1] - p.query_start_loc[seq_idx] : 1;
    for (int64_t kv_head_idx = 0; kv_head_idx < p.num_kv_heads; ++kv_head_idx) {
      for (int64_t row = 0; row < query_len * group; row += TILE_ROWS)
        tasks.push_back({seq_idx, kv_head_idx, row});
    }
  }
  return tasks;
}

}  // namespace

void portable_paged_attention(const PagedAttentionParams& p) {
  const std::vector<Task> tasks = list_tasks(p);
  const int64_t group = p.num_heads / p.num_kv_heads;
  dispatch_cache_pair(p.query_dtype, p.cache_dtype, [&]<class Query, class Cache>() {
    parallel_for(static_cast<int64_t>(tasks.size()), 1, [&](int64_t task_idx) {
      thread_local Scratch scratch;
      scratch.resize(p);
      const Task& task = tasks[task_idx];
      const int64_t query_begin =
          p.query_start_loc != nullptr ? p.query_start_loc[task.seq_idx] : task.seq_idx;
      const int64_t query_len =
          p.query_start_loc != nullptr ? p.query_start_loc[task.seq_idx + 1] - query_begin : 1;
      attend_rows<Query, Cache>(p, task.seq_idx, task.kv_head_idx, query_begin, query_len, task.row_begin,
                                std::min(task.row_begin + TILE_ROWS, query_len * group), scratch);
    });
  });
}

}  // namespace pagedkv::cpu
