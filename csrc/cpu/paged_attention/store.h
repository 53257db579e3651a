// From partial rows to out and lse: merges the chunks of keys, normalises, rounds.
#pragma once

#include <cmath>

#include "common/online_softmax.h"
#include "common/paging.h"
#include "cpu/paged_attention/task.h"
#include "cpu/paged_attention/vector_math.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

template <class Isa, class Query>
class Store {
  using Float = typename Isa::Float;

 public:
  // partial_rows: [num_chunks, num_kv_heads, row_end - row_begin, value_head_dim + 2].
  static void run(const PagedAttentionParams& p, const AttentionTask& task, const float* partial_rows,
                  int64_t num_chunks) {
    const int64_t group = p.num_heads / p.num_kv_heads;
    const int64_t rows_per_head = task.row_end - task.row_begin;
    const int64_t num_rows = task.num_kv_heads * rows_per_head, stride = PartialRows::stride(p);
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t row = task.row_begin + i % rows_per_head;
      const int64_t head_idx = (task.kv_head_idx + i / rows_per_head) * group + row % group;
      store_row(p, task.query_begin + row / group, head_idx, partial_rows + i * stride, num_rows * stride,
                num_chunks);
    }
  }

 private:
  static void store_row(const PagedAttentionParams& p, int64_t token_idx, int64_t head_idx,
                        const float* partial, int64_t chunk_stride, int64_t num_chunks) {
    const float sink = p.sinks != nullptr ? p.sinks[head_idx] * LOG2_E : PartialRows::NO_SCORE;
    float largest = PartialRows::NO_SCORE;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      largest = max_of(largest, partial[chunk * chunk_stride + p.value_head_dim]);
    }
    if (p.sinks != nullptr) largest = max_of(largest, sink);
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const float* state = partial + chunk * chunk_stride + p.value_head_dim;
      sum += state[1] * weight_of(state[0], largest);
    }
    const bool empty = sum == 0.0f;
    if (p.sinks != nullptr) sum += weight_of(sink, largest);
    if (p.lse != nullptr) {
      p.lse[token_idx * p.num_heads + head_idx] = sum == 0.0f ? NEG_INF : largest * LN_2 + std::log(sum);
    }
    auto* out = static_cast<Query*>(p.out) + token_idx * p.out_token_stride + head_idx * p.out_head_stride;
    const Float divisor = Isa::set(empty ? 1.0f : sum);
    for (int64_t dim = 0; dim < p.value_head_dim; dim += Isa::WIDTH) {
      const int64_t count = p.value_head_dim - dim;
      Float total = Isa::set(0.0f);
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const float* state = partial + chunk * chunk_stride;
        const float weight = weight_of(state[p.value_head_dim], largest);
        total = Isa::fma(Isa::widen(state + dim, count), Isa::set(weight), total);
      }
      Isa::narrow(out + dim, Isa::div(total, divisor), count);
    }
  }

  static float weight_of(float score, float largest) {
    return score == largest ? 1.0f : exp2_of<Isa>(score - largest);
  }
};

}  // namespace
}  // namespace pagedkv::cpu
