// From the operator's parameters to kernel launches. Each query dtype has a .cu file of its own that
// instantiates this.
#pragma once

#include <algorithm>

#include "cuda/paged_attention/combine.h"
#include "cuda/paged_attention/decode.h"
#include "cuda/rows.h"

namespace pagedkv::cuda {

// Rows that a CTA takes: as few 8-row columns of an mma as hold the group, or 32 rows (16 at head_dim above
// 128, whose accumulators would not fit the registers).
inline int64_t rows_per_tile(const PagedAttentionParams& p) {
  const int64_t rows = p.max_query_len * (p.num_heads / p.num_kv_heads);
  if (rows <= 8) return 8;
  return std::max(p.head_dim, p.value_head_dim) > 128 ? 16 : 32;
}

// As many as first_row_tile numbers; at least one, whose CTAs fill the padding.
inline int64_t count_row_tiles(const PagedAttentionParams& p, int64_t tile_rows) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  if (p.query_start_loc == nullptr) return p.num_seqs * ceil_div(group, tile_rows);
  return std::max<int64_t>(1, p.num_tokens * group / tile_rows + p.num_seqs);
}

// How many CTAs share the keys of a row tile. From sizes that the host knows: the lengths themselves stay on
// the device.
//
// Example, one sequence of up to 8192 keys, 8 KV heads, one row tile, 132 SMs: 8 pieces leave most of 4 * 132
// CTAs' room unused, so the keys are cut into 8192 / 256 = 32 chunks, 256 CTAs.
inline int64_t choose_num_chunks(const PagedAttentionParams& p, int64_t num_pieces, int64_t num_sms) {
  constexpr int64_t CTAS_PER_SM = 4;
  constexpr int64_t MIN_CHUNK_TOKENS = 256;  // below it a chunk's state costs more traffic than its keys
  constexpr int64_t MAX_CHUNKS = 128;
  // A row's states, 4 (value_head_dim + 2) bytes a chunk, stay below this.
  constexpr int64_t MAX_SCRATCH_BYTES = int64_t{256} << 20;
  const int64_t max_context = p.max_blocks_per_seq * p.block_size;
  const int64_t state_bytes = p.num_tokens * p.num_heads * (p.value_head_dim + 2) * 4;
  if (p.split_size > 0) {
    // One CTA per split where their states fit; otherwise a CTA takes all of them, in the same order and with
    // the same bits.
    const int64_t splits = ceil_div(max_context, p.split_size);
    return splits * state_bytes <= MAX_SCRATCH_BYTES ? std::max<int64_t>(1, splits) : 1;
  }
  const int64_t room = CTAS_PER_SM * num_sms;
  if (num_pieces * 2 > room) return 1;  // two chunks would not run side by side
  const int64_t longest = std::max<int64_t>(1, MAX_SCRATCH_BYTES / std::max<int64_t>(1, state_bytes));
  return std::clamp<int64_t>(std::min(room / num_pieces, max_context / MIN_CHUNK_TOKENS), 1,
                             std::min(MAX_CHUNKS, longest));
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

template <class Query, int CACHE_BYTES, int D, int NT>
cudaError_t launch_decode(const AttentionLaunch& args, cudaStream_t stream) {
  using Tile = DecodeTile<Query, CACHE_BYTES, D, NT>;
  const dim3 grid(static_cast<unsigned>(args.num_row_tiles * args.p.num_kv_heads * args.num_chunks));
  const int shared_bytes = takes_several_splits(args) ? Tile::KEPT_SHARED_BYTES : Tile::SHARED_BYTES;
  const cudaError_t error =
      launch(decode_kernel<Query, CACHE_BYTES, D, NT>, grid, dim3(CTA_THREADS), shared_bytes, stream, args);
  if (error != cudaSuccess || args.num_chunks == 1) return error;
  const dim3 combine_grid(static_cast<unsigned>(ceil_div(args.p.num_tokens * args.p.num_heads, CTA_WARPS)));
  return launch(combine_kernel<Query>, combine_grid, dim3(CTA_THREADS), 0, stream, args);
}

template <class Query, int CACHE_BYTES, int D>
cudaError_t launch_decode_rows(const AttentionLaunch& args, int64_t tile_rows, cudaStream_t stream) {
  if (tile_rows == 8) return launch_decode<Query, CACHE_BYTES, D, 1>(args, stream);
  return launch_decode<Query, CACHE_BYTES, D, D == 256 ? 2 : 4>(args, stream);
}

template <class Query, int CACHE_BYTES>
cudaError_t launch_decode_dim(const AttentionLaunch& args, int64_t tile_rows, cudaStream_t stream) {
  const int64_t dim = std::max(args.p.head_dim, args.p.value_head_dim);
  if (dim <= 64) return launch_decode_rows<Query, CACHE_BYTES, 64>(args, tile_rows, stream);
  if (dim <= 128) return launch_decode_rows<Query, CACHE_BYTES, 128>(args, tile_rows, stream);
  return launch_decode_rows<Query, CACHE_BYTES, 256>(args, tile_rows, stream);
}

template <class Query>
cudaError_t launch_tensor_core_attention(const AttentionLaunch& args, int64_t tile_rows,
                                         cudaStream_t stream) {
  if (element_bytes(args.p.cache_dtype) == 1) return launch_decode_dim<Query, 1>(args, tile_rows, stream);
  return launch_decode_dim<Query, 2>(args, tile_rows, stream);
}

cudaError_t paged_attention_float16(const AttentionLaunch& args, int64_t tile_rows, cudaStream_t stream);
cudaError_t paged_attention_bfloat16(const AttentionLaunch& args, int64_t tile_rows, cudaStream_t stream);
cudaError_t paged_attention_float32(const AttentionLaunch& args, cudaStream_t stream);

}  // namespace pagedkv::cuda
