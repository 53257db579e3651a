// out = w_a out_a + w_b out_b with w = exp(lse_x - lse), lse = log(exp(lse_a) + exp(lse_b)): the attention
// over the union of two disjoint key sets (Dao 2023, "FlashAttention-2", section 3.1.1).
//
// Work: one warp per (token, head) row, its lanes over the elements. Bytes: each row is read and written
// once. An empty state (lse -inf) weighs nothing, whatever its out holds.
#include "common/dispatch.h"
#include "common/online_softmax.h"
#include "common/paging.h"
#include "ops.h"

namespace pagedkv::cuda {

namespace {

constexpr int WARP_THREADS = 32;
constexpr int CTA_THREADS = 128;
constexpr int CTA_WARPS = CTA_THREADS / WARP_THREADS;

template <class T>
__global__ void __launch_bounds__(CTA_THREADS) merge_attn_states_kernel(const MergeAttnStatesParams p) {
  const int warp_idx = threadIdx.x / WARP_THREADS, lane_idx = threadIdx.x % WARP_THREADS;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * CTA_WARPS + warp_idx;
  if (row >= p.num_tokens * p.num_heads) return;
  const int64_t token_idx = row / p.num_heads, head_idx = row % p.num_heads;
  const auto* out_a =
      static_cast<const T*>(p.out_a) + token_idx * p.out_a_token_stride + head_idx * p.out_a_head_stride;
  const auto* out_b =
      static_cast<const T*>(p.out_b) + token_idx * p.out_b_token_stride + head_idx * p.out_b_head_stride;
  T* out = static_cast<T*>(p.out) + row * p.head_dim;
  const MergeWeights weight = merge_weights(p.lse_a[token_idx * p.lse_a_token_stride + head_idx],
                                            p.lse_b[token_idx * p.lse_b_token_stride + head_idx]);
  if (lane_idx == 0) p.lse[row] = weight.lse;
  for (int64_t i = lane_idx; i < p.head_dim; i += WARP_THREADS) {
    // A weight of 0 must not meet a NaN (0 * NaN is NaN), and the other state then stays as it is, -0 too.
    const float from_a = weight.a == 0.0f ? -0.0f : weight.a * to_float(out_a[i]);
    const float from_b = weight.b == 0.0f ? -0.0f : weight.b * to_float(out_b[i]);
    const bool empty = weight.a == 0.0f && weight.b == 0.0f;
    out[i] = from_float<T>(empty ? 0.0f : from_a + from_b);
  }
}

}  // namespace

cudaError_t merge_attn_states(const MergeAttnStatesParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.num_tokens * p.num_heads, CTA_WARPS)));
  cudaError_t error = cudaSuccess;
  dispatch_float_dtype(p.dtype, [&]<class T>() {
    error = launch(merge_attn_states_kernel<T>, grid, dim3(CTA_THREADS), 0, stream, p);
  });
  return error;
}

}  // namespace pagedkv::cuda
