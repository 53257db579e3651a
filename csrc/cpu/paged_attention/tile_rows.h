// Where the keys and values of a tile of tokens lie.
#pragma once

#include "common/dispatch.h"
#include "common/paging.h"
#include "cpu/paged_attention/task.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// Element offsets into both caches, of KV head 0; -1 for a token that is not among the task's keys.
template <int TOKENS>
struct TileRows {
  int num_tokens = 0;
  int64_t key[TOKENS], value[TOKENS];

  // The tokens [begin, end). A run of tokens in one block needs one look-up, and blocks of no key of the task
  // none: their entries may hold anything.
  void find(const PagedAttentionParams& p, const AttentionTask& task, int32_t begin, int32_t end) {
    const int32_t* block_table = p.block_tables + task.seq_idx * p.block_tables_seq_stride;
    const auto block_size = static_cast<int32_t>(p.block_size);
    num_tokens = end - begin;
    int32_t token = begin;
    for (; token < task.keys_begin; ++token) key[token - begin] = value[token - begin] = -1;
    const int32_t keys_end = min_of(end, task.keys_end);
    while (token < keys_end) {
      const int32_t token_in_block = token % block_size;
      const int64_t block = block_table[token / block_size];
      int64_t key_offset = cache_offset(key_cache_strides(p), block, token_in_block, 0);
      int64_t value_offset = cache_offset(value_cache_strides(p), block, token_in_block, 0);
      const int32_t run_end = token + min_of(keys_end - token, block_size - token_in_block);
      for (; token < run_end; ++token) {
        key[token - begin] = key_offset;
        value[token - begin] = value_offset;
        key_offset += p.key_cache_token_stride;
        value_offset += p.value_cache_token_stride;
      }
    }
    for (; token < end; ++token) key[token - begin] = value[token - begin] = -1;
  }
};

// A query row as `padded_dim` elements in the operands' form, zero beyond head_dim.
template <class Math>
void load_query_row(const PagedAttentionParams& p, int64_t token_idx, int64_t head_idx, int64_t padded_dim,
                    uint32_t* dwords) {
  const int64_t offset = token_idx * p.query_token_stride + head_idx * p.query_head_stride;
  if constexpr (Math::PACK == 2) {
    Math::load_query(static_cast<const bfloat16*>(p.query) + offset, p.head_dim, padded_dim, dwords);
  } else {
    dispatch_float_dtype(p.query_dtype, [&]<class Query>() {
      Math::load_query(static_cast<const Query*>(p.query) + offset, p.head_dim, padded_dim, dwords);
    });
  }
}

}  // namespace
}  // namespace pagedkv::cpu
