// Keys and values on their way from the pages of a cache to shared memory.
#pragma once

#include "cuda/paged_attention/row_tile.h"

namespace pagedkv::cuda {

// Finds where a lane's tokens lie. Block ids are read one step ahead, so that a copy does not wait for them.
class PageCursor {
 public:
  PAGEDKV_DEVICE PageCursor(const PagedAttentionParams& p, const Chunk& chunk) : p_(p), chunk_(chunk) {}

  // Reads the block of the next token, where it is wanted and a row can see it.
  PAGEDKV_DEVICE void look_up(int token, bool is_wanted) {
    is_wanted &= token >= chunk_.keys.begin && token < chunk_.keys.end;
    next_block_ = is_wanted ? static_cast<int>(block_of_token(p_, chunk_.piece.seq_idx, token)) : -1;
  }

  // Goes on to the token that was looked up. False where it has no block or no row can see it.
  PAGEDKV_DEVICE bool advance(int token) {
    block_ = next_block_;
    token_in_block_ = token % static_cast<int>(p_.block_size);
    return block_ >= 0;
  }

  // The element offset of the token's row in a cache; -1 where advance() was false.
  PAGEDKV_DEVICE int64_t offset(const CacheStrides& strides) const {
    if (block_ < 0) return -1;
    return cache_offset(strides, block_, token_in_block_, chunk_.piece.kv_head_idx);
  }

 private:
  const PagedAttentionParams& p_;
  const Chunk& chunk_;
  int next_block_, block_, token_in_block_;
};

// A warp copies num_rows rows of one cache to shared memory, swizzled, in chunks of 16 bytes; `row_offset` of
// lane i is the element offset of row i. Rows without one, and what is beyond row_dim, become zero.
template <int CACHE_BYTES, int D>
PAGEDKV_DEVICE void copy_rows(const AttentionLaunch& launch, const void* cache, int64_t row_dim,
                              int64_t row_offset, int num_rows, unsigned char* destination) {
  constexpr int ROW_BYTES = D * CACHE_BYTES, CHUNKS = ROW_BYTES / 16, CHUNK_ELEMENTS = 16 / CACHE_BYTES;
  const int dim = static_cast<int>(row_dim), lane_idx = threadIdx.x % WARP_THREADS;
  const auto* bytes = static_cast<const unsigned char*>(cache);
  if (!launch.cache_rows_are_aligned) {
    using Element = std::conditional_t<CACHE_BYTES == 2, uint16_t, uint8_t>;
#pragma unroll 1
    for (int i = lane_idx; i < num_rows * D; i += WARP_THREADS) {
      const int row = i / D, element = i % D;
      const int64_t offset = __shfl_sync(FULL_WARP, row_offset, row);
      const bool is_read = offset >= 0 && element < dim;
      reinterpret_cast<Element*>(
          destination + swizzled<ROW_BYTES>(row, element / CHUNK_ELEMENTS))[element % CHUNK_ELEMENTS] =
          is_read ? reinterpret_cast<const Element*>(bytes)[offset + element] : Element{};
    }
    return;
  }
  // A lane copies the same chunk of every ROW_STEP-th row, whose places differ by an exclusive or.
  constexpr int ROW_STEP = WARP_THREADS / CHUNKS;
  const int first_row = lane_idx / CHUNKS, chunk = lane_idx % CHUNKS, first = chunk * CHUNK_ELEMENTS;
  const int first_at = swizzled<ROW_BYTES>(first_row, chunk);
#pragma unroll 8
  for (int row = 0; row < num_rows; row += ROW_STEP) {
    const int64_t offset = __shfl_sync(FULL_WARP, row_offset, row + first_row);
    const int place = ROW_BYTES >= 128 ? first_at ^ (row & 7) << 4 : first_at;
    cp_async_16(destination + place + row * ROW_BYTES, bytes + (offset + first) * CACHE_BYTES,
                offset >= 0 && first < dim);
  }
}

}  // namespace pagedkv::cuda
