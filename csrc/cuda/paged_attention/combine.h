// Folds the chunks of every row together, in order, and normalises.
//
// Work: one warp per (token, head), its lanes over the value dimensions. Bytes: every chunk's state is read
// once.
#pragma once

#include "cuda/paged_attention/plan.h"
#include "cuda/paged_attention/state.h"

namespace pagedkv::cuda {

template <class Query>
__global__ void __launch_bounds__(CTA_THREADS) combine_kernel(const AttentionLaunch launch) {
  const PagedAttentionParams& p = launch.p;
  const int warp_idx = threadIdx.x / WARP_THREADS, lane_idx = threadIdx.x % WARP_THREADS;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * CTA_WARPS + warp_idx;
  const int64_t num_query_tokens = p.query_start_loc != nullptr ? p.query_start_loc[p.num_seqs] : p.num_seqs;
  if (row >= num_query_tokens * p.num_heads) return;
  const int64_t token_idx = row / p.num_heads, head_idx = row % p.num_heads;
  const float2* max_sum = launch.partial_max_sum + row * launch.num_chunks;
  const float* partial_acc = launch.partial_acc + row * launch.num_chunks * p.value_head_dim;
  for (int64_t dim = lane_idx; dim < p.value_head_dim; dim += WARP_THREADS) {
    float max = NEGATIVE_INFINITY, sum = 0.0f, acc = 0.0f;
    for (int64_t chunk = 0; chunk < launch.num_chunks; ++chunk) {
      const float2 state = max_sum[chunk];
      if (state.x == NEGATIVE_INFINITY) continue;
      const Fold fold = fold_of(max, state.x);
      acc = folded(fold, acc, partial_acc[chunk * p.value_head_dim + dim]);
      sum = folded(fold, sum, state.y);
      max = fold.max;
    }
    const Normaliser normaliser = normaliser_of(p, head_idx, max * LN_2, sum);
    const float result = normaliser(acc);
    out_row<Query>(p, token_idx, head_idx)[dim] = from_float<Query>(result);
    if (dim == 0 && p.lse != nullptr) p.lse[row] = normaliser.lse;
  }
}

}  // namespace pagedkv::cuda
