// The cache operators' kernels at small shapes: the same bytes as the CPU back-end writes, under every
// schedule.
#include "kernel_cases.h"

namespace pagedkv::emulator {
namespace {

// ---- reshape_and_cache and rope_and_cache

struct WriteShape {
  DType input, cache;
  int64_t num_tokens, head_dim;
};

// Owns what ReshapeAndCacheParams points to; value rows are 8 elements longer than key rows. The kernels skip
// slots outside the cache, which the CPU back-end is never given.
struct WriteCase {
  static constexpr int64_t NUM_BLOCKS = 7, BLOCK_SIZE = 3, NUM_KV_HEADS = 2;
  std::vector<int64_t> slots, inner_slots;
  std::vector<float> k_scale{0.5f, 3.0f};
  Bytes key, value;
  std::vector<Bytes> caches;
  ReshapeAndCacheParams params{};

  explicit WriteCase(const WriteShape& shape) {
    const int64_t num_tokens = shape.num_tokens, value_head_dim = shape.head_dim + 8;
    for (int64_t i = 0; i < num_tokens; ++i) {
      slots.push_back(static_cast<int64_t>(random_bits() % 25) - 2);  // some outside, some repeated
      inner_slots.push_back(slots.back() < NUM_BLOCKS * BLOCK_SIZE ? slots.back() : -1);
    }
    key = random_elements(shape.input, num_tokens * NUM_KV_HEADS * shape.head_dim);
    value = random_elements(shape.input, num_tokens * NUM_KV_HEADS * value_head_dim);
    ReshapeAndCacheParams& p = params;
    p.key = key.data();
    p.value = value.data();
    p.slot_mapping = slots.data();
    p.k_scale = k_scale.data();
    p.v_scale_value = 0.25f;
    p.input_dtype = shape.input;
    p.cache_dtype = shape.cache;
    p.num_tokens = num_tokens;
    p.num_kv_heads = NUM_KV_HEADS;
    p.head_dim = p.key_head_stride = p.key_cache_head_stride = shape.head_dim;
    p.value_head_dim = p.value_head_stride = p.value_cache_head_stride = value_head_dim;
    p.key_token_stride = p.key_cache_token_stride = NUM_KV_HEADS * shape.head_dim;
    p.value_token_stride = p.value_cache_token_stride = NUM_KV_HEADS * value_head_dim;
    p.num_blocks = NUM_BLOCKS;
    p.block_size = BLOCK_SIZE;
    p.key_cache_block_stride = BLOCK_SIZE * p.key_cache_token_stride;
    p.value_cache_block_stride = BLOCK_SIZE * p.value_cache_token_stride;
    caches = {random_elements(shape.cache, NUM_BLOCKS * p.key_cache_block_stride),
              random_elements(shape.cache, NUM_BLOCKS * p.value_cache_block_stride)};
  }
};

void check_reshape_and_cache(const WriteShape& shape) {
  WriteCase write(shape);
  check_same_bytes(write.caches, [&](bool emulated, std::vector<Bytes>& outputs) {
    write.params.key_cache = outputs[0].data();
    write.params.value_cache = outputs[1].data();
    write.params.slot_mapping = (emulated ? write.slots : write.inner_slots).data();
    if (emulated) return cuda::reshape_and_cache(write.params, nullptr);
    cpu::reshape_and_cache(write.params);
    return cudaSuccess;
  });
}

TEST(kernel_reshape_and_cache) {
  for (const auto& [input, cache] : dtype_pairs()) {
    check_reshape_and_cache({input, cache, 9, 32});
    check_reshape_and_cache({input, cache, 9, 5});
  }
  check_reshape_and_cache({DType::bfloat16, DType::bfloat16, 1030, 16});  // several tokens a CTA
}

// Two rows more are rotated than are cached.
void check_rope_and_cache(const WriteShape& shape, DType table, int64_t rotary_dim, bool interleaved) {
  constexpr int64_t NUM_HEADS = 3, MAX_POSITION = 50;
  WriteCase write(shape);
  RopeAndCacheParams params{};
  params.num_positions = shape.num_tokens + 2;
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < params.num_positions; ++i) {
    positions.push_back(static_cast<int64_t>(random_bits() % MAX_POSITION));
  }
  const Bytes cos = random_elements(table, MAX_POSITION * rotary_dim / 2);
  const Bytes sin = random_elements(table, MAX_POSITION * rotary_dim / 2);
  params.cos = cos.data();
  params.sin = sin.data();
  params.positions = positions.data();
  params.table_dtype = table;
  params.num_heads = NUM_HEADS;
  params.rotary_dim = rotary_dim;
  params.max_position = MAX_POSITION;
  params.query_head_stride = shape.head_dim;
  params.query_token_stride = NUM_HEADS * shape.head_dim;
  params.cos_position_stride = params.sin_position_stride = rotary_dim / 2;
  params.interleaved = interleaved;
  std::vector<Bytes> outputs = write.caches;
  outputs.push_back(random_elements(shape.input, params.num_positions * params.query_token_stride));
  check_same_bytes(outputs, [&](bool emulated, std::vector<Bytes>& outputs) {
    params.write = write.params;
    params.write.key_cache = outputs[0].data();
    params.write.value_cache = outputs[1].data();
    params.write.slot_mapping = (emulated ? write.slots : write.inner_slots).data();
    params.query = outputs[2].data();
    if (emulated) return cuda::rope_and_cache(params, nullptr);
    cpu::rope_and_cache(params);
    return cudaSuccess;
  });
}

TEST(kernel_rope_and_cache) {
  for (const auto& [input, cache] : dtype_pairs()) {
    for (const bool interleaved : {false, true}) {
      check_rope_and_cache({input, cache, 5, 64}, input, 32, interleaved);
      check_rope_and_cache({input, cache, 5, 10}, DType::float32, 6, interleaved);
    }
  }
  check_rope_and_cache({DType::float16, DType::float16, 1030, 16}, DType::float32, 16, false);
}

// ---- copy_blocks and swap_blocks

// Two caches of rows that are, or are not, dense; pairs that read what others write are staged.
void check_copy(int64_t row_bytes, bool dense, const std::vector<BlockPair>& pairs, int64_t num_staged,
                bool swap) {
  constexpr int64_t NUM_BLOCKS = 6, NUM_CACHES = 2, NUM_ROWS = 4;
  const int64_t row_stride = dense ? row_bytes : 2 * row_bytes, block_stride = NUM_ROWS * row_stride;
  const auto cache_bytes = NUM_BLOCKS * block_stride;
  std::vector<Bytes> buffers;
  for (int64_t idx = 0; idx < 2 * NUM_CACHES; ++idx)
    buffers.push_back(random_elements(DType::int8, cache_bytes));
  check_same_bytes(buffers, [&](bool emulated, std::vector<Bytes>& outputs) {
    std::vector<BlockLayout> layouts;
    std::vector<Bytes> staging(NUM_CACHES, Bytes(static_cast<size_t>(num_staged * NUM_ROWS * row_bytes)));
    std::vector<char*> staging_pointers;
    for (Bytes& buffer : outputs) {
      const int64_t num_rows = dense ? 1 : NUM_ROWS, bytes = dense ? block_stride : row_bytes;
      layouts.push_back({reinterpret_cast<char*>(buffer.data()), NUM_BLOCKS, block_stride, 1, block_stride,
                         num_rows, row_stride, bytes});
    }
    for (Bytes& buffer : staging) staging_pointers.push_back(reinterpret_cast<char*>(buffer.data()));
    CopyBlocksParams params{};
    params.sources = layouts.data();
    params.destinations = swap ? layouts.data() + NUM_CACHES : layouts.data();
    params.pairs = pairs.data();
    params.num_caches = NUM_CACHES;
    params.num_pairs = static_cast<int64_t>(pairs.size());
    params.num_staged = num_staged;
    params.cross_device = swap;
    params.staging = num_staged > 0 ? staging_pointers.data() : nullptr;
    if (emulated) return swap ? cuda::swap_blocks(params, nullptr) : cuda::copy_blocks(params, nullptr);
    swap ? cpu::swap_blocks(params) : cpu::copy_blocks(params);
    return cudaSuccess;
  });
}

TEST(kernel_copy_blocks) {
  for (const int64_t row_bytes : {64, 12, 7}) {
    for (const bool dense : {true, false}) {
      check_copy(row_bytes, dense, {{0, 3}, {0, 4}, {1, 5}}, 0, false);
      check_copy(row_bytes, dense, {{0, 1}, {1, 0}, {2, 3}}, 2, false);
    }
  }
}

TEST(kernel_swap_blocks) {
  for (const bool dense : {true, false}) check_copy(48, dense, {{0, 2}, {1, 3}, {5, 0}}, 0, true);
}

// ---- gather_kv and merge_attn_states

void check_gather_kv(DType out, DType cache, int64_t head_dim, bool with_starts) {
  constexpr int64_t NUM_BLOCKS = 8, BLOCK_SIZE = 4, NUM_KV_HEADS = 2, MAX_BLOCKS = 3;
  const std::vector<int32_t> tables = {3, 1, 6, 7, -1, -1, 5, 0, 2}, lens = {11, 0, 9}, starts = {5, 0, 1};
  GatherKvParams params{};
  params.block_tables = tables.data();
  params.context_lens = lens.data();
  params.kv_starts = with_starts ? starts.data() : nullptr;
  params.k_scale_value = 0.5f;
  params.v_scale_value = 2.0f;
  params.cache_dtype = cache;
  params.out_dtype = out;
  params.total_tokens = with_starts ? 14 : 20;
  params.num_seqs = static_cast<int64_t>(lens.size());
  params.num_kv_heads = NUM_KV_HEADS;
  params.head_dim = params.key_cache_head_stride = head_dim;
  params.value_head_dim = params.value_cache_head_stride = head_dim;
  params.num_blocks = NUM_BLOCKS;
  params.block_size = BLOCK_SIZE;
  params.max_blocks_per_seq = params.block_tables_seq_stride = MAX_BLOCKS;
  params.key_cache_token_stride = params.value_cache_token_stride = NUM_KV_HEADS * head_dim;
  params.key_cache_block_stride = params.value_cache_block_stride = BLOCK_SIZE * NUM_KV_HEADS * head_dim;
  const Bytes key_cache = random_elements(cache, NUM_BLOCKS * params.key_cache_block_stride);
  const Bytes value_cache = random_elements(cache, NUM_BLOCKS * params.value_cache_block_stride);
  params.key_cache = key_cache.data();
  params.value_cache = value_cache.data();
  const auto out_bytes = static_cast<size_t>(params.total_tokens * NUM_KV_HEADS * head_dim * bytes_of(out));
  check_same_bytes({Bytes(out_bytes), Bytes(out_bytes)}, [&](bool emulated, std::vector<Bytes>& outputs) {
    std::vector<int64_t> offsets(lens.size() + 1);
    params.key = outputs[0].data();
    params.value = outputs[1].data();
    params.token_offsets = offsets.data();
    if (emulated) return cuda::gather_kv(params, nullptr);
    cpu::gather_kv(params);
    return cudaSuccess;
  });
}

TEST(kernel_gather_kv) {
  for (const auto& [out, cache] : dtype_pairs()) {
    check_gather_kv(out, cache, 32, false);
    check_gather_kv(out, cache, 3, true);
  }
}

TEST(kernel_merge_attn_states) {
  constexpr int64_t NUM_TOKENS = 5, NUM_HEADS = 3, HEAD_DIM = 40;
  for (const DType dtype : FLOAT_DTYPES) {
    const Bytes out_a = random_elements(dtype, NUM_TOKENS * NUM_HEADS * HEAD_DIM);
    const Bytes out_b = random_elements(dtype, NUM_TOKENS * NUM_HEADS * HEAD_DIM);
    const Bytes lse_a = random_elements(DType::float32, NUM_TOKENS * NUM_HEADS);
    const Bytes lse_b = random_elements(DType::float32, NUM_TOKENS * NUM_HEADS);
    MergeAttnStatesParams params{};
    params.out_a = out_a.data();
    params.out_b = out_b.data();
    params.lse_a = reinterpret_cast<const float*>(lse_a.data());
    params.lse_b = reinterpret_cast<const float*>(lse_b.data());
    params.dtype = dtype;
    params.num_tokens = NUM_TOKENS;
    params.num_heads = params.lse_a_token_stride = params.lse_b_token_stride = NUM_HEADS;
    params.head_dim = params.out_a_head_stride = params.out_b_head_stride = HEAD_DIM;
    params.out_a_token_stride = params.out_b_token_stride = NUM_HEADS * HEAD_DIM;
    check_same_bytes({Bytes(out_a.size()), Bytes(lse_a.size())},
                     [&](bool emulated, std::vector<Bytes>& outputs) {
                       params.out = outputs[0].data();
                       params.lse = reinterpret_cast<float*>(outputs[1].data());
                       if (emulated) return cuda::merge_attn_states(params, nullptr);
                       cpu::merge_attn_states(params);
                       return cudaSuccess;
                     });
  }
}

}  // namespace
}  // namespace pagedkv::emulator
