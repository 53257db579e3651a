// key[i], value[i] = dequantised cache rows of every sequence's tokens, one sequence after another.
//
// Work: tiles of output rows in parallel; a tile finds its sequence by bisection of token_offsets. Bytes:
// each cached row is read once, each output row written once.
#include <algorithm>
#include <cstring>

#include "common/dispatch.h"
#include "common/paging.h"
#include "cpu/parallel.h"
#include "cpu/stream_copy.h"
#include "ops.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t TILE_TOKENS = 64;
constexpr int64_t AHEAD_TOKENS = 8;

void fill_token_offsets(const GatherKvParams& p) {
  p.token_offsets[0] = 0;
  for (int64_t seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
    const int64_t kv_start = p.kv_starts != nullptr ? std::max(0, p.kv_starts[seq_idx]) : 0;
    p.token_offsets[seq_idx + 1] =
        p.token_offsets[seq_idx] + std::max<int64_t>(0, p.context_lens[seq_idx] - kv_start);
  }
}

// row = dequantised cache_row. With `ahead`, which is a row that is to be loaded later, by stream_copy.
template <class Cache, class Out>
void load_row(const Cache* cache_row, Out* row, int64_t size, float scale, const Cache* ahead) {
  if constexpr (std::is_same_v<Cache, Out>) {
    if (ahead != nullptr) {
      stream_copy(row, cache_row, size * sizeof(Out), ahead);
    } else {
      std::memcpy(row, cache_row, size * sizeof(Out));
    }
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const float stored = to_float(cache_row[i]);
      row[i] = from_float<Out>(is_quantised_v<Cache> ? stored * scale : stored);
    }
  }
}

// The rows of one token, key heads first. What is read is one row a head, in blocks that lie anywhere, so
// where it is much the token AHEAD_TOKENS after this one is asked for meanwhile.
template <class Cache, class Out>
void gather_token(const GatherKvParams& p, int64_t seq_idx, int64_t out_idx, bool stream) {
  const int64_t kv_start = p.kv_starts != nullptr ? std::max(0, p.kv_starts[seq_idx]) : 0;
  const int64_t token = kv_start + out_idx - p.token_offsets[seq_idx];
  const int64_t later = std::min<int64_t>(token + AHEAD_TOKENS, p.context_lens[seq_idx] - 1);
  const int32_t* block_table = p.block_tables + seq_idx * p.block_tables_seq_stride;
  const auto gather = [&](const void* cache, const CacheStrides& strides, void* out, int64_t head_dim,
                          const float* scales, float scale) {
    const auto* elements = static_cast<const Cache*>(cache);
    const int64_t block = block_table[token / p.block_size], later_block = block_table[later / p.block_size];
    for (int64_t kv_head_idx = 0; kv_head_idx < p.num_kv_heads; ++kv_head_idx) {
      const Cache* ahead = elements + cache_offset(strides, later_block, later % p.block_size, kv_head_idx);
      load_row(elements + cache_offset(strides, block, token % p.block_size, kv_head_idx),
               static_cast<Out*>(out) + (out_idx * p.num_kv_heads + kv_head_idx) * head_dim, head_dim,
               scale_of(scales, scale, kv_head_idx), stream ? ahead : nullptr);
    }
  };
  gather(p.key_cache, key_cache_strides(p), p.key, p.head_dim, p.k_scale, p.k_scale_value);
  gather(p.value_cache, value_cache_strides(p), p.value, p.value_head_dim, p.v_scale, p.v_scale_value);
}

}  // namespace

void gather_kv(const GatherKvParams& p) {
  fill_token_offsets(p);
  dispatch_dtype(p.cache_dtype, [&]<class Cache>() {
    dispatch_float_dtype(p.out_dtype, [&]<class Out>() {
      const int64_t bytes_per_token = p.num_kv_heads * (p.head_dim + p.value_head_dim) * sizeof(Out);
      const bool stream = p.total_tokens * bytes_per_token >= STREAM_BYTES;
      parallel_for(ceil_div(p.total_tokens, TILE_TOKENS), 1, [&](int64_t tile) {
        const int64_t begin = tile * TILE_TOKENS, end = std::min(begin + TILE_TOKENS, p.total_tokens);
        const int64_t* offsets = p.token_offsets;
        int64_t seq_idx = std::upper_bound(offsets, offsets + p.num_seqs + 1, begin) - offsets - 1;
        for (int64_t out_idx = begin; out_idx < end; ++out_idx) {
          while (out_idx >= offsets[seq_idx + 1]) ++seq_idx;
          gather_token<Cache, Out>(p, seq_idx, out_idx, stream);
        }
        stream_fence();
      });
    });
  });
}

}  // namespace pagedkv::cpu
