#include <ATen/ops/empty.h>

#include "bindings/checks.h"

namespace pagedkv::bindings {

static std::tuple<Tensor, Tensor> merge_attn_states(const Tensor& out_a, const Tensor& lse_a,
                                                    const Tensor& out_b, const Tensor& lse_b) {
  check_float_dtype(out_a, "out_a");
  check_same_dtype(out_b, "out_b", out_a, "out_a");
  check_dtype(lse_a, "lse_a", at::kFloat);
  check_dtype(lse_b, "lse_b", at::kFloat);
  check_device(lse_a, "lse_a", out_a, "out_a");
  check_device(out_b, "out_b", out_a, "out_a");
  check_device(lse_b, "lse_b", out_a, "out_a");
  check_layout(out_a, "out_a", "[num_tokens, num_heads, head_dim]");
  check_layout(out_b, "out_b", "[num_tokens, num_heads, head_dim]");
  check_layout(lse_a, "lse_a", "[num_tokens, num_heads]");
  check_layout(lse_b, "lse_b", "[num_tokens, num_heads]");
  check_size(out_b, "out_b", 0, out_a.size(0), "num_tokens of out_a");
  check_size(out_b, "out_b", 1, out_a.size(1), "num_heads of out_a");
  check_size(out_b, "out_b", 2, out_a.size(2), "head_dim of out_a");
  check_size(lse_a, "lse_a", 0, out_a.size(0), "num_tokens of out_a");
  check_size(lse_a, "lse_a", 1, out_a.size(1), "num_heads of out_a");
  check_size(lse_b, "lse_b", 0, out_a.size(0), "num_tokens of out_a");
  check_size(lse_b, "lse_b", 1, out_a.size(1), "num_heads of out_a");

  Tensor out = at::empty(out_a.sizes(), out_a.options());
  Tensor lse = at::empty(lse_a.sizes(), lse_a.options());
  if (lse.numel() == 0) return {out, lse};

  MergeAttnStatesParams params;
  params.out_a = out_a.const_data_ptr();
  params.out_b = out_b.const_data_ptr();
  params.lse_a = lse_a.const_data_ptr<float>();
  params.lse_b = lse_b.const_data_ptr<float>();
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr<float>();
  params.dtype = dtype_of(out_a, "out_a");
  params.num_tokens = out_a.size(0);
  params.num_heads = out_a.size(1);
  params.head_dim = out_a.size(2);
  params.out_a_token_stride = out_a.stride(0);
  params.out_a_head_stride = out_a.stride(1);
  params.out_b_token_stride = out_b.stride(0);
  params.out_b_head_stride = out_b.stride(1);
  params.lse_a_token_stride = lse_a.stride(0);
  params.lse_b_token_stride = lse_b.stride(0);
  PAGEDKV_RUN(merge_attn_states, out_a.device(), params);
  return {out, lse};
}

}  // namespace pagedkv::bindings

PAGEDKV_OP(merge_attn_states,
           "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)")
