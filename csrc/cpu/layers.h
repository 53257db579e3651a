// What lies between attention and linear layers in a Llama, for pagedkv.generation on the CPU: not operators
// of the package, but the passes over memory that cost most next to them when they are left to several
// others.
#pragma once

#include "common/dispatch.h"

namespace pagedkv::cpu {

// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight (Zhang and Sennrich 2019, "Root mean square layer
// normalization"), rounded before the product with the weight, as transformers does.
struct RmsNormParams {
  const void* x = nullptr;       // [num_rows, width]
  const void* weight = nullptr;  // [width]
  void* out = nullptr;           // [num_rows, width]
  DType dtype;
  int64_t num_rows, width, x_row_stride;
  float eps;
};
void rms_norm(const RmsNormParams& params);

// out[r] = silu(gate[r]) * up[r], gate being the first half of a row, in float32, rounded once (Shazeer 2020,
// "GLU variants improve transformer").
struct SiluAndMulParams {
  const void* gate_and_up = nullptr;  // [num_rows, 2 * width], contiguous
  void* out = nullptr;                // [num_rows, width]
  DType dtype;
  int64_t num_rows, width;
};
void silu_and_mul(const SiluAndMulParams& params);

}  // namespace pagedkv::cpu
