// The CUDA kernels at small shapes, for the sanitizers: the same bytes as the CPU back-end writes, under
// several schedules. Buffers have their exact size, so that an access past any of them is a report.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "common/dispatch.h"
#include "ops.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

using Bytes = std::vector<unsigned char>;

std::mt19937 random_bits(1);

int64_t bytes_of(DType dtype) {
  int64_t num_bytes = 0;
  dispatch_dtype(dtype, [&]<class T>() { num_bytes = sizeof(T); });
  return num_bytes;
}

Bytes random_elements(DType dtype, int64_t num_elements) {
  std::normal_distribution<float> normal;
  Bytes result(static_cast<size_t>(num_elements * bytes_of(dtype)));
  dispatch_dtype(dtype, [&]<class T>() {
    for (int64_t idx = 0; idx < num_elements; ++idx) {
      const T element = from_float<T>(4 * normal(random_bits));
      std::memcpy(result.data() + idx * static_cast<int64_t>(sizeof(T)), &element, sizeof(T));
    }
  });
  return result;
}

// Runs `run` once on the CPU back-end and once per schedule on the emulator, each on a fresh copy of
// `outputs`, and compares what they leave there.
template <class Run>
void check_same_bytes(const std::vector<Bytes>& outputs, Run run) {
  std::vector<Bytes> expected = outputs;
  run(false, expected);
  for (const Options& options : {Options{}, Options{.schedule = Schedule::descending},
                                 Options{.schedule = Schedule::random, .seed = 7}}) {
    set_options(options);
    std::vector<Bytes> actual = outputs;
    const cudaError_t error = run(true, actual);
    testing::report(error == cudaSuccess, __FILE__, __LINE__, cudaGetErrorString(error));
    CHECK(actual == expected);
  }
}

constexpr DType FLOAT_DTYPES[] = {DType::float16, DType::bfloat16, DType::float32};
constexpr DType QUANTISED_DTYPES[] = {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8};

// The legal pairs of an input and a cache dtype.
std::vector<std::pair<DType, DType>> dtype_pairs() {
  std::vector<std::pair<DType, DType>> pairs;
  for (const DType input : FLOAT_DTYPES) {
    pairs.emplace_back(input, input);
    for (const DType cache : QUANTISED_DTYPES) pairs.emplace_back(input, cache);
  }
  return pairs;
}

// ---- reshape_and_cache
// ---------------------------------------------------------------------------------------------

void check_reshape_and_cache(DType input, DType cache, int64_t num_tokens, int64_t head_dim) {
  constexpr int64_t NUM_BLOCKS = 7, BLOCK_SIZE = 3, NUM_KV_HEADS = 2;
  const int64_t value_head_dim = head_dim + 8;
  std::vector<int64_t> slots(static_cast<size_t>(num_tokens));
  for (int64_t& slot : slots)
    slot = static_cast<int64_t>(random_bits() % 23) - 2;  // some negative, some repeated
  const Bytes key = random_elements(input, num_tokens * NUM_KV_HEADS * head_dim);
  const Bytes value = random_elements(input, num_tokens * NUM_KV_HEADS * value_head_dim);
  const std::vector<float> k_scale = {0.5f, 3.0f};
  ReshapeAndCacheParams params{};
  params.key = key.data();
  params.value = value.data();
  params.slot_mapping = slots.data();
  params.k_scale = k_scale.data();
  params.v_scale_value = 0.25f;
  params.input_dtype = input;
  params.cache_dtype = cache;
  params.num_tokens = num_tokens;
  params.num_kv_heads = NUM_KV_HEADS;
  params.head_dim = params.key_head_stride = params.key_cache_head_stride = head_dim;
  params.value_head_dim = params.value_head_stride = params.value_cache_head_stride = value_head_dim;
  params.key_token_stride = params.key_cache_token_stride = NUM_KV_HEADS * head_dim;
  params.value_token_stride = params.value_cache_token_stride = NUM_KV_HEADS * value_head_dim;
  params.num_blocks = NUM_BLOCKS;
  params.block_size = BLOCK_SIZE;
  params.key_cache_block_stride = BLOCK_SIZE * params.key_cache_token_stride;
  params.value_cache_block_stride = BLOCK_SIZE * params.value_cache_token_stride;
  const std::vector<Bytes> caches = {random_elements(cache, NUM_BLOCKS * params.key_cache_block_stride),
                                     random_elements(cache, NUM_BLOCKS * params.value_cache_block_stride)};
  check_same_bytes(caches, [&](bool emulated, std::vector<Bytes>& outputs) {
    params.key_cache = outputs[0].data();
    params.value_cache = outputs[1].data();
    if (emulated) return cuda::reshape_and_cache(params, nullptr);
    cpu::reshape_and_cache(params);
    return cudaSuccess;
  });
}

TEST(kernel_reshape_and_cache) {
  for (const auto& [input, cache] : dtype_pairs()) {
    check_reshape_and_cache(input, cache, 9, 32);
    check_reshape_and_cache(input, cache, 9, 5);
  }
  check_reshape_and_cache(DType::bfloat16, DType::bfloat16, 1030, 16);  // several tokens a CTA
}

// ---- copy_blocks and swap_blocks
// -----------------------------------------------------------------------------------

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
// -------------------------------------------------------------------------------

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

// ---- paged_attention
// -----------------------------------------------------------------------------------------------

struct AttentionShape {
  DType query_dtype, cache_dtype;
  int64_t head_dim, num_heads, num_kv_heads, block_size;
  std::vector<int32_t> query_lens, context_lens;
  int64_t split_size = 0;
  int64_t window = NO_WINDOW;
  bool with_options = false;  // softcap, ALiBi, sinks
};

// Owns what PagedAttentionParams points to; blocks lie backwards in the pool and the last table entry is
// garbage.
struct AttentionCase {
  Bytes query, key_cache, value_cache;
  std::vector<int32_t> block_tables, query_start_loc{0};
  std::vector<float> slopes, sinks, scratch;
  PagedAttentionParams params{};

  explicit AttentionCase(const AttentionShape& shape) {
    PagedAttentionParams& p = params;
    p.query_dtype = shape.query_dtype;
    p.cache_dtype = shape.cache_dtype;
    p.num_seqs = static_cast<int64_t>(shape.context_lens.size());
    p.num_heads = shape.num_heads;
    p.num_kv_heads = shape.num_kv_heads;
    p.head_dim = shape.head_dim;
    p.value_head_dim = shape.head_dim;
    p.block_size = shape.block_size;
    for (const int32_t len : shape.context_lens) {
      p.max_blocks_per_seq = std::max<int64_t>(p.max_blocks_per_seq, len / shape.block_size + 2);
    }
    for (const int32_t len : shape.query_lens) {
      query_start_loc.push_back(query_start_loc.back() + len);
      p.max_query_len = std::max<int64_t>(p.max_query_len, len);
    }
    p.num_tokens = query_start_loc.back() + 1;  // one row of padding
    p.num_blocks = p.num_seqs * p.max_blocks_per_seq;
    for (int64_t i = 0; i < p.num_blocks; ++i) {
      const bool is_garbage = i % p.max_blocks_per_seq == p.max_blocks_per_seq - 1;
      block_tables.push_back(is_garbage ? 1 << 30 : static_cast<int32_t>(p.num_blocks - 1 - i));
    }
    const int64_t cache_elements = p.num_blocks * p.block_size * p.num_kv_heads * p.head_dim;
    query = random_elements(p.query_dtype, p.num_tokens * p.num_heads * p.head_dim);
    key_cache = random_elements(p.cache_dtype, cache_elements);
    value_cache = random_elements(p.cache_dtype, cache_elements);
    slopes.assign(static_cast<size_t>(p.num_heads), 0.25f);
    sinks.assign(static_cast<size_t>(p.num_heads), 0.5f);
    fill_pointers(shape);
  }

  void fill_pointers(const AttentionShape& shape) {
    PagedAttentionParams& p = params;
    p.query = query.data();
    p.key_cache = key_cache.data();
    p.value_cache = value_cache.data();
    p.block_tables = block_tables.data();
    p.context_lens = shape.context_lens.data();
    p.query_start_loc = query_start_loc.data();
    p.alibi_slopes = shape.with_options ? slopes.data() : nullptr;
    p.sinks = shape.with_options ? sinks.data() : nullptr;
    p.softcap = shape.with_options ? 5.0f : 0.0f;
    p.k_scale_value = 0.125f;
    p.v_scale_value = 0.5f;
    if (p.query_dtype == p.cache_dtype) p.k_scale_value = p.v_scale_value = 1.0f;
    p.query_head_stride = p.out_head_stride = p.key_cache_head_stride = p.value_cache_head_stride =
        p.head_dim;
    p.query_token_stride = p.out_token_stride = p.num_heads * p.head_dim;
    p.key_cache_token_stride = p.value_cache_token_stride = p.num_kv_heads * p.head_dim;
    p.key_cache_block_stride = p.value_cache_block_stride = p.block_size * p.key_cache_token_stride;
    p.block_tables_seq_stride = p.max_blocks_per_seq;
    p.softmax_scale = 0.125f;
    p.window = shape.window;
    p.split_size = shape.split_size;
    p.causal = true;
    p.scratch_context = &scratch;
    p.allocate_scratch = [](void* context, int64_t num_floats) {
      auto& scratch = *static_cast<std::vector<float>*>(context);
      scratch.assign(static_cast<size_t>(num_floats), std::numeric_limits<float>::quiet_NaN());
      return scratch.data();
    };
  }
};

float element_at(const Bytes& bytes, DType dtype, int64_t idx) {
  float value = 0.0f;
  dispatch_dtype(dtype, [&]<class T>() {
    T element;
    std::memcpy(&element, bytes.data() + idx * static_cast<int64_t>(sizeof(T)), sizeof(T));
    value = to_float(element);
  });
  return value;
}

// The same result as the CPU back-end, up to rounding, and the same bits under every schedule.
void check_paged_attention(const AttentionShape& shape) {
  AttentionCase attention(shape);
  PagedAttentionParams& p = attention.params;
  const int64_t num_outputs = p.num_tokens * p.num_heads * p.head_dim;
  const Bytes untouched(static_cast<size_t>(num_outputs * bytes_of(p.query_dtype)), 0xff);
  const auto run = [&](bool emulated, Bytes& out) {
    out = untouched;
    p.out = out.data();
    if (emulated) return cuda::paged_attention(p, nullptr);
    cpu::paged_attention(p);
    return cudaSuccess;
  };
  Bytes expected, first;
  run(false, expected);
  for (const Options& options : {Options{}, Options{.schedule = Schedule::descending},
                                 Options{.schedule = Schedule::random, .seed = 7}}) {
    set_options(options);
    Bytes actual;
    const cudaError_t error = run(true, actual);
    testing::report(error == cudaSuccess, __FILE__, __LINE__, cudaGetErrorString(error));
    if (first.empty()) first = actual;
    CHECK(actual == first);
  }
  const float tolerance =
      p.query_dtype == DType::float32 ? 1e-4f : 0.1f;  // values are about 4, bfloat16 has 8 bits
  bool close = true;
  for (int64_t i = 0; i < num_outputs; ++i) {
    close &=
        std::fabs(element_at(first, p.query_dtype, i) - element_at(expected, p.query_dtype, i)) <= tolerance;
  }
  CHECK(close);
}

TEST(kernel_paged_attention) {
  const DType bf16 = DType::bfloat16, fp16 = DType::float16, fp32 = DType::float32;
  check_paged_attention({bf16, bf16, 128, 4, 1, 16, {1, 1}, {150, 3}});
  check_paged_attention({fp16, fp16, 64, 3, 3, 5, {1, 0, 1}, {70, 9, 0}});
  check_paged_attention({bf16, bf16, 40, 6, 2, 7, {9, 20}, {90, 20}, 64});
  check_paged_attention({fp16, fp16, 256, 4, 2, 16, {6}, {70}, 0, 20, true});
  check_paged_attention({bf16, bf16, 64, 2, 1, 16, {1}, {600}});  // several CTAs share the keys
  check_paged_attention({bf16, DType::int8, 128, 4, 1, 16, {1, 5}, {100, 40}});
  check_paged_attention({fp16, DType::float8_e4m3fn, 72, 4, 1, 16, {3}, {100}, 0, NO_WINDOW, true});
  check_paged_attention({fp32, fp32, 24, 4, 2, 3, {1, 4}, {70, 9}, 0, NO_WINDOW, true});
}

// Many rows a sequence: tiles of 64 and 128 rows, alone and with several CTAs to a row's keys.
TEST(kernel_paged_attention_prefill) {
  const DType bf16 = DType::bfloat16, fp16 = DType::float16;
  check_paged_attention({bf16, bf16, 64, 4, 2, 16, {40, 0, 3}, {90, 5, 20}});
  check_paged_attention({bf16, bf16, 128, 2, 1, 5, {70}, {150}, 0, 50, true});
  check_paged_attention({fp16, fp16, 256, 2, 1, 16, {20}, {70}});
  check_paged_attention({fp16, DType::float8_e5m2, 128, 2, 1, 16, {70}, {80}, 0, NO_WINDOW, true});
  check_paged_attention({bf16, DType::int8, 136, 2, 1, 3, {20}, {50}});
  check_paged_attention({bf16, DType::float8_e4m3fn, 40, 64, 1, 16, {1, 1}, {600, 30}});
}

}  // namespace
}  // namespace pagedkv::emulator
