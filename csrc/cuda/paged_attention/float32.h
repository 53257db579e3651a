// Attention for float32 queries, by plain multiply-adds: tensor cores would round to tf32.
//
// Work: a CTA has one (query token, head) and all of its keys, TILE_TOKENS at a time: two threads score a
// key, then each thread sums its value dimensions over the tile's keys. Tiles lie at absolute multiples of
// TILE_TOKENS and are folded in order, so every split_size gives the same bits. Bytes: K and V once per query
// head.
#pragma once

#include "cuda/paged_attention/plan.h"
#include "cuda/paged_attention/state.h"

namespace pagedkv::cuda {

inline constexpr int MAX_HEAD_DIM = 256;
inline constexpr int DIMS_PER_THREAD = MAX_HEAD_DIM / CTA_THREADS;

struct Float32Shared {
  int64_t block[TILE_TOKENS];
  float query[MAX_HEAD_DIM];
  float score[TILE_TOKENS];
};

// An element of the cache: float32, or one byte of the dtype that is known at run time.
template <int CACHE_BYTES>
PAGEDKV_DEVICE float cache_element(const void* cache, int64_t offset, DType dtype) {
  if constexpr (CACHE_BYTES == 4) {
    return static_cast<const float*>(cache)[offset];
  } else {
    const uint8_t bits = static_cast<const uint8_t*>(cache)[offset];
    if (dtype == DType::int8) return to_float(static_cast<int8_t>(bits));
    return dtype == DType::float8_e4m3fn ? to_float(float8_e4m3fn{bits}) : to_float(float8_e5m2{bits});
  }
}

// Two neighbouring threads score a key, half of head_dim each.
template <int CACHE_BYTES>
PAGEDKV_DEVICE void score_keys(const PagedAttentionParams& p, const RowMask& mask, const Piece& piece,
                               int64_t head_idx, int32_t tile_begin, Float32Shared& shared) {
  static_assert(CTA_THREADS == 2 * TILE_TOKENS);
  const int i = threadIdx.x / 2, half = threadIdx.x % 2;
  const int32_t token = tile_begin + i;
  const int64_t block = mask.visible(token) ? block_of_token(p, piece.seq_idx, token) : -1;
  float sum = 0.0f;
  if (block >= 0) {
    const int64_t key = cache_offset(key_cache_strides(p), block, token % p.block_size, piece.kv_head_idx);
    const int64_t dims = p.head_dim / 2;
    for (int64_t dim = half * dims; dim < (half + 1) * dims; ++dim) {
      sum = fmaf(shared.query[dim], cache_element<CACHE_BYTES>(p.key_cache, key + dim, p.cache_dtype), sum);
    }
  }
  sum += __shfl_xor_sync(FULL_WARP, sum, 1);
  if (half != 0) return;
  float score = NEGATIVE_INFINITY;
  if (block >= 0) {
    score = sum * p.softmax_scale * scale_of(p.k_scale, p.k_scale_value, piece.kv_head_idx);
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (p.alibi_slopes != nullptr) {
      score += p.alibi_slopes[head_idx] * static_cast<float>(token - mask.position);
    }
  }
  shared.block[i] = block;
  shared.score[i] = score;
}

template <int CACHE_BYTES>
__global__ void __launch_bounds__(CTA_THREADS) float32_kernel(const AttentionLaunch launch) {
  PAGEDKV_SHARED(shared_bytes);
  auto& shared = *reinterpret_cast<Float32Shared*>(shared_bytes);
  const PagedAttentionParams& p = launch.p;
  fill_padding<float>(p);
  Piece piece;
  piece.kv_head_idx = blockIdx.x % p.num_kv_heads;
  if (!find_row_tile(launch, static_cast<int>(blockIdx.x / p.num_kv_heads), piece)) return;
  const int64_t query_idx = piece.row_begin / launch.group, token_idx = piece.query_begin + query_idx;
  const int64_t head_idx = piece.kv_head_idx * launch.group + piece.row_begin % launch.group;
  const auto* query =
      static_cast<const float*>(p.query) + token_idx * p.query_token_stride + head_idx * p.query_head_stride;
  for (int64_t dim = threadIdx.x; dim < p.head_dim; dim += CTA_THREADS) shared.query[dim] = query[dim];
  __syncthreads();

  const RowMask mask = row_mask(p, piece.seq_idx, piece.query_len, query_idx, token_idx);
  float max = NEGATIVE_INFINITY, sum = 0.0f, acc[DIMS_PER_THREAD] = {};
  for (int32_t tile_begin = mask.begin / TILE_TOKENS * TILE_TOKENS; tile_begin < mask.end;
       tile_begin += TILE_TOKENS) {
    score_keys<CACHE_BYTES>(p, mask, piece, head_idx, tile_begin, shared);
    __syncthreads();
    float tile_max = NEGATIVE_INFINITY;
    for (int i = 0; i < TILE_TOKENS; ++i) tile_max = fmaxf(tile_max, shared.score[i]);
    // In natural units: a product with log2(e) would cost large scores a digit.
    const float new_max = fmaxf(max, tile_max);
    const float factor = max == NEGATIVE_INFINITY ? 0.0f : expf(max - new_max);
    max = new_max;
    sum *= factor;
    for (float& element : acc) element *= factor;
    for (int i = 0; i < TILE_TOKENS; ++i) {
      if (shared.block[i] < 0) continue;  // its slot is not read: it may hold NaN, and 0 * NaN is NaN
      const float weight = expf(shared.score[i] - (max == NEGATIVE_INFINITY ? 0.0f : max));
      sum += weight;
      const int64_t value = cache_offset(value_cache_strides(p), shared.block[i],
                                         (tile_begin + i) % p.block_size, piece.kv_head_idx);
      for (int j = 0; j < DIMS_PER_THREAD; ++j) {
        const int64_t dim = threadIdx.x + j * CTA_THREADS;
        if (dim >= p.value_head_dim) continue;
        acc[j] = fmaf(weight, cache_element<CACHE_BYTES>(p.value_cache, value + dim, p.cache_dtype), acc[j]);
      }
    }
    __syncthreads();
  }
  const Normaliser normaliser = normaliser_of(p, head_idx, piece.kv_head_idx, max, sum);
  for (int j = 0; j < DIMS_PER_THREAD; ++j) {
    const int64_t dim = threadIdx.x + j * CTA_THREADS;
    if (dim >= p.value_head_dim) continue;
    out_row<float>(p, token_idx, head_idx)[dim] = normaliser(acc[j]);
  }
  if (threadIdx.x == 0 && p.lse != nullptr) p.lse[token_idx * p.num_heads + head_idx] = normaliser.lse;
}

}  // namespace pagedkv::cuda
