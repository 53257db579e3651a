// From dot products to scores in units of log2, in the contract's order: scale, softcap, ALiBi.
#pragma once

#include "common/paging.h"
#include "cpu/paged_attention/task.h"
#include "cpu/paged_attention/vector_math.h"
#include "params.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

template <class Isa>
struct ScoreRule {
  using Float = typename Isa::Float;

  float scale;    // the query's and the keys', of a dot product
  float softcap;  // 0: off
  bool adjusts;   // there is more to do than to multiply by a positive factor

  ScoreRule(const PagedAttentionParams& p, int64_t kv_head_idx)
      : scale(p.softmax_scale * scale_of(p.k_scale, p.k_scale_value, kv_head_idx)),
        softcap(p.softcap),
        adjusts(p.softcap > 0.0f || p.alibi_slopes != nullptr || !(scale > 0.0f)) {}

  // A weight is 2 ** ((score - largest) * factor), of scores that adjust was called for where it must be. The
  // difference comes first: it is exactly 0 at the largest score, however big that is.
  float factor() const { return adjusts ? 1.0f : scale * LOG2_E; }

  // The largest score as partial rows hold it.
  float exported(float largest) const {
    return largest == PartialRows::NO_SCORE ? largest : largest * factor();
  }

  // `distance` is key position - query position.
  Float adjust(Float dot, Float slope, Float distance) const {
    Float score = Isa::mul(dot, Isa::set(scale));
    if (softcap > 0.0f) {
      score = Isa::mul(Isa::set(softcap), tanh_of<Isa>(Isa::div(score, Isa::set(softcap))));
    }
    return Isa::mul(Isa::fma(slope, distance, score), Isa::set(LOG2_E));
  }
};

}  // namespace
}  // namespace pagedkv::cpu
