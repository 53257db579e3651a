// Blocks of a cache copied to other blocks, byte for byte, every source as it was before the call.
//
// Work: the blocks of all caches in one row, cut into tasks of TASK_BYTES. Pairs whose source is another
// pair's destination are first read into staging; then everything is written. Bytes: each block is read and
// written once, staged ones twice.
#include <cstring>
#include <vector>

#include "common/paging.h"
#include "cpu/parallel.h"
#include "cpu/stream_copy.h"
#include "ops.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t TASK_BYTES = 256 << 10;  // waking a thread costs a tenth of the time that these take
constexpr int64_t AHEAD_BYTES = 8 << 10;   // a block may lie anywhere, so it is asked for this long before

// One block of a cache.
struct Block {
  const BlockLayout& layout;
  char* bytes;
};

Block block_of(const BlockLayout& layout, int64_t block) {
  return {layout, layout.base + block * layout.block_stride_bytes};
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

// Copies a block. With `ahead` by streaming stores, and meanwhile that block, which lies like the source, is
// asked for.
void copy_block(const Block& from, const Block& to, const char* ahead) {
  if (from.bytes == to.bytes) return;  // a pair (b, b)
  const BlockLayout &source = from.layout, &destination = to.layout;
  for (int64_t outer = 0; outer < source.outer_rows; ++outer) {
    for (int64_t inner = 0; inner < source.inner_rows; ++inner) {
      const int64_t row = outer * source.outer_stride_bytes + inner * source.inner_stride_bytes;
      char* copy = to.bytes + outer * destination.outer_stride_bytes + inner * destination.inner_stride_bytes;
      if (ahead != nullptr) {
        stream_copy(copy, from.bytes + row, source.row_bytes, ahead + row);
      } else {
        std::memcpy(copy, from.bytes + row, source.row_bytes);
      }
    }
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& p) {
  const BlockLayout& layout = p.sources[0];
  const int64_t block_bytes = layout.outer_rows * layout.inner_rows * layout.row_bytes;
  const bool stream = p.num_caches * p.num_pairs * block_bytes >= STREAM_BYTES;
  const int64_t blocks_per_task = ceil_div(TASK_BYTES, block_bytes);
  const int64_t blocks_ahead = ceil_div(AHEAD_BYTES, block_bytes);

  // Copies source(cache_idx, pair_idx) to destination(cache_idx, pair_idx) for the first num_pairs pairs.
  const auto copy_all = [&](int64_t num_pairs, auto&& source, auto&& destination) {
    const int64_t num_blocks = p.num_caches * num_pairs;
    parallel_for(ceil_div(num_blocks, blocks_per_task), 1, [&](int64_t task) {
      const int64_t begin = task * blocks_per_task, end = std::min(begin + blocks_per_task, num_blocks);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t cache_idx = i / num_pairs, pair_idx = i % num_pairs;
        const int64_t later = std::min(i + blocks_ahead, num_blocks - 1);
        const char* ahead = stream ? source(later / num_pairs, later % num_pairs).bytes : nullptr;
        copy_block(source(cache_idx, pair_idx), destination(cache_idx, pair_idx), ahead);
      }
      stream_fence();
    });
  };
  std::vector<BlockLayout> staging;
  for (int64_t i = 0; p.num_staged > 0 && i < p.num_caches; ++i)
    staging.push_back(packed(p.sources[i], p.staging[i]));
  const auto source = [&](int64_t cache_idx, int64_t pair_idx) {
    return block_of(p.sources[cache_idx], p.pairs[pair_idx].source);
  };
  const auto staged = [&](int64_t cache_idx, int64_t pair_idx) {
    return block_of(staging[cache_idx], pair_idx);
  };
  const auto source_or_staged = [&](int64_t cache_idx, int64_t pair_idx) {
    return pair_idx < p.num_staged ? staged(cache_idx, pair_idx) : source(cache_idx, pair_idx);
  };
  const auto destination = [&](int64_t cache_idx, int64_t pair_idx) {
    return block_of(p.destinations[cache_idx], p.pairs[pair_idx].destination);
  };
  copy_all(p.num_staged, source, staged);
  copy_all(p.num_pairs, source_or_staged, destination);
}

}  // namespace pagedkv::cpu
