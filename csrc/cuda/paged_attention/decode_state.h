// The softmax states of a decode CTA: one a warp while it goes through its keys, merged to one a CTA.
#pragma once

#include "cuda/paged_attention/state.h"
#include "cuda/primitives.h"

namespace pagedkv::cuda {

// A warp's state of 8 * NT rows and 16 * K_STEPS value dimensions, as accumulators of O^T: per lane, with
// g = lane / 4 and q = lane % 4, rows 2q and 2q + 1 of each 8 and dimensions g and g + 8 of each 16.
template <int K_STEPS, int NT>
struct WarpState {
  float acc[K_STEPS][NT][4];
  float max[NT][2], sum[NT][2];

  PAGEDKV_DEVICE void clear() {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      max[nt][0] = max[nt][1] = NEGATIVE_INFINITY;
      sum[nt][0] = sum[nt][1] = 0.0f;
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step) {
        for (int e = 0; e < 4; ++e) acc[step][nt][e] = 0.0f;
      }
    }
  }

  // Scores become weights; what was summed before is rescaled where a row's maximum rose.
  PAGEDKV_DEVICE void weigh(float (&score)[NT][4]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float tile_max = fmaxf(score[nt][e], score[nt][e + 2]);
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL_WARP, tile_max, lanes));
        }
        if (tile_max > max[nt][e]) {
          const float factor = max[nt][e] == NEGATIVE_INFINITY ? 0.0f : exp2_approx(max[nt][e] - tile_max);
          max[nt][e] = tile_max;
          sum[nt][e] *= factor;
#pragma unroll
          for (int step = 0; step < K_STEPS; ++step) {
            acc[step][nt][e] *= factor;
            acc[step][nt][e + 2] *= factor;
          }
        }
        // A row that has seen nothing yet has only scores of -inf, and -inf - -inf is NaN.
        const float base = max[nt][e] == NEGATIVE_INFINITY ? 0.0f : max[nt][e];
        score[nt][e] = exp2_approx(score[nt][e] - base);
        score[nt][e + 2] = exp2_approx(score[nt][e + 2] - base);
        sum[nt][e] += score[nt][e] + score[nt][e + 2];
      }
    }
  }
};

// Several warps' states in shared memory: acc [num_warps, rows, row_stride], max and sum [num_warps, rows].
struct SharedStates {
  float *acc, *max, *sum;
  int rows, row_stride;

  PAGEDKV_DEVICE SharedStates(unsigned char* memory, int num_warps, int num_rows, int acc_row_stride)
      : acc(reinterpret_cast<float*>(memory)),
        max(acc + num_warps * num_rows * acc_row_stride),
        sum(max + num_warps * num_rows),
        rows(num_rows),
        row_stride(acc_row_stride) {}

  // Of all warps, for one row.
  PAGEDKV_DEVICE float merged_max(int num_warps, int row) const {
    float merged = NEGATIVE_INFINITY;
    for (int warp = 0; warp < num_warps; ++warp) merged = fmaxf(merged, max[warp * rows + row]);
    return merged;
  }

  // The sum of what the warps have at `values` + warp * stride, weighed by their maxima of a row.
  PAGEDKV_DEVICE float merged(int num_warps, int row, float merged_max, const float* values,
                              int stride) const {
    float total = 0.0f;
    for (int warp = 0; warp < num_warps; ++warp) {
      // A warp that saw no key has zeros; one that saw only NaN keys has the same maximum and must show them.
      const float warp_max = max[warp * rows + row];
      const float factor = warp_max == NEGATIVE_INFINITY ? 0.0f : exp2_approx(warp_max - merged_max);
      total = fmaf(values[warp * stride], factor, total);
    }
    return total;
  }
};

// Folds the warps' states of a chunk into the CTA's. A barrier must precede it and follow it.
PAGEDKV_DEVICE void fold_warps(const SharedStates& warps, int num_warps, const SharedStates& cta,
                               int num_rows, bool is_first) {
  const int row_stride = warps.row_stride;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * row_stride; i += blockDim.x) {
    const int row = i / row_stride;
    const float max = warps.merged_max(num_warps, row);
    const float acc = warps.merged(num_warps, row, max, warps.acc + i, warps.rows * row_stride);
    const Fold fold = fold_of(is_first ? NEGATIVE_INFINITY : cta.max[row], max);
    cta.acc[i] = folded(fold, is_first ? 0.0f : cta.acc[i], acc);
  }
  __syncthreads();
#pragma unroll 1
  for (int row = threadIdx.x; row < num_rows; row += blockDim.x) {
    const float max = warps.merged_max(num_warps, row);
    const float sum = warps.merged(num_warps, row, max, warps.sum + row, warps.rows);
    const Fold fold = fold_of(is_first ? NEGATIVE_INFINITY : cta.max[row], max);
    cta.sum[row] = folded(fold, is_first ? 0.0f : cta.sum[row], sum);
    cta.max[row] = fold.max;
  }
}

}  // namespace pagedkv::cuda
