// A call of paged_attention with everything that it points to. Whatever no query may see is poison: the slots
// past a sequence's end and before kv_starts, a key that the tree hides from all, unused blocks, the table's
// unused entries.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/paging.h"
#include "kernel_cases.h"

namespace pagedkv::emulator {

struct AttentionShape {
  DType query_dtype, cache_dtype;
  int64_t head_dim, num_heads, num_kv_heads, block_size;
  std::vector<int32_t> query_lens, context_lens;
  int64_t value_head_dim = 0;  // 0: head_dim
  int64_t split_size = 0;
  int64_t window = NO_WINDOW;
  bool causal = true;
  bool score_options = false;           // softcap, ALiBi, sinks
  bool scale_per_head = false;          // otherwise one for all
  std::vector<int32_t> kv_starts = {};  // empty: none
  int64_t max_tree = 0;                 // 0: no tree
  bool unaligned = false;               // cache rows that no 16-byte copy can read
};

struct AttentionCase {
  static constexpr int64_t HIDDEN_COLUMN = 3;  // of the tree, from every query

  Bytes query, key_cache, value_cache;
  std::vector<int32_t> block_tables, context_lens, kv_starts, query_start_loc{0};
  std::vector<float> slopes, sinks, k_scale, v_scale, scratch;
  std::vector<unsigned char> tree_mask;
  PagedAttentionParams params{};

  explicit AttentionCase(const AttentionShape& shape) : context_lens(shape.context_lens) {
    kv_starts = shape.kv_starts;
    set_sizes(shape);
    set_options(shape);
    fill_caches(shape);
    set_pointers(shape);
  }
  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  int64_t num_outputs() const { return params.num_tokens * params.num_heads * params.value_head_dim; }

  // The output and the log-sum-exps that the emulated kernels, or the CPU back-end, leave.
  cudaError_t run(bool emulated, Bytes& out, std::vector<float>& lse) {
    out = poison(params.query_dtype, num_outputs());
    lse.assign(static_cast<size_t>(params.num_tokens * params.num_heads),
               std::numeric_limits<float>::quiet_NaN());
    params.out = out.data();
    params.lse = lse.data();
    if (emulated) return cuda::paged_attention(params, nullptr);
    cpu::paged_attention(params);
    return cudaSuccess;
  }

 private:
  void set_sizes(const AttentionShape& shape) {
    PagedAttentionParams& p = params;
    p.query_dtype = shape.query_dtype;
    p.cache_dtype = shape.cache_dtype;
    p.num_seqs = static_cast<int64_t>(shape.context_lens.size());
    p.num_heads = shape.num_heads;
    p.num_kv_heads = shape.num_kv_heads;
    p.head_dim = shape.head_dim;
    p.value_head_dim = shape.value_head_dim > 0 ? shape.value_head_dim : shape.head_dim;
    p.block_size = shape.block_size;
    for (const int32_t len : shape.context_lens) {
      p.max_blocks_per_seq = std::max<int64_t>(p.max_blocks_per_seq, len / shape.block_size + 2);
    }
    for (const int32_t len : shape.query_lens) {
      query_start_loc.push_back(query_start_loc.back() + len);
      p.max_query_len = std::max<int64_t>(p.max_query_len, len);
    }
    p.num_tokens = query_start_loc.back() + 1;  // one row of padding
    p.num_blocks = p.num_seqs * p.max_blocks_per_seq;
    p.query_head_stride = p.head_dim;
    p.out_head_stride = p.value_head_dim;
    p.query_token_stride = p.num_heads * p.head_dim;
    p.out_token_stride = p.num_heads * p.value_head_dim;
    const int64_t gap = shape.unaligned ? 1 : 0;
    p.key_cache_head_stride = p.head_dim + gap;
    p.value_cache_head_stride = p.value_head_dim + gap;
    p.key_cache_token_stride = p.num_kv_heads * p.key_cache_head_stride;
    p.value_cache_token_stride = p.num_kv_heads * p.value_cache_head_stride;
    p.key_cache_block_stride = p.block_size * p.key_cache_token_stride;
    p.value_cache_block_stride = p.block_size * p.value_cache_token_stride;
    p.block_tables_seq_stride = p.max_blocks_per_seq;
  }

  void set_options(const AttentionShape& shape) {
    PagedAttentionParams& p = params;
    for (int64_t head_idx = 0; head_idx < p.num_heads; ++head_idx) {
      slopes.push_back(0.25f / static_cast<float>(1 + head_idx));
      sinks.push_back(0.5f * static_cast<float>(head_idx));
    }
    for (int64_t kv_head_idx = 0; kv_head_idx < p.num_kv_heads; ++kv_head_idx) {
      k_scale.push_back(0.125f * static_cast<float>(1 + kv_head_idx));
      v_scale.push_back(0.5f * static_cast<float>(1 + kv_head_idx));
    }
    p.softcap = shape.score_options ? 5.0f : 0.0f;
    const bool is_quantised = p.query_dtype != p.cache_dtype;
    p.k_scale_value = is_quantised ? 0.125f : 1.0f;
    p.v_scale_value = is_quantised ? 0.5f : 1.0f;
    p.softmax_scale = 0.125f;
    p.window = shape.window;
    p.split_size = shape.split_size;
    p.causal = shape.causal;
    p.max_tree = p.tree_mask_token_stride = shape.max_tree;
    for (int64_t i = 0; i < p.num_tokens * p.max_tree; ++i) {
      tree_mask.push_back(i % p.max_tree != HIDDEN_COLUMN && random_bits() % 2 != 0);
    }
  }

  // Blocks lie backwards in the pool.
  void fill_caches(const AttentionShape& shape) {
    PagedAttentionParams& p = params;
    query = random_elements(p.query_dtype, p.num_tokens * p.num_heads * p.head_dim);
    key_cache = poison(p.cache_dtype, p.num_blocks * p.key_cache_block_stride);
    value_cache = poison(p.cache_dtype, p.num_blocks * p.value_cache_block_stride);
    block_tables.assign(static_cast<size_t>(p.num_blocks), 1 << 30);
    for (int64_t seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
      const auto begin = kv_starts.empty() ? 0 : kv_starts[static_cast<size_t>(seq_idx)];
      const int64_t context_len = shape.context_lens[static_cast<size_t>(seq_idx)];
      for (int64_t token = begin; token < context_len; ++token) {
        const bool is_hidden = p.max_tree > 0 && token - (context_len - p.max_tree) == HIDDEN_COLUMN;
        const int64_t entry = seq_idx * p.max_blocks_per_seq + token / p.block_size;
        const int64_t block = p.num_blocks - 1 - entry, token_in_block = token % p.block_size;
        block_tables[static_cast<size_t>(entry)] = static_cast<int32_t>(block);
        for (int64_t kv_head_idx = 0; kv_head_idx < (is_hidden ? 0 : p.num_kv_heads); ++kv_head_idx) {
          const int64_t bytes = bytes_of(p.cache_dtype);
          const auto key = cache_offset(key_cache_strides(p), block, token_in_block, kv_head_idx);
          const auto value = cache_offset(value_cache_strides(p), block, token_in_block, kv_head_idx);
          fill_randomly(key_cache.data() + key * bytes, p.cache_dtype, p.head_dim);
          fill_randomly(value_cache.data() + value * bytes, p.cache_dtype, p.value_head_dim);
        }
      }
    }
  }

  void set_pointers(const AttentionShape& shape) {
    PagedAttentionParams& p = params;
    const bool one_token_each =
        std::all_of(shape.query_lens.begin(), shape.query_lens.end(), [](int32_t len) { return len == 1; });
    p.query = query.data();
    p.key_cache = key_cache.data();
    p.value_cache = value_cache.data();
    p.block_tables = block_tables.data();
    p.context_lens = context_lens.data();
    p.query_start_loc = one_token_each && p.max_tree == 0 ? nullptr : query_start_loc.data();
    if (p.query_start_loc == nullptr) p.num_tokens = p.num_seqs;
    p.kv_starts = kv_starts.empty() ? nullptr : kv_starts.data();
    p.tree_mask = p.max_tree == 0 ? nullptr : reinterpret_cast<const bool*>(tree_mask.data());
    p.alibi_slopes = shape.score_options ? slopes.data() : nullptr;
    p.sinks = shape.score_options ? sinks.data() : nullptr;
    p.k_scale = shape.scale_per_head ? k_scale.data() : nullptr;
    p.v_scale = shape.scale_per_head ? v_scale.data() : nullptr;
    p.scratch_context = &scratch;
    p.allocate_scratch = [](void* context, int64_t num_floats) {
      auto& scratch = *static_cast<std::vector<float>*>(context);
      scratch.assign(static_cast<size_t>(num_floats), std::numeric_limits<float>::quiet_NaN());
      return scratch.data();
    };
  }
};

inline bool is_close(float actual, float expected, float tolerance) {
  return actual == expected || std::fabs(actual - expected) <= tolerance;  // NaN is close to nothing
}

// The same up to rounding.
inline void check_close(const AttentionCase& attention, const Bytes& out, const std::vector<float>& lse,
                        const Bytes& expected_out, const std::vector<float>& expected_lse) {
  const PagedAttentionParams& p = attention.params;
  const float tolerance =
      p.query_dtype == DType::float32 ? 1e-4f : 0.1f;  // values are about 4, bfloat16 has 8 bits
  bool out_is_close = true, lse_is_close = true;
  for (int64_t i = 0; i < attention.num_outputs(); ++i) {
    out_is_close &=
        is_close(element_at(out, p.query_dtype, i), element_at(expected_out, p.query_dtype, i), tolerance);
  }
  for (size_t i = 0; i < lse.size(); ++i) lse_is_close &= is_close(lse[i], expected_lse[i], 0.02f);
  CHECK(out_is_close);
  CHECK(lse_is_close);
}

}  // namespace pagedkv::emulator
