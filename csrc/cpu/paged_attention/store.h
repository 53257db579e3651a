// From what is known of a row to its out and lse: merges the chunks of keys, normalises, rounds.
#pragma once

#include <cmath>

#include "common/online_softmax.h"
#include "common/paging.h"
#include "cpu/paged_attention/task.h"
#include "cpu/paged_attention/vector_math.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

template <class Isa>
float weight_of_partial(float score, float largest) {
  return score == largest ? 1.0f : exp2_of<Isa>(score - largest);
}

// How a row is normalised: out = acc * multiplier / divisor. A row that saw no key gives 0.
struct Normaliser {
  float multiplier, divisor;
};

// Of a row with these states of its softmax, over all its keys. Adds the sink to the denominator and stores
// lse.
template <class Isa, class Query>
Normaliser end_row(const PagedAttentionParams& p, int64_t token_idx, int64_t head_idx, float largest,
                   float sum) {
  float total = sum, factor = 1.0f, natural_largest = largest * LN_2;
  if (p.sinks != nullptr) {
    // In units of log2 a sink that means none, or nothing else, may be more than a float.
    constexpr float MOST = std::numeric_limits<float>::max();
    const float natural_sink = p.sinks[head_idx], keys_largest = largest;
    const float sink = max_of(-MOST, min_of(natural_sink * LOG2_E, MOST));
    if (sink >= largest) largest = sink, natural_largest = natural_sink;
    factor = weight_of_partial<Isa>(keys_largest, largest);
    total = sum * factor + weight_of_partial<Isa>(sink, largest);
  }
  if (p.lse != nullptr) {
    p.lse[token_idx * p.num_heads + head_idx] = total == 0.0f ? NEG_INF : natural_largest + std::log(total);
  }
  if (sum == 0.0f) return {0.0f, 1.0f};
  // A division is exact to the last digit, which a dtype of 16 bits does not show.
  return sizeof(Query) == 2 ? Normaliser{factor / total, 1.0f} : Normaliser{factor, total};
}

template <class Isa, class Query>
typename Isa::Float normalised(typename Isa::Float acc, typename Isa::Float multiplier,
                               typename Isa::Float divisor) {
  acc = Isa::mul(acc, multiplier);
  return sizeof(Query) == 2 ? acc : Isa::div(acc, divisor);
}

template <class Query>
Query* out_row(const PagedAttentionParams& p, int64_t token_idx, int64_t head_idx) {
  return static_cast<Query*>(p.out) + token_idx * p.out_token_stride + head_idx * p.out_head_stride;
}

// partial_rows: [num_chunks, num_kv_heads, row_end - row_begin, value_head_dim + 2].
template <class Isa, class Query>
void store_rows(const PagedAttentionParams& p, const AttentionTask& task, const float* partial_rows,
                int64_t num_chunks) {
  using Float = typename Isa::Float;
  const int64_t group = p.num_heads / p.num_kv_heads, rows_per_head = task.row_end - task.row_begin;
  const int64_t num_rows = task.num_kv_heads * rows_per_head, row_stride = PartialRows::stride(p);
  const int64_t chunk_stride = num_rows * row_stride, state = p.value_head_dim;
  alignas(64) float acc[MAX_HEAD_DIM];
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t row = task.row_begin + i % rows_per_head;
    const int64_t token_idx = task.query_begin + row / group;
    const int64_t head_idx = (task.kv_head_idx + i / rows_per_head) * group + row % group;
    const float* partial = partial_rows + i * row_stride;
    float largest = PartialRows::NO_SCORE, sum = 0.0f;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      largest = max_of(largest, partial[chunk * chunk_stride + state]);
    }
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const float* part = partial + chunk * chunk_stride;
      const float weight = weight_of_partial<Isa>(part[state], largest);
      sum += part[state + 1] * weight;
      for (int64_t dim = 0; dim < p.value_head_dim; dim += Isa::WIDTH) {
        const Float before = chunk == 0 ? Isa::set(0.0f) : Isa::load(acc + dim);
        Isa::store(acc + dim,
                   Isa::fma(Isa::widen(part + dim, p.value_head_dim - dim), Isa::set(weight), before));
      }
    }
    const Normaliser end = end_row<Isa, Query>(p, token_idx, head_idx, largest, sum);
    Query* out = out_row<Query>(p, token_idx, head_idx);
    for (int64_t dim = 0; dim < p.value_head_dim; dim += Isa::WIDTH) {
      const Float x = Isa::load(acc + dim);
      Isa::narrow(out + dim, normalised<Isa, Query>(x, Isa::set(end.multiplier), Isa::set(end.divisor)),
                  p.value_head_dim - dim);
    }
  }
}

}  // namespace
}  // namespace pagedkv::cpu
