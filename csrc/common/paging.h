// From slots and block ids to element offsets, always in int64: a cache of more than 2**31 elements is
// ordinary.
#pragma once

#include <cstdint>

#include "common/device.h"

namespace pagedkv {

// Strides, in elements, of a cache seen as [num_blocks, block_size, num_kv_heads, head_dim].
struct CacheStrides {
  int64_t block, token, head;
};

PAGEDKV_HD int64_t cache_offset(const CacheStrides& stride, int64_t block, int64_t token_in_block,
                                int64_t kv_head_idx) {
  return block * stride.block + token_in_block * stride.token + kv_head_idx * stride.head;
}

template <class Params>
PAGEDKV_HD CacheStrides key_cache_strides(const Params& p) {
  return {p.key_cache_block_stride, p.key_cache_token_stride, p.key_cache_head_stride};
}

template <class Params>
PAGEDKV_HD CacheStrides value_cache_strides(const Params& p) {
  return {p.value_cache_block_stride, p.value_cache_token_stride, p.value_cache_head_stride};
}

// A quantised cache's scale: one a KV head, or one for all.
PAGEDKV_HD float scale_of(const float* per_head, float value, int64_t kv_head_idx) {
  return per_head != nullptr ? per_head[kv_head_idx] : value;
}

// The block that an entry of a sequence's table names, or -1 where the table is too short or names none
// inside the pool. On the CPU the bindings have raised an error for such an entry already; on a device its
// tokens count as not visible.
template <class Params>
PAGEDKV_HD int block_of_entry(const Params& p, const int32_t* table, int entry) {
  if (entry >= p.max_blocks_per_seq) return -1;
  const int block = table[entry];
  return block >= 0 && block < p.num_blocks ? block : -1;
}

// The block that holds a logical token, or -1.
template <class Params>
PAGEDKV_HD int64_t block_of_token(const Params& p, int64_t seq_idx, int32_t token) {
  return block_of_entry(p, p.block_tables + seq_idx * p.block_tables_seq_stride,
                        token / static_cast<int32_t>(p.block_size));
}

template <class T>
PAGEDKV_HD constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
PAGEDKV_HD constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

PAGEDKV_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace pagedkv
