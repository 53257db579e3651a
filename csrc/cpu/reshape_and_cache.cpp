// cache[slot_mapping[i]] = round(row i / scale).
//
// Work: blocks are dealt out to partitions, and each partition takes its blocks' rows in order, so that of
// two rows for the same slot the later one ends there, whole, whatever the number of threads. Bytes: each row
// is read and written once.
#include "common/dispatch.h"
#include "common/paging.h"
#include "cpu/parallel.h"
#include "cpu/store_row.h"
#include "ops.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t MIN_TOKENS_PER_PARTITION = 64;  // below it, waking a thread costs more than the copies

template <class Input, class Cache>
void write_token(const ReshapeAndCacheParams& p, int64_t token_idx, int64_t slot, bool stream) {
  const auto* key = static_cast<const Input*>(p.key) + token_idx * p.key_token_stride;
  const auto* value = static_cast<const Input*>(p.value) + token_idx * p.value_token_stride;
  auto* key_cache = static_cast<Cache*>(p.key_cache);
  auto* value_cache = static_cast<Cache*>(p.value_cache);
  const int64_t block = slot / p.block_size, token_in_block = slot % p.block_size;
  for (int64_t kv_head_idx = 0; kv_head_idx < p.num_kv_heads; ++kv_head_idx) {
    store_row(key + kv_head_idx * p.key_head_stride,
              key_cache + cache_offset(key_cache_strides(p), block, token_in_block, kv_head_idx), p.head_dim,
              scale_of(p.k_scale, p.k_scale_value, kv_head_idx), stream);
    store_row(value + kv_head_idx * p.value_head_stride,
              value_cache + cache_offset(value_cache_strides(p), block, token_in_block, kv_head_idx),
              p.value_head_dim, scale_of(p.v_scale, p.v_scale_value, kv_head_idx), stream);
  }
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& p) {
  const int64_t num_partitions =
      std::clamp<int64_t>(p.num_tokens / MIN_TOKENS_PER_PARTITION, 1, omp_get_max_threads());
  dispatch_cache_pair(p.input_dtype, p.cache_dtype, [&]<class Input, class Cache>() {
    const int64_t bytes_per_token = p.num_kv_heads * (p.head_dim + p.value_head_dim) * sizeof(Cache);
    const bool stream = p.num_tokens * bytes_per_token >= STREAM_BYTES;
    parallel_for(num_partitions, 1, [&](int64_t partition) {
      for (int64_t token_idx = 0; token_idx < p.num_tokens; ++token_idx) {
        const int64_t slot = p.slot_mapping[token_idx];
        if (slot < 0 || slot / p.block_size % num_partitions != partition) continue;
        write_token<Input, Cache>(p, token_idx, slot, stream);
      }
      stream_fence();
    });
  });
}

}  // namespace pagedkv::cpu
