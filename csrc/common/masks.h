// Which keys a query row may see: one small object for every back-end.
#pragma once

#include <limits>

#include "common/device.h"
#include "common/paging.h"
#include "params.h"

namespace pagedkv {

// Query i of q_len stands at position context_len - q_len + i (bottom-right causal). With q_len 2, kv_len 5,
// window 3:
//
//            key 0 1 2 3 4
//   query 0      . x x x .        position 3
//   query 1      . . x x x        position 4
// Positions fit int32, as context lengths do.
struct RowMask {
  int32_t begin, end;    // keys outside [begin, end) are not visible
  int32_t causal_end;    // nor are keys in [causal_end, tree_begin)
  int32_t tree_begin;    // from this key on tree_row decides; NO_TREE without a tree
  int32_t position;      // of the query, for ALiBi
  const bool* tree_row;  // [max_tree] is key tree_begin + column visible?

  static constexpr int32_t NO_TREE = std::numeric_limits<int32_t>::max();

  PAGEDKV_HD bool visible(int32_t key) const {
    return key >= begin && key < end && (key < tree_begin ? key < causal_end : tree_row[key - tree_begin]);
  }
};

PAGEDKV_HD RowMask row_mask(const PagedAttentionParams& p, int64_t seq_idx, int64_t query_len,
                            int64_t query_idx, int64_t token_idx) {
  const int64_t context_len = max_of<int64_t>(0, p.context_lens[seq_idx]);
  const int64_t position = context_len - query_len + query_idx;
  const int64_t causal_end = p.causal ? min_of(context_len, position + 1) : context_len;
  int64_t begin = p.kv_starts != nullptr ? max_of<int64_t>(0, p.kv_starts[seq_idx]) : 0;
  int64_t end = p.tree_mask != nullptr ? context_len : causal_end;
  if (p.window != NO_WINDOW) {
    begin = max_of(begin, position - p.window + 1);
    if (!p.causal) end = min_of(end, position + p.window);
  }
  // Neither a context longer than its table nor a kv_starts far behind its end leads anywhere else.
  const int64_t keys_end = min_of(context_len, p.max_blocks_per_seq * p.block_size);
  end = min_of(end, keys_end);
  begin = min_of(begin, keys_end);
  RowMask mask;
  mask.begin = static_cast<int32_t>(begin);
  mask.end = static_cast<int32_t>(end);
  mask.causal_end = static_cast<int32_t>(causal_end);
  mask.position = static_cast<int32_t>(position);
  mask.tree_begin =
      p.tree_mask != nullptr ? static_cast<int32_t>(context_len - p.max_tree) : RowMask::NO_TREE;
  mask.tree_row = p.tree_mask != nullptr ? p.tree_mask + token_idx * p.tree_mask_token_stride : nullptr;
  return mask;
}

}  // namespace pagedkv
