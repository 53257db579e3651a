// out = w_a out_a + w_b out_b with w = exp(lse_x - lse), lse = log(exp(lse_a) + exp(lse_b)): the attention
// over the union of two disjoint key sets (Dao 2023, "FlashAttention-2", section 3.1.1).
//
// Work: tokens in parallel. An empty state (lse -inf) weighs nothing, whatever its out holds.
#include "common/dispatch.h"
#include "common/online_softmax.h"
#include "cpu/parallel.h"
#include "cpu/vector_clones.h"
#include "ops.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t MIN_TOKENS_PER_THREAD = 16;

template <class T>
PAGEDKV_VECTOR_CLONES void merge_row(const MergeAttnStatesParams& p, int64_t token_idx, int64_t head_idx) {
  const auto* out_a =
      static_cast<const T*>(p.out_a) + token_idx * p.out_a_token_stride + head_idx * p.out_a_head_stride;
  const auto* out_b =
      static_cast<const T*>(p.out_b) + token_idx * p.out_b_token_stride + head_idx * p.out_b_head_stride;
  T* out = static_cast<T*>(p.out) + (token_idx * p.num_heads + head_idx) * p.head_dim;
  const MergeWeights weight = merge_weights(p.lse_a[token_idx * p.lse_a_token_stride + head_idx],
                                            p.lse_b[token_idx * p.lse_b_token_stride + head_idx]);
  p.lse[token_idx * p.num_heads + head_idx] = weight.lse;
  if (weight.a != 0.0f && weight.b != 0.0f) {
    for (int64_t i = 0; i < p.head_dim; ++i) {
      out[i] = from_float<T>(weight.a * to_float(out_a[i]) + weight.b * to_float(out_b[i]));
    }
    return;
  }
  for (int64_t i = 0; i < p.head_dim; ++i) {
    // A weight of 0 must not meet a NaN (0 * NaN is NaN), and the other state then stays as it is, -0 too.
    const float from_a = weight.a == 0.0f ? -0.0f : weight.a * to_float(out_a[i]);
    const float from_b = weight.b == 0.0f ? -0.0f : weight.b * to_float(out_b[i]);
    const bool empty = weight.a == 0.0f && weight.b == 0.0f;
    out[i] = from_float<T>(empty ? 0.0f : from_a + from_b);
  }
}

}  // namespace

void merge_attn_states(const MergeAttnStatesParams& p) {
  dispatch_float_dtype(p.dtype, [&]<class T>() {
    parallel_for(p.num_tokens, MIN_TOKENS_PER_THREAD, [&](int64_t token_idx) {
      for (int64_t head_idx = 0; head_idx < p.num_heads; ++head_idx) merge_row<T>(p, token_idx, head_idx);
    });
  });
}

}  // namespace pagedkv::cpu
