#include "cpu/layers.h"

#include <ATen/ops/empty.h>

#include "bindings/checks.h"

namespace pagedkv::bindings {

static Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_float_dtype(x, "x");
  check_layout(x, "x", "[num_rows, width]");
  check_same_dtype(weight, "weight", x, "x");
  check_layout(weight, "weight", "[width]");
  check_size(weight, "weight", 0, x.size(1), "width of x");
  Tensor out = at::empty(x.sizes(), x.options());
  cpu::RmsNormParams params;
  params.x = x.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.dtype = dtype_of(x, "x");
  params.num_rows = x.size(0);
  params.width = x.size(1);
  params.x_row_stride = x.stride(0);
  params.eps = static_cast<float>(eps);
  cpu::rms_norm(params);
  return out;
}

static Tensor silu_and_mul(const Tensor& gate_and_up) {
  check_float_dtype(gate_and_up, "gate_and_up");
  check_layout(gate_and_up, "gate_and_up", "[num_rows, 2 * width]");
  TORCH_CHECK_VALUE(gate_and_up.is_contiguous() && gate_and_up.size(1) % 2 == 0,
                    "gate_and_up must be contiguous, with two halves of one width, got ",
                    gate_and_up.sizes());
  Tensor out = at::empty({gate_and_up.size(0), gate_and_up.size(1) / 2}, gate_and_up.options());
  cpu::SiluAndMulParams params;
  params.gate_and_up = gate_and_up.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.dtype = dtype_of(gate_and_up, "gate_and_up");
  params.num_rows = out.size(0);
  params.width = out.size(1);
  cpu::silu_and_mul(params);
  return out;
}

}  // namespace pagedkv::bindings

// Private to pagedkv.generation.layers.
TORCH_LIBRARY_FRAGMENT(PAGEDKV_NAMESPACE, m) {
  m.def("_rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("_silu_and_mul(Tensor gate_and_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(PAGEDKV_NAMESPACE, CPU, m) {
  m.impl("_rms_norm", &::pagedkv::bindings::rms_norm);
  m.impl("_silu_and_mul", &::pagedkv::bindings::silu_and_mul);
}
