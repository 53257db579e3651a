// Blocks of a cache copied to other blocks, byte for byte, every source as it was before the call.
//
// Work: one CTA per (pair, cache); its threads run over the block in the widest pieces that all rows allow.
// The pointers of all layers and the pairs travel in the kernel's parameters: nothing is uploaded, nothing
// synchronises, and a captured graph replays. Pairs whose source another pair writes go through staging, by
// a launch before the others and one after. Bytes: each block is read and written once, staged ones twice.
#include <vector>

#include "common/device.h"
#include "common/paging.h"
#include "ops.h"

namespace pagedkv::cuda {

namespace {

constexpr int CTA_THREADS = 256;
// 32 layers of keys and values, and the pairs of a step, in one launch; together below the 4 KiB that
// parameters may have.
constexpr int64_t MAX_CACHES = 64;
constexpr int64_t MAX_PAIRS = 320;

struct Side {
  char* base[MAX_CACHES];
  int64_t block_stride_bytes, outer_stride_bytes, inner_stride_bytes;
};

struct Launch {
  Side from, to;
  int32_t source[MAX_PAIRS], destination[MAX_PAIRS];
  int64_t outer_rows, inner_rows, row_bytes;
  int64_t piece_bytes;  // 16, 4 or 1
};

template <class Piece>
PAGEDKV_DEVICE void copy_block(const Launch& launch, const char* from, char* to) {
  const int64_t row_pieces = launch.row_bytes / static_cast<int64_t>(sizeof(Piece));
  const int64_t num_pieces = launch.outer_rows * launch.inner_rows * row_pieces;
  for (int64_t i = threadIdx.x; i < num_pieces; i += CTA_THREADS) {
    const int64_t row = i / row_pieces, offset = i % row_pieces * static_cast<int64_t>(sizeof(Piece));
    const int64_t outer = row / launch.inner_rows, inner = row % launch.inner_rows;
    const char* source =
        from + outer * launch.from.outer_stride_bytes + inner * launch.from.inner_stride_bytes + offset;
    char* destination =
        to + outer * launch.to.outer_stride_bytes + inner * launch.to.inner_stride_bytes + offset;
    if constexpr (sizeof(Piece) == 1) {
      *destination = *source;
    } else {
      store_vector(destination, load_vector<Piece>(source));
    }
  }
}

__global__ void __launch_bounds__(CTA_THREADS) copy_blocks_kernel(const Launch launch) {
  const int64_t pair_idx = blockIdx.x, cache_idx = blockIdx.y;
  const char* from = launch.from.base[cache_idx] + launch.source[pair_idx] * launch.from.block_stride_bytes;
  char* to = launch.to.base[cache_idx] + launch.destination[pair_idx] * launch.to.block_stride_bytes;
  if (from == to) return;  // a pair (b, b)
  if (launch.piece_bytes == 16) {
    copy_block<uint4>(launch, from, to);
  } else if (launch.piece_bytes == 4) {
    copy_block<unsigned>(launch, from, to);
  } else {
    copy_block<char>(launch, from, to);
  }
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

bool same_shape(const BlockLayout& a, const BlockLayout& b) {
  return a.block_stride_bytes == b.block_stride_bytes && a.outer_rows == b.outer_rows &&
         a.inner_rows == b.inner_rows && a.outer_stride_bytes == b.outer_stride_bytes &&
         a.inner_stride_bytes == b.inner_stride_bytes && a.row_bytes == b.row_bytes;
}

// The largest of 16, 4 and 1 that divides every address and length of the caches in question.
int64_t widest_piece(const std::vector<BlockLayout>& from, const std::vector<BlockLayout>& to, int64_t begin,
                     int64_t end) {
  uintptr_t bits = 0;
  for (int64_t i = begin; i < end; ++i) {
    for (const BlockLayout* layout : {&from[i], &to[i]}) {
      bits |= reinterpret_cast<uintptr_t>(layout->base) | static_cast<uintptr_t>(layout->block_stride_bytes) |
              static_cast<uintptr_t>(layout->outer_stride_bytes) |
              static_cast<uintptr_t>(layout->inner_stride_bytes) | static_cast<uintptr_t>(layout->row_bytes);
    }
  }
  return bits % 16 == 0 ? 16 : (bits % 4 == 0 ? 4 : 1);
}

void fill_side(Side& side, const std::vector<BlockLayout>& layouts, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) side.base[i - begin] = layouts[i].base;
  side.block_stride_bytes = layouts[begin].block_stride_bytes;
  side.outer_stride_bytes = layouts[begin].outer_stride_bytes;
  side.inner_stride_bytes = layouts[begin].inner_stride_bytes;
}

// Copies pairs [0, num_pairs) of every cache: one launch per MAX_CACHES caches of one shape and MAX_PAIRS
// pairs.
cudaError_t copy_pairs(const std::vector<BlockLayout>& from, const std::vector<BlockLayout>& to,
                       const BlockPair* pairs, int64_t num_pairs, cudaStream_t stream) {
  const auto num_caches = static_cast<int64_t>(from.size());
  for (int64_t begin = 0, end; begin < num_caches; begin = end) {
    for (end = begin + 1; end < num_caches && end - begin < MAX_CACHES; ++end) {
      if (!same_shape(from[end], from[begin]) || !same_shape(to[end], to[begin])) break;
    }
    Launch args;
    fill_side(args.from, from, begin, end);
    fill_side(args.to, to, begin, end);
    args.outer_rows = from[begin].outer_rows;
    args.inner_rows = from[begin].inner_rows;
    args.row_bytes = from[begin].row_bytes;
    args.piece_bytes = widest_piece(from, to, begin, end);
    for (int64_t first = 0; first < num_pairs; first += MAX_PAIRS) {
      const int64_t count = min_of(MAX_PAIRS, num_pairs - first);
      for (int64_t i = 0; i < count; ++i) {
        args.source[i] = static_cast<int32_t>(pairs[first + i].source);
        args.destination[i] = static_cast<int32_t>(pairs[first + i].destination);
      }
      const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(end - begin));
      const cudaError_t error = launch(copy_blocks_kernel, grid, dim3(CTA_THREADS), 0, stream, args);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t copy_blocks(const CopyBlocksParams& p, cudaStream_t stream) {
  const std::vector<BlockLayout> sources(p.sources, p.sources + p.num_caches);
  const std::vector<BlockLayout> destinations(p.destinations, p.destinations + p.num_caches);
  const BlockPair* direct = p.pairs + p.num_staged;
  if (p.num_staged == 0) return copy_pairs(sources, destinations, direct, p.num_pairs, stream);

  std::vector<BlockLayout> staging;
  for (int64_t i = 0; i < p.num_caches; ++i) staging.push_back(packed(sources[i], p.staging[i]));
  std::vector<BlockPair> in, out;
  for (int64_t i = 0; i < p.num_staged; ++i) {
    in.push_back({p.pairs[i].source, i});
    out.push_back({i, p.pairs[i].destination});
  }
  cudaError_t error = copy_pairs(sources, staging, in.data(), p.num_staged, stream);
  if (error == cudaSuccess)
    error = copy_pairs(sources, destinations, direct, p.num_pairs - p.num_staged, stream);
  if (error == cudaSuccess) error = copy_pairs(staging, destinations, out.data(), p.num_staged, stream);
  return error;
}

}  // namespace pagedkv::cuda
