// Blocks of a cache copied to other blocks, byte for byte, every source as it was before the call.
//
// Work: caches in parallel (pairs too, where nothing is staged). Pairs whose source is another pair's
// destination are first read into staging; then everything is written. Bytes: each block is read and written
// once, staged ones twice.
#include <cstring>

#include "cpu/parallel.h"
#include "ops.h"

namespace pagedkv::cpu {

namespace {

char* block_at(const BlockLayout& layout, int64_t block) {
  return layout.base + block * layout.block_stride_bytes;
}

// A block as it lies in staging: its rows one after another.
BlockLayout packed(const BlockLayout& layout, char* base) {
  BlockLayout staging = layout;
  staging.base = base;
  staging.inner_stride_bytes = layout.row_bytes;
  staging.outer_stride_bytes = layout.inner_rows * layout.row_bytes;
  staging.block_stride_bytes = layout.outer_rows * staging.outer_stride_bytes;
  return staging;
}

void copy_block(const BlockLayout& from, int64_t source, const BlockLayout& to, int64_t destination) {
  const char* source_block = block_at(from, source);
  char* destination_block = block_at(to, destination);
  if (source_block == destination_block) return;  // a pair (b, b)
  for (int64_t outer = 0; outer < from.outer_rows; ++outer) {
    for (int64_t inner = 0; inner < from.inner_rows; ++inner) {
      std::memcpy(destination_block + outer * to.outer_stride_bytes + inner * to.inner_stride_bytes,
                  source_block + outer * from.outer_stride_bytes + inner * from.inner_stride_bytes,
                  from.row_bytes);
    }
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& p) {
  const auto for_each = [&](int64_t num_pairs, auto&& body) {
    parallel_for(p.num_caches * num_pairs, 2,
                 [&](int64_t task) { body(task / num_pairs, task % num_pairs); });
  };
  const auto staging = [&](int64_t cache_idx) { return packed(p.sources[cache_idx], p.staging[cache_idx]); };
  for_each(p.num_staged, [&](int64_t cache_idx, int64_t i) {
    copy_block(p.sources[cache_idx], p.pairs[i].source, staging(cache_idx), i);
  });
  for_each(p.num_pairs, [&](int64_t cache_idx, int64_t i) {
    if (i < p.num_staged) {
      copy_block(staging(cache_idx), i, p.destinations[cache_idx], p.pairs[i].destination);
    } else {
      copy_block(p.sources[cache_idx], p.pairs[i].source, p.destinations[cache_idx], p.pairs[i].destination);
    }
  });
}

}  // namespace pagedkv::cpu
