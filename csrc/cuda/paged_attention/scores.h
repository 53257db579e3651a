// From the products of queries and keys to scores.
#pragma once

#include "cuda/paged_attention/row_tile.h"

namespace pagedkv::cuda {

// How a KV head's products become scores.
class ScoreRule {
 public:
  PAGEDKV_DEVICE ScoreRule(const PagedAttentionParams& p, int64_t kv_head_idx)
      : p_(p), scale_(p.softmax_scale * scale_of(p.k_scale, p.k_scale_value, kv_head_idx)) {}

  // Whether there is neither softcap nor ALiBi.
  PAGEDKV_DEVICE bool is_plain() const { return p_.softcap == 0.0f && p_.alibi_slopes == nullptr; }

  // In base 2, where the row sees the key for certain and the rule is plain.
  PAGEDKV_DEVICE float plain(float product) const { return product * scale_ * LOG2_E; }

  // In base 2, -inf where the row does not see the key.
  PAGEDKV_DEVICE float operator()(float product, const QueryRow& row, int key, bool is_visible) const {
    float score = product * scale_;
    if (p_.softcap > 0.0f) score = p_.softcap * tanh_fast(score / p_.softcap);
    score += row.slope * static_cast<float>(key - row.mask.position);
    return is_visible ? score * LOG2_E : NEGATIVE_INFINITY;
  }

 private:
  // To a few ulp of 1, which is what a softcap needs.
  PAGEDKV_DEVICE static float tanh_fast(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2.0f * LOG2_E)));
  }

  const PagedAttentionParams& p_;
  float scale_;
};

// Bits 2 i and 2 i + 1 say whether to keep the halves of a register.
PAGEDKV_DEVICE uint32_t halves_to_keep(uint32_t two_bits) {
  return ((two_bits & 1) != 0 ? 0xffffu : 0u) | ((two_bits & 2) != 0 ? 0xffff0000u : 0u);
}

}  // namespace pagedkv::cuda
