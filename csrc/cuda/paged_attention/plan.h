// How paged_attention is cut into CTAs: host-known sizes fix the grid, each CTA finds its work from the
// lengths on the device (schedule.h), so that a captured graph replays with other lengths.
#pragma once

#include <limits>

#include "common/device.h"
#include "common/masks.h"
#include "common/paging.h"
#include "params.h"

namespace pagedkv::cuda {

inline constexpr int WARP_THREADS = 32;
inline constexpr int CTA_WARPS = 4;
inline constexpr int CTA_THREADS = CTA_WARPS * WARP_THREADS;
inline constexpr int TILE_TOKENS = 64;            // keys are shared out in tiles of so many
inline constexpr int FLOAT32_TILE_ROWS_LOG2 = 3;  // of rows that a CTA of float32_kernel has
inline constexpr int MIN_CHUNK_TILES = 4;  // below 256 keys a chunk's state costs more traffic than they do

// The parameters of the attention kernels. A row is one query token and one head of its KV head's group; a
// *piece* is a tile of rows of one sequence with one KV head and all the keys that they see. A CTA takes
// whole pieces, or *chunks* of their keys: then it writes the softmax state of each row to `partial` and
// combine_kernel folds a piece's chunks together in order.
//
// Chunks are numbered along the keys. Without split_size, part n of a KV head is what its n-th CTA takes: the
// end of one piece, whole pieces, and the beginning of another, so that it may have two states to write.
// With split_size, the chunks of piece i are num_splits numbers from i * num_splits on.
struct AttentionLaunch {
  PagedAttentionParams p;
  float* partial_acc;       // [num_kv_heads, num_states, state_rows, value_head_dim] sum of weight * value
  float2* partial_max_sum;  // [num_kv_heads, num_states, state_rows] largest score (base 2), sum of weights
  int2* partial_chunks;     // [num_row_tiles] first and last chunk of the piece; the last is before the first
                            // where the piece needs no combining
  int num_row_tiles;        // an upper bound over all sequences
  int num_parts;            // CTAs that share out the pieces of a KV head; 0: every piece has CTAs of its own
  int num_splits;           // CTAs of a piece where it has its own
  int64_t num_states;
  int group;  // query heads of a KV head
  int tile_rows_log2;
  int block_size_log2;          // -1 where block_size is no power of two
  int state_rows;               // rows that a piece can have
  bool cache_rows_are_aligned;  // cache rows can be copied in 16-byte pieces
  bool query_rows_are_aligned;  // rows of query and out can be moved four elements at a time

  PAGEDKV_HD int tile_rows() const { return 1 << tile_rows_log2; }
};

// Whether states are written and combined.
PAGEDKV_HD bool is_combined(const AttentionLaunch& launch) {
  return launch.num_parts > 0 || launch.num_splits > 1;
}

// Whether a CTA goes through all splits of its rows itself.
PAGEDKV_HD bool takes_several_splits(const AttentionLaunch& launch) {
  return launch.p.split_size > 0 && launch.num_splits == 1;
}

struct Piece {
  int row_tile_idx;  // among those of all sequences; fits an int, as the grid does
  int seq_idx, kv_head_idx;
  int query_begin, query_len;
  int row_begin, num_rows;  // among the query_len * group rows of the sequence
};

// Row tiles are numbered without counting them: sequence s begins at query_start_loc[s] * group / tile_rows +
// s, which leaves it room for a partial tile at its end, so that a CTA finds its sequence by bisection.
PAGEDKV_DEVICE int first_row_tile(const AttentionLaunch& launch, int64_t seq_idx) {
  return static_cast<int>(
      (int64_t{launch.p.query_start_loc[seq_idx]} * launch.group >> launch.tile_rows_log2) + seq_idx);
}

// Finds the sequence and the rows of a row tile. False where it has no row.
PAGEDKV_DEVICE bool find_row_tile(const AttentionLaunch& launch, int row_tile_idx, Piece& piece) {
  const PagedAttentionParams& p = launch.p;
  const int tile_rows = launch.tile_rows(), num_seqs = static_cast<int>(p.num_seqs);
  if (num_seqs == 0) return false;
  int seq_idx, tile_in_seq, query_begin, query_len = 1;
  if (p.query_start_loc == nullptr) {  // one query token a sequence
    const int tiles_per_seq = (launch.group + tile_rows - 1) >> launch.tile_rows_log2;
    seq_idx = tiles_per_seq == 1 ? row_tile_idx : row_tile_idx / tiles_per_seq;
    tile_in_seq = row_tile_idx - seq_idx * tiles_per_seq;
    query_begin = seq_idx;
  } else {
    seq_idx = 0;
    int end = num_seqs;  // first_row_tile(seq_idx) <= row_tile_idx < first_row_tile(end)
    while (end - seq_idx > 1) {
      const int middle = (seq_idx + end) / 2;
      (first_row_tile(launch, middle) <= row_tile_idx ? seq_idx : end) = middle;
    }
    query_begin = p.query_start_loc[seq_idx];
    query_len = p.query_start_loc[seq_idx + 1] - query_begin;
    tile_in_seq = row_tile_idx - first_row_tile(launch, seq_idx);
  }
  piece.row_tile_idx = row_tile_idx;
  piece.seq_idx = seq_idx;
  piece.query_begin = query_begin;
  piece.query_len = query_len;
  piece.row_begin = tile_in_seq * tile_rows;
  // A query_start_loc that falls or ends late, which the host cannot see, leads to no row outside the query.
  const int rows_end = min_of(query_len, static_cast<int>(p.num_tokens) - query_begin) * launch.group;
  piece.num_rows = min_of(tile_rows, rows_end - piece.row_begin);
  return piece.num_rows > 0 && query_begin >= 0 && tile_in_seq >= 0;
}

// Rows past the last sequence's are padding: out 0, lse -inf. The CTAs share them out.
template <class Query>
PAGEDKV_DEVICE void fill_padding(const PagedAttentionParams& p) {
  if (p.query_start_loc == nullptr) return;
  for (int64_t token_idx = max_of(0, p.query_start_loc[p.num_seqs]) + blockIdx.x; token_idx < p.num_tokens;
       token_idx += gridDim.x) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.num_heads * p.value_head_dim; i += blockDim.x) {
      const int head_idx = i / static_cast<int>(p.value_head_dim);
      const int dim = i % static_cast<int>(p.value_head_dim);
      static_cast<Query*>(p.out)[token_idx * p.out_token_stride + head_idx * p.out_head_stride + dim] =
          Query{};
    }
    if (p.lse == nullptr) continue;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.num_heads; i += blockDim.x) {
      p.lse[token_idx * p.num_heads + i] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace pagedkv::cuda
