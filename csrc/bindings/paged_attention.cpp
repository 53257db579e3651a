#include <ATen/ops/empty.h>

#include <cmath>

#include "bindings/checks.h"

namespace pagedkv::bindings {

namespace {

// query_start_loc starts at 0, never falls and ends at most at num_tokens.
void check_query_start_loc(const Tensor& query_start_loc, int64_t num_tokens, int64_t max_query_len) {
  const Tensor host = query_start_loc.cpu();
  const auto* start = host.const_data_ptr<int32_t>();
  const int64_t num_seqs = host.size(0) - 1;
  TORCH_CHECK_VALUE(start[0] == 0, "query_start_loc[0] is ", start[0], "; it must be 0");
  for (int64_t seq_idx = 0; seq_idx < num_seqs; ++seq_idx) {
    const int64_t query_len = static_cast<int64_t>(start[seq_idx + 1]) - start[seq_idx];
    TORCH_CHECK_VALUE(query_len >= 0, "query_start_loc[", seq_idx + 1, "] is ", start[seq_idx + 1],
                      ", less than the ", start[seq_idx], " before it; it must never fall");
    TORCH_CHECK_VALUE(query_len <= max_query_len, "max_query_len is ", max_query_len, ", but sequence ",
                      seq_idx, " has ", query_len, " query tokens");
  }
  TORCH_CHECK_VALUE(start[num_seqs] <= num_tokens, "query_start_loc ends at ", start[num_seqs], ", past the ",
                    num_tokens, " tokens of query");
}

// The first key that any row of each sequence may see; sequences without a row need none.
void check_indices(const PagedAttentionParams& params, const Tensor& block_tables, const Tensor& context_lens,
                   const OptionalTensor& query_start_loc, const OptionalTensor& kv_starts) {
  const Tensor lens = context_lens.cpu();
  const Tensor starts = kv_starts.has_value() ? kv_starts->cpu() : Tensor();
  const Tensor query_starts = query_start_loc.has_value() ? query_start_loc->cpu() : Tensor();
  check_needed_blocks(
      block_tables, context_lens, params.block_size, params.num_blocks, [&](int64_t seq_idx) -> int64_t {
        const int64_t context_len = lens.const_data_ptr<int32_t>()[seq_idx];
        int64_t query_len = 1;
        if (query_starts.defined()) {
          const auto* start = query_starts.const_data_ptr<int32_t>() + seq_idx;
          query_len = start[1] - start[0];
        }
        if (query_len == 0) return context_len;
        const int64_t kv_start = starts.defined() ? starts.const_data_ptr<int32_t>()[seq_idx] : 0;
        if (params.window == NO_WINDOW) return kv_start;
        return std::max(kv_start, context_len - query_len - params.window + 1);
      });
}

// Memory for the partial results of CTAs that share a row: a tensor, which outlives the call's launches
// because the caching allocator hands memory out again in stream order.
struct Scratch {
  at::TensorOptions options;
  Tensor tensor;

  static float* allocate(void* context, int64_t num_floats) {
    auto* scratch = static_cast<Scratch*>(context);
    scratch->tensor = at::empty({num_floats}, scratch->options);
    return scratch->tensor.mutable_data_ptr<float>();
  }
};

}  // namespace

static void paged_attention(const Tensor& query, const Tensor& block_tables, const Tensor& key_cache,
                            const Tensor& value_cache, const Tensor& context_lens, const Tensor& out,
                            const OptionalTensor& lse, const OptionalTensor& query_start_loc,
                            int64_t max_query_len, double softmax_scale, bool causal,
                            std::optional<int64_t> window, double softcap, const OptionalTensor& alibi_slopes,
                            const OptionalTensor& sinks, const OptionalTensor& k_scale,
                            const OptionalTensor& v_scale, std::optional<double> k_scale_value,
                            std::optional<double> v_scale_value, const OptionalTensor& kv_starts,
                            const OptionalTensor& tree_mask, std::optional<int64_t> split_size) {
  check_float_dtype(query, "query");
  check_caches(key_cache, value_cache);
  const DType cache_dtype = dtype_of(key_cache, "key_cache");
  if (!is_quantised(cache_dtype)) check_same_dtype(key_cache, "key_cache", query, "query");
  check_same_dtype(out, "out", query, "query");
  check_device(query, "query", key_cache, "key_cache");
  check_device(out, "out", key_cache, "key_cache");
  check_layout(query, "query", "[num_tokens, num_heads, head_dim]");
  check_layout(out, "out", "[num_tokens, num_heads, value_head_dim]");
  const int64_t num_tokens = query.size(0), num_heads = query.size(1), num_kv_heads = key_cache.size(2);
  check_size(query, "query", 2, key_cache.size(3), "head_dim of key_cache");
  check_attention_head_dim(key_cache.size(3), "key_cache");
  check_attention_head_dim(value_cache.size(3), "value_cache");
  TORCH_CHECK_VALUE(num_heads >= 1 && num_heads % num_kv_heads == 0, "query has ", num_heads,
                    " heads and key_cache ", num_kv_heads, "; num_heads must be a multiple of num_kv_heads");
  check_size(out, "out", 0, num_tokens, "num_tokens of query");
  check_size(out, "out", 1, num_heads, "num_heads of query");
  check_size(out, "out", 2, value_cache.size(3), "head_dim of value_cache");

  check_tables(block_tables, context_lens, kv_starts, key_cache);
  const int64_t num_seqs = block_tables.size(0);
  if (query_start_loc.has_value()) {
    check_vector(*query_start_loc, "query_start_loc", at::kInt, num_seqs + 1, "[num_seqs + 1]", query,
                 "query");
  } else {
    check_size(query, "query", 0, num_seqs,
               "num_seqs of block_tables (one query token per sequence without query_start_loc)");
  }
  if (lse.has_value()) {
    check_dtype(*lse, "lse", at::kFloat);
    check_device(*lse, "lse", query, "query");
    check_layout(*lse, "lse", "[num_tokens, num_heads]");
    check_size(*lse, "lse", 0, num_tokens, "num_tokens of query");
    check_size(*lse, "lse", 1, num_heads, "num_heads of query");
    TORCH_CHECK_VALUE(lse->is_contiguous(), "lse must be contiguous, got the strides ", lse->strides());
  }
  if (alibi_slopes.has_value()) {
    check_vector(*alibi_slopes, "alibi_slopes", at::kFloat, num_heads, "[num_heads]", query, "query");
  }
  if (sinks.has_value()) check_vector(*sinks, "sinks", at::kFloat, num_heads, "[num_heads]", query, "query");
  if (tree_mask.has_value()) {
    TORCH_CHECK_VALUE(causal,
                      "tree_mask replaces causality among the last keys, so it cannot go with causal=False");
    check_dtype(*tree_mask, "tree_mask", at::kBool);
    check_device(*tree_mask, "tree_mask", query, "query");
    check_layout(*tree_mask, "tree_mask", "[num_tokens, max_tree]");
    check_size(*tree_mask, "tree_mask", 0, num_tokens, "num_tokens of query");
  }
  check_scales(key_cache, k_scale, k_scale_value, v_scale, v_scale_value);
  TORCH_CHECK_VALUE(
      !window.has_value() || *window >= 1, "window is ", *window,
      "; it counts the keys a query sees, itself included, so it must be at least 1 (None: all)");
  TORCH_CHECK_VALUE(!split_size.has_value() || *split_size >= 1, "split_size is ", *split_size,
                    "; it must be at least 1 (None: chosen for speed)");
  const auto float_softcap = static_cast<float>(softcap);
  TORCH_CHECK_VALUE(softcap == 0 || (float_softcap > 0 && std::isfinite(float_softcap)), "softcap is ",
                    softcap, "; it must be 0 (off) or a positive number that float32 can hold");

  PagedAttentionParams params;
  params.query = query.const_data_ptr();
  params.key_cache = key_cache.const_data_ptr();
  params.value_cache = value_cache.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.lse = lse.has_value() ? lse->mutable_data_ptr<float>() : nullptr;
  params.block_tables = block_tables.const_data_ptr<int32_t>();
  params.context_lens = context_lens.const_data_ptr<int32_t>();
  params.query_start_loc = data_or_null<int32_t>(query_start_loc);
  params.kv_starts = data_or_null<int32_t>(kv_starts);
  params.tree_mask = data_or_null<bool>(tree_mask);
  params.alibi_slopes = data_or_null<float>(alibi_slopes);
  params.sinks = data_or_null<float>(sinks);
  params.k_scale = data_or_null<float>(k_scale);
  params.v_scale = data_or_null<float>(v_scale);
  params.k_scale_value = static_cast<float>(k_scale_value.value_or(1.0));
  params.v_scale_value = static_cast<float>(v_scale_value.value_or(1.0));
  params.query_dtype = dtype_of(query, "query");
  params.cache_dtype = cache_dtype;
  params.num_tokens = num_tokens;
  params.num_seqs = num_seqs;
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim = key_cache.size(3);
  params.value_head_dim = value_cache.size(3);
  params.num_blocks = key_cache.size(0);
  params.block_size = key_cache.size(1);
  params.max_blocks_per_seq = block_tables.size(1);
  params.max_query_len = query_start_loc.has_value() ? std::min(max_query_len, num_tokens) : 1;
  params.max_tree = tree_mask.has_value() ? tree_mask->size(1) : 0;
  params.query_token_stride = query.stride(0);
  params.query_head_stride = query.stride(1);
  params.key_cache_block_stride = key_cache.stride(0);
  params.key_cache_token_stride = key_cache.stride(1);
  params.key_cache_head_stride = key_cache.stride(2);
  params.value_cache_block_stride = value_cache.stride(0);
  params.value_cache_token_stride = value_cache.stride(1);
  params.value_cache_head_stride = value_cache.stride(2);
  params.out_token_stride = out.stride(0);
  params.out_head_stride = out.stride(1);
  params.block_tables_seq_stride = block_tables.stride(0);
  params.tree_mask_token_stride = tree_mask.has_value() ? tree_mask->stride(0) : 0;
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.softcap = float_softcap;
  // Positions are int32, so a wider window sees everything, and sums with it cannot overflow.
  constexpr int64_t WIDEST_WINDOW = std::numeric_limits<int32_t>::max();
  params.window = window.has_value() && *window <= WIDEST_WINDOW ? *window : NO_WINDOW;
  params.split_size = split_size.value_or(0);
  params.causal = causal;

  if (indices_are_checked(context_lens)) {
    if (query_start_loc.has_value())
      check_query_start_loc(*query_start_loc, num_tokens, params.max_query_len);
    check_indices(params, block_tables, context_lens, query_start_loc, kv_starts);
  }
  if (num_tokens == 0) return;
  Scratch scratch{query.options().dtype(at::kFloat), {}};
  params.allocate_scratch = &Scratch::allocate;
  params.scratch_context = &scratch;
  PAGEDKV_RUN(paged_attention, query.device(), params);
}

}  // namespace pagedkv::bindings

PAGEDKV_OP(
    paged_attention,
    "(Tensor query, Tensor block_tables, Tensor key_cache, Tensor value_cache, Tensor context_lens, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor? query_start_loc, SymInt max_query_len, float softmax_scale, "
    "bool causal, SymInt? window, float softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, "
    "Tensor? v_scale, float? k_scale_value, float? v_scale_value, Tensor? kv_starts, Tensor? tree_mask, "
    "SymInt? split_size) -> ()")
