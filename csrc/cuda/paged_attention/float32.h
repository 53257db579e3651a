// Attention for float32 queries, by plain multiply-adds: tensor cores would round to tf32.
//
// Work: a CTA has up to ROWS rows of a KV head and all of their keys, TILE_TOKENS at a time: two threads
// score a key for all rows, 16 threads weigh the scores of a row, then each thread sums its value dimensions
// over the tile's keys. Tiles lie at absolute multiples of TILE_TOKENS and are folded in order, and a row's
// arithmetic does not depend on the others, so every split_size gives the same bits. Bytes: K and V once per
// tile of rows.
#pragma once

#include "cuda/paged_attention/plan.h"
#include "cuda/paged_attention/state.h"

namespace pagedkv::cuda {

inline constexpr int MAX_HEAD_DIM = 256;
inline constexpr int DIMS_PER_THREAD = MAX_HEAD_DIM / CTA_THREADS;
inline constexpr int ROWS = 1 << FLOAT32_TILE_ROWS_LOG2;
inline constexpr int ROW_THREADS = CTA_THREADS / ROWS;  // that weigh a row's scores

struct Float32Shared {
  RowMask mask[ROWS];
  int64_t block[TILE_TOKENS];  // negative where no row sees the key
  uint32_t seen[TILE_TOKENS];  // a bit for each row that sees it
  float query[ROWS][MAX_HEAD_DIM];
  float score[ROWS][TILE_TOKENS];  // then the weight
  float factor[ROWS], max[ROWS], sum[ROWS];
};

// An element of the cache: float32, or one byte of the dtype that is known at run time.
template <int CACHE_BYTES>
PAGEDKV_DEVICE float cache_element(const void* cache, int64_t offset, DType dtype) {
  if constexpr (CACHE_BYTES == 4) {
    return load_vector<float>(static_cast<const float*>(cache) + offset);
  } else {
    const uint8_t bits = static_cast<const uint8_t*>(cache)[offset];
    if (dtype == DType::int8) return to_float(static_cast<int8_t>(bits));
    return dtype == DType::float8_e4m3fn ? to_float(float8_e4m3fn{bits}) : to_float(float8_e5m2{bits});
  }
}

PAGEDKV_DEVICE int64_t head_of_row(const AttentionLaunch& launch, const Piece& piece, int row) {
  return piece.kv_head_idx * launch.group + (piece.row_begin + row) % launch.group;
}

PAGEDKV_DEVICE int64_t token_of_row(const AttentionLaunch& launch, const Piece& piece, int row) {
  return piece.query_begin + (piece.row_begin + row) / launch.group;
}

// Queries and masks of the rows; a row that is not there sees nothing.
PAGEDKV_DEVICE void load_rows(const AttentionLaunch& launch, const Piece& piece, Float32Shared& shared) {
  const PagedAttentionParams& p = launch.p;
  for (int row = 0; row < piece.num_rows; ++row) {
    const auto* query = static_cast<const float*>(p.query) +
                        token_of_row(launch, piece, row) * p.query_token_stride +
                        head_of_row(launch, piece, row) * p.query_head_stride;
    for (int64_t dim = threadIdx.x; dim < p.head_dim; dim += CTA_THREADS) shared.query[row][dim] = query[dim];
  }
  if (threadIdx.x >= ROWS) return;
  const int row = threadIdx.x;
  const int64_t token_idx = token_of_row(launch, piece, row);
  shared.mask[row] = row < piece.num_rows ? row_mask(p, piece.seq_idx, piece.query_len,
                                                     token_idx - piece.query_begin, token_idx)
                                          : RowMask{};
}

// Two neighbouring threads score a key, half of head_dim each.
template <int CACHE_BYTES>
PAGEDKV_DEVICE void score_keys(const AttentionLaunch& launch, const Piece& piece, int32_t tile_begin,
                               Float32Shared& shared) {
  static_assert(CTA_THREADS == 2 * TILE_TOKENS);
  const PagedAttentionParams& p = launch.p;
  const int i = threadIdx.x / 2, half = threadIdx.x % 2;
  const int32_t token = tile_begin + i;
  uint32_t seen = 0;
  for (int row = 0; row < ROWS; ++row) seen |= uint32_t{shared.mask[row].visible(token)} << row;
  const int64_t block = seen != 0 ? block_of_token(p, piece.seq_idx, token) : -1;
  float sum[ROWS] = {};
  if (block >= 0) {
    const int64_t key = cache_offset(key_cache_strides(p), block, token % p.block_size, piece.kv_head_idx);
    const int dims = static_cast<int>(p.head_dim) / 2;
    for (int dim = half * dims; dim < (half + 1) * dims; ++dim) {
      const float element = cache_element<CACHE_BYTES>(p.key_cache, key + dim, p.cache_dtype);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (row < piece.num_rows) sum[row] = fmaf(shared.query[row][dim], element, sum[row]);
      }
    }
  }
  const float scale = p.softmax_scale * scale_of(p.k_scale, p.k_scale_value, piece.kv_head_idx);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    float score = (sum[row] + __shfl_xor_sync(FULL_WARP, sum[row], 1)) * scale;
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (p.alibi_slopes != nullptr && row < piece.num_rows) {
      score += p.alibi_slopes[head_of_row(launch, piece, row)] *
               static_cast<float>(token - shared.mask[row].position);
    }
    const bool is_seen = block >= 0 && (seen >> row & 1) != 0;
    if (half == 0) shared.score[row][i] = is_seen ? score : NEGATIVE_INFINITY;
  }
  if (half != 0) return;
  shared.block[i] = block;
  shared.seen[i] = seen;
}

// The softmax step: ROW_THREADS threads replace a row's scores by weights. max and sum are those of the row
// so far.
PAGEDKV_DEVICE void weigh_scores(Float32Shared& shared, float& max, float& sum) {
  const int row = threadIdx.x / ROW_THREADS, lane = threadIdx.x % ROW_THREADS;
  float* score = shared.score[row];
  float new_max = max;
  for (int i = lane; i < TILE_TOKENS; i += ROW_THREADS) new_max = fmaxf(new_max, score[i]);
  for (int lanes = ROW_THREADS / 2; lanes > 0; lanes /= 2) {
    new_max = fmaxf(new_max, __shfl_xor_sync(FULL_WARP, new_max, lanes));
  }
  // In natural units: a product with log2(e) would cost large scores a digit.
  const float factor = max == NEGATIVE_INFINITY ? 0.0f : expf(max - new_max);
  float tile_sum = 0.0f;
  for (int i = lane; i < TILE_TOKENS; i += ROW_THREADS) {
    score[i] = expf(score[i] - (new_max == NEGATIVE_INFINITY ? 0.0f : new_max));
    tile_sum += score[i];
  }
  for (int lanes = ROW_THREADS / 2; lanes > 0; lanes /= 2) {
    tile_sum += __shfl_xor_sync(FULL_WARP, tile_sum, lanes);
  }
  max = new_max;
  sum = sum * factor + tile_sum;
  if (lane == 0) shared.factor[row] = factor;
}

template <int CACHE_BYTES>
PAGEDKV_DEVICE void add_values(const AttentionLaunch& launch, const Piece& piece, int32_t tile_begin,
                               const Float32Shared& shared, float (&acc)[ROWS][DIMS_PER_THREAD]) {
  const PagedAttentionParams& p = launch.p;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    for (float& element : acc[row]) element *= shared.factor[row];
  }
  for (int i = 0; i < TILE_TOKENS; ++i) {
    if (shared.block[i] < 0) continue;
    const int64_t value = cache_offset(value_cache_strides(p), shared.block[i],
                                       (tile_begin + i) % p.block_size, piece.kv_head_idx);
    const uint32_t seen = shared.seen[i];
#pragma unroll
    for (int j = 0; j < DIMS_PER_THREAD; ++j) {
      const int dim = threadIdx.x + j * CTA_THREADS;
      if (dim >= p.value_head_dim) continue;
      const float element = cache_element<CACHE_BYTES>(p.value_cache, value + dim, p.cache_dtype);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {  // not for those that do not see it: 0 * NaN is NaN
        if ((seen >> row & 1) != 0) acc[row][j] = fmaf(shared.score[row][i], element, acc[row][j]);
      }
    }
  }
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
  load_rows(launch, piece, shared);
  __syncthreads();

  int32_t begin = std::numeric_limits<int32_t>::max(), end = 0;
  for (const RowMask& mask : shared.mask) {
    if (mask.begin >= mask.end) continue;
    begin = min_of(begin, mask.begin);
    end = max_of(end, mask.end);
  }
  float max = NEGATIVE_INFINITY, sum = 0.0f, acc[ROWS][DIMS_PER_THREAD] = {};
  for (int32_t tile_begin = begin / TILE_TOKENS * TILE_TOKENS; tile_begin < end; tile_begin += TILE_TOKENS) {
    score_keys<CACHE_BYTES>(launch, piece, tile_begin, shared);
    __syncthreads();
    weigh_scores(shared, max, sum);
    __syncthreads();
    add_values<CACHE_BYTES>(launch, piece, tile_begin, shared, acc);
    __syncthreads();
  }
  if (threadIdx.x % ROW_THREADS == 0) {
    shared.max[threadIdx.x / ROW_THREADS] = max;
    shared.sum[threadIdx.x / ROW_THREADS] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    if (row >= piece.num_rows) break;
    const int64_t token_idx = token_of_row(launch, piece, row), head_idx = head_of_row(launch, piece, row);
    const Normaliser normaliser =
        normaliser_of(p, head_idx, piece.kv_head_idx, shared.max[row], shared.sum[row]);
    for (int j = 0; j < DIMS_PER_THREAD; ++j) {
      const int64_t dim = threadIdx.x + j * CTA_THREADS;
      if (dim < p.value_head_dim) out_row<float>(p, token_idx, head_idx)[dim] = normaliser(acc[row][j]);
    }
    if (threadIdx.x == 0 && p.lse != nullptr) p.lse[token_idx * p.num_heads + head_idx] = normaliser.lse;
  }
}

}  // namespace pagedkv::cuda
