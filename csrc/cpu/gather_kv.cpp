// key[i], value[i] = dequantised cache rows of every sequence's tokens, one sequence after another.
//
// Work: tiles of output rows in parallel; a tile finds its sequence by bisection of token_offsets. Bytes:
// each cached row is read once, each output row written once.
#include <algorithm>
#include <cstring>

#include "common/dispatch.h"
#include "common/paging.h"
#include "cpu/parallel.h"
#include "ops.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t TILE_TOKENS = 64;

void fill_token_offsets(const GatherKvParams& p) {
  p.token_offsets[0] = 0;
  for (int64_t seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
    const int64_t kv_start = p.kv_starts != nullptr ? std::max(0, p.kv_starts[seq_idx]) : 0;
    p.token_offsets[seq_idx + 1] =
        p.token_offsets[seq_idx] + std::max<int64_t>(0, p.context_lens[seq_idx] - kv_start);
  }
}

template <class Cache, class Out>
void load_row(const Cache* cache_row, Out* row, int64_t size, float scale) {
  if constexpr (std::is_same_v<Cache, Out>) {
    std::memcpy(row, cache_row, size * sizeof(Out));
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const float stored = to_float(cache_row[i]);
      row[i] = from_float<Out>(is_quantised_v<Cache> ? stored * scale : stored);
    }
  }
}

template <class Cache, class Out>
void gather_token(const GatherKvParams& p, int64_t seq_idx, int64_t out_idx) {
  const int64_t kv_start = p.kv_starts != nullptr ? std::max(0, p.kv_starts[seq_idx]) : 0;
  const int64_t token = kv_start + out_idx - p.token_offsets[seq_idx];
  const int32_t* block_table = p.block_tables + seq_idx * p.block_tables_seq_stride;
  const int64_t block = block_table[token / p.block_size], token_in_block = token % p.block_size;
  const auto* key_cache = static_cast<const Cache*>(p.key_cache);
  const auto* value_cache = static_cast<const Cache*>(p.value_cache);
  for (int64_t kv_head_idx = 0; kv_head_idx < p.num_kv_heads; ++kv_head_idx) {
    const int64_t out_row = out_idx * p.num_kv_heads + kv_head_idx;
    load_row(key_cache + cache_offset(key_cache_strides(p), block, token_in_block, kv_head_idx),
             static_cast<Out*>(p.key) + out_row * p.head_dim, p.head_dim,
             scale_of(p.k_scale, p.k_scale_value, kv_head_idx));
    load_row(value_cache + cache_offset(value_cache_strides(p), block, token_in_block, kv_head_idx),
             static_cast<Out*>(p.value) + out_row * p.value_head_dim, p.value_head_dim,
             scale_of(p.v_scale, p.v_scale_value, kv_head_idx));
  }
}

}  // namespace

void gather_kv(const GatherKvParams& p) {
  fill_token_offsets(p);
  dispatch_dtype(p.cache_dtype, [&]<class Cache>() {
    dispatch_float_dtype(p.out_dtype, [&]<class Out>() {
      parallel_for(ceil_div(p.total_tokens, TILE_TOKENS), 1, [&](int64_t tile) {
        const int64_t begin = tile * TILE_TOKENS, end = std::min(begin + TILE_TOKENS, p.total_tokens);
        const int64_t* offsets = p.token_offsets;
        int64_t seq_idx = std::upper_bound(offsets, offsets + p.num_seqs + 1, begin) - offsets - 1;
        for (int64_t out_idx = begin; out_idx < end; ++out_idx) {
          while (out_idx >= offsets[seq_idx + 1]) ++seq_idx;
          gather_token<Cache, Out>(p, seq_idx, out_idx);
        }
      });
    });
  });
}

}  // namespace pagedkv::cpu
