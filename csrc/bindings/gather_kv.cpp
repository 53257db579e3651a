#include <ATen/ops/empty.h>
#include <sys/mman.h>

#include "bindings/checks.h"

namespace pagedkv::bindings {

namespace {

// sum(max(0, context_len - kv_start)); synchronises where the lengths are on a device.
int64_t count_tokens(const Tensor& context_lens, const OptionalTensor& kv_starts) {
  const Tensor lens = context_lens.cpu();
  const Tensor starts = kv_starts.has_value() ? kv_starts->cpu() : Tensor();
  int64_t total = 0;
  for (int64_t seq_idx = 0; seq_idx < lens.size(0); ++seq_idx) {
    const int64_t start = starts.defined() ? std::max(0, starts.const_data_ptr<int32_t>()[seq_idx]) : 0;
    total += std::max<int64_t>(0, lens.const_data_ptr<int32_t>()[seq_idx] - start);
  }
  return total;
}

// An output of gather_kv. Its pages are touched for the first time by the kernel, which for small pages takes
// longer than the copy.
Tensor empty_rows(int64_t num_tokens, const Tensor& cache, const at::TensorOptions& options) {
  Tensor rows = at::empty({num_tokens, cache.size(2), cache.size(3)}, options);
  if (rows.is_cpu()) {
    constexpr uintptr_t HUGE_PAGE_BYTES = 2 << 20;
    const auto begin = reinterpret_cast<uintptr_t>(rows.mutable_data_ptr());
    const uintptr_t aligned = (begin + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    const uintptr_t end = (begin + rows.nbytes()) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    // Advice: where it is not taken, nothing else changes.
    if (aligned < end) madvise(reinterpret_cast<void*>(aligned), end - aligned, MADV_HUGEPAGE);
  }
  return rows;
}

}  // namespace

static std::tuple<Tensor, Tensor> gather_kv(
    const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
    const Tensor& context_lens, const OptionalTensor& kv_starts, std::optional<int64_t> total_tokens,
    const OptionalTensor& k_scale, const OptionalTensor& v_scale, std::optional<double> k_scale_value,
    std::optional<double> v_scale_value, std::optional<at::ScalarType> dtype) {
  check_caches(key_cache, value_cache);
  check_tables(block_tables, context_lens, kv_starts, key_cache);
  check_scales(key_cache, k_scale, k_scale_value, v_scale, v_scale_value);
  const bool quantised = is_quantised(dtype_of(key_cache, "key_cache"));
  const at::ScalarType out_dtype = dtype.value_or(quantised ? at::kFloat : key_cache.scalar_type());
  TORCH_CHECK_TYPE(out_dtype == at::kHalf || out_dtype == at::kBFloat16 || out_dtype == at::kFloat,
                   "dtype is ", out_dtype, "; supported: float16, bfloat16, float32");
  const bool checked = indices_are_checked(context_lens);
  if (checked) {
    const Tensor starts = kv_starts.has_value() ? kv_starts->cpu() : Tensor();
    check_needed_blocks(
        block_tables, context_lens, key_cache.size(1), key_cache.size(0),
        [&](int64_t seq_idx) { return starts.defined() ? starts.const_data_ptr<int32_t>()[seq_idx] : 0; });
  }
  TORCH_CHECK_VALUE(!total_tokens.has_value() || *total_tokens >= 0, "total_tokens is ", *total_tokens,
                    "; it must not be negative");
  if (checked || !total_tokens.has_value()) {
    const int64_t counted = count_tokens(context_lens, kv_starts);
    TORCH_CHECK_VALUE(!total_tokens.has_value() || *total_tokens == counted, "total_tokens is ",
                      *total_tokens, ", but context_lens and kv_starts add up to ", counted);
    total_tokens = counted;
  }

  const auto options = key_cache.options().dtype(out_dtype);
  Tensor key = empty_rows(*total_tokens, key_cache, options);
  Tensor value = empty_rows(*total_tokens, value_cache, options);
  const Tensor token_offsets = at::empty({context_lens.size(0) + 1}, key_cache.options().dtype(at::kLong));
  if (*total_tokens == 0) return {key, value};

  GatherKvParams params;
  params.key_cache = key_cache.const_data_ptr();
  params.value_cache = value_cache.const_data_ptr();
  params.block_tables = block_tables.const_data_ptr<int32_t>();
  params.context_lens = context_lens.const_data_ptr<int32_t>();
  params.kv_starts = data_or_null<int32_t>(kv_starts);
  params.key = key.mutable_data_ptr();
  params.value = value.mutable_data_ptr();
  params.token_offsets = token_offsets.mutable_data_ptr<int64_t>();
  params.k_scale = data_or_null<float>(k_scale);
  params.v_scale = data_or_null<float>(v_scale);
  params.k_scale_value = static_cast<float>(k_scale_value.value_or(1.0));
  params.v_scale_value = static_cast<float>(v_scale_value.value_or(1.0));
  params.cache_dtype = dtype_of(key_cache, "key_cache");
  params.out_dtype = dtype_of(key, "key");
  params.total_tokens = *total_tokens;
  params.num_seqs = context_lens.size(0);
  params.num_kv_heads = key_cache.size(2);
  params.head_dim = key_cache.size(3);
  params.value_head_dim = value_cache.size(3);
  params.num_blocks = key_cache.size(0);
  params.block_size = key_cache.size(1);
  params.max_blocks_per_seq = block_tables.size(1);
  params.block_tables_seq_stride = block_tables.stride(0);
  params.key_cache_block_stride = key_cache.stride(0);
  params.key_cache_token_stride = key_cache.stride(1);
  params.key_cache_head_stride = key_cache.stride(2);
  params.value_cache_block_stride = value_cache.stride(0);
  params.value_cache_token_stride = value_cache.stride(1);
  params.value_cache_head_stride = value_cache.stride(2);
  PAGEDKV_RUN(gather_kv, key_cache.device(), params);
  return {key, value};
}

}  // namespace pagedkv::bindings

PAGEDKV_OP(
    gather_kv,
    "(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor context_lens, Tensor? kv_starts, "
    "SymInt? total_tokens, Tensor? k_scale, Tensor? v_scale, float? k_scale_value, float? v_scale_value, "
    "ScalarType? dtype) -> (Tensor key, Tensor value)")
