#include "bindings/checks.h"
#include "bindings/write_params.h"

namespace pagedkv::bindings {

namespace {

void check_positions(const Tensor& positions, int64_t max_position) {
  if (!indices_are_checked(positions)) return;
  const Tensor host = positions.cpu();
  const auto* position = host.const_data_ptr<int64_t>();
  for (int64_t token_idx = 0; token_idx < host.size(0); ++token_idx) {
    TORCH_CHECK_INDEX(position[token_idx] >= 0 && position[token_idx] < max_position, "positions[", token_idx,
                      "] is ", position[token_idx], ", outside the ", max_position, " rows of cos and sin");
  }
}

}  // namespace

static void rope_and_cache(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cos,
                           const Tensor& sin, const Tensor& positions, const Tensor& key_cache,
                           const Tensor& value_cache, const Tensor& slot_mapping, bool interleaved,
                           const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                           std::optional<double> k_scale_value, std::optional<double> v_scale_value) {
  check_same_dtype(query, "query", key, "key");
  TORCH_CHECK_TYPE(cos.scalar_type() == at::kFloat || cos.scalar_type() == query.scalar_type(),
                   "cos has dtype ", cos.scalar_type(), "; supported: float32 or query's ",
                   query.scalar_type());
  check_same_dtype(sin, "sin", cos, "cos");
  check_dtype(positions, "positions", at::kLong);
  check_device(query, "query", key_cache, "key_cache");
  check_device(cos, "cos", key_cache, "key_cache");
  check_device(sin, "sin", key_cache, "key_cache");
  check_device(positions, "positions", key_cache, "key_cache");
  check_layout(query, "query", "[num_tokens, num_heads, head_dim]");
  check_layout(cos, "cos", "[max_position, rotary_dim / 2]");
  check_layout(sin, "sin", "[max_position, rotary_dim / 2]");
  check_layout(positions, "positions", "[num_tokens]");
  check_size(sin, "sin", 0, cos.size(0), "max_position of cos");
  check_size(sin, "sin", 1, cos.size(1), "rotary_dim / 2 of cos");
  check_size(positions, "positions", 0, query.size(0), "num_tokens of query");

  RopeAndCacheParams params;
  // Checked and filled before anything is written: the query is rotated in place.
  params.write = write_params(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
                              k_scale_value, v_scale_value);
  check_size(query, "query", 0, key.size(0), "num_tokens of key");
  check_size(query, "query", 2, key.size(2), "head_dim of key");
  const int64_t rotary_dim = 2 * cos.size(1);
  TORCH_CHECK_VALUE(rotary_dim <= query.size(2), "cos is [max_position, ", cos.size(1),
                    "], that is rotary_dim ", rotary_dim, ", more than head_dim ", query.size(2));
  check_positions(positions, cos.size(0));
  if (query.size(0) == 0) return;

  params.query = query.mutable_data_ptr();
  params.cos = cos.const_data_ptr();
  params.sin = sin.const_data_ptr();
  params.positions = positions.const_data_ptr<int64_t>();
  params.table_dtype = dtype_of(cos, "cos");
  params.num_positions = query.size(0);
  params.num_heads = query.size(1);
  params.rotary_dim = rotary_dim;
  params.max_position = cos.size(0);
  params.query_token_stride = query.stride(0);
  params.query_head_stride = query.stride(1);
  params.cos_position_stride = cos.stride(0);
  params.sin_position_stride = sin.stride(0);
  params.interleaved = interleaved;
  cpu::rope_and_cache(params);
}

}  // namespace pagedkv::bindings

PAGEDKV_CPU_OP(
    rope_and_cache,
    "(Tensor(a!) query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor positions, "
    "Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor slot_mapping, bool interleaved, Tensor? k_scale, "
    "Tensor? v_scale, float? k_scale_value, float? v_scale_value) -> ()")
