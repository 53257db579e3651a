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
struct RowMask {
  int64_t begin, end;    // keys outside [begin, end) are not visible
  int64_t causal_end;    // nor are keys in [causal_end, tree_begin)
  int64_t tree_begin;    // from this key on tree_row decides; NO_TREE without a tree
  const bool* tree_row;  // [max_tree] is key tree_begin + column visible?
  int64_t position;      // of the query, for ALiBi

  static constexpr int64_t NO_TREE = std::numeric_limits<int64_t>::max();

  PAGEDKV_HD bool visible(int64_t key) const {
    return key >= begin && key < end && (key < tree_begin ? key < causal_end : tree_row[key - tree_begin]);
  }
};

PAGEDKV_HD RowMask row_mask(const PagedAttentionParams& p, int64_t seq_idx, int64_t query_len,
                            int64_t query_idx, int64_t token_idx) {
  const int64_t context_len = max_of<int64_t>(0, p.context_lens[seq_idx]);
  RowMask mask;
  mask.position = context_len - query_len + query_idx;
  mask.begin = p.kv_starts != nullptr ? max_of<int64_t>(0, p.kv_starts[seq_idx]) : 0;
  mask.end = context_len;
  mask.causal_end = p.causal ? min_of(context_len, mask.position + 1) : context_len;
  mask.tree_begin = RowMask::NO_TREE;
  mask.tree_row = nullptr;
  if (p.tree_mask != nullptr) {
    mask.tree_begin = context_len - p.max_tree;
    mask.tree_row = p.tree_mask + token_idx * p.tree_mask_token_stride;
  } else {
    mask.end = mask.causal_end;
  }
  if (p.window != NO_WINDOW) {
    mask.begin = max_of(mask.begin, mask.position - p.window + 1);
    if (!p.causal) mask.end = min_of(mask.end, mask.position + p.window);
  }
  return mask;
}

}  // namespace pagedkv
