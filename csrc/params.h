// One plain struct per operator: everything a back-end needs, checked by csrc/bindings and free of torch.
// Shapes stand in brackets after each pointer. Strides are in elements, and the last dimension of every
// tensor is contiguous. "null" says what a missing pointer means; a pointer without it is never null.
#pragma once

#include <cstdint>
#include <limits>

namespace pagedkv {

enum class DType : int8_t { float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, int8 };

inline constexpr int64_t NO_WINDOW = std::numeric_limits<int64_t>::max();

// out[t, h] = softmax(mask(softcap(query[t, h] . K * softmax_scale) + alibi), sink) V over the pages of t's
// sequence.
struct PagedAttentionParams {
  const void* query;               // [num_tokens, num_heads, head_dim] query_dtype
  const void* key_cache;           // [num_blocks, block_size, num_kv_heads, head_dim] cache_dtype
  const void* value_cache;         // [num_blocks, block_size, num_kv_heads, value_head_dim] cache_dtype
  void* out;                       // [num_tokens, num_heads, value_head_dim] query_dtype
  float* lse;                      // [num_tokens, num_heads] contiguous, natural log; null: not wanted
  const int32_t* block_tables;     // [num_seqs, max_blocks_per_seq]
  const int32_t* context_lens;     // [num_seqs]
  const int32_t* query_start_loc;  // [num_seqs + 1]; null: one query token per sequence
  const int32_t* kv_starts;        // [num_seqs] first visible key; null: 0
  const bool* tree_mask;           // [num_tokens, max_tree] over the last max_tree keys; null: none
  const float* alibi_slopes;       // [num_heads]; null: none
  const float* sinks;              // [num_heads] extra logits; null: none
  const float* k_scale;            // [num_kv_heads]; null: k_scale_value for every head
  const float* v_scale;            // [num_kv_heads]; null: v_scale_value for every head
  float k_scale_value, v_scale_value;
  DType query_dtype, cache_dtype;
  int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, value_head_dim;
  int64_t num_blocks, block_size, max_blocks_per_seq;
  int64_t max_query_len;  // no sequence has more query tokens
  int64_t max_tree;
  int64_t query_token_stride, query_head_stride;
  int64_t key_cache_block_stride, key_cache_token_stride, key_cache_head_stride;
  int64_t value_cache_block_stride, value_cache_token_stride, value_cache_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t block_tables_seq_stride, tree_mask_token_stride;
  float softmax_scale;
  float softcap;       // 0: off
  int64_t window;      // keys a query sees, itself included; NO_WINDOW: all
  int64_t split_size;  // KV is cut at its multiples; 0: the back-end chooses
  bool causal;
};

// cache[slot_mapping[i]] = round(row i / scale) for keys and values; a negative slot is skipped.
struct ReshapeAndCacheParams {
  const void* key;              // [num_tokens, num_kv_heads, head_dim] input_dtype
  const void* value;            // [num_tokens, num_kv_heads, value_head_dim] input_dtype
  void* key_cache;              // [num_blocks, block_size, num_kv_heads, head_dim] cache_dtype
  void* value_cache;            // [num_blocks, block_size, num_kv_heads, value_head_dim] cache_dtype
  const int64_t* slot_mapping;  // [num_tokens] block * block_size + offset
  const float* k_scale;         // [num_kv_heads]; null: k_scale_value for every head
  const float* v_scale;         // [num_kv_heads]; null: v_scale_value for every head
  float k_scale_value, v_scale_value;
  DType input_dtype, cache_dtype;
  int64_t num_tokens, num_kv_heads, head_dim, value_head_dim, num_blocks, block_size;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t key_cache_block_stride, key_cache_token_stride, key_cache_head_stride;
  int64_t value_cache_block_stride, value_cache_token_stride, value_cache_head_stride;
};

// Rotates query in place and key on its way into the cache, then writes as ReshapeAndCacheParams does.
struct RopeAndCacheParams {
  void* query;               // [num_positions, num_heads, head_dim] write.input_dtype, rotated in place
  const void* cos;           // [max_position, rotary_dim / 2] float32 or write.input_dtype
  const void* sin;           // [max_position, rotary_dim / 2] the same dtype
  const int64_t* positions;  // [num_positions]; the first write.num_tokens rows are also cached
  ReshapeAndCacheParams write;
  DType table_dtype;
  int64_t num_positions, num_heads, rotary_dim, max_position;
  int64_t query_token_stride, query_head_stride, cos_position_stride, sin_position_stride;
  bool interleaved;  // pairs (2i, 2i + 1) are rotated; otherwise (i, i + rotary_dim / 2)
};

// Where the bytes of one block of a cache lie: base + block * block_stride_bytes, as outer_rows x inner_rows
// rows of row_bytes. A block that is dense in memory, in whatever order of its axes, is a single row.
struct BlockLayout {
  char* base;
  int64_t num_blocks, block_stride_bytes;
  int64_t outer_rows, outer_stride_bytes;
  int64_t inner_rows, inner_stride_bytes;
  int64_t row_bytes;
};

struct BlockPair {
  int64_t source, destination;
};

// For every cache c and pair p: block pairs[p].destination of destinations[c] = block pairs[p].source of
// sources[c], byte for byte, with every source read as it was before the call. copy_blocks and swap_blocks
// both take it.
struct CopyBlocksParams {
  const BlockLayout* sources;       // [num_caches] on the host
  const BlockLayout* destinations;  // [num_caches] on the host, rows as in sources
  const BlockPair* pairs;           // [num_pairs] on the host, no destination twice
  int64_t num_caches, num_pairs;
  int64_t num_staged;    // the first num_staged pairs read blocks that other pairs write: their sources go
                         // through staging
  bool cross_device;     // one side is host memory or another device: the bytes go by cudaMemcpyAsync
  char* const* staging;  // [num_caches] on the host, each [num_staged, bytes of its block] beside sources;
                         // null without any
};

// key[i], value[i] = dequantised cache rows of every sequence's tokens kv_start .. context_len, one sequence
// after another.
struct GatherKvParams {
  const void* key_cache;        // [num_blocks, block_size, num_kv_heads, head_dim] cache_dtype
  const void* value_cache;      // [num_blocks, block_size, num_kv_heads, value_head_dim] cache_dtype
  const int32_t* block_tables;  // [num_seqs, max_blocks_per_seq]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* kv_starts;     // [num_seqs]; null: 0
  void* key;                    // [total_tokens, num_kv_heads, head_dim] contiguous, out_dtype
  void* value;                  // [total_tokens, num_kv_heads, value_head_dim] contiguous, out_dtype
  int64_t* token_offsets;       // [num_seqs + 1] scratch: first output row of each sequence
  const float* k_scale;         // [num_kv_heads]; null: k_scale_value for every head
  const float* v_scale;         // [num_kv_heads]; null: v_scale_value for every head
  float k_scale_value, v_scale_value;
  DType cache_dtype, out_dtype;
  int64_t total_tokens, num_seqs, num_kv_heads, head_dim, value_head_dim;
  int64_t num_blocks, block_size, max_blocks_per_seq, block_tables_seq_stride;
  int64_t key_cache_block_stride, key_cache_token_stride, key_cache_head_stride;
  int64_t value_cache_block_stride, value_cache_token_stride, value_cache_head_stride;
};

// out, lse = the attention state of the union of two disjoint key sets.
struct MergeAttnStatesParams {
  const void* out_a;   // [num_tokens, num_heads, head_dim] dtype
  const void* out_b;   // [num_tokens, num_heads, head_dim] dtype
  const float* lse_a;  // [num_tokens, num_heads] natural log
  const float* lse_b;  // [num_tokens, num_heads] natural log
  void* out;           // [num_tokens, num_heads, head_dim] contiguous, dtype
  float* lse;          // [num_tokens, num_heads] contiguous
  DType dtype;
  int64_t num_tokens, num_heads, head_dim;
  int64_t out_a_token_stride, out_a_head_stride, out_b_token_stride, out_b_head_stride;
  int64_t lse_a_token_stride, lse_b_token_stride;
};

}  // namespace pagedkv
