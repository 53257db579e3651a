// What becomes of a block of prefill.h's rows when its task ends.
#pragma once

#include <algorithm>

#include "cpu/paged_attention/scores.h"
#include "cpu/paged_attention/store.h"
#include "cpu/paged_attention/task.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

template <class Math, int BLOCK_ROWS>
struct BlockStore {
  using Isa = typename Math::Isa;
  using Float = typename Isa::Float;
  static constexpr int WIDTH = Isa::WIDTH;

  const PagedAttentionParams& p;
  const AttentionTask& task;
  const ScoreRule<Isa>& rule;
  int64_t first_row;
  int num_rows;
  const float* acc;            // [value_head_dim, BLOCK_ROWS], and what makes up a whole vector
  const float *largest, *sum;  // [BLOCK_ROWS]

  // Out and lse of rows that have seen all their keys.
  template <class Query>
  void whole() const {
    const int64_t group = p.num_heads / p.num_kv_heads;
    const float value_scale = scale_of(p.v_scale, p.v_scale_value, task.kv_head_idx);
    alignas(64) float multiplier[BLOCK_ROWS] = {}, divisor[BLOCK_ROWS];
    Query* out[BLOCK_ROWS];
    for (int row = 0; row < num_rows; ++row) {
      const int64_t token_idx = task.query_begin + (first_row + row) / group;
      const int64_t head_idx = task.kv_head_idx * group + (first_row + row) % group;
      const Normaliser end =
          end_row<Isa, Query>(p, token_idx, head_idx, rule.exported(largest[row]), sum[row]);
      multiplier[row] = end.multiplier * value_scale;
      divisor[row] = end.divisor;
      out[row] = out_row<Query>(p, token_idx, head_idx);
    }
    std::fill(divisor + num_rows, divisor + BLOCK_ROWS, 1.0f);
    int64_t first_dim = 0;
    if constexpr (Math::PACK == 2) first_dim = store_pairs(multiplier, out);
    for_turned(
        first_dim,
        [&](int row_begin, Float(&x)[WIDTH]) {
          const Float m = Isa::load(multiplier + row_begin), d = Isa::load(divisor + row_begin);
          for (int i = 0; i < WIDTH; ++i) x[i] = normalised<Isa, Query>(x[i], m, d);
        },
        [&](int row, int64_t dim, Float x) { Isa::narrow(out[row] + dim, x, p.value_head_dim - dim); });
  }

  // What is known of the rows after one of several chunks.
  void partial(float* partial_rows) const {
    const int64_t stride = PartialRows::stride(p);
    const Float scale = Isa::set(scale_of(p.v_scale, p.v_scale_value, task.kv_head_idx));
    for_turned(
        0,
        [&](int, Float(&x)[WIDTH]) {
          for (int i = 0; i < WIDTH; ++i) x[i] = Isa::mul(x[i], scale);
        },
        [&](int row, int64_t dim, Float x) {
          Isa::narrow(partial_rows + row * stride + dim, x, p.value_head_dim - dim);
        });
    for (int row = 0; row < num_rows; ++row) {
      partial_rows[row * stride + p.value_head_dim] = rule.exported(largest[row]);
      partial_rows[row * stride + p.value_head_dim + 1] = sum[row];
    }
  }

 private:
  // Turns pairs of dimensions, rounded first, which is half as much to turn, and stores them a line at a
  // time. Returns where the dimensions begin that do not make up a line.
  template <class Query>
  int64_t store_pairs(const float* multiplier, Query* const* out) const {
    int64_t dim = 0;
    for (; dim + 2 * WIDTH <= p.value_head_dim; dim += 2 * WIDTH) {
      for (int row_begin = 0; row_begin < num_rows; row_begin += WIDTH) {
        const Float m = Isa::load(multiplier + row_begin);
        const float* place = acc + dim * BLOCK_ROWS + row_begin;
        Float x[WIDTH];
        for (int i = 0; i < WIDTH; ++i, place += 2 * BLOCK_ROWS) {
          x[i] = (Float)Math::pack(Isa::mul(Isa::load(place), m), Isa::mul(Isa::load(place + BLOCK_ROWS), m));
        }
        Isa::transpose(x);
        for (int i = 0; i < min_of(WIDTH, num_rows - row_begin); ++i) {
          Isa::store(reinterpret_cast<float*>(out[row_begin + i] + dim), x[i]);
        }
      }
    }
    return dim;
  }

  // acc from first_dim on, turned back so that a vector is WIDTH dimensions of a row: before(row_begin, x)
  // while a row is still a lane, then after(row, dim, x).
  template <class Before, class After>
  void for_turned(int64_t first_dim, Before&& before, After&& after) const {
    for (int64_t dim = first_dim; dim < p.value_head_dim; dim += WIDTH) {
      for (int row_begin = 0; row_begin < num_rows; row_begin += WIDTH) {
        Float x[WIDTH];
        for (int i = 0; i < WIDTH; ++i) x[i] = Isa::load(acc + (dim + i) * BLOCK_ROWS + row_begin);
        before(row_begin, x);
        Isa::transpose(x);
        for (int i = 0; i < min_of(WIDTH, num_rows - row_begin); ++i) after(row_begin + i, dim, x[i]);
      }
    }
  }
};

}  // namespace
}  // namespace pagedkv::cpu
