// Folds the chunks of every row together, in order, and normalises.
//
// Work: one warp per row of a piece, its lanes over the value dimensions. Bytes: every chunk's state is read
// once.
#pragma once

#include "cuda/paged_attention/row_tile.h"

namespace pagedkv::cuda {

// With 4 CTAs to an SM named, the compiler may take the registers for 8 states that are read at once.
template <class Query>
__global__ void __launch_bounds__(CTA_THREADS, 4) combine_kernel(const AttentionLaunch launch) {
  wait_for_kernel_before();
  const PagedAttentionParams& p = launch.p;
  const int warp_idx = threadIdx.x / WARP_THREADS, lane_idx = threadIdx.x % WARP_THREADS;
  const int row_ctas = (launch.state_rows + CTA_WARPS - 1) / CTA_WARPS;
  const int row = static_cast<int>(blockIdx.x) % row_ctas * CTA_WARPS + warp_idx;
  const int rest = static_cast<int>(blockIdx.x) / row_ctas;
  Piece piece;
  piece.kv_head_idx = rest % static_cast<int>(p.num_kv_heads);
  if (!find_row_tile(launch, rest / static_cast<int>(p.num_kv_heads), piece) || row >= piece.num_rows) return;
  const int2 chunks = launch.partial_chunks[piece.row_tile_idx];
  if (chunks.y < chunks.x) return;
  const int64_t head_base = piece.kv_head_idx * launch.num_states;
  const int64_t token_idx = piece.query_begin + (piece.row_begin + row) / launch.group;
  const int64_t head_idx = piece.kv_head_idx * launch.group + (piece.row_begin + row) % launch.group;
  for (int dim = lane_idx * 4; dim < p.value_head_dim; dim += WARP_THREADS * 4) {
    float max = NEGATIVE_INFINITY, sum = 0.0f;
    float4 acc{};
#pragma unroll 8
    for (int chunk = chunks.x; chunk <= chunks.y; ++chunk) {
      const int64_t state_idx = head_base + state_idx_of(launch, chunk, chunk == chunks.x);
      const int64_t state_row = state_idx * launch.state_rows + row;
      const float2 state = launch.partial_max_sum[state_row];
      const float4 chunk_acc = load_vector<float4>(launch.partial_acc + state_row * p.value_head_dim + dim);
      const Fold fold = fold_of(max, state.x);
      acc = {folded(fold, acc.x, chunk_acc.x), folded(fold, acc.y, chunk_acc.y),
             folded(fold, acc.z, chunk_acc.z), folded(fold, acc.w, chunk_acc.w)};
      sum = folded(fold, sum, state.y);
      max = fold.max;
    }
    const Normaliser normaliser = normaliser_of(p, head_idx, piece.kv_head_idx, max * LN_2, sum);
    store_quad(out_row<Query>(p, token_idx, head_idx) + dim, normalised<Query>(normaliser.ratio(), acc),
               launch.query_rows_are_aligned);
    if (dim == 0 && p.lse != nullptr) p.lse[token_idx * p.num_heads + head_idx] = normaliser.lse;
  }
}

}  // namespace pagedkv::cuda
