// Work: rows in parallel. A row's result does not depend on the others, nor on the instruction set.
#include "cpu/layers.h"

#include <bit>
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/vector_clones.h"

namespace pagedkv::cpu {

namespace {

constexpr int64_t MIN_ROWS_PER_THREAD = 16;

// exp(x), to 2 ulp, infinity from 2^128 on and at least 2^-126: 2^n * 2^f with n whole and |f| <= 1/2, 2^f by
// its Taylor series.
inline float bounded_exp(float x) {
  constexpr float LOG2_E = 1.44269504f, ROUNDER = 12582912.0f;  // 1.5 * 2^23: its ulp is 1
  float power = x * LOG2_E;
  power = power < -126.0f ? -126.0f : power > 128.0f ? 128.0f : power;
  const float rounded = power + ROUNDER;
  const float f = power - (rounded - ROUNDER);
  float y = 1.54035304e-4f;
  y = y * f + 1.33335581e-3f;
  y = y * f + 9.61812911e-3f;
  y = y * f + 5.55041087e-2f;
  y = y * f + 2.40226507e-1f;
  y = y * f + 6.93147181e-1f;
  y = y * f + 1.0f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(y) + (std::bit_cast<uint32_t>(rounded) << 23));
}

template <class T>
PAGEDKV_VECTOR_CLONES void rms_norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  constexpr int64_t LANES = 32;  // sums side by side, always the same ones
  float sums[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const float value = to_float(x[i + lane]);
      sums[lane] += value * value;
    }
  }
  float sum = 0.0f;
  for (; i < width; ++i) sum += to_float(x[i]) * to_float(x[i]);
  for (const float lane_sum : sums) sum += lane_sum;
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  for (i = 0; i < width; ++i) {
    out[i] = from_float<T>(to_float(from_float<T>(to_float(x[i]) * factor)) * to_float(weight[i]));
  }
}

template <class T>
PAGEDKV_VECTOR_CLONES void silu_and_mul_row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const float x = to_float(gate[i]);
    out[i] = from_float<T>(x / (1.0f + bounded_exp(-x)) * to_float(up[i]));
  }
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
  dispatch_float_dtype(p.dtype, [&]<class T>() {
    parallel_for(p.num_rows, MIN_ROWS_PER_THREAD, [&](int64_t row) {
      rms_norm_row(static_cast<const T*>(p.x) + row * p.x_row_stride, static_cast<const T*>(p.weight),
                   static_cast<T*>(p.out) + row * p.width, p.width, p.eps);
    });
  });
}

void silu_and_mul(const SiluAndMulParams& p) {
  dispatch_float_dtype(p.dtype, [&]<class T>() {
    parallel_for(p.num_rows, MIN_ROWS_PER_THREAD, [&](int64_t row) {
      const auto* gate = static_cast<const T*>(p.gate_and_up) + 2 * row * p.width;
      silu_and_mul_row(gate, gate + p.width, static_cast<T*>(p.out) + row * p.width, p.width);
    });
  });
}

}  // namespace pagedkv::cpu
