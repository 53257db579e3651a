// What the two operators that write into a cache, reshape_and_cache and rope_and_cache, check and fill alike.
#pragma once

#include "bindings/checks.h"

namespace pagedkv::bindings {

inline ReshapeAndCacheParams write_params(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                          const Tensor& value_cache, const Tensor& slot_mapping,
                                          const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                          std::optional<double> k_scale_value,
                                          std::optional<double> v_scale_value) {
  check_float_dtype(key, "key");
  check_same_dtype(value, "value", key, "key");
  check_caches(key_cache, value_cache);
  const DType input_dtype = dtype_of(key, "key"), cache_dtype = dtype_of(key_cache, "key_cache");
  if (!is_quantised(cache_dtype)) check_same_dtype(key_cache, "key_cache", key, "key");
  check_dtype(slot_mapping, "slot_mapping", at::kLong);

  check_device(key, "key", key_cache, "key_cache");
  check_device(value, "value", key_cache, "key_cache");
  check_device(slot_mapping, "slot_mapping", key_cache, "key_cache");

  check_layout(key, "key", "[num_tokens, num_kv_heads, head_dim]");
  check_layout(value, "value", "[num_tokens, num_kv_heads, head_dim]");
  check_layout(slot_mapping, "slot_mapping", "[num_tokens]");

  check_size(key, "key", 1, key_cache.size(2), "num_kv_heads of key_cache");
  check_size(key, "key", 2, key_cache.size(3), "head_dim of key_cache");
  check_size(value, "value", 0, key.size(0), "num_tokens of key");
  check_size(value, "value", 1, key_cache.size(2), "num_kv_heads of value_cache");
  check_size(value, "value", 2, value_cache.size(3), "head_dim of value_cache");
  TORCH_CHECK_VALUE(slot_mapping.size(0) <= key.size(0), "slot_mapping has ", slot_mapping.size(0),
                    " entries, more than the ", key.size(0), " tokens of key");
  check_scales(key_cache, k_scale, k_scale_value, v_scale, v_scale_value);
  check_slots(slot_mapping, key_cache.size(0) * key_cache.size(1));

  ReshapeAndCacheParams params;
  params.key = key.const_data_ptr();
  params.value = value.const_data_ptr();
  params.key_cache = key_cache.mutable_data_ptr();
  params.value_cache = value_cache.mutable_data_ptr();
  params.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  params.k_scale = data_or_null<float>(k_scale);
  params.v_scale = data_or_null<float>(v_scale);
  params.k_scale_value = static_cast<float>(k_scale_value.value_or(1.0));
  params.v_scale_value = static_cast<float>(v_scale_value.value_or(1.0));
  params.input_dtype = input_dtype;
  params.cache_dtype = cache_dtype;
  params.num_tokens = slot_mapping.size(0);
  params.num_kv_heads = key_cache.size(2);
  params.head_dim = key_cache.size(3);
  params.value_head_dim = value_cache.size(3);
  params.num_blocks = key_cache.size(0);
  params.block_size = key_cache.size(1);
  params.key_token_stride = key.stride(0);
  params.key_head_stride = key.stride(1);
  params.value_token_stride = value.stride(0);
  params.value_head_stride = value.stride(1);
  params.key_cache_block_stride = key_cache.stride(0);
  params.key_cache_token_stride = key_cache.stride(1);
  params.key_cache_head_stride = key_cache.stride(2);
  params.value_cache_block_stride = value_cache.stride(0);
  params.value_cache_token_stride = value_cache.stride(1);
  params.value_cache_head_stride = value_cache.stride(2);
  return params;
}

}  // namespace pagedkv::bindings
