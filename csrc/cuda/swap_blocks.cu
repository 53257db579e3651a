// Blocks of one cache copied to blocks of another, byte for byte.
//
// Work: on one device the kernel of copy_blocks; between host and device, or two devices, one asynchronous
// copy per run of adjacent blocks, in stream order. Bytes: each block crosses once.
#include "common/device.h"
#include "ops.h"

namespace pagedkv::cuda {

namespace {

char* block_at(const BlockLayout& layout, int64_t block) {
  return layout.base + block * layout.block_stride_bytes;
}

// num_rows rows, row_stride bytes apart on either side; one plain copy where they are dense.
cudaError_t copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t row_bytes,
                      int64_t num_rows, cudaStream_t stream) {
  if (num_rows == 1 || (to_stride == row_bytes && from_stride == row_bytes)) {
    return cudaMemcpyAsync(to, from, row_bytes * num_rows, cudaMemcpyDefault, stream);
  }
  return cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, num_rows, cudaMemcpyDefault, stream);
}

cudaError_t copy_run(const BlockLayout& from, const BlockLayout& to, BlockPair first, int64_t num_blocks,
                     cudaStream_t stream) {
  if (from.outer_rows * from.inner_rows == 1) {
    return copy_rows(block_at(to, first.destination), to.block_stride_bytes, block_at(from, first.source),
                     from.block_stride_bytes, from.row_bytes, num_blocks, stream);
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    for (int64_t outer = 0; outer < from.outer_rows; ++outer) {
      const cudaError_t error =
          copy_rows(block_at(to, first.destination + i) + outer * to.outer_stride_bytes,
                    to.inner_stride_bytes, block_at(from, first.source + i) + outer * from.outer_stride_bytes,
                    from.inner_stride_bytes, from.row_bytes, from.inner_rows, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t swap_blocks(const CopyBlocksParams& p, cudaStream_t stream) {
  if (!p.cross_device) return copy_blocks(p, stream);
  for (int64_t cache_idx = 0; cache_idx < p.num_caches; ++cache_idx) {
    for (int64_t begin = 0, end; begin < p.num_pairs; begin = end) {
      const BlockPair first = p.pairs[begin];
      for (end = begin + 1; end < p.num_pairs; ++end) {
        const int64_t ahead = end - begin;
        if (p.pairs[end].source != first.source + ahead ||
            p.pairs[end].destination != first.destination + ahead)
          break;
      }
      const cudaError_t error =
          copy_run(p.sources[cache_idx], p.destinations[cache_idx], first, end - begin, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace pagedkv::cuda
