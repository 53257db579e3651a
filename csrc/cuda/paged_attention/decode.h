// Attention of a tile of at most 8 * NT query rows to the keys and values of one KV head, on tensor cores.
//
// Work: a CTA has one piece (plan.h). Its 4 warps share a tile of 64 keys, 16 each, from load to the sum of
// values, through rings of shared memory of their own: no barrier of the CTA in the main loop, one merge of
// the warps at a chunk's end. Bytes: K and V of a piece are read once for all rows, by 16-byte asynchronous
// copies.
//
// The operands are swapped, S^T = K Q^T and O^T = V^T P^T, so that keys and value dimensions fill the 16 rows
// of an mma and query rows its 8 columns: padding is to 8 rows, and one kernel serves every group size. Per
// lane, with g = lane / 4 and q = lane % 4, an accumulator holds rows 2q, 2q + 1 of keys (or value
// dimensions) g and g + 8.
#pragma once

#include "cuda/paged_attention/plan.h"
#include "cuda/paged_attention/state.h"
#include "cuda/primitives.h"

namespace pagedkv::cuda {

inline constexpr int WARP_TOKENS = TILE_TOKENS / CTA_WARPS;
static_assert(WARP_TOKENS == 16, "a warp's keys are the 16 rows of one mma");

// D is head_dim rounded up to 64, 128 or 256; CACHE_BYTES is the size of a cache element.
template <class Query, int CACHE_BYTES, int D, int NT>
struct DecodeTile {
  static constexpr int ROWS = 8 * NT;
  static constexpr int ROW_BYTES = D * CACHE_BYTES;
  static constexpr int CHUNK_ELEMENTS = 16 / CACHE_BYTES;
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int SLOT_BYTES = WARP_TOKENS * ROW_BYTES;  // of one warp
  // Bytes in flight hide the latency of memory: 3 slots of 16 KiB a CTA at head_dim 128, more where a slot is
  // smaller. Two at head_dim 256, so that a CTA fits the 99 KiB of sm_86, sm_89 and sm_120.
  static constexpr int SLOTS = CACHE_BYTES == 1 ? 4 : (D == 256 ? 2 : 3);

  static constexpr int QUERY_BYTES = ROWS * D * 2;
  static constexpr int RING_BYTES = SLOTS * CTA_WARPS * SLOT_BYTES;
  static constexpr int MERGE_BYTES = CTA_WARPS * ROWS * (D + 2) * 4;
  static constexpr int FOLD_BYTES = ROWS * (D + 2) * 4;
  static constexpr int MASKS_BYTES = ROWS * static_cast<int>(sizeof(RowMask));

  static constexpr int MASKS_AT = QUERY_BYTES;
  static constexpr int VALID_AT = MASKS_AT + MASKS_BYTES;
  static constexpr int RING_AT = (VALID_AT + CTA_WARPS * 4 * 4 + 127) / 128 * 128;
  // The merge uses the ring's memory. What is folded outlives it only where a CTA takes several splits;
  // otherwise it lies in the ring's memory too, and 4 CTAs fit an SM of sm_90 at head_dim 128.
  static constexpr int FOLD_AT = RING_AT + MERGE_BYTES;
  static constexpr int KEPT_FOLD_AT = RING_AT + (RING_BYTES > MERGE_BYTES ? RING_BYTES : MERGE_BYTES);
  static constexpr int SHARED_BYTES =
      KEPT_FOLD_AT > FOLD_AT + FOLD_BYTES ? KEPT_FOLD_AT : FOLD_AT + FOLD_BYTES;
  static constexpr int KEPT_SHARED_BYTES = KEPT_FOLD_AT + FOLD_BYTES;
  static_assert(SHARED_BYTES <= 99 * 1024 && KEPT_SHARED_BYTES <= 99 * 1024, "a CTA fits every architecture");

  // Where 16-byte chunk `chunk` of row `row` lies: chunks are permuted so that the 8 rows that an ldmatrix
  // reads at once fall into different banks.
  template <int BYTES_PER_ROW>
  PAGEDKV_DEVICE static int swizzled(int row, int chunk) {
    if constexpr (BYTES_PER_ROW >= 128) return row * BYTES_PER_ROW + ((chunk ^ (row & 7)) << 4);
    return row * BYTES_PER_ROW + ((chunk ^ ((row >> 1) & 3)) << 4);
  }
};

// Four 8-bit cache elements as two registers of Query.
template <class Query>
PAGEDKV_DEVICE void widen(uint32_t four, DType dtype, uint32_t& low, uint32_t& high) {
  float value[4];
  for (int i = 0; i < 4; ++i) {
    const auto bits = static_cast<uint8_t>(four >> (8 * i));
    value[i] = dtype == DType::int8            ? to_float(static_cast<int8_t>(bits))
               : dtype == DType::float8_e4m3fn ? to_float(float8_e4m3fn{bits})
                                               : to_float(float8_e5m2{bits});
  }
  low = pack2<Query>(value[0], value[1]);
  high = pack2<Query>(value[2], value[3]);
}

template <class Query, int CACHE_BYTES, int D, int NT>
class DecodeCta {
  using Tile = DecodeTile<Query, CACHE_BYTES, D, NT>;
  static constexpr int K_STEPS = D / 16;

 public:
  PAGEDKV_DEVICE DecodeCta(const AttentionLaunch& launch, unsigned char* shared, const Piece& piece)
      : launch_(launch), p_(launch.p), shared_(shared), piece_(piece) {
    warp_ = threadIdx.x / WARP_THREADS;
    lane_ = threadIdx.x % WARP_THREADS;
    group_ = static_cast<int>(p_.num_heads / p_.num_kv_heads);
    row_begin_ = static_cast<int>(piece.row_tile * Tile::ROWS);
    fold_at_ = takes_several_splits(launch) ? Tile::KEPT_FOLD_AT : Tile::FOLD_AT;
    num_rows_ = static_cast<int>(min_of<int64_t>(Tile::ROWS, piece.query_len * group_ - row_begin_));
  }

  PAGEDKV_DEVICE void run() {
    load_query();
    find_keys();
    int begin, end, step;  // this CTA's keys, and how many of them make a chunk
    find_chunks(begin, end, step);
    do {
      attend(begin, min_of(begin + step, end));
      begin += step;
    } while (begin < end);
    store();
  }

 private:
  PAGEDKV_DEVICE int64_t token_of(int row) const { return piece_.query_begin + (row_begin_ + row) / group_; }
  PAGEDKV_DEVICE int64_t head_of(int row) const {
    return piece_.kv_head_idx * group_ + (row_begin_ + row) % group_;
  }
  PAGEDKV_DEVICE RowMask* masks() const { return reinterpret_cast<RowMask*>(shared_ + Tile::MASKS_AT); }
  PAGEDKV_DEVICE float* fold_acc() const { return reinterpret_cast<float*>(shared_ + fold_at_); }
  PAGEDKV_DEVICE float* fold_max() const { return fold_acc() + Tile::ROWS * D; }
  PAGEDKV_DEVICE float* fold_sum() const { return fold_max() + Tile::ROWS; }
  PAGEDKV_DEVICE float* merge_acc(int warp) const {
    return reinterpret_cast<float*>(shared_ + Tile::RING_AT) + warp * Tile::ROWS * D;
  }
  PAGEDKV_DEVICE float* merge_max(int warp) const { return merge_acc(CTA_WARPS) + warp * Tile::ROWS; }
  PAGEDKV_DEVICE float* merge_sum(int warp) const { return merge_max(CTA_WARPS) + warp * Tile::ROWS; }
  PAGEDKV_DEVICE unsigned char* slot(int entry) const {
    return shared_ + Tile::RING_AT + (entry % Tile::SLOTS * CTA_WARPS + warp_) * Tile::SLOT_BYTES;
  }
  // Which of the warp's 16 keys of a tile have a block; the ring never holds more than 4 tiles.
  PAGEDKV_DEVICE uint32_t& valid(int tile) const {
    return reinterpret_cast<uint32_t*>(shared_ + Tile::VALID_AT)[warp_ * 4 + (tile & 3)];
  }

  // Query rows to shared memory, zero beyond head_dim and beyond the last row. Where K is widened from 8 bits
  // a register of four neighbours feeds dimensions (2q, 2q + 1) and (2q + 8, 2q + 9) of an mma, so the
  // query's are permuted alike.
  PAGEDKV_DEVICE void load_query() {
    for (int i = threadIdx.x; i < Tile::ROWS * D; i += CTA_THREADS) {
      const int row = i / D, dim = i % D;
      int place = dim;
      if constexpr (CACHE_BYTES == 1) {
        const int quad = dim % 16 / 4, within = dim % 4;
        place = dim / 16 * 16 + (within / 2) * 8 + quad * 2 + within % 2;
      }
      Query element{};
      if (row < num_rows_ && dim < p_.head_dim) {
        element = static_cast<const Query*>(
            p_.query)[token_of(row) * p_.query_token_stride + head_of(row) * p_.query_head_stride + dim];
      }
      *reinterpret_cast<Query*>(shared_ + Tile::template swizzled<D * 2>(row, place / 8) + place % 8 * 2) =
          element;
    }
  }

  // The keys that any row may see, and those that every row sees for certain.
  PAGEDKV_DEVICE void find_keys() {
    if (threadIdx.x < Tile::ROWS) {
      RowMask mask{};  // a row past the last sees nothing
      if (static_cast<int>(threadIdx.x) < num_rows_) {
        const int64_t query_idx = (row_begin_ + threadIdx.x) / group_;
        mask = row_mask(p_, piece_.seq_idx, piece_.query_len, query_idx, piece_.query_begin + query_idx);
      }
      masks()[threadIdx.x] = mask;
    }
    __syncthreads();
    keys_begin_ = std::numeric_limits<int>::max();
    keys_end_ = 0;
    sure_begin_ = 0;
    sure_end_ = std::numeric_limits<int>::max();
    for (int row = 0; row < num_rows_; ++row) {
      const RowMask& mask = masks()[row];
      if (mask.begin < mask.end) {
        keys_begin_ = min_of(keys_begin_, mask.begin);
        keys_end_ = max_of(keys_end_, mask.end);
      }
      sure_begin_ = max_of(sure_begin_, mask.begin);
      sure_end_ = min_of(sure_end_, min_of(mask.end, min_of(mask.causal_end, mask.tree_begin)));
    }
    keys_begin_ = min_of(keys_begin_, keys_end_);
  }

  // Without split_size the keys are shared out evenly, in whole tiles. With it they are cut at its multiples,
  // and a CTA takes either one split or all of them.
  PAGEDKV_DEVICE void find_chunks(int& begin, int& end, int& step) const {
    const int chunk_idx = static_cast<int>(piece_.chunk_idx),
              num_chunks = static_cast<int>(launch_.num_chunks);
    const auto ceil_to = [](int value, int unit) { return (value + unit - 1) / unit; };
    if (p_.split_size == 0) {
      const int first_tile = keys_begin_ / TILE_TOKENS, end_tile = ceil_to(keys_end_, TILE_TOKENS);
      step = ceil_to(end_tile - first_tile, num_chunks) * TILE_TOKENS;
      begin = first_tile * TILE_TOKENS + chunk_idx * step;
      end = min_of(begin + step, end_tile * TILE_TOKENS);
    } else {
      step = static_cast<int>(min_of<int64_t>(p_.split_size, keys_end_ + 1));
      const int first = keys_begin_ / step + chunk_idx;
      begin = first * step;
      end = num_chunks == 1 ? keys_end_ : begin + step;
    }
  }

  // Keys [begin, end), cut into tiles from begin on; those that no row sees are passed over.
  PAGEDKV_DEVICE void attend(int begin, int end) {
    const int skipped = keys_begin_ > begin ? (keys_begin_ - begin) / TILE_TOKENS : 0;
    tiles_begin_ = begin + skipped * TILE_TOKENS;
    chunk_end_ = min_of(end, keys_end_);
    num_tiles_ = tiles_begin_ < chunk_end_ ? (chunk_end_ - tiles_begin_ + TILE_TOKENS - 1) / TILE_TOKENS : 0;
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 2; ++e) {
        max_[nt][e] = NEGATIVE_INFINITY;
        sum_[nt][e] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        for (int e = 0; e < 4; ++e) acc_[step][nt][e] = 0.0f;
      }
    }
    // The ring alternates K and V: entry 2 t is K of tile t, entry 2 t + 1 its V.
    for (int entry = 0; entry < Tile::SLOTS - 1; ++entry) issue(entry);
    for (int tile = 0; tile < num_tiles_; ++tile) {
      float score[NT][4];
      uint32_t seen = 0xffffffffu;
      issue(2 * tile + Tile::SLOTS - 1);
      cp_async_wait<Tile::SLOTS - 1>();
      __syncwarp();
      multiply_keys(slot(2 * tile), score);
      const bool sure = mask_scores(tile, score, seen);
      __syncwarp();
      weigh(score);
      issue(2 * tile + Tile::SLOTS);
      cp_async_wait<Tile::SLOTS - 1>();
      __syncwarp();
      multiply_values(slot(2 * tile + 1), score, sure, seen);
      __syncwarp();
    }
    cp_async_wait<0>();
    merge_warps();
  }

  // Starts the copies of a ring entry: lanes 0 to 15 find a key's block each, then all lanes copy 16-byte
  // chunks.
  PAGEDKV_DEVICE void issue(int entry) {
    const int tile = entry / 2;
    if (tile < num_tiles_) {
      const bool is_value = entry % 2 != 0;
      if (!is_value) find_rows(tile);
      const int head_dim = static_cast<int>(is_value ? p_.value_head_dim : p_.head_dim);
      const auto* cache = static_cast<const unsigned char*>(is_value ? p_.value_cache : p_.key_cache);
      const int64_t my_offset = is_value ? value_offset_ : key_offset_;
      unsigned char* destination = slot(entry);
      // An mma takes 16 dimensions: the last one's second half is zero where head_dim ends in its first.
      const int used_chunks = (head_dim + 15) / 16 * 16 / Tile::CHUNK_ELEMENTS;
#pragma unroll 4
      for (int i = lane_; i < WARP_TOKENS * Tile::CHUNKS; i += WARP_THREADS) {
        const int row = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
        const int64_t offset = __shfl_sync(FULL_WARP, my_offset, row);
        if (chunk >= used_chunks) continue;
        copy_chunk(destination + Tile::template swizzled<Tile::ROW_BYTES>(row, chunk), cache, offset, chunk,
                   head_dim);
      }
    }
    cp_async_commit();
  }

  PAGEDKV_DEVICE void copy_chunk(unsigned char* destination, const unsigned char* cache, int64_t offset,
                                 int chunk, int head_dim) {
    const int first = chunk * Tile::CHUNK_ELEMENTS;
    const unsigned char* source = cache + (offset + first) * CACHE_BYTES;
    if (launch_.rows_are_aligned) {
      cp_async_16(destination, source, offset >= 0 && first < head_dim);
      return;
    }
    using Element = std::conditional_t<CACHE_BYTES == 2, uint16_t, uint8_t>;
    for (int i = 0; i < Tile::CHUNK_ELEMENTS; ++i) {
      const bool read = offset >= 0 && first + i < head_dim;
      reinterpret_cast<Element*>(destination)[i] =
          read ? reinterpret_cast<const Element*>(source)[i] : Element{};
    }
  }

  // The element offset of the lane's key in both caches, -1 where it has no block or no row can see it.
  PAGEDKV_DEVICE void find_rows(int tile) {
    const int token = tiles_begin_ + tile * TILE_TOKENS + warp_ * WARP_TOKENS + lane_ % WARP_TOKENS;
    int64_t block = -1;
    if (token >= keys_begin_ && token < chunk_end_) block = block_of_token(p_, piece_.seq_idx, token);
    const int token_in_block = token % static_cast<int>(p_.block_size);
    key_offset_ =
        block < 0 ? -1 : cache_offset(key_cache_strides(p_), block, token_in_block, piece_.kv_head_idx);
    value_offset_ =
        block < 0 ? -1 : cache_offset(value_cache_strides(p_), block, token_in_block, piece_.kv_head_idx);
    const uint32_t has_block = __ballot_sync(FULL_WARP, block >= 0) & 0xffffu;
    if (lane_ == 0) valid(tile) = has_block;
  }

  // score = K Q^T for the warp's 16 keys.
  PAGEDKV_DEVICE void multiply_keys(const unsigned char* keys, float (&score)[NT][4]) {
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;
    const int token = matrix_row + (matrix & 1) * 8, half = matrix >> 1;
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 4; ++e) score[nt][e] = 0.0f;
    }
#pragma unroll 4
    for (int step = 0; step < K_STEPS; step += 2 / CACHE_BYTES) {
      if (step * 16 >= p_.head_dim) break;
      uint32_t loaded[4];
      if constexpr (CACHE_BYTES == 2) {
        ldmatrix_x4(loaded, keys + Tile::template swizzled<Tile::ROW_BYTES>(token, 2 * step + half));
        multiply_key_step(step, loaded, score);
      } else {
        ldmatrix_x4(loaded, keys + Tile::template swizzled<Tile::ROW_BYTES>(token, step + half));
        for (int i = 0; i < 2; ++i) {  // matrices 0, 1 are the first step's dimensions, 2, 3 the second's
          if ((step + i) * 16 >= p_.head_dim) break;
          uint32_t a[4];
          widen<Query>(loaded[2 * i], p_.cache_dtype, a[0], a[2]);
          widen<Query>(loaded[2 * i + 1], p_.cache_dtype, a[1], a[3]);
          multiply_key_step(step + i, a, score);
        }
      }
    }
  }

  PAGEDKV_DEVICE void multiply_key_step(int step, const uint32_t (&a)[4], float (&score)[NT][4]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      uint32_t b[2];
      const int row = nt * 8 + lane_ % 8, chunk = 2 * step + lane_ / 8 % 2;
      ldmatrix_x2(b, shared_ + Tile::template swizzled<D * 2>(row, chunk));
      mma_m16n8k16<Query>(score[nt], a, b);
    }
  }

  // Scale, softcap, ALiBi and mask, in base 2. True where every row sees all of the warp's keys; otherwise
  // bit t of `seen` says whether any row sees key t.
  PAGEDKV_DEVICE bool mask_scores(int tile, float (&score)[NT][4], uint32_t& seen) {
    const float scale = p_.softmax_scale * scale_of(p_.k_scale, p_.k_scale_value, piece_.kv_head_idx);
    const int warp_begin = tiles_begin_ + tile * TILE_TOKENS + warp_ * WARP_TOKENS;
    const uint32_t has_block = valid(tile);
    const bool sure =
        has_block == 0xffffu && warp_begin >= sure_begin_ && warp_begin + WARP_TOKENS <= sure_end_;
    const bool plain = p_.softcap == 0.0f && p_.alibi_slopes == nullptr;
    bool seen_low = false, seen_high = false;
    for (int nt = 0; nt < NT; ++nt) {
      for (int e = 0; e < 4; ++e) {
        float value = score[nt][e] * scale;
        if (!sure || !plain) {
          const int row = nt * 8 + lane_ % 4 * 2 + e % 2;
          const int key = lane_ / 4 + e / 2 * 8;
          if (p_.softcap > 0.0f) value = p_.softcap * tanhf(value / p_.softcap);
          if (p_.alibi_slopes != nullptr && row < num_rows_) {
            value +=
                p_.alibi_slopes[head_of(row)] * static_cast<float>(warp_begin + key - masks()[row].position);
          }
          const bool visible = row < num_rows_ && (has_block >> key & 1) != 0 &&
                               masks()[row].visible(warp_begin + key) && warp_begin + key < chunk_end_;
          if (!visible) value = NEGATIVE_INFINITY;
          (e / 2 == 0 ? seen_low : seen_high) |= visible;
        }
        score[nt][e] = value * LOG2_E;
      }
    }
    if (sure) return true;
    seen = gather_seen(seen_low) | gather_seen(seen_high) << 8;
    return false;
  }

  // The OR of the four lanes that share a key, as bit g for lanes 4 g to 4 g + 3.
  PAGEDKV_DEVICE uint32_t gather_seen(bool mine) const {
    const uint32_t lanes = __ballot_sync(FULL_WARP, mine);
    uint32_t keys = 0;
    for (int key = 0; key < 8; ++key) keys |= ((lanes >> (4 * key) & 0xfu) != 0 ? 1u : 0u) << key;
    return keys;
  }

  // Scores become weights; what was summed before is rescaled where a row's maximum rose.
  PAGEDKV_DEVICE void weigh(float (&score)[NT][4]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float tile_max = fmaxf(score[nt][e], score[nt][e + 2]);
        for (int lanes = 4; lanes < WARP_THREADS; lanes *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL_WARP, tile_max, lanes));
        }
        if (tile_max > max_[nt][e]) {
          const float factor = max_[nt][e] == NEGATIVE_INFINITY ? 0.0f : exp2_approx(max_[nt][e] - tile_max);
          max_[nt][e] = tile_max;
          sum_[nt][e] *= factor;
#pragma unroll
          for (int step = 0; step < K_STEPS; ++step) {
            acc_[step][nt][e] *= factor;
            acc_[step][nt][e + 2] *= factor;
          }
        }
        // A row that has seen nothing yet has only scores of -inf, and -inf - -inf is NaN.
        const float base = max_[nt][e] == NEGATIVE_INFINITY ? 0.0f : max_[nt][e];
        score[nt][e] = exp2_approx(score[nt][e] - base);
        score[nt][e + 2] = exp2_approx(score[nt][e + 2] - base);
        sum_[nt][e] += score[nt][e] + score[nt][e + 2];
      }
    }
  }

  // acc += V^T P^T. A key that no row sees may hold NaN, and 0 * NaN is NaN, so its values are cleared.
  PAGEDKV_DEVICE void multiply_values(const unsigned char* values, const float (&weight)[NT][4], bool sure,
                                      uint32_t seen) {
    uint32_t b[NT][2];
    for (int nt = 0; nt < NT; ++nt) {
      b[nt][0] = movmatrix_trans(pack2<Query>(weight[nt][0], weight[nt][1]));
      b[nt][1] = movmatrix_trans(pack2<Query>(weight[nt][2], weight[nt][3]));
    }
    const int pair = lane_ % 4 * 2;
    const uint32_t keep_low = halves(seen >> pair), keep_high = halves(seen >> (pair + 8));
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;
#pragma unroll
    for (int step = 0; step < K_STEPS; step += 2 / CACHE_BYTES) {
      if (step * 16 >= p_.value_head_dim) break;
      uint32_t loaded[4];
      if constexpr (CACHE_BYTES == 2) {
        const int token = matrix_row + (matrix >> 1) * 8, chunk = 2 * step + (matrix & 1);
        ldmatrix_x4_trans(loaded, values + Tile::template swizzled<Tile::ROW_BYTES>(token, chunk));
        multiply_value_step(step, loaded, b, sure, keep_low, keep_high);
      } else {
        const int token = matrix_row + (matrix & 1) * 8, chunk = step + (matrix >> 1);
        ldmatrix_x4_trans(loaded, values + Tile::template swizzled<Tile::ROW_BYTES>(token, chunk));
        for (int i = 0; i < 2; ++i) {
          if ((step + i) * 16 >= p_.value_head_dim) break;
          uint32_t a[4];  // rows g and g + 8 are value dimensions 2 g and 2 g + 1
          widen<Query>(swap_middle_bytes(loaded[2 * i]), p_.cache_dtype, a[0], a[1]);
          widen<Query>(swap_middle_bytes(loaded[2 * i + 1]), p_.cache_dtype, a[2], a[3]);
          multiply_value_step(step + i, a, b, sure, keep_low, keep_high);
        }
      }
    }
  }

  PAGEDKV_DEVICE void multiply_value_step(int step, uint32_t (&a)[4], const uint32_t (&b)[NT][2], bool sure,
                                          uint32_t keep_low, uint32_t keep_high) {
    if (!sure) {
      a[0] &= keep_low;
      a[1] &= keep_low;
      a[2] &= keep_high;
      a[3] &= keep_high;
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) mma_m16n8k16<Query>(acc_[step][nt], a, b[nt]);
  }

  PAGEDKV_DEVICE static uint32_t halves(uint32_t two_bits) {
    return ((two_bits & 1) != 0 ? 0xffffu : 0u) | ((two_bits & 2) != 0 ? 0xffff0000u : 0u);
  }
  PAGEDKV_DEVICE static uint32_t swap_middle_bytes(uint32_t x) {
    return (x & 0xff0000ffu) | (x >> 8 & 0xff00u) | (x << 8 & 0xff0000u);
  }

  // The four warps' states of the chunk become one, which is folded into the CTA's.
  PAGEDKV_DEVICE void merge_warps() {
    __syncthreads();  // all warps are done with the ring, whose memory the merge uses
    const int g = lane_ / 4, q = lane_ % 4;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = nt * 8 + q * 2 + e;
        float sum = sum_[nt][e];
        for (int lanes = 4; lanes < WARP_THREADS; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
        if (g == 0) {
          merge_max(warp_)[row] = max_[nt][e];
          merge_sum(warp_)[row] = sum;
        }
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          float* acc = merge_acc(warp_) + row * D + step * 16;
          acc[CACHE_BYTES == 2 ? g : 2 * g] = acc_[step][nt][e];
          acc[CACHE_BYTES == 2 ? g + 8 : 2 * g + 1] = acc_[step][nt][e + 2];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_rows_ * D; i += CTA_THREADS) {
      const int row = i / D;
      float max, sum;
      merged_max_sum(row, max, sum);
      float acc = 0.0f;
      for (int warp = 0; warp < CTA_WARPS; ++warp) {
        const float warp_max = merge_max(warp)[row];
        if (warp_max != NEGATIVE_INFINITY) acc = fmaf(merge_acc(warp)[i], exp2_approx(warp_max - max), acc);
      }
      fold_acc()[i] = is_first_ ? acc : folded(fold_of(fold_max()[row], max), fold_acc()[i], acc);
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < num_rows_) {
      float max, sum;
      merged_max_sum(threadIdx.x, max, sum);
      const Fold fold = is_first_ ? Fold{max, 0.0f, 1.0f} : fold_of(fold_max()[threadIdx.x], max);
      fold_sum()[threadIdx.x] = is_first_ ? sum : folded(fold, fold_sum()[threadIdx.x], sum);
      fold_max()[threadIdx.x] = fold.max;
    }
    is_first_ = false;
    __syncthreads();
  }

  PAGEDKV_DEVICE void merged_max_sum(int row, float& max, float& sum) const {
    max = NEGATIVE_INFINITY;
    for (int warp = 0; warp < CTA_WARPS; ++warp) max = fmaxf(max, merge_max(warp)[row]);
    sum = 0.0f;
    for (int warp = 0; warp < CTA_WARPS; ++warp) {
      const float warp_max = merge_max(warp)[row];
      if (warp_max != NEGATIVE_INFINITY) sum = fmaf(merge_sum(warp)[row], exp2_approx(warp_max - max), sum);
    }
  }

  // The result, or the chunk's state where other CTAs have the row's other chunks.
  PAGEDKV_DEVICE void store() {
    for (int64_t i = threadIdx.x; i < num_rows_ * p_.value_head_dim; i += CTA_THREADS) {
      const int row = static_cast<int>(i / p_.value_head_dim);
      const int64_t dim = i % p_.value_head_dim, token_idx = token_of(row), head_idx = head_of(row);
      const float acc = fold_acc()[row * D + dim];
      if (launch_.num_chunks > 1) {
        const int64_t state_idx =
            (token_idx * p_.num_heads + head_idx) * launch_.num_chunks + piece_.chunk_idx;
        launch_.partial_acc[state_idx * p_.value_head_dim + dim] = acc;
        if (dim == 0) launch_.partial_max_sum[state_idx] = {fold_max()[row], fold_sum()[row]};
        continue;
      }
      const Normaliser normaliser = normaliser_of(p_, head_idx, fold_max()[row] * LN_2, fold_sum()[row]);
      const float result = normaliser(acc);
      out_row<Query>(p_, token_idx, head_idx)[dim] = from_float<Query>(result);
      if (dim == 0 && p_.lse != nullptr) p_.lse[token_idx * p_.num_heads + head_idx] = normaliser.lse;
    }
  }

  const AttentionLaunch& launch_;
  const PagedAttentionParams& p_;
  unsigned char* shared_;
  Piece piece_;
  int warp_, lane_, num_rows_, fold_at_;
  bool is_first_ = true;  // nothing has been folded yet
  int group_, row_begin_;
  int keys_begin_, keys_end_, sure_begin_, sure_end_;  // positions fit int32, as context lengths do
  int tiles_begin_, chunk_end_, num_tiles_;
  int64_t key_offset_, value_offset_;
  float acc_[K_STEPS][NT][4];
  float max_[NT][2], sum_[NT][2];
};

template <class Query, int CACHE_BYTES, int D, int NT>
__global__ void __launch_bounds__(CTA_THREADS) decode_kernel(const AttentionLaunch launch) {
  using Tile = DecodeTile<Query, CACHE_BYTES, D, NT>;
  PAGEDKV_SHARED(shared);
  fill_padding<Query>(launch.p);
  Piece piece;
  piece.chunk_idx = blockIdx.x % launch.num_chunks;
  const int64_t rest = blockIdx.x / launch.num_chunks;
  piece.kv_head_idx = rest % launch.p.num_kv_heads;
  if (!find_row_tile<Tile::ROWS>(launch.p, rest / launch.p.num_kv_heads, piece)) return;
  DecodeCta<Query, CACHE_BYTES, D, NT>(launch, shared, piece).run();
}

}  // namespace pagedkv::cuda
