// Attention of a tile of at most 8 * NT query rows to the keys and values of one KV head, on tensor cores.
//
// Work: a CTA has the chunks of schedule.h. Its 4 warps share a tile of 64 keys, 16 each, from load to the
// sum of values, through rings of shared memory of their own: no barrier of the CTA in the main loop, one
// merge of the warps at a chunk's end. Bytes: K and V of a chunk are read once for all rows, by 16-byte
// asynchronous copies.
//
// The operands are swapped, S^T = K Q^T and O^T = V^T P^T, so that keys and value dimensions fill the 16 rows
// of an mma and query rows its 8 columns: padding is to 8 rows, and one kernel serves every group size. Per
// lane, with g = lane / 4 and q = lane % 4, an accumulator holds rows 2q, 2q + 1 of keys (or value
// dimensions) g and g + 8.
#pragma once

#include "cuda/paged_attention/cta.h"
#include "cuda/paged_attention/decode_state.h"

namespace pagedkv::cuda {

inline constexpr int WARP_TOKENS = TILE_TOKENS / CTA_WARPS;
static_assert(WARP_TOKENS == 16, "a warp's keys are the 16 rows of one mma");

// D is head_dim rounded up to 64, 128 or 256; CACHE_BYTES is the size of a cache element.
template <int CACHE_BYTES, int D, int NT>
struct DecodeTile {
  static constexpr int ROWS = 8 * NT;
  static constexpr int ROW_BYTES = D * CACHE_BYTES;
  static constexpr int SLOT_BYTES = WARP_TOKENS * ROW_BYTES;  // of one warp
  // Bytes in flight hide the latency of memory: 3 slots of 16 KiB a CTA at head_dim 128, more where a slot is
  // smaller. Two at head_dim 256, so that a CTA fits the 99 KiB of sm_86, sm_89 and sm_120.
  static constexpr int SLOTS = CACHE_BYTES == 1 ? 4 : (D == 256 ? 2 : 3);
  // CTAs that an SM should hold at once, as far as accumulators allow: with 4 the compiler may use 128
  // registers a thread.
  static constexpr int CTAS_PER_SM = NT > 1 ? 2 : (D == 256 ? 3 : 4);

  static constexpr int QUERY_BYTES = ROWS * D * 2;
  static constexpr int RING_BYTES = SLOTS * CTA_WARPS * SLOT_BYTES;
  static constexpr int ACC_ROW_STRIDE = D + 4;  // in floats: the lanes of a store fall into different banks
  static constexpr int CTA_STATE_BYTES = ROWS * (ACC_ROW_STRIDE + 2) * 4;
  static constexpr int WARP_STATES_BYTES = CTA_WARPS * CTA_STATE_BYTES;

  static constexpr int QUERY_AT = WORK_BYTES;
  static constexpr int ROWS_AT = QUERY_AT + QUERY_BYTES;
  static constexpr int UNSCALES_AT = ROWS_AT + ROWS * static_cast<int>(sizeof(QueryRow));
  static constexpr int RING_AT = (UNSCALES_AT + ROWS * 4 + 127) / 128 * 128;
  // The merge uses the ring's memory. The CTA's state outlives it only where a CTA takes several splits;
  // otherwise it lies in the ring's memory too, and 4 CTAs fit an SM of sm_90 at head_dim 128.
  static constexpr int STATE_AT = RING_AT + WARP_STATES_BYTES;
  static constexpr int KEPT_STATE_AT =
      RING_AT + (RING_BYTES > WARP_STATES_BYTES ? RING_BYTES : WARP_STATES_BYTES);
  static constexpr int SHARED_BYTES =
      KEPT_STATE_AT > STATE_AT + CTA_STATE_BYTES ? KEPT_STATE_AT : STATE_AT + CTA_STATE_BYTES;
  static constexpr int KEPT_SHARED_BYTES = KEPT_STATE_AT + CTA_STATE_BYTES;
  static_assert(SHARED_BYTES <= 99 * 1024 && KEPT_SHARED_BYTES <= 99 * 1024, "a CTA fits every architecture");
};

template <class Query, int CACHE_BYTES, int D, int NT>
class DecodeCta : AttentionCta {
  using Element = Operand<Query, CACHE_BYTES>;
  using Tile = DecodeTile<CACHE_BYTES, D, NT>;
  static constexpr int K_STEPS = D / 16;
  static constexpr bool IS_CONVERTED = RowTile<Query, CACHE_BYTES, D>::IS_CONVERTED;

 public:
  PAGEDKV_DEVICE DecodeCta(const AttentionLaunch& launch, unsigned char* shared, const Chunk& chunk)
      : AttentionCta(launch, shared, chunk) {}

  PAGEDKV_DEVICE void run() {
    load_rows();
    __syncthreads();
    tree_begin_ = query_rows()[0].mask.tree_begin;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 2; ++e) {
        scale_[nt][e] = rule_.log2_scale();
        if constexpr (IS_CONVERTED) scale_[nt][e] *= unscales()[nt * 8 + lane_ % 4 * 2 + e];
      }
    }
    sure_ = keys_seen_by_all(query_rows()[0], query_rows()[chunk_.piece.num_rows - 1]);
    const int state_at = takes_several_splits(launch_) ? Tile::KEPT_STATE_AT : Tile::STATE_AT;
    const SharedStates warps(shared_ + Tile::RING_AT, CTA_WARPS, Tile::ROWS, Tile::ACC_ROW_STRIDE);
    const SharedStates cta(shared_ + state_at, 1, Tile::ROWS, Tile::ACC_ROW_STRIDE);
    int begin = chunk_.fold_begin;
    do {
      attend(begin);
      __syncthreads();  // all warps are done with the ring, whose memory the merge uses
      write_state(warps);
      __syncthreads();
      fold_warps(warps, CTA_WARPS, cta, chunk_.piece.num_rows, D, begin == chunk_.fold_begin);
      __syncthreads();
      begin += chunk_.fold_keys;
    } while (begin < chunk_.keys.end);
    RowTile<Query, CACHE_BYTES, D>(launch_, chunk_.piece)
        .store(chunk_, cta.acc, Tile::ACC_ROW_STRIDE, cta.max, cta.sum);
  }

 private:
  PAGEDKV_DEVICE void load_rows() const {
    const RowTile<Query, CACHE_BYTES, D> rows(launch_, chunk_.piece);
    rows.load_query(shared_ + Tile::QUERY_AT, unscales(), Tile::ROWS);
    rows.fill_rows(query_rows(), Tile::ROWS);
  }

  PAGEDKV_DEVICE float* unscales() const { return reinterpret_cast<float*>(shared_ + Tile::UNSCALES_AT); }
  PAGEDKV_DEVICE QueryRow* query_rows() const { return reinterpret_cast<QueryRow*>(shared_ + Tile::ROWS_AT); }
  PAGEDKV_DEVICE int slot_at(int entry) const {
    return Tile::RING_AT + (entry % Tile::SLOTS * CTA_WARPS + warp_) * Tile::SLOT_BYTES;
  }
  // The first of the warp's keys.
  PAGEDKV_DEVICE int token_of(int tile) const {
    return tiles_begin_ + tile * TILE_TOKENS + warp_ * WARP_TOKENS;
  }

  // The chunk's keys from `begin` on, at most fold_keys of them, cut into tiles from there; tiles that no row
  // sees are passed over.
  PAGEDKV_DEVICE void attend(int begin) {
    const int skipped = chunk_.keys.begin > begin ? (chunk_.keys.begin - begin) / TILE_TOKENS : 0;
    tiles_begin_ = begin + skipped * TILE_TOKENS;
    fold_end_ = min_of(begin + chunk_.fold_keys, chunk_.keys.end);
    num_tiles_ = tiles_begin_ < fold_end_ ? (fold_end_ - tiles_begin_ + TILE_TOKENS - 1) / TILE_TOKENS : 0;
    state_.clear();
    pages_.look_up(my_token(0), fold_end_);
    // The ring alternates K and V: entry 2 t is K of tile t, entry 2 t + 1 its V.
    for (int entry = 0; entry < Tile::SLOTS - 1; ++entry) issue(entry);
    for (int tile = 0; tile < num_tiles_; ++tile) {
      issue(2 * tile + Tile::SLOTS - 1);
      cp_async_wait<Tile::SLOTS - 1>();
      __syncwarp();
      float score[NT][4];
      if (CACHE_BYTES == 1 && widener_.is_int8()) {
        multiply_keys<true>(slot_at(2 * tile), score);
      } else {
        multiply_keys<false>(slot_at(2 * tile), score);
      }
      mask_scores(tile, score);
      __syncwarp();
      state_.weigh(score);
      issue(2 * tile + Tile::SLOTS);
      cp_async_wait<Tile::SLOTS - 1>();
      __syncwarp();
      const int values_at = slot_at(2 * tile + 1);
      if (token_of(tile) + WARP_TOKENS > tree_begin_) {
        clear_unseen<Tile::ROW_BYTES>(query_rows(), chunk_.piece.num_rows, token_of(tile), WARP_TOKENS,
                                      shared_ + values_at);
        __syncwarp();
      }
      if (CACHE_BYTES == 1 && widener_.is_int8()) {
        multiply_values<true>(values_at, score);
      } else {
        multiply_values<false>(values_at, score);
      }
      __syncwarp();
    }
    cp_async_wait<0>();
  }

  // The key of a tile whose row lanes 0 to 15, and 16 to 31 once more, find.
  PAGEDKV_DEVICE int my_token(int tile) const { return token_of(tile) + lane_ % WARP_TOKENS; }

  // Starts the copies of a ring entry.
  PAGEDKV_DEVICE void issue(int entry) {
    const int tile = entry / 2;
    if (tile < num_tiles_) {
      unsigned char* slot = shared_ + slot_at(entry);
      if (entry % 2 == 0) {
        has_block_ = has_block_ << 16 | (__ballot_sync(FULL_WARP, pages_.advance()) & 0xffffu);
        pages_.look_up(my_token(tile + 1), fold_end_);
        copy_rows<CACHE_BYTES, D, WARP_TOKENS>(
            launch_.cache_rows_are_aligned,
            pages_.template row<CACHE_BYTES>(p_.key_cache, key_cache_strides(p_)), p_.head_dim, slot);
      } else {
        copy_rows<CACHE_BYTES, D, WARP_TOKENS>(
            launch_.cache_rows_are_aligned,
            pages_.template row<CACHE_BYTES>(p_.value_cache, value_cache_strides(p_)), p_.value_head_dim,
            slot);
      }
    } else if (entry % 2 == 0) {
      has_block_ <<= 16;
    }
    cp_async_commit();
  }

  // score = K Q^T for the warp's 16 keys.
  template <bool IS_INT8>
  PAGEDKV_DEVICE void multiply_keys(int keys_at, float (&score)[NT][4]) {
    // With few rows even and odd steps are summed apart, since a product waits for the one before it. Not
    // with split_size, where a row's sums have the same order among many rows.
    if (NT == 1 && p_.split_size == 0) {
      sum_products<IS_INT8, true>(keys_at, score);
    } else {
      sum_products<IS_INT8, false>(keys_at, score);
    }
  }

  // 32 dimensions at a time.
  template <bool IS_INT8, bool IS_APART>
  PAGEDKV_DEVICE void sum_products(int keys_at, float (&score)[NT][4]) {
    const int head_dim = static_cast<int>(p_.head_dim);
    const SwizzledRow<Tile::ROW_BYTES> keys(keys_at, lane_ % 16, lane_ / 16);
    const SwizzledRow<D * 2> query(Tile::QUERY_AT, lane_ % 8, lane_ / 8);
    float odd[NT][4];
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 4; ++e) score[nt][e] = odd[nt][e] = 0.0f;
    }
#pragma unroll(NT == 1 ? 4 : 2)
    for (int step = 0; step < K_STEPS; step += 2) {
      if (step % BRANCH_STEPS == 0 && step * 16 >= head_dim) break;
      uint32_t a[2][4];
      if constexpr (CACHE_BYTES == 2) {
        ldmatrix_x4(a[0], shared_ + keys.at(2 * step));
        ldmatrix_x4(a[1], shared_ + keys.at(2 * step + 2));
      } else {
        uint32_t loaded[4], low[4], high[4];  // matrices 0, 1 are the first 16 dimensions, 2, 3 the other
        ldmatrix_x4(loaded, shared_ + keys.at(step));
        widener_.template widen<IS_INT8, Pairing::neighbours>(loaded, low, high);
        for (int i = 0; i < 4; ++i) {
          a[i / 2][i % 2] = low[i];
          a[i / 2][i % 2 + 2] = high[i];
        }
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        uint32_t b[4];
        ldmatrix_x4(b, shared_ + query.at(2 * step) + nt * 8 * D * 2);
        mma_m16n8k16<Element>(score[nt], a[0], {b[0], b[1]});
        mma_m16n8k16<Element>(IS_APART ? odd[nt] : score[nt], a[1], {b[2], b[3]});
      }
    }
    for (int nt = 0; IS_APART && nt < NT; ++nt) {
      for (int e = 0; e < 4; ++e) score[nt][e] += odd[nt][e];
    }
  }

  // Products to scores.
  PAGEDKV_DEVICE void mask_scores(int tile, float (&score)[NT][4]) const {
    const int warp_begin = token_of(tile);
    // Between a tile's copies and its use (SLOTS - 1) / 2 further tiles have begun.
    const uint32_t has_block = has_block_ >> (Tile::SLOTS - 1) / 2 * 16 & 0xffffu;
    const bool sure =
        has_block == 0xffffu && warp_begin >= sure_.begin && warp_begin + WARP_TOKENS <= sure_.end;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 4; ++e) score[nt][e] *= scale_[nt][e % 2];
    }
    if (sure && rule_.is_plain()) return;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 4; ++e) {
        const QueryRow& row = query_rows()[nt * 8 + lane_ % 4 * 2 + e % 2];
        const int key = lane_ / 4 + e / 2 * 8;
        const bool is_visible = (has_block >> key & 1) != 0 && row.mask.visible(warp_begin + key);
        score[nt][e] = rule_(score[nt][e], row, warp_begin + key, is_visible);
      }
    }
  }

  // acc += V^T P^T.
  template <bool IS_INT8>
  PAGEDKV_DEVICE void multiply_values(int values_at, const float (&weight)[NT][4]) {
    uint32_t b[NT][2];
    for (int nt = 0; nt < NT; ++nt) {
      b[nt][0] = movmatrix_trans(pack2<Element>(weight[nt][0], weight[nt][1]));
      b[nt][1] = movmatrix_trans(pack2<Element>(weight[nt][2], weight[nt][3]));
    }
    // Matrices 0 to 3: both halves of 16 dimensions by both halves of the keys, or the other way round.
    const int key_half = CACHE_BYTES == 2 ? lane_ / 16 : lane_ / 8 % 2;
    const int dim_half = CACHE_BYTES == 2 ? lane_ / 8 % 2 : lane_ / 16;
    const int head_dim = static_cast<int>(p_.value_head_dim);
    const SwizzledRow<Tile::ROW_BYTES> values(values_at, lane_ % 8 + key_half * 8, dim_half);
#pragma unroll
    for (int step = 0; step < K_STEPS; step += 2 / CACHE_BYTES) {
      if (step % BRANCH_STEPS == 0 && step * 16 >= head_dim) break;
      uint32_t loaded[4];
      ldmatrix_x4_trans(loaded, shared_ + values.at(CACHE_BYTES * step));
      if constexpr (CACHE_BYTES == 2) {
        multiply_value_step(step, loaded, b);
      } else {
        uint32_t low[4], high[4];  // rows g and g + 8 are value dimensions 2 g and 2 g + 1
        widener_.template widen<IS_INT8, Pairing::transposed>(loaded, low, high);
        multiply_value_step(step, {low[0], high[0], low[1], high[1]}, b);
        multiply_value_step(step + 1, {low[2], high[2], low[3], high[3]}, b);
      }
    }
  }

  PAGEDKV_DEVICE void multiply_value_step(int step, const uint32_t (&a)[4], const uint32_t (&b)[NT][2]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) mma_m16n8k16<Element>(state_.acc[step][nt], a, b[nt]);
  }

  PAGEDKV_DEVICE void write_state(const SharedStates& warps) {
    const int g = lane_ / 4, q = lane_ % 4;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = warp_ * Tile::ROWS + nt * 8 + q * 2 + e;
        float sum = state_.sum[nt][e];
        for (int lanes = 4; lanes < WARP_THREADS; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
        if (g == 0) {
          warps.max[row] = state_.max[nt][e];
          warps.sum[row] = sum;
        }
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          float* acc = warps.acc + row * Tile::ACC_ROW_STRIDE + step * 16;
          acc[CACHE_BYTES == 2 ? g : 2 * g] = state_.acc[step][nt][e];
          acc[CACHE_BYTES == 2 ? g + 8 : 2 * g + 1] = state_.acc[step][nt][e + 2];
        }
      }
    }
  }

  KeyRange sure_;       // every row sees these keys
  float scale_[NT][2];  // of the products of rows 2q and 2q + 1
  int tree_begin_;      // from this key on a row may see one and not the one before
  int tiles_begin_, fold_end_, num_tiles_;
  uint32_t has_block_;  // which of the warp's 16 keys have one: of the tile that began last in the low half
  WarpState<K_STEPS, NT> state_;
};

template <class Query, int CACHE_BYTES, int D, int NT>
__global__ void __launch_bounds__(CTA_THREADS, DecodeTile<CACHE_BYTES, D, NT>::CTAS_PER_SM)
    decode_kernel(const AttentionLaunch launch) {
  PAGEDKV_SHARED(shared);
  let_kernel_behind_start();
  fill_padding<Query>(launch.p);
  auto& work = *reinterpret_cast<Work*>(shared);
  bool is_first = true;
  while (find_chunk(launch, work, is_first)) {
    DecodeCta<Query, CACHE_BYTES, D, NT>(launch, shared, work.chunk).run();
    is_first = false;
  }
}

}  // namespace pagedkv::cuda
