// From the products of queries and keys to scores.
#pragma once

#include "cuda/paged_attention/row_tile.h"

namespace pagedkv::cuda {

// How a KV head's products become scores in base 2.
class ScoreRule {
 public:
  PAGEDKV_DEVICE ScoreRule(const PagedAttentionParams& p, int64_t kv_head_idx)
      : p_(p), log2_scale_(p.softmax_scale * scale_of(p.k_scale, p.k_scale_value, kv_head_idx) * LOG2_E) {}

  // What a product is multiplied with, where the query was not.
  PAGEDKV_DEVICE float log2_scale() const { return log2_scale_; }

  // Whether there is neither softcap nor ALiBi.
  PAGEDKV_DEVICE bool is_plain() const { return p_.softcap == 0.0f && p_.alibi_slopes == nullptr; }

  // From a score of the plain rule, a scaled product, to one of this; -inf where the row does not see the
  // key.
  PAGEDKV_DEVICE float operator()(float score, const QueryRow& row, int key, bool is_visible) const {
    if (!is_plain()) {
      score *= LN_2;
      if (p_.softcap > 0.0f) score = p_.softcap * tanh_fast(__fdividef(score, p_.softcap));
      score = (score + row.slope * static_cast<float>(key - row.mask.position)) * LOG2_E;
    }
    return is_visible ? score : NEGATIVE_INFINITY;
  }

 private:
  // To a few ulp of 1 or, of a small x, which a large softcap leaves, of x.
  PAGEDKV_DEVICE static float tanh_fast(float x) {
    const float square = x * x;
    if (square < 0.01f) return fmaf(x, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f) * square, x);
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2.0f * LOG2_E)));
  }

  const PagedAttentionParams& p_;
  float log2_scale_;
};

// Zeroes the values of those of a warp's num_tokens keys, from `token` on, that no row sees: they may be NaN,
// and 0 * NaN is NaN. Only a tree mask makes it necessary: without one the keys that some row sees have no
// gaps, since queries are neighbours, and keys outside are not read.
template <int ROW_BYTES>
PAGEDKV_DEVICE void clear_unseen(const QueryRow* rows, int num_rows, int token, int num_tokens,
                                 unsigned char* values) {
  const int lane_idx = threadIdx.x % WARP_THREADS;
#pragma unroll 1
  for (int i = 0; i < num_tokens; ++i) {
    bool is_seen = false;
#pragma unroll 1
    for (int row = lane_idx; row < num_rows; row += WARP_THREADS) {
      is_seen |= rows[row].mask.visible(token + i);
    }
    if (__any_sync(FULL_WARP, is_seen)) continue;
    if (lane_idx < ROW_BYTES / 16) store_vector(values + i * ROW_BYTES + lane_idx * 16, uint4{});
  }
}

}  // namespace pagedkv::cuda
