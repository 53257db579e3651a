// x' = rotate(x, positions): (a, b) -> (a cos - b sin, b cos + a sin) on pairs of elements, in float32,
// rounded once (Su et al. 2021, "RoFormer", section 3.2). Query rows are rotated in place, key rows on their
// way into the cache; value rows go along.
//
// Work: a CTA takes tokens_per_cta tokens, each of its groups one at a time; a group's threads run over
// (head, 16-byte piece of the first halves). Bytes: every row of query, key and value is read and written
// once; cos and sin once per head, from the L1 cache. A token whose position is outside cos and sin is left
// alone, a slot outside the cache is skipped.
#include "common/dispatch.h"
#include "cuda/rows.h"
#include "cuda/slots.h"
#include "ops.h"

namespace pagedkv::cuda {

namespace {

struct Launch {
  RopeAndCacheParams p;
  int64_t tokens_per_cta;
  bool queries_aligned, keys_aligned, values_aligned;  // rows can be moved in 16-byte pieces
};

PAGEDKV_DEVICE float angle(const void* table, DType dtype, DType input_dtype, int64_t idx) {
  if (dtype == DType::float32) return static_cast<const float*>(table)[idx];
  return input_dtype == DType::float16 ? to_float(static_cast<const float16*>(table)[idx])
                                       : to_float(static_cast<const bfloat16*>(table)[idx]);
}

// Rotates num_rows rows of one token, N pairs at a time: from_row and to_row turn a head into a pointer,
// store(head, x) turns a rotated element into one of To. Elements past rotary_dim pass through.
template <bool INTERLEAVED, int N, class From, class To, class FromRow, class ToRow, class Store>
PAGEDKV_DEVICE void rotate_packs(const RopeAndCacheParams& p, const TokenGroup& group, int64_t position,
                                 int num_rows, FromRow&& from_row, ToRow&& to_row, Store&& store) {
  const int half = static_cast<int>(p.rotary_dim / 2),
            rest = static_cast<int>(p.write.head_dim - p.rotary_dim);
  const int units = half / N;
#pragma unroll 1
  for (int i = group.lane; i < num_rows * units; i += group.size) {
    const int row = i / units, pair = i % units * N;
    const int first_at = INTERLEAVED ? 2 * pair : pair, second_at = INTERLEAVED ? 2 * pair + N : pair + half;
    const Pack<From, N> first = load_pack<From, N>(from_row(row) + first_at);
    const Pack<From, N> second = load_pack<From, N>(from_row(row) + second_at);
    Pack<To, N> rotated_first, rotated_second;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float c =
          angle(p.cos, p.table_dtype, p.write.input_dtype, position * p.cos_position_stride + pair + k);
      const float s =
          angle(p.sin, p.table_dtype, p.write.input_dtype, position * p.sin_position_stride + pair + k);
      // Elements a_at and b_at of both pieces together: N pairs one after another, or a pair split between
      // the pieces.
      const int a_at = INTERLEAVED ? 2 * k : k, b_at = INTERLEAVED ? 2 * k + 1 : N + k;
      const float a = to_float(a_at < N ? first.item[a_at % N] : second.item[a_at % N]);
      const float b = to_float(b_at < N ? first.item[b_at % N] : second.item[b_at % N]);
      (a_at < N ? rotated_first : rotated_second).item[a_at % N] = store(row, a * c - b * s);
      (b_at < N ? rotated_first : rotated_second).item[b_at % N] = store(row, b * c + a * s);
    }
    store_pack<To, N>(to_row(row) + first_at, rotated_first);
    store_pack<To, N>(to_row(row) + second_at, rotated_second);
  }
#pragma unroll 1
  for (int i = group.lane; i < num_rows * rest; i += group.size) {
    const int row = i / rest, dim = static_cast<int>(p.rotary_dim) + i % rest;
    to_row(row)[dim] = store(row, to_float(from_row(row)[dim]));
  }
}

template <class From, class To, class FromRow, class ToRow, class Store>
PAGEDKV_DEVICE void rotate_rows(bool aligned, const RopeAndCacheParams& p, const TokenGroup& group,
                                int64_t position, int64_t num_heads, FromRow&& from_row, ToRow&& to_row,
                                Store&& store) {
  constexpr int N = PACK_SIZE<From, To>;
  const int num_rows = static_cast<int>(num_heads);
  if (aligned && p.interleaved) {
    rotate_packs<true, N, From, To>(p, group, position, num_rows, from_row, to_row, store);
  } else if (aligned) {
    rotate_packs<false, N, From, To>(p, group, position, num_rows, from_row, to_row, store);
  } else if (p.interleaved) {
    rotate_packs<true, 1, From, To>(p, group, position, num_rows, from_row, to_row, store);
  } else {
    rotate_packs<false, 1, From, To>(p, group, position, num_rows, from_row, to_row, store);
  }
}

template <class Input>
PAGEDKV_DEVICE void rotate_query(const Launch& launch, const TokenGroup& group, int64_t token_idx,
                                 int64_t position) {
  const RopeAndCacheParams& p = launch.p;
  Input* query = static_cast<Input*>(p.query) + token_idx * p.query_token_stride;
  const auto row = [&](int64_t head_idx) { return query + head_idx * p.query_head_stride; };
  rotate_rows<Input, Input>(launch.queries_aligned, p, group, position, p.num_heads, row, row,
                            [](int64_t, float x) { return from_float<Input>(x); });
}

template <class Input, class Cache>
PAGEDKV_DEVICE void write_token(const Launch& launch, const TokenGroup& group, int64_t token_idx,
                                int64_t position, int64_t slot) {
  const ReshapeAndCacheParams& w = launch.p.write;
  const int64_t block = slot / w.block_size, token_in_block = slot % w.block_size;
  const auto* key = static_cast<const Input*>(w.key) + token_idx * w.key_token_stride;
  const auto* value = static_cast<const Input*>(w.value) + token_idx * w.value_token_stride;
  Cache* key_cache =
      static_cast<Cache*>(w.key_cache) + cache_offset(key_cache_strides(w), block, token_in_block, 0);
  Cache* value_cache =
      static_cast<Cache*>(w.value_cache) + cache_offset(value_cache_strides(w), block, token_in_block, 0);
  rotate_rows<Input, Cache>(
      launch.keys_aligned, launch.p, group, position, w.num_kv_heads,
      [&](int64_t kv_head_idx) { return key + kv_head_idx * w.key_head_stride; },
      [&](int64_t kv_head_idx) { return key_cache + kv_head_idx * w.key_cache_head_stride; },
      [&](int64_t kv_head_idx, float x) {
        // A quantised cache divides the float32 rotation, so that it too is rounded once.
        return from_float<Cache>(is_quantised_v<Cache> ? x / scale_of(w.k_scale, w.k_scale_value, kv_head_idx)
                                                       : x);
      });
  move_rows<Input, Cache>(
      launch.values_aligned, w.num_kv_heads, w.value_head_dim, group.lane, group.size,
      [&](int64_t kv_head_idx) { return value + kv_head_idx * w.value_head_stride; },
      [&](int64_t kv_head_idx) { return value_cache + kv_head_idx * w.value_cache_head_stride; },
      [&](int64_t kv_head_idx, Input element) {
        if constexpr (std::is_same_v<Input, Cache>) {
          return element;
        } else {
          return from_float<Cache>(to_float(element) / scale_of(w.v_scale, w.v_scale_value, kv_head_idx));
        }
      });
}

// Two CTAs to an SM are named, since the compiler would aim at more and spill.
template <class Cache>
__global__ void __launch_bounds__(WRITE_CTA_THREADS, 2) rope_and_cache_kernel(const Launch launch) {
  PAGEDKV_SHARED(shared);
  auto& slots = *reinterpret_cast<CtaSlots*>(shared);
  const RopeAndCacheParams& p = launch.p;
  const int64_t token_begin = blockIdx.x * launch.tokens_per_cta;
  const int64_t num_tokens = min_of(launch.tokens_per_cta, p.num_positions - token_begin);
  find_slots(p.write, token_begin, num_tokens, slots);
  const TokenGroup group(launch.tokens_per_cta);
  for (int64_t i = group.idx; i < num_tokens; i += group.num_groups) {
    const int64_t token_idx = token_begin + i, position = p.positions[token_idx];
    if (position < 0 || position >= p.max_position) continue;
    const int64_t slot = slots.writable(p.write, i);
    const auto run = [&]<class Input>() {
      rotate_query<Input>(launch, group, token_idx, position);
      if (slot >= 0) write_token<Input, Cache>(launch, group, token_idx, position, slot);
    };
    if constexpr (is_quantised_v<Cache>) {
      with_float_dtype(p.write.input_dtype, run);
    } else {
      run.template operator()<Cache>();
    }
  }
}

}  // namespace

cudaError_t rope_and_cache(const RopeAndCacheParams& p, cudaStream_t stream) {
  const ReshapeAndCacheParams& w = p.write;
  const int64_t input_bytes = element_bytes(w.input_dtype), cache_bytes = element_bytes(w.cache_dtype);
  const RowAlignment query{p.query, input_bytes, {p.query_token_stride, p.query_head_stride, 0}};
  const RowAlignment key{w.key, input_bytes, {w.key_token_stride, w.key_head_stride, 0}};
  const RowAlignment value{w.value, input_bytes, {w.value_token_stride, w.value_head_stride, 0}};
  const RowAlignment key_cache{w.key_cache,
                               cache_bytes,
                               {w.key_cache_block_stride, w.key_cache_token_stride, w.key_cache_head_stride}};
  const RowAlignment value_cache{
      w.value_cache,
      cache_bytes,
      {w.value_cache_block_stride, w.value_cache_token_stride, w.value_cache_head_stride}};
  Launch args;
  args.p = p;
  args.tokens_per_cta = tokens_per_cta(p.num_positions);
  args.queries_aligned = rows_are_aligned(query, query, p.rotary_dim / 2);
  args.keys_aligned = rows_are_aligned(key, key_cache, p.rotary_dim / 2);
  args.values_aligned = rows_are_aligned(value, value_cache, w.value_head_dim);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.num_positions, args.tokens_per_cta)));
  cudaError_t error = cudaSuccess;
  dispatch_dtype(w.cache_dtype, [&]<class Cache>() {
    error =
        launch(rope_and_cache_kernel<Cache>, grid, dim3(WRITE_CTA_THREADS), sizeof(CtaSlots), stream, args);
  });
  return error;
}

}  // namespace pagedkv::cuda
