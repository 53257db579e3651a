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

PAGEDKV_DEVICE int64_t query_begin_of(const PagedAttentionParams& p, int64_t seq_idx) {
  return p.query_start_loc != nullptr ? p.query_start_loc[seq_idx] : seq_idx;
}

PAGEDKV_DEVICE int64_t query_len_of(const PagedAttentionParams& p, int64_t seq_idx) {
  return p.query_start_loc != nullptr ? p.query_start_loc[seq_idx + 1] - p.query_start_loc[seq_idx] : 1;
}

// Finds the sequence and the tile in it of global row tile `target`: the CTA's threads count the tiles of
// CTA_THREADS sequences at a time. False where there are fewer tiles. `shared` has room for CTA_WARPS + 2
// values.
template <int TILE_ROWS>
PAGEDKV_DEVICE bool find_row_tile(const PagedAttentionParams& p, int64_t target, int64_t* shared,
                                  Piece& piece) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  if (p.query_start_loc == nullptr) {
    const int64_t tiles = ceil_div(group, TILE_ROWS);
    piece.seq_idx = target / tiles;
    piece.row_tile = target % tiles;
    return piece.seq_idx < p.num_seqs;
  }
  const int warp_idx = threadIdx.x / WARP_THREADS, lane_idx = threadIdx.x % WARP_THREADS;
  int64_t* warp_total = shared;         // [CTA_WARPS]
  int64_t* found = shared + CTA_WARPS;  // [2] sequence, tile
  if (threadIdx.x == 0) found[0] = -1;
  int64_t before = 0;
  for (int64_t base = 0; base < p.num_seqs; base += CTA_THREADS) {
    const int64_t seq_idx = base + threadIdx.x;
    const int64_t tiles = seq_idx < p.num_seqs ? ceil_div(query_len_of(p, seq_idx) * group, TILE_ROWS) : 0;
    int64_t inclusive = tiles;
    for (int stride = 1; stride < WARP_THREADS; stride *= 2) {
      const int64_t lower = __shfl_up_sync(0xffffffffu, inclusive, stride);
      if (lane_idx >= stride) inclusive += lower;
    }
    if (lane_idx == WARP_THREADS - 1) warp_total[warp_idx] = inclusive;
    __syncthreads();
    int64_t total = 0;
    for (int warp = 0; warp < CTA_WARPS; ++warp) {
      if (warp == warp_idx) inclusive += before + total;
      total += warp_total[warp];
    }
    if (target < inclusive && target >= inclusive - tiles) {
      found[0] = seq_idx;
      found[1] = target - (inclusive - tiles);
    }
    before += total;
    __syncthreads();
    if (target < before) break;
  }
  piece.seq_idx = found[0];
  piece.row_tile = found[1];
  return target < before;
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
