// The softmax states of a decode CTA: one a warp while it goes through its keys, merged to one a CTA.
#pragma once

#include "cuda/paged_attention/plan.h"
#include "cuda/paged_attention/state.h"

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
    float tile_max[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 2; ++e) tile_max[nt][e] = fmaxf(score[nt][e], score[nt][e + 2]);
    }
    // All rows together: the shuffles of one do not wait for another's.
#pragma unroll
    for (int lanes = 4; lanes < WARP_THREADS; lanes *= 2) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        for (int e = 0; e < 2; ++e) {
          tile_max[nt][e] = fmaxf(tile_max[nt][e], __shfl_xor_sync(FULL_WARP, tile_max[nt][e], lanes));
        }
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (tile_max[nt][e] > max[nt][e]) {
          const float factor = exp2_approx(max[nt][e] - tile_max[nt][e]);  // 0 where there was no maximum
          max[nt][e] = tile_max[nt][e];
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
};

// Folds the warps' states of a chunk, of num_dims value dimensions, into the CTA's; what was in `warps` is
// lost. A barrier must precede it and follow it.
PAGEDKV_DEVICE void fold_warps(const SharedStates& warps, int num_warps, const SharedStates& cta,
                               int num_rows, int num_dims, bool is_first) {
  // First the rows' maxima and sums. The factors of their values take the place of the warps' maxima, those
  // of the fold that of their sums.
  float *factors = warps.max, *old_factors = warps.sum, *new_factors = warps.sum + warps.rows;
#pragma unroll 1
  for (int row = threadIdx.x; row < num_rows; row += blockDim.x) {
    float max = NEGATIVE_INFINITY, sum = 0.0f;
    for (int warp = 0; warp < num_warps; ++warp) max = fmaxf(max, warps.max[warp * warps.rows + row]);
    for (int warp = 0; warp < num_warps; ++warp) {
      // A warp that saw no key has zeros; one that saw only NaN keys has the same maximum and must show them.
      const int i = warp * warps.rows + row;
      factors[i] = warps.max[i] == NEGATIVE_INFINITY ? 0.0f : exp2_approx(warps.max[i] - max);
      sum = fmaf(warps.sum[i], factors[i], sum);
    }
    const Fold fold = fold_of(is_first ? NEGATIVE_INFINITY : cta.max[row], max);
    cta.sum[row] = folded(fold, is_first ? 0.0f : cta.sum[row], sum);
    cta.max[row] = fold.max;
    old_factors[row] = fold.old_factor;
    new_factors[row] = fold.new_factor;
  }
  __syncthreads();
#pragma unroll 2
  for (int i = threadIdx.x; i < num_rows * num_dims; i += blockDim.x) {
    const int row = i / num_dims, place = row * warps.row_stride + i % num_dims;
    float acc = 0.0f;
    for (int warp = 0; warp < num_warps; ++warp) {
      acc = fmaf(warps.acc[warp * warps.rows * warps.row_stride + place], factors[warp * warps.rows + row],
                 acc);
    }
    const Fold fold{0.0f, old_factors[row], new_factors[row]};
    cta.acc[place] = folded(fold, is_first ? 0.0f : cta.acc[place], acc);
  }
}

}  // namespace pagedkv::cuda
