// The query rows of a CTA: their masks, their way into shared memory and their results' way out. Decode and
// prefill share it. Loops outside the main loop are unrolled little, here and elsewhere, since the registers
// that they would take are the whole kernel's.
#pragma once

#include "cuda/paged_attention/schedule.h"
#include "cuda/paged_attention/state.h"
#include "cuda/paged_attention/widen.h"
#include "cuda/primitives.h"

namespace pagedkv::cuda {

// A head_dim below the kernel's ends the main loops' steps of 16 dimensions early, but only after so many:
// what lies between is zero, and a branch keeps the compiler from moving loads ahead of products.
inline constexpr int BRANCH_STEPS = 4;

// What a row's scores depend on; a row past the last sees nothing.
struct QueryRow {
  RowMask mask;
  float slope;  // of ALiBi
};

// The keys that each of several rows sees for certain.
PAGEDKV_DEVICE KeyRange keys_seen_by_all(const QueryRow& first, const QueryRow& last) {
  return {last.mask.begin, min_of(first.mask.end, min_of(first.mask.causal_end, first.mask.tree_begin))};
}

// Where 16-byte chunk `chunk` of row `row` lies in shared memory: chunks are permuted so that the 8 rows that
// an ldmatrix reads at once fall into different banks.
template <int ROW_BYTES>
PAGEDKV_DEVICE int swizzled(int row, int chunk) {
  if constexpr (ROW_BYTES >= 128) return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
  return row * ROW_BYTES + ((chunk ^ ((row >> 1) & 3)) << 4);
}

// The chunks of one row of swizzled shared memory, by offset: at(i) is that of chunk `first` + i, where i has
// none of the bits of `first`, and one exclusive or away.
template <int ROW_BYTES>
class SwizzledRow {
 public:
  PAGEDKV_DEVICE SwizzledRow(int memory, int row, int first)
      : first_at_(memory + swizzled<ROW_BYTES>(row, first)) {}

  PAGEDKV_DEVICE int at(int i) const {
    if constexpr (ROW_BYTES >= 128) return (first_at_ ^ (i & 7) << 4) + (i >> 3) * 128;
    return first_at_ ^ i << 4;
  }

 private:
  int first_at_;
};

// Four neighbouring elements of 16 bits.
PAGEDKV_DEVICE uint2 load_quad(const void* source, bool is_aligned) {
  if (is_aligned) return load_vector<uint2>(source);
  const auto* element = static_cast<const uint16_t*>(source);
  return {element[0] | static_cast<uint32_t>(element[1]) << 16, element[2] | static_cast<uint32_t>(element[3])
                                                                                 << 16};
}

PAGEDKV_DEVICE void store_quad(void* destination, uint2 quad, bool is_aligned) {
  if (is_aligned) return store_vector(destination, quad);
  auto* element = static_cast<uint16_t*>(destination);
  element[0] = static_cast<uint16_t>(quad.x);
  element[1] = static_cast<uint16_t>(quad.x >> 16);
  element[2] = static_cast<uint16_t>(quad.y);
  element[3] = static_cast<uint16_t>(quad.y >> 16);
}

// Four neighbouring accumulated values of a row as its results; `ratio` is its Normaliser's.
template <class Query>
PAGEDKV_DEVICE uint2 normalised(float ratio, const float4& acc) {
  if (ratio == 0.0f) return {};  // also where acc is not finite
  return {pack2<Query>(acc.x * ratio, acc.y * ratio), pack2<Query>(acc.z * ratio, acc.w * ratio)};
}

// D is head_dim rounded up to 64, 128 or 256; CACHE_BYTES is the size of a cache element. A warp takes every
// CTA_WARPS-th row, a lane four neighbouring elements of it.
template <class Query, int CACHE_BYTES, int D>
class RowTile {
  static constexpr int LANES_DIMS = 4 * WARP_THREADS;

 public:
  // Whether queries are bfloat16 and the tensor cores' operands float16.
  static constexpr bool IS_CONVERTED = !std::is_same_v<Operand<Query, CACHE_BYTES>, Query>;

  // A copy of the piece, which lies in shared memory: else it would be read anew after every store.
  PAGEDKV_DEVICE RowTile(const AttentionLaunch& launch, const Piece& piece)
      : launch_(launch), p_(launch.p), piece_(piece) {
    warp_ = threadIdx.x / WARP_THREADS;
    lane_ = threadIdx.x % WARP_THREADS;
  }

  // To `rows`, one entry for each of tile_rows rows. A barrier must follow.
  PAGEDKV_DEVICE void fill_rows(QueryRow* rows, int tile_rows) const {
#pragma unroll 1
    for (int row = threadIdx.x; row < tile_rows; row += blockDim.x) {
      QueryRow filled{};
      if (row < piece_.num_rows) {
        const int query_idx = (piece_.row_begin + row) / launch_.group;
        filled.mask =
            row_mask(p_, piece_.seq_idx, piece_.query_len, query_idx, piece_.query_begin + query_idx);
        if (p_.alibi_slopes != nullptr) filled.slope = p_.alibi_slopes[head_of(row)];
      }
      rows[row] = filled;
    }
  }

  // Query rows to swizzled shared memory, zero beyond head_dim and beyond the last row. Where K is widened
  // from 8 bits a register of four neighbours feeds dimensions (2q, 2q + 1) and (2q + 8, 2q + 9) of an mma,
  // so the query's are permuted alike. `unscales` gets what makes up for a row's scale().
  PAGEDKV_DEVICE void load_query(unsigned char* shared, float* unscales, int tile_rows) const {
    constexpr int BATCH = 4;                                    // rows that are on their way together
    constexpr int PARTS = D > LANES_DIMS ? D / LANES_DIMS : 1;  // of a row
#pragma unroll 1
    for (int first = warp_; first < tile_rows; first += BATCH * CTA_WARPS) {
      uint2 quads[BATCH][PARTS] = {};
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int row = first + i * CTA_WARPS;
        if (row >= piece_.num_rows) continue;
        const auto* query = static_cast<const Query*>(p_.query) + token_of(row) * p_.query_token_stride +
                            head_of(row) * p_.query_head_stride;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const int dim = part * LANES_DIMS + lane_ * 4;
          if (dim < p_.head_dim) quads[i][part] = load_quad(query + dim, launch_.query_rows_are_aligned);
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int row = first + i * CTA_WARPS;
        if (row >= tile_rows) continue;
        if constexpr (IS_CONVERTED) {
          const float unscale = scale(quads[i]);
          if (lane_ == 0) unscales[row] = unscale;
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const int dim = part * LANES_DIMS + lane_ * 4;
          if (dim < D) store_query_quad(shared, row, dim, quads[i][part]);
        }
      }
    }
  }

  // The results of the rows or, where they saw only a chunk of their keys, their states: acc [num_rows,
  // acc_row_stride], max and sum [num_rows] in shared memory; max is overwritten. Barriers around it.
  PAGEDKV_DEVICE void store(const Chunk& chunk, const float* acc, int acc_row_stride, float* max,
                            const float* sum) {
    if (chunk.is_first && chunk.is_last) {
      if (piece_.kv_head_idx == 0 && threadIdx.x == 0 && is_combined(launch_)) {
        launch_.partial_chunks[piece_.row_tile_idx] = {0, -1};
      }
      store_results(acc, acc_row_stride, max, sum);
    } else {
      store_states(chunk, acc, acc_row_stride, max, sum);
    }
  }

 private:
  // A row from bfloat16 to float16, which has fewer exponents: first it is multiplied by the power of two
  // that brings its largest element near 2 ** 14. What is rounded then is 2 ** 28 times smaller than that.
  // Returns the inverse of the power.
  template <int PARTS>
  PAGEDKV_DEVICE static float scale(uint2 (&quads)[PARTS]) {
    uint32_t largest = 0;
    for (const uint2& quad : quads) {
      for (const uint32_t bits :
           {quad.x & 0x7fff, quad.x >> 16 & 0x7fff, quad.y & 0x7fff, quad.y >> 16 & 0x7fff}) {
        if (bits < 0x7f80) largest = max_of(largest, bits);  // a finite one
      }
    }
    for (int lanes = 1; lanes < WARP_THREADS; lanes *= 2) {
      largest = max_of(largest, __shfl_xor_sync(FULL_WARP, largest, lanes));
    }
    const int exponent = min_of(14 + 127 - static_cast<int>(largest >> 7), 126);
    const auto power_of_two = [](int e) { return to_float(bfloat16{static_cast<uint16_t>((e + 127) << 7)}); };
    const float factor = power_of_two(exponent);
    const auto half = [factor](uint32_t bits) {
      return to_float(bfloat16{static_cast<uint16_t>(bits)}) * factor;
    };
    for (uint2& quad : quads) {
      quad = {pack2<float16>(half(quad.x), half(quad.x >> 16)),
              pack2<float16>(half(quad.y), half(quad.y >> 16))};
    }
    return power_of_two(-exponent);
  }

  PAGEDKV_DEVICE static void store_query_quad(unsigned char* shared, int row, int dim, uint2 quad) {
    if constexpr (CACHE_BYTES == 2) {
      store_vector(shared + swizzled<D * 2>(row, dim / 8) + dim % 8 * 2, quad);
    } else {
      store_vector(shared + swizzled<D * 2>(row, dim / 16 * 2) + dim % 16, quad.x);
      store_vector(shared + swizzled<D * 2>(row, dim / 16 * 2 + 1) + dim % 16, quad.y);
    }
  }

  PAGEDKV_DEVICE int64_t token_of(int row) const {
    return piece_.query_begin + (piece_.row_begin + row) / launch_.group;
  }
  PAGEDKV_DEVICE int64_t head_of(int row) const {
    return piece_.kv_head_idx * launch_.group + (piece_.row_begin + row) % launch_.group;
  }

  PAGEDKV_DEVICE void store_results(const float* acc, int acc_row_stride, float* max,
                                    const float* sum) const {
    // The place of a row's `max` is taken by what its values are multiplied with.
#pragma unroll 1
    for (int row = threadIdx.x; row < piece_.num_rows; row += blockDim.x) {
      const Normaliser normaliser =
          normaliser_of(p_, head_of(row), piece_.kv_head_idx, max[row] * LN_2, sum[row]);
      max[row] = normaliser.ratio();
      if (p_.lse != nullptr) p_.lse[token_of(row) * p_.num_heads + head_of(row)] = normaliser.lse;
    }
    __syncthreads();
#pragma unroll 2
    for (int row = warp_; row < piece_.num_rows; row += CTA_WARPS) {
      Query* out = out_row<Query>(p_, token_of(row), head_of(row));
#pragma unroll 1
      for (int dim = lane_ * 4; dim < p_.value_head_dim; dim += LANES_DIMS) {
        const float4 row_acc = load_vector<float4>(acc + row * acc_row_stride + dim);
        store_quad(out + dim, normalised<Query>(max[row], row_acc), launch_.query_rows_are_aligned);
      }
    }
  }

  PAGEDKV_DEVICE void store_states(const Chunk& chunk, const float* acc, int acc_row_stride, const float* max,
                                   const float* sum) const {
    if (piece_.kv_head_idx == 0 && threadIdx.x == 0) {
      int2& chunks = launch_.partial_chunks[piece_.row_tile_idx];
      if (chunk.is_first) chunks.x = chunk.number;
      if (chunk.is_last) chunks.y = chunk.number;
    }
    const int64_t state_idx = state_idx_of(launch_, chunk.number, chunk.is_first);
    const int64_t first_row = (piece_.kv_head_idx * launch_.num_states + state_idx) * launch_.state_rows;
#pragma unroll 1
    for (int row = threadIdx.x; row < piece_.num_rows; row += blockDim.x) {
      launch_.partial_max_sum[first_row + row] = {max[row], sum[row]};
    }
#pragma unroll 2
    for (int row = warp_; row < piece_.num_rows; row += CTA_WARPS) {
      float* partial_acc = launch_.partial_acc + (first_row + row) * p_.value_head_dim;
#pragma unroll 1
      for (int dim = lane_ * 4; dim < p_.value_head_dim; dim += LANES_DIMS) {
        store_vector(partial_acc + dim, load_vector<float4>(acc + row * acc_row_stride + dim));
      }
    }
  }

  const AttentionLaunch& launch_;
  const PagedAttentionParams& p_;
  const Piece piece_;
  int warp_, lane_;
};

}  // namespace pagedkv::cuda
