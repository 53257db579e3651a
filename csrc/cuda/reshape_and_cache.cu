// cache[slot_mapping[i]] = round(row i / scale).
//
// Work: a CTA takes tokens_per_cta tokens, each of its groups one at a time; a group's threads run over
// (head, 16-byte piece) of the token's keys, then its values. Bytes: each row is read and written once, the
// slots once per CTA: it looks for later rows that name one of its slots and leaves those tokens out, so that
// of several rows one whole row ends in the slot. A slot outside the cache is skipped.
#include "common/dispatch.h"
#include "cuda/rows.h"
#include "cuda/slots.h"
#include "ops.h"

namespace pagedkv::cuda {

namespace {

struct Launch {
  ReshapeAndCacheParams p;
  int64_t tokens_per_cta;
  bool keys_aligned, values_aligned;
};

template <class Input, class Cache>
PAGEDKV_DEVICE void write_token(const Launch& launch, const TokenGroup& group, int64_t token_idx,
                                int64_t slot) {
  const ReshapeAndCacheParams& p = launch.p;
  const int64_t block = slot / p.block_size, token_in_block = slot % p.block_size;
  const auto* key = static_cast<const Input*>(p.key) + token_idx * p.key_token_stride;
  const auto* value = static_cast<const Input*>(p.value) + token_idx * p.value_token_stride;
  auto* key_cache = static_cast<Cache*>(p.key_cache);
  auto* value_cache = static_cast<Cache*>(p.value_cache);
  const auto store = [](float scale, Input element) {
    if constexpr (std::is_same_v<Input, Cache>) {
      return element;
    } else {
      return from_float<Cache>(to_float(element) / scale);
    }
  };
  move_rows<Input, Cache>(
      launch.keys_aligned, p.num_kv_heads, p.head_dim, group.lane, group.size,
      [&](int64_t kv_head_idx) { return key + kv_head_idx * p.key_head_stride; },
      [&](int64_t kv_head_idx) {
        return key_cache + cache_offset(key_cache_strides(p), block, token_in_block, kv_head_idx);
      },
      [&](int64_t kv_head_idx, Input element) {
        return store(scale_of(p.k_scale, p.k_scale_value, kv_head_idx), element);
      });
  move_rows<Input, Cache>(
      launch.values_aligned, p.num_kv_heads, p.value_head_dim, group.lane, group.size,
      [&](int64_t kv_head_idx) { return value + kv_head_idx * p.value_head_stride; },
      [&](int64_t kv_head_idx) {
        return value_cache + cache_offset(value_cache_strides(p), block, token_in_block, kv_head_idx);
      },
      [&](int64_t kv_head_idx, Input element) {
        return store(scale_of(p.v_scale, p.v_scale_value, kv_head_idx), element);
      });
}

// Two CTAs to an SM are named, since the compiler would aim at more and spill.
template <class Cache>
__global__ void __launch_bounds__(WRITE_CTA_THREADS, 2) reshape_and_cache_kernel(const Launch launch) {
  PAGEDKV_SHARED(shared);
  auto& slots = *reinterpret_cast<CtaSlots*>(shared);
  const ReshapeAndCacheParams& p = launch.p;
  const int64_t token_begin = blockIdx.x * launch.tokens_per_cta;
  const int64_t num_tokens = min_of(launch.tokens_per_cta, p.num_tokens - token_begin);
  find_slots(p, token_begin, num_tokens, slots);
  const TokenGroup group(launch.tokens_per_cta);
  for (int64_t i = group.idx; i < num_tokens; i += group.num_groups) {
    const int64_t slot = slots.writable(p, i);
    if (slot < 0) continue;
    if constexpr (is_quantised_v<Cache>) {
      with_float_dtype(p.input_dtype, [&]<class Input>() {
        write_token<Input, Cache>(launch, group, token_begin + i, slot);
      });
    } else {
      write_token<Cache, Cache>(launch, group, token_begin + i, slot);
    }
  }
}

}  // namespace

cudaError_t reshape_and_cache(const ReshapeAndCacheParams& p, cudaStream_t stream) {
  const int64_t input_bytes = element_bytes(p.input_dtype), cache_bytes = element_bytes(p.cache_dtype);
  Launch args;
  args.p = p;
  args.tokens_per_cta = tokens_per_cta(p.num_tokens);
  args.keys_aligned =
      rows_are_aligned({p.key, input_bytes, {p.key_token_stride, p.key_head_stride, 0}},
                       {p.key_cache,
                        cache_bytes,
                        {p.key_cache_block_stride, p.key_cache_token_stride, p.key_cache_head_stride}},
                       p.head_dim);
  args.values_aligned =
      rows_are_aligned({p.value, input_bytes, {p.value_token_stride, p.value_head_stride, 0}},
                       {p.value_cache,
                        cache_bytes,
                        {p.value_cache_block_stride, p.value_cache_token_stride, p.value_cache_head_stride}},
                       p.value_head_dim);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.num_tokens, args.tokens_per_cta)));
  cudaError_t error = cudaSuccess;
  dispatch_dtype(p.cache_dtype, [&]<class Cache>() {
    error = launch(reshape_and_cache_kernel<Cache>, grid, dim3(WRITE_CTA_THREADS), sizeof(CtaSlots), stream,
                   args);
  });
  return error;
}

}  // namespace pagedkv::cuda
