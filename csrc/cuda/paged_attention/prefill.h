// Attention of a tile of 64 query rows to the keys and values of one KV head, on tensor cores, for
// prefill and for large groups (Dao 2023, "FlashAttention-2", section 3).
//
// Work: a CTA has the chunks of schedule.h. Each of its 4 warps has 16 rows; all share a tile of 64 keys
// (32 at head_dim 256). Bytes: K and V of a chunk are read once for all rows, by 16-byte asynchronous copies
// into two buffers, of which one is filled while the other is used.
//
// S = Q K^T and O = P V: query rows fill the 16 rows of an mma, keys or value dimensions its 8 columns. Per
// lane, with g = lane / 4 and q = lane % 4, an accumulator holds columns 2q, 2q + 1 of rows g and g + 8.
#pragma once

#include "cuda/paged_attention/cta.h"

namespace pagedkv::cuda {

inline constexpr int WARP_ROWS = 16;
inline constexpr int PREFILL_ROWS = CTA_WARPS * WARP_ROWS;

// D is head_dim rounded up to 64, 128 or 256; CACHE_BYTES is the size of a cache element.
template <int CACHE_BYTES, int D>
struct PrefillTile {
  static constexpr int KEYS = D == 256 ? 32 : 64;
  static constexpr int ROW_BYTES = D * CACHE_BYTES;
  static constexpr int BUFFER_BYTES = KEYS * ROW_BYTES;  // of K or V of one tile
  // At head_dim 256 the accumulators leave no registers for the query.
  static constexpr bool HOLDS_QUERY = D <= 128;
  static constexpr int ACC_ROW_STRIDE = D + 8;  // in floats: the lanes of a store fall into different banks

  static constexpr int VALID_AT = WORK_BYTES;  // a byte for 8 keys of each of two tiles
  static constexpr int ROWS_AT = VALID_AT + 16;
  static constexpr int UNSCALES_AT = ROWS_AT + PREFILL_ROWS * static_cast<int>(sizeof(QueryRow));
  static constexpr int QUERY_AT = (UNSCALES_AT + PREFILL_ROWS * 4 + 127) / 128 * 128;
  static constexpr int QUERY_BYTES = PREFILL_ROWS * D * 2;
  // A query that registers hold passes through the memory of the buffers.
  static constexpr int BUFFERS_AT = QUERY_AT + (HOLDS_QUERY ? 0 : QUERY_BYTES);
  // The CTA's state takes the place of query and buffers when all keys are done.
  static constexpr int STATE_BYTES = PREFILL_ROWS * (ACC_ROW_STRIDE + 2) * 4;
  static constexpr int SHARED_BYTES =
      max_of(BUFFERS_AT + 4 * BUFFER_BYTES, QUERY_AT + max_of(STATE_BYTES, QUERY_BYTES));
  static_assert(SHARED_BYTES <= 99 * 1024, "a CTA fits every architecture");
};

template <class Query, int CACHE_BYTES, int D>
class PrefillCta : AttentionCta {
  using Element = Operand<Query, CACHE_BYTES>;
  using Tile = PrefillTile<CACHE_BYTES, D>;
  static constexpr int K_STEPS = D / 16;
  static constexpr int KEY_COLUMNS = Tile::KEYS / 8, VALUE_COLUMNS = D / 8;
  static constexpr bool IS_CONVERTED = RowTile<Query, CACHE_BYTES, D>::IS_CONVERTED;
  static constexpr int COPIED_TOKENS = Tile::KEYS / CTA_WARPS;  // of a tile, by a warp

 public:
  PAGEDKV_DEVICE PrefillCta(const AttentionLaunch& launch, unsigned char* shared, const Chunk& chunk)
      : AttentionCta(launch, shared, chunk) {}

  PAGEDKV_DEVICE void run() {
    load_rows();
    __syncthreads();
    find_warp_keys();
    tree_begin_ = query_rows()[0].mask.tree_begin;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale_[i] = rule_.log2_scale();
      if constexpr (IS_CONVERTED) scale_[i] *= unscales()[warp_ * WARP_ROWS + lane_ / 4 + i * 8];
    }
    if constexpr (Tile::HOLDS_QUERY) {
#pragma unroll
      for (int step = 0; step < K_STEPS; ++step) load_query_step(step, query_[step]);
      __syncthreads();  // the buffers take the query's place
    }
    attend();
    __syncthreads();  // all warps are done with query and buffers, whose memory the state uses
    auto* acc = reinterpret_cast<float*>(shared_ + Tile::QUERY_AT);
    float* max = acc + PREFILL_ROWS * Tile::ACC_ROW_STRIDE;
    write_state(acc, max, max + PREFILL_ROWS);
    __syncthreads();
    RowTile<Query, CACHE_BYTES, D>(launch_, chunk_.piece)
        .store(chunk_, acc, Tile::ACC_ROW_STRIDE, max, max + PREFILL_ROWS);
  }

 private:
  PAGEDKV_DEVICE void load_rows() const {
    const RowTile<Query, CACHE_BYTES, D> rows(launch_, chunk_.piece);
    rows.load_query(shared_ + Tile::QUERY_AT, unscales(), PREFILL_ROWS);
    rows.fill_rows(query_rows(), PREFILL_ROWS);
  }

  PAGEDKV_DEVICE float* unscales() const { return reinterpret_cast<float*>(shared_ + Tile::UNSCALES_AT); }
  PAGEDKV_DEVICE QueryRow* query_rows() const { return reinterpret_cast<QueryRow*>(shared_ + Tile::ROWS_AT); }
  PAGEDKV_DEVICE uint8_t* valid(int tile) const {
    return shared_ + Tile::VALID_AT + tile % 2 * (Tile::KEYS / 8);
  }
  PAGEDKV_DEVICE int buffer_at(int tile, bool is_value) const {
    return Tile::BUFFERS_AT + (tile % 2 * 2 + is_value) * Tile::BUFFER_BYTES;
  }

  // The keys that any of the warp's rows sees, and those that all of them see; none for a warp without rows.
  PAGEDKV_DEVICE void find_warp_keys() {
    const int first = warp_ * WARP_ROWS;
    const int last = min_of(first + WARP_ROWS, chunk_.piece.num_rows) - 1;
    warp_keys_ = sure_ = {0, 0};
    if (last < first) return;
    const QueryRow &first_row = query_rows()[first], &last_row = query_rows()[last];
    warp_keys_ = {first_row.mask.begin, last_row.mask.end};
    sure_ = keys_seen_by_all(first_row, last_row);
  }

  PAGEDKV_DEVICE void attend() {
    const int tiles_begin = chunk_.fold_begin, tiles_end = chunk_.keys.end;
    const int num_tiles =
        tiles_begin < tiles_end ? (tiles_end - tiles_begin + Tile::KEYS - 1) / Tile::KEYS : 0;
    for (int row = 0; row < 2; ++row) {
      max_[row] = NEGATIVE_INFINITY;
      sum_[row] = 0.0f;
    }
#pragma unroll
    for (int column = 0; column < VALUE_COLUMNS; ++column) {
      for (int e = 0; e < 4; ++e) acc_[column][e] = 0.0f;
    }
    pages_.look_up(token_of(0), chunk_.keys.end);
    if (num_tiles > 0) issue(0);
    for (int tile = 0; tile < num_tiles; ++tile) {
      cp_async_wait<0>();
      __syncthreads();  // the tile is there for all warps, and all are done with the one before
      if (tile + 1 < num_tiles) issue(tile + 1);
      const int begin = tiles_begin + tile * Tile::KEYS;
      if (begin + Tile::KEYS > tree_begin_) {
        const int first = warp_ * COPIED_TOKENS;
        clear_unseen<Tile::ROW_BYTES>(query_rows(), chunk_.piece.num_rows, begin + first, COPIED_TOKENS,
                                      shared_ + buffer_at(tile, true) + first * Tile::ROW_BYTES);
        __syncthreads();
      }
      if (begin >= warp_keys_.end || begin + Tile::KEYS <= warp_keys_.begin) continue;
      if (CACHE_BYTES == 1 && widener_.is_int8()) {
        attend_tile<true>(tile, begin);
      } else {
        attend_tile<false>(tile, begin);
      }
    }
  }

  template <bool IS_INT8>
  PAGEDKV_DEVICE void attend_tile(int tile, int begin) {
    float score[KEY_COLUMNS][4];
    multiply_keys<IS_INT8>(buffer_at(tile, false), score);
    mask_scores(tile, begin, score);
    weigh(score);
    multiply_values<IS_INT8>(buffer_at(tile, true), score);
  }

  // The token of a tile whose row this lane finds.
  PAGEDKV_DEVICE int token_of(int tile) const {
    return chunk_.fold_begin + tile * Tile::KEYS + warp_ * COPIED_TOKENS + lane_ % COPIED_TOKENS;
  }

  // Starts the copies of a tile's keys and values.
  PAGEDKV_DEVICE void issue(int tile) {
    const uint32_t has_block = __ballot_sync(FULL_WARP, pages_.advance());
    const int first = warp_ * COPIED_TOKENS;
    if (lane_ < COPIED_TOKENS / 8) {
      valid(tile)[first / 8 + lane_] = static_cast<uint8_t>(has_block >> 8 * lane_);
    }
    pages_.look_up(token_of(tile + 1), chunk_.keys.end);
    copy_rows<CACHE_BYTES, D, COPIED_TOKENS>(
        launch_.cache_rows_are_aligned, pages_.template row<CACHE_BYTES>(p_.key_cache, key_cache_strides(p_)),
        p_.head_dim, shared_ + buffer_at(tile, false) + first * Tile::ROW_BYTES);
    copy_rows<CACHE_BYTES, D, COPIED_TOKENS>(
        launch_.cache_rows_are_aligned,
        pages_.template row<CACHE_BYTES>(p_.value_cache, value_cache_strides(p_)), p_.value_head_dim,
        shared_ + buffer_at(tile, true) + first * Tile::ROW_BYTES);
    cp_async_commit();
  }

  // 16 dimensions of the warp's rows, as operand a.
  PAGEDKV_DEVICE void load_query_step(int step, uint32_t (&a)[4]) const {
    const SwizzledRow<D * 2> row(Tile::QUERY_AT, warp_ * WARP_ROWS + lane_ % 16, lane_ / 16);
    ldmatrix_x4(a, shared_ + row.at(2 * step));
  }

  // score = Q K^T.
  template <bool IS_INT8>
  PAGEDKV_DEVICE void multiply_keys(int keys_at, float (&score)[KEY_COLUMNS][4]) {
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; ++column) {
      for (int e = 0; e < 4; ++e) score[column][e] = 0.0f;
    }
    // Matrices 0 to 3: two columns of 8 keys by both halves of 16 dimensions; four columns of 8-bit keys.
    const int key = CACHE_BYTES == 2 ? lane_ / 16 * 8 + lane_ % 8 : lane_;
    const int head_dim = static_cast<int>(p_.head_dim);
    const SwizzledRow<Tile::ROW_BYTES> keys(keys_at, key, CACHE_BYTES == 2 ? lane_ / 8 % 2 : 0);
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      if (step % BRANCH_STEPS == 0 && step * 16 >= head_dim) break;
      if constexpr (!Tile::HOLDS_QUERY) load_query_step(step, query_[0]);
      const uint32_t (&a)[4] = query_[Tile::HOLDS_QUERY ? step : 0];
#pragma unroll
      for (int column = 0; column < KEY_COLUMNS; column += CACHE_BYTES == 2 ? 2 : 4) {
        uint32_t loaded[4];
        ldmatrix_x4(loaded, shared_ + keys.at(CACHE_BYTES * step) + column * 8 * Tile::ROW_BYTES);
        if constexpr (CACHE_BYTES == 2) {
          mma_m16n8k16<Element>(score[column], a, {loaded[0], loaded[1]});
          mma_m16n8k16<Element>(score[column + 1], a, {loaded[2], loaded[3]});
        } else {
          uint32_t low[4], high[4];
          widener_.template widen<IS_INT8, Pairing::neighbours>(loaded, low, high);
#pragma unroll
          for (int i = 0; i < 4; ++i) mma_m16n8k16<Element>(score[column + i], a, {low[i], high[i]});
        }
      }
    }
  }

  // Products to scores.
  PAGEDKV_DEVICE void mask_scores(int tile, int begin, float (&score)[KEY_COLUMNS][4]) const {
    constexpr int WORDS = Tile::KEYS / 32;
    uint32_t has_block[WORDS], all_have_blocks = 0xffffffffu;
    for (int word = 0; word < WORDS; ++word) {
      has_block[word] = load_vector<uint32_t>(valid(tile) + 4 * word);
      all_have_blocks &= has_block[word];
    }
    const bool sure =
        all_have_blocks == 0xffffffffu && begin >= sure_.begin && begin + Tile::KEYS <= sure_.end;
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; ++column) {
      for (int e = 0; e < 4; ++e) score[column][e] *= scale_[e / 2];
    }
    if (sure && rule_.is_plain()) return;
    const int row = warp_ * WARP_ROWS + lane_ / 4, pair = lane_ % 4 * 2;
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; ++column) {
      for (int e = 0; e < 4; ++e) {
        const QueryRow& query_row = query_rows()[row + e / 2 * 8];
        const int key = begin + column * 8 + pair + e % 2;
        const bool is_valid = (has_block[column / 4] >> (column % 4 * 8 + pair + e % 2) & 1) != 0;
        const bool is_visible = is_valid && query_row.mask.visible(key);
        score[column][e] = rule_(score[column][e], query_row, key, is_visible);
      }
    }
  }

  // Scores become weights; what was summed before is rescaled where a row's maximum rose.
  PAGEDKV_DEVICE void weigh(float (&score)[KEY_COLUMNS][4]) {
    float tile_max[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      tile_max[row] = NEGATIVE_INFINITY;
#pragma unroll
      for (int column = 0; column < KEY_COLUMNS; ++column) {
        tile_max[row] = fmaxf(tile_max[row], fmaxf(score[column][2 * row], score[column][2 * row + 1]));
      }
    }
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      for (int row = 0; row < 2; ++row) {
        tile_max[row] = fmaxf(tile_max[row], __shfl_xor_sync(FULL_WARP, tile_max[row], lanes));
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (tile_max[row] > max_[row]) {
        const float factor = exp2_approx(max_[row] - tile_max[row]);  // 0 where there was no maximum
        max_[row] = tile_max[row];
        sum_[row] *= factor;
#pragma unroll
        for (int column = 0; column < VALUE_COLUMNS; ++column) {
          acc_[column][2 * row] *= factor;
          acc_[column][2 * row + 1] *= factor;
        }
      }
      // A row that has seen nothing yet has only scores of -inf, and -inf - -inf is NaN.
      const float base = max_[row] == NEGATIVE_INFINITY ? 0.0f : max_[row];
#pragma unroll
      for (int column = 0; column < KEY_COLUMNS; ++column) {
        float& first = score[column][2 * row];
        float& second = score[column][2 * row + 1];
        first = exp2_approx(first - base);
        second = exp2_approx(second - base);
        sum_[row] += first + second;
      }
    }
  }

  // acc += P V.
  template <bool IS_INT8>
  PAGEDKV_DEVICE void multiply_values(int values_at, const float (&weight)[KEY_COLUMNS][4]) {
    const int head_dim = static_cast<int>(p_.value_head_dim);
    // Matrices 0 to 3: both halves of 16 keys by two columns of 8 dimensions, or of 16 where they have 8
    // bits.
    const SwizzledRow<Tile::ROW_BYTES> values(values_at, lane_ % 16, lane_ / 16);
#pragma unroll
    for (int column = 0; column < KEY_COLUMNS; column += 2) {
      uint32_t a[4];
      for (int i = 0; i < 4; ++i) {
        const float (&part)[4] = weight[column + i / 2];
        a[i] = pack2<Element>(part[i % 2 * 2], part[i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int step = 0; step < K_STEPS; step += 2 / CACHE_BYTES) {
        if (step % BRANCH_STEPS == 0 && step * 16 >= head_dim) break;
        uint32_t loaded[4];
        ldmatrix_x4_trans(loaded, shared_ + values.at(CACHE_BYTES * step) + column * 8 * Tile::ROW_BYTES);
        if constexpr (CACHE_BYTES == 2) {
          mma_m16n8k16<Element>(acc_[2 * step], a, {loaded[0], loaded[1]});
          mma_m16n8k16<Element>(acc_[2 * step + 1], a, {loaded[2], loaded[3]});
        } else {
          uint32_t low[4], high[4];  // columns of the even and of the odd ones of 16 dimensions, of two steps
          widener_.template widen<IS_INT8, Pairing::transposed>(loaded, low, high);
          mma_m16n8k16<Element>(acc_[2 * step], a, {low[0], low[1]});
          mma_m16n8k16<Element>(acc_[2 * step + 1], a, {high[0], high[1]});
          mma_m16n8k16<Element>(acc_[2 * step + 2], a, {low[2], low[3]});
          mma_m16n8k16<Element>(acc_[2 * step + 3], a, {high[2], high[3]});
        }
      }
    }
  }

  PAGEDKV_DEVICE void write_state(float* acc, float* max, float* sum) const {
    const int q = lane_ % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp_ * WARP_ROWS + lane_ / 4 + i * 8;
      float row_sum = sum_[i] + __shfl_xor_sync(FULL_WARP, sum_[i], 1);
      row_sum += __shfl_xor_sync(FULL_WARP, row_sum, 2);
      if (q == 0) {
        max[row] = max_[i];
        sum[row] = row_sum;
      }
      float* row_acc = acc + row * Tile::ACC_ROW_STRIDE;
#pragma unroll
      for (int column = 0; column < VALUE_COLUMNS; column += 2) {
        const float even[2] = {acc_[column][2 * i], acc_[column][2 * i + 1]};
        const float odd[2] = {acc_[column + 1][2 * i], acc_[column + 1][2 * i + 1]};
        if constexpr (CACHE_BYTES == 2) {
          store_vector(row_acc + column * 8 + 2 * q, float2{even[0], even[1]});
          store_vector(row_acc + column * 8 + 8 + 2 * q, float2{odd[0], odd[1]});
        } else {
          store_vector(row_acc + column * 8 + 4 * q, float4{even[0], odd[0], even[1], odd[1]});
        }
      }
    }
  }

  int tree_begin_;  // from this key on a row may see one and not the one before
  KeyRange warp_keys_, sure_;
  float scale_[2];  // of the products of rows g and g + 8
  uint32_t query_[Tile::HOLDS_QUERY ? K_STEPS : 1][4];
  float acc_[VALUE_COLUMNS][4];
  float max_[2], sum_[2];
};

template <class Query, int CACHE_BYTES, int D>
__global__ void __launch_bounds__(CTA_THREADS, 2) prefill_kernel(const AttentionLaunch launch) {
  PAGEDKV_SHARED(shared);
  let_kernel_behind_start();
  fill_padding<Query>(launch.p);
  auto& work = *reinterpret_cast<Work*>(shared);
  bool is_first = true;
  while (find_chunk(launch, work, is_first)) {
    PrefillCta<Query, CACHE_BYTES, D>(launch, shared, work.chunk).run();
    is_first = false;
  }
}

}  // namespace pagedkv::cuda
