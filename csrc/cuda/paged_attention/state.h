// The softmax state of a row over some keys, and how two are folded into one. Scores are in base 2: log2(e)
// is part of the scale, so that a weight is one exp2. Chunks of keys are folded in order by the same
// arithmetic wherever it happens, in the CTA that computed them or in combine_kernel, so that the bits do not
// depend on where.
#pragma once

#include <cmath>
#include <limits>

#include "common/paging.h"
#include "cuda/primitives.h"
#include "params.h"

namespace pagedkv::cuda {

inline constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();
inline constexpr float LOG2_E = 1.4426950408889634f;
inline constexpr float LN_2 = 0.6931471805599453f;

struct Fold {
  float max;                     // of both
  float old_factor, new_factor;  // what their sums are multiplied by
};

PAGEDKV_DEVICE Fold fold_of(float old_max, float new_max) {
  Fold fold;
  fold.max = fmaxf(old_max, new_max);
  // -inf - -inf would be NaN: an empty state weighs nothing.
  fold.old_factor = old_max == NEGATIVE_INFINITY ? 0.0f : exp2_approx(old_max - fold.max);
  fold.new_factor = new_max == NEGATIVE_INFINITY ? 0.0f : exp2_approx(new_max - fold.max);
  return fold;
}

PAGEDKV_DEVICE float folded(const Fold& fold, float old_sum, float new_sum) {
  return fmaf(new_sum, fold.new_factor, old_sum * fold.old_factor);
}

// How a finished row's accumulated values become its output, and its log-sum-exp.
struct Normaliser {
  float factor, sum, lse;

  // A division, so that equal values give exactly that value. A row that saw no key gives 0.
  PAGEDKV_DEVICE float operator()(float acc) const { return factor == 0.0f ? 0.0f : acc * factor / sum; }
  // The same but for an ulp of float32, which 16-bit results do not show, in one multiplication: acc *
  // ratio().
  PAGEDKV_DEVICE float ratio() const { return factor / sum; }
};

// `max` in natural units.
PAGEDKV_DEVICE Normaliser normaliser_of(const PagedAttentionParams& p, int64_t head_idx, int64_t kv_head_idx,
                                        float max, float sum) {
  float factor = scale_of(p.v_scale, p.v_scale_value, kv_head_idx);
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head_idx], both_max = fmaxf(max, sink);
    const float old_factor = max == NEGATIVE_INFINITY ? 0.0f : expf(max - both_max);
    factor *= old_factor;
    sum = sum * old_factor + (sink == NEGATIVE_INFINITY ? 0.0f : expf(sink - both_max));
    max = both_max;
  }
  if (sum == 0.0f) return {0.0f, 1.0f, NEGATIVE_INFINITY};
  return {factor, sum, max + logf(sum)};
}

template <class Query>
PAGEDKV_DEVICE Query* out_row(const PagedAttentionParams& p, int64_t token_idx, int64_t head_idx) {
  return static_cast<Query*>(p.out) + token_idx * p.out_token_stride + head_idx * p.out_head_stride;
}

}  // namespace pagedkv::cuda
