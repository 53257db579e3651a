// The running state of a softmax over keys that arrive in pieces (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax", algorithm 3), with the accumulated values kept by the caller.
#pragma once

#include <cmath>
#include <limits>

#include "common/device.h"

namespace pagedkv {

inline constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

struct OnlineSoftmax {
  float max = NEG_INF;  // largest score so far
  float sum = 0.0f;     // of exp(score - max)

  // Takes a piece's largest score in and returns the factor by which what was summed before must be
  // multiplied. A piece without a visible key has max -inf and leaves the state as it is: exp(-inf - -inf)
  // would be NaN.
  PAGEDKV_HD float raise_max(float piece_max) {
    if (!(piece_max > max)) return 1.0f;
    const float factor = max == NEG_INF ? 0.0f : std::exp(max - piece_max);
    max = piece_max;
    sum *= factor;
    return factor;
  }

  // The weight of a score after raise_max; a masked score (-inf) weighs exactly 0.
  PAGEDKV_HD float weight(float score) const { return score == NEG_INF ? 0.0f : std::exp(score - max); }

  // exp-sum of everything seen, as a log; -inf where nothing was.
  PAGEDKV_HD float lse() const { return sum == 0.0f ? NEG_INF : max + std::log(sum); }
};

// How much two states with these log-sum-exps weigh in their union. Two empty states weigh nothing.
struct MergeWeights {
  float a, b, lse;
};

PAGEDKV_HD MergeWeights merge_weights(float lse_a, float lse_b) {
  if (lse_a == NEG_INF) return {0.0f, lse_b == NEG_INF ? 0.0f : 1.0f, lse_b};
  if (lse_b == NEG_INF) return {1.0f, 0.0f, lse_a};
  const float max = lse_a > lse_b ? lse_a : lse_b;
  const float exp_a = std::exp(lse_a - max), exp_b = std::exp(lse_b - max);
  const float sum = exp_a + exp_b;
  return {exp_a / sum, exp_b / sum, max + std::log(sum)};
}

}  // namespace pagedkv
