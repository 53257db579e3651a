// A block of prefill.h's rows, and which keys they see.
#pragma once

#include <algorithm>
#include <limits>

#include "common/masks.h"
#include "common/paging.h"
#include "cpu/paged_attention/task.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// Of a tile, the tokens that each vector of a block's rows sees: pairs, even where that is one too many.
template <int ROW_VECTORS>
struct SeenTile {
  static constexpr int SLICE = 8;  // tokens that are worked on together

  int begin, end[ROW_VECTORS];  // ends do not fall

  int last_end() const { return end[ROW_VECTORS - 1]; }
  int num_slices() const { return max_of(0, (last_end() - begin + SLICE - 1) / SLICE); }
};

template <int ROW_VECTORS, int WIDTH>
struct PrefillBlock {
  static constexpr int ROWS = ROW_VECTORS * WIDTH;

  int64_t row_begin;
  int num_rows;
  uint32_t* query;  // [padded head_dim / PACK, ROWS]
  float* acc;       // [padded value_head_dim, ROWS]
  bool has_acc;     // anything in acc
  alignas(64) float largest[ROWS], sum[ROWS];
  float slope[ROWS];               // of ALiBi
  int32_t begin[ROWS], end[ROWS];  // the keys a row sees; with a tree, those that it may see
  int32_t position[ROWS];
  RowMask masks[ROWS];
  int32_t seen_begin, seen_end;     // keys that some row sees
  int32_t sure_begin, sure_end;     // keys that every row sees
  int32_t vector_end[ROW_VECTORS];  // where the keys end that rows of this or an earlier vector see

  int64_t row_end() const { return row_begin + num_rows; }

  bool is_sure(int32_t keys_begin, int32_t keys_end) const {
    return sure_begin <= keys_begin && keys_end <= sure_end;
  }

  SeenTile<ROW_VECTORS> tile(int32_t tile_begin, int32_t tile_end) const {
    SeenTile<ROW_VECTORS> seen;
    seen.begin = max_of(0, (seen_begin & ~1) - tile_begin);
    for (int vector = 0; vector < ROW_VECTORS; ++vector) {
      seen.end[vector] = min_of(tile_end, (vector_end[vector] + 1) & ~1) - tile_begin;
    }
    return seen;
  }

  // The task's rows from first_row on, before any key. query and acc are left alone.
  void start(const PagedAttentionParams& p, const AttentionTask& task, int64_t first_row) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    row_begin = first_row;
    has_acc = false;
    num_rows = static_cast<int>(min_of<int64_t>(ROWS, task.row_end - first_row));
    seen_begin = sure_end = std::numeric_limits<int32_t>::max();
    seen_end = sure_begin = 0;
    int64_t query_idx = -1;
    RowMask mask;
    for (int row = 0; row < ROWS; ++row) {
      if (row >= num_rows) {
        mask = RowMask{};  // a lane without a row sees nothing
      } else if (query_idx < 0 || (first_row + row) % group == 0) {
        query_idx = (first_row + row) / group;
        mask = row_mask(p, task.seq_idx, task.query_len, query_idx, task.query_begin + query_idx);
        sure_begin = max_of(sure_begin, mask.begin);
        sure_end = min_of(sure_end, min_of(mask.end, min_of(mask.causal_end, mask.tree_begin)));
      }
      masks[row] = mask;
      begin[row] = mask.begin;
      end[row] = mask.tree_row != nullptr ? mask.end : min_of(mask.end, mask.causal_end);
      position[row] = mask.position;
      if (begin[row] < end[row]) {
        seen_begin = min_of(seen_begin, begin[row]);
        seen_end = max_of(seen_end, end[row]);
      }
      if ((row + 1) % WIDTH == 0) vector_end[row / WIDTH] = seen_end;
    }
    std::fill_n(largest, ROWS, PartialRows::NO_SCORE);
    std::fill_n(sum, ROWS, 0.0f);
    std::fill_n(slope, ROWS, 0.0f);
    for (int row = 0; row < num_rows && p.alibi_slopes != nullptr; ++row) {
      slope[row] = p.alibi_slopes[task.kv_head_idx * group + (first_row + row) % group];
    }
  }
};

}  // namespace
}  // namespace pagedkv::cpu
