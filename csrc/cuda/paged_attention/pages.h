// Keys and values on their way from the pages of a cache to shared memory.
#pragma once

#include "cuda/paged_attention/row_tile.h"

namespace pagedkv::cuda {

// Finds where a lane's tokens lie. Block ids are read one step ahead, so that a copy does not wait for them.
class PageCursor {
 public:
  PAGEDKV_DEVICE PageCursor(const AttentionLaunch& launch, const Chunk& chunk)
      : launch_(launch),
        p_(launch.p),
        table_(p_.block_tables + chunk.piece.seq_idx * p_.block_tables_seq_stride),
        keys_begin_(chunk.keys.begin),
        kv_head_idx_(chunk.piece.kv_head_idx) {}

  // Reads the block of the next token, where it is not before the chunk's keys and not behind `end`.
  PAGEDKV_DEVICE void look_up(int token, int end) {
    const int block_size = static_cast<int>(p_.block_size), log2 = launch_.block_size_log2;
    const int entry = log2 >= 0 ? token >> log2 : token / block_size;  // a division is a long way
    next_token_in_block_ = token - entry * block_size;
    next_block_ = token >= keys_begin_ && token < end ? block_of_entry(p_, table_, entry) : -1;
  }

  // Goes on to the token that was looked up. False where it has no block or no row can see it.
  PAGEDKV_DEVICE bool advance() {
    block_ = next_block_;
    token_in_block_ = next_token_in_block_;
    return block_ >= 0;
  }

  // The token's row in a cache; null where advance() was false.
  template <int CACHE_BYTES>
  PAGEDKV_DEVICE const unsigned char* row(const void* cache, const CacheStrides& strides) const {
    if (block_ < 0) return nullptr;
    return static_cast<const unsigned char*>(cache) +
           cache_offset(strides, block_, token_in_block_, kv_head_idx_) * CACHE_BYTES;
  }

 private:
  const AttentionLaunch& launch_;
  const PagedAttentionParams& p_;
  const int32_t* table_;
  int keys_begin_, kv_head_idx_, next_block_, next_token_in_block_, block_, token_in_block_;
};

// A warp copies NUM_ROWS rows of one cache to shared memory, swizzled, in chunks of 16 bytes; lane i has the
// address of row i. Rows without one, and what is beyond row_dim, become zero.
template <int CACHE_BYTES, int D, int NUM_ROWS>
PAGEDKV_DEVICE void copy_rows(bool rows_are_aligned, const unsigned char* row_of_lane, int64_t row_dim,
                              unsigned char* destination) {
  constexpr int ROW_BYTES = D * CACHE_BYTES, CHUNKS = ROW_BYTES / 16, CHUNK_ELEMENTS = 16 / CACHE_BYTES;
  const int dim = static_cast<int>(row_dim), lane_idx = threadIdx.x % WARP_THREADS;
  const auto address = reinterpret_cast<uint64_t>(row_of_lane);
  if (!rows_are_aligned) {
    using Element = std::conditional_t<CACHE_BYTES == 2, uint16_t, uint8_t>;
#pragma unroll 1
    for (int i = lane_idx; i < NUM_ROWS * D; i += WARP_THREADS) {
      const int row = i / D, element = i % D;
      const auto* source = reinterpret_cast<const Element*>(__shfl_sync(FULL_WARP, address, row));
      const bool is_read = source != nullptr && element < dim;
      reinterpret_cast<Element*>(
          destination + swizzled<ROW_BYTES>(row, element / CHUNK_ELEMENTS))[element % CHUNK_ELEMENTS] =
          is_read ? source[element] : Element{};
    }
    return;
  }
  // A lane copies the same chunk of every ROW_STEP-th row, whose places differ by an exclusive or.
  constexpr int ROW_STEP = WARP_THREADS / CHUNKS;
  const int first_row = lane_idx / CHUNKS, chunk = lane_idx % CHUNKS;
  const int first_at = swizzled<ROW_BYTES>(first_row, chunk);
  const bool has_chunk = chunk * CHUNK_ELEMENTS < dim;
#pragma unroll
  for (int row = 0; row < NUM_ROWS; row += ROW_STEP) {
    const auto* source =
        reinterpret_cast<const unsigned char*>(__shfl_sync(FULL_WARP, address, row + first_row));
    const int place = ROW_BYTES >= 128 ? first_at ^ (row & 7) << 4 : first_at;
    cp_async_16(destination + place + row * ROW_BYTES, source + chunk * 16, has_chunk && source != nullptr);
  }
}

}  // namespace pagedkv::cuda
