// How paged_attention is cut into CTAs: host-known sizes fix the grid, each CTA finds its piece from the
// lengths on the device, so that a captured graph replays with other lengths.
#pragma once

#include "common/device.h"
#include "common/masks.h"
#include "common/paging.h"
#include "params.h"

namespace pagedkv::cuda {

inline constexpr int WARP_THREADS = 32;
inline constexpr int CTA_WARPS = 4;
inline constexpr int CTA_THREADS = CTA_WARPS * WARP_THREADS;
inline constexpr int TILE_TOKENS = 64;  // keys of a step of a CTA

// The parameters of the attention kernels. A piece is (sequence, tile of query rows, KV head, chunk of keys);
// a row is one query token and one head of the KV head's group. With one chunk a CTA writes the result, with
// more it writes its softmax state to `partial` and combine_kernel folds the chunks together in order.
struct AttentionLaunch {
  PagedAttentionParams p;
  float* partial_acc;       // [num_tokens, num_heads, num_chunks, value_head_dim] sum of weight * value
  float2* partial_max_sum;  // [num_tokens, num_heads, num_chunks] largest score (base 2) and sum of weights
  int64_t num_chunks;
  int64_t num_row_tiles;  // an upper bound over all sequences
  bool rows_are_aligned;  // cache rows can be copied in 16-byte pieces
};

// Whether a CTA goes through all splits of its rows itself.
PAGEDKV_HD bool takes_several_splits(const AttentionLaunch& launch) {
  return launch.p.split_size > 0 && launch.num_chunks == 1;
}

struct Piece {
  int64_t seq_idx, row_tile, kv_head_idx, chunk_idx;
  int64_t query_begin, query_len;
};

// Row tiles are numbered without counting them: sequence s begins at query_start_loc[s] * group / TILE_ROWS +
// s, which leaves it room for a partial tile at its end, so that a CTA finds its sequence by bisection.
template <int TILE_ROWS>
PAGEDKV_DEVICE int64_t first_row_tile(const PagedAttentionParams& p, int64_t seq_idx) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  if (p.query_start_loc == nullptr) return seq_idx * ceil_div(group, TILE_ROWS);
  return p.query_start_loc[seq_idx] * group / TILE_ROWS + seq_idx;
}

// Finds the sequence of row tile `target` and the tile's number in it. False where it has no row.
template <int TILE_ROWS>
PAGEDKV_DEVICE bool find_row_tile(const PagedAttentionParams& p, int64_t target, Piece& piece) {
  if (p.num_seqs == 0) return false;
  int64_t low = 0, high = p.num_seqs;  // first_row_tile(low) <= target < first_row_tile(high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_row_tile<TILE_ROWS>(p, middle) <= target ? low : high) = middle;
  }
  piece.seq_idx = low;
  piece.row_tile = target - first_row_tile<TILE_ROWS>(p, low);
  piece.query_begin = p.query_start_loc != nullptr ? p.query_start_loc[low] : low;
  piece.query_len = p.query_start_loc != nullptr ? p.query_start_loc[low + 1] - piece.query_begin : 1;
  return piece.row_tile * TILE_ROWS < piece.query_len * (p.num_heads / p.num_kv_heads);
}

// Rows past the last sequence's are padding: out 0, lse -inf. The CTAs share them out.
template <class Query>
PAGEDKV_DEVICE void fill_padding(const PagedAttentionParams& p) {
  if (p.query_start_loc == nullptr) return;
  for (int64_t token_idx = p.query_start_loc[p.num_seqs] + blockIdx.x; token_idx < p.num_tokens;
       token_idx += gridDim.x) {
    for (int64_t i = threadIdx.x; i < p.num_heads * p.value_head_dim; i += CTA_THREADS) {
      const int64_t head_idx = i / p.value_head_dim;
      static_cast<Query*>(
          p.out)[token_idx * p.out_token_stride + head_idx * p.out_head_stride + i % p.value_head_dim] =
          Query{};
    }
    if (p.lse == nullptr) continue;
    for (int64_t i = threadIdx.x; i < p.num_heads; i += CTA_THREADS) {
      p.lse[token_idx * p.num_heads + i] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace pagedkv::cuda
