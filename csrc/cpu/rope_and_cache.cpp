// x' = rotate(x, positions): (a, b) -> (a cos - b sin, b cos + a sin) on pairs of elements, in float32,
// rounded once (Su et al. 2021, "RoFormer", section 3.2). Every query row is rotated in place; key rows are
// rotated on their way into the cache and value rows go along.
//
// Work: query rows in parallel; then the cache write, as in reshape_and_cache, so that the later of two rows
// for one slot ends there. Bytes: each row of query, key and value is read and written once.
#include <vector>

#include "common/dispatch.h"
#include "common/paging.h"
#include "cpu/parallel.h"
#include "cpu/store_row.h"
#include "cpu/vector_clones.h"
#include "ops.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t MIN_TOKENS_PER_TASK = 16;

// rotated[0, head_dim) = the float32 rotation of `row` for the angles at `position`.
template <class Input, class Table>
PAGEDKV_VECTOR_CLONES void rotate_row(const RopeAndCacheParams& p, const Input* row, int64_t position,
                                      float* rotated) {
  const auto* cos = static_cast<const Table*>(p.cos) + position * p.cos_position_stride;
  const auto* sin = static_cast<const Table*>(p.sin) + position * p.sin_position_stride;
  const int64_t half = p.rotary_dim / 2;
  const auto rotate_pair = [&](int64_t i, int64_t first, int64_t second) {
    const float a = to_float(row[first]), b = to_float(row[second]);
    const float c = to_float(cos[i]), s = to_float(sin[i]);
    rotated[first] = a * c - b * s;
    rotated[second] = b * c + a * s;
  };
  // Two loops, each with fixed distances, which compilers make vector loops of.
  if (p.interleaved) {
    for (int64_t i = 0; i < half; ++i) rotate_pair(i, 2 * i, 2 * i + 1);
  } else {
    for (int64_t i = 0; i < half; ++i) rotate_pair(i, i, i + half);
  }
  for (int64_t i = p.rotary_dim; i < p.write.head_dim; ++i) rotated[i] = to_float(row[i]);
}

// row[0, size) = rotated[0, size), rounded.
template <class T>
PAGEDKV_VECTOR_CLONES void round_row(const float* rotated, T* row, int64_t size) {
  for (int64_t i = 0; i < size; ++i) row[i] = from_float<T>(rotated[i]);
}

template <class Input, class Table>
void rotate_query(const RopeAndCacheParams& p) {
  parallel_for(p.num_positions, MIN_TOKENS_PER_TASK, [&](int64_t token_idx) {
    std::vector<float> rotated(p.write.head_dim);
    for (int64_t head_idx = 0; head_idx < p.num_heads; ++head_idx) {
      Input* row =
          static_cast<Input*>(p.query) + token_idx * p.query_token_stride + head_idx * p.query_head_stride;
      rotate_row<Input, Table>(p, row, p.positions[token_idx], rotated.data());
      round_row(rotated.data(), row, p.rotary_dim);
    }
  });
}

template <class Input, class Table, class Cache>
void write_token(const RopeAndCacheParams& p, int64_t token_idx, int64_t slot, float* rotated) {
  const ReshapeAndCacheParams& w = p.write;
  const int64_t block = slot / w.block_size, token_in_block = slot % w.block_size;
  for (int64_t kv_head_idx = 0; kv_head_idx < w.num_kv_heads; ++kv_head_idx) {
    const auto* key =
        static_cast<const Input*>(w.key) + token_idx * w.key_token_stride + kv_head_idx * w.key_head_stride;
    const auto* value = static_cast<const Input*>(w.value) + token_idx * w.value_token_stride +
                        kv_head_idx * w.value_head_stride;
    auto* key_row = static_cast<Cache*>(w.key_cache) +
                    cache_offset(key_cache_strides(w), block, token_in_block, kv_head_idx);
    auto* value_row = static_cast<Cache*>(w.value_cache) +
                      cache_offset(value_cache_strides(w), block, token_in_block, kv_head_idx);
    rotate_row<Input, Table>(p, key, p.positions[token_idx], rotated);
    if constexpr (is_quantised_v<Cache>) {
      // The float32 rotation is divided: rounded once, from float32 to the cache's dtype.
      const float k_scale = scale_of(w.k_scale, w.k_scale_value, kv_head_idx);
      for (int64_t i = 0; i < w.head_dim; ++i) rotated[i] /= k_scale;
    }
    round_row(rotated, key_row, w.head_dim);
    store_row(value, value_row, w.value_head_dim, scale_of(w.v_scale, w.v_scale_value, kv_head_idx), false);
  }
}

template <class Input, class Table, class Cache>
void write_rotated_keys(const RopeAndCacheParams& p) {
  const ReshapeAndCacheParams& w = p.write;
  const int64_t num_partitions =
      std::clamp<int64_t>(w.num_tokens / MIN_TOKENS_PER_TASK, 1, 4 * omp_get_max_threads());
  parallel_for(num_partitions, 1, [&](int64_t partition) {
    std::vector<float> rotated(w.head_dim);
    for (int64_t token_idx = 0; token_idx < w.num_tokens; ++token_idx) {
      const int64_t slot = w.slot_mapping[token_idx];
      if (slot < 0 || slot / w.block_size % num_partitions != partition) continue;
      write_token<Input, Table, Cache>(p, token_idx, slot, rotated.data());
    }
  });
}

}  // namespace

void rope_and_cache(const RopeAndCacheParams& p) {
  dispatch_cache_pair(p.write.input_dtype, p.write.cache_dtype, [&]<class Input, class Cache>() {
    const auto run = [&]<class Table>() {
      rotate_query<Input, Table>(p);
      write_rotated_keys<Input, Table, Cache>(p);
    };
    if (p.table_dtype == DType::float32) {
      run.template operator()<float>();
    } else {
      run.template operator()<Input>();
    }
  });
}

}  // namespace pagedkv::cpu
