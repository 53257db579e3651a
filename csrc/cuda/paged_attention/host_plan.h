// How the host cuts paged_attention, from sizes that it knows: the lengths themselves stay on the device.
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/paged_attention/plan.h"
#include "cuda/rows.h"

namespace pagedkv::cuda {

// Rows that a CTA takes. Up to 32 (16 at head_dim above 128, whose accumulators would not fit the registers)
// they are the columns of decode.h, which serves every number of them where split_size asks for one order of
// sums; 64 are the rows of prefill.h.
inline int choose_tile_rows_log2(const PagedAttentionParams& p) {
  const int64_t group = p.num_heads / p.num_kv_heads, rows = p.max_query_len * group;
  const bool is_wide = std::max(p.head_dim, p.value_head_dim) > 128;
  const int decode_log2 = is_wide ? 4 : 5;
  if (rows <= 8) return 3;
  return rows <= 1 << decode_log2 || p.split_size > 0 ? decode_log2 : 6;
}

// As many as first_row_tile numbers; at least one, whose CTAs fill the padding.
inline int64_t count_row_tiles(const AttentionLaunch& launch) {
  const PagedAttentionParams& p = launch.p;
  if (p.query_start_loc == nullptr) return p.num_seqs * ceil_div(launch.group, launch.tile_rows());
  return std::max<int64_t>(1, p.num_tokens * launch.group / launch.tile_rows() + p.num_seqs);
}

inline int64_t state_bytes(const AttentionLaunch& launch) {
  return launch.p.num_kv_heads * launch.state_rows * (launch.p.value_head_dim + 2) * int64_t{sizeof(float)};
}

// With split_size a piece has one CTA per split where their states fit; otherwise a CTA takes all of them, in
// the same order and with the same bits.
inline int64_t choose_num_splits(const AttentionLaunch& launch) {
  constexpr int64_t MAX_SCRATCH_BYTES = int64_t{256} << 20;
  const PagedAttentionParams& p = launch.p;
  if (p.split_size == 0) return 1;
  const int64_t splits = std::max<int64_t>(1, ceil_div(p.max_blocks_per_seq * p.block_size, p.split_size));
  return splits * launch.num_row_tiles * state_bytes(launch) <= MAX_SCRATCH_BYTES ? splits : 1;
}

// How many CTAs share out the pieces of a KV head; 0: every piece has a CTA of its own.
//
// Example, decode of one sequence of up to 8192 keys, 8 KV heads, 132 SMs: 4 * 132 CTAs run at once, 66 for a
// KV head, but its one piece has only 32 chunks of 256 keys: 32 parts, 256 CTAs.
inline int64_t choose_num_parts(const AttentionLaunch& launch, int64_t num_sms) {
  constexpr int64_t MIN_CHUNK_TOKENS = MIN_CHUNK_TILES * TILE_TOKENS;
  const PagedAttentionParams& p = launch.p;
  const int64_t max_chunks = p.max_blocks_per_seq * p.block_size / MIN_CHUNK_TOKENS;
  if (p.split_size > 0 || max_chunks <= 1) return 0;  // there is nothing to cut
  const bool is_decode = launch.tile_rows() <= 32;
  const int64_t room = num_sms * (is_decode ? 4 : 2);  // CTAs that run at once
  const int64_t num_pieces = int64_t{launch.num_row_tiles} * p.num_kv_heads;
  // Many pieces keep the device busy without being cut. A prefill's state is large, so that it is cut only
  // where half of the room would be left.
  if (is_decode ? num_pieces > 8 * room : 2 * num_pieces > room) return 0;
  return std::clamp<int64_t>(room / p.num_kv_heads, 1, launch.num_row_tiles * max_chunks);
}

inline bool cache_rows_are_aligned(const PagedAttentionParams& p) {
  const int64_t bytes = element_bytes(p.cache_dtype);
  const int64_t chunk = VECTOR_BYTES / bytes;
  const RowAlignment key{
      p.key_cache, bytes, {p.key_cache_block_stride, p.key_cache_token_stride, p.key_cache_head_stride}};
  const RowAlignment value{
      p.value_cache,
      bytes,
      {p.value_cache_block_stride, p.value_cache_token_stride, p.value_cache_head_stride}};
  return p.head_dim % chunk == 0 && p.value_head_dim % chunk == 0 && key.holds(chunk) && value.holds(chunk);
}

inline bool query_rows_are_aligned(const PagedAttentionParams& p) {
  const int64_t bytes = element_bytes(p.query_dtype);
  const RowAlignment query{p.query, bytes, {p.query_token_stride, p.query_head_stride, 0}};
  const RowAlignment out{p.out, bytes, {p.out_token_stride, p.out_head_stride, 0}};
  return query.holds(4) && out.holds(4);
}

// Everything but the scratch memory.
inline AttentionLaunch make_launch(const PagedAttentionParams& p, int64_t num_sms) {
  AttentionLaunch launch{};
  launch.p = p;
  launch.group = static_cast<int>(p.num_heads / p.num_kv_heads);
  launch.tile_rows_log2 = p.query_dtype == DType::float32 ? FLOAT32_TILE_ROWS_LOG2 : choose_tile_rows_log2(p);
  launch.num_row_tiles = static_cast<int>(count_row_tiles(launch));
  launch.state_rows = launch.tile_rows();
  if (p.query_start_loc == nullptr) launch.state_rows = std::min(launch.state_rows, launch.group);
  launch.num_splits = 1;
  const auto block_size = static_cast<uint64_t>(p.block_size);
  launch.block_size_log2 = std::has_single_bit(block_size) ? std::countr_zero(block_size) : -1;
  launch.cache_rows_are_aligned = cache_rows_are_aligned(p);
  launch.query_rows_are_aligned = query_rows_are_aligned(p);
  if (p.query_dtype == DType::float32) return launch;
  launch.num_splits = static_cast<int>(choose_num_splits(launch));
  launch.num_parts = static_cast<int>(choose_num_parts(launch, num_sms));
  launch.num_states =
      launch.num_parts > 0 ? 2 * launch.num_parts : int64_t{launch.num_row_tiles} * launch.num_splits;
  return launch;
}

}  // namespace pagedkv::cuda
