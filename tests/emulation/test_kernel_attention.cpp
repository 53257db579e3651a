// The attention kernels at small shapes: the CPU back-end's result up to rounding, and the same bits under
// every schedule.
#include "attention_case.h"

namespace pagedkv::emulator {
namespace {

const DType FP16 = DType::float16, BF16 = DType::bfloat16, FP32 = DType::float32;
const DType E4M3 = DType::float8_e4m3fn, E5M2 = DType::float8_e5m2, INT8 = DType::int8;

void check_paged_attention(const AttentionShape& shape) {
  AttentionCase attention(shape);
  Bytes expected_out, first_out;
  std::vector<float> expected_lse, first_lse;
  attention.run(false, expected_out, expected_lse);
  for (const Options& options : schedules()) {
    set_options(options);
    Bytes out;
    std::vector<float> lse;
    const cudaError_t error = attention.run(true, out, lse);
    testing::report(error == cudaSuccess, __FILE__, __LINE__, cudaGetErrorString(error));
    if (first_out.empty()) first_out = out, first_lse = lse;
    CHECK(out == first_out);
    CHECK(std::memcmp(lse.data(), first_lse.data(), lse.size() * sizeof(float)) == 0);
  }
  check_close(attention, first_out, first_lse, expected_out, expected_lse);
}

// Every kernel: query dtype, size of a cache element, bucket of head_dim, few or many query rows.
void check_every_kernel(DType query_dtype) {
  for (const DType cache_dtype : {query_dtype, E4M3, E5M2, INT8}) {
    for (const int64_t head_dim : {48, 128, 256}) {
      check_paged_attention({query_dtype, cache_dtype, head_dim, 4, 2, 16, {1, 1}, {100, 3}});
      check_paged_attention({query_dtype, cache_dtype, head_dim, 4, 2, 5, {1, 9}, {70, 40}});
      check_paged_attention({query_dtype, cache_dtype, head_dim, 2, 1, 16, {40, 0, 3}, {90, 5, 20}});
    }
  }
}

TEST(kernel_attention_float16) { check_every_kernel(FP16); }
TEST(kernel_attention_bfloat16) { check_every_kernel(BF16); }

TEST(kernel_attention_float32) {
  for (const DType cache_dtype : {FP32, E4M3, E5M2, INT8}) {
    check_paged_attention({FP32, cache_dtype, 24, 4, 2, 3, {1, 4}, {70, 9}});
    check_paged_attention({.query_dtype = FP32,
                           .cache_dtype = cache_dtype,
                           .head_dim = 136,
                           .num_heads = 2,
                           .num_kv_heads = 1,
                           .block_size = 16,
                           .query_lens = {1, 1},
                           .context_lens = {20, 0},
                           .score_options = true});
  }
}

// Long contexts, of which several CTAs take a part each.
TEST(kernel_attention_chunks) {
  check_paged_attention({BF16, BF16, 64, 2, 1, 16, {1}, {600}});
  check_paged_attention({FP16, E4M3, 128, 8, 1, 16, {1, 1}, {520, 20}});
  check_paged_attention({BF16, BF16, 64, 2, 1, 16, {3, 1}, {300, 600}, 0, 64});
  check_paged_attention({FP16, FP16, 128, 2, 2, 16, {1, 0, 7}, {300, 5, 90}, 0, 48});
}

// Many rows a sequence: tiles of 64 and 128 rows, alone and with several CTAs to a row's keys.
TEST(kernel_attention_prefill) {
  check_paged_attention({BF16, BF16, 128, 2, 1, 5, {70}, {150}});
  check_paged_attention({FP16, FP16, 256, 2, 1, 16, {70}, {70}});
  check_paged_attention({FP16, E5M2, 64, 2, 1, 16, {70}, {80}});
  check_paged_attention({BF16, INT8, 136, 2, 1, 3, {20}, {50}});
  check_paged_attention({BF16, E4M3, 40, 64, 1, 16, {1, 1}, {600, 30}});
}

TEST(kernel_attention_options) {
  for (const DType dtype : {BF16, FP16, FP32}) {
    const AttentionShape mixed{dtype, dtype, 64, 4, 2, 7, {1, 12, 0, 30}, {90, 20, 3, 30}};
    check_paged_attention(mixed);
    const auto check_with = [&](auto change) {
      AttentionShape shape = mixed;
      change(shape);
      check_paged_attention(shape);
    };
    check_with([](AttentionShape& shape) { shape.score_options = true; });
    check_with([](AttentionShape& shape) { shape.window = 20; });
    check_with([](AttentionShape& shape) { shape.window = 80; });
    check_with([](AttentionShape& shape) { shape.window = 9, shape.causal = false; });
    check_with([](AttentionShape& shape) { shape.causal = false; });
    check_with([](AttentionShape& shape) { shape.kv_starts = {70, 0, 0, 17}; });
    check_with([](AttentionShape& shape) { shape.max_tree = 12, shape.query_lens = {4, 12, 0, 9}; });
    check_with([](AttentionShape& shape) {
      shape.max_tree = 12, shape.num_heads = 20, shape.query_lens = {4, 12, 0, 9};
    });
    check_with([](AttentionShape& shape) { shape.window = 20, shape.num_heads = 20; });
    check_with([](AttentionShape& shape) { shape.value_head_dim = 40; });
    check_with([](AttentionShape& shape) { shape.head_dim = 40, shape.value_head_dim = 128; });
    check_with([](AttentionShape& shape) { shape.unaligned = true; });
    check_with([](AttentionShape& shape) { shape.num_heads = 6, shape.num_kv_heads = 6; });
    check_with([](AttentionShape& shape) { shape.num_heads = 11, shape.num_kv_heads = 1; });
    check_with([](AttentionShape& shape) { shape.block_size = 1; });
  }
  for (const DType cache_dtype : {E4M3, E5M2, INT8}) {
    AttentionShape shape{BF16, cache_dtype, 72, 4, 2, 16, {1, 6}, {70, 40}};
    shape.scale_per_head = true;
    check_paged_attention(shape);
    shape.unaligned = true;
    check_paged_attention(shape);
  }
}

// The first rows of a tile see whole groups of keys that the window hides from its last rows: 16 keys of a
// warp of decode, 64 of a tile of prefill.
TEST(kernel_attention_window_between_rows) {
  AttentionShape shape{BF16, BF16, 64, 1, 1, 16, {20}, {100}};
  shape.window = 50;
  check_paged_attention(shape);
  shape.query_lens = {40}, shape.context_lens = {200}, shape.window = 100;
  check_paged_attention(shape);
}

// A needed block outside the pool is not visible.
TEST(kernel_attention_hole) {
  for (const DType dtype : {BF16, FP32}) {
    for (const int32_t bad_block : {-1, 12345, 1 << 30}) {
      AttentionCase attention({dtype, dtype, 64, 4, 2, 16, {1}, {25}});
      attention.block_tables[1] = bad_block;
      // All scores are 0, so that a key too many has its full weight.
      std::fill(attention.query.begin(), attention.query.end(), 0);
      Bytes out, expected_out;
      std::vector<float> lse, expected_lse;
      CHECK(attention.run(true, out, lse) == cudaSuccess);
      attention.context_lens[0] = 16;
      attention.run(false, expected_out, expected_lse);
      check_close(attention, out, lse, expected_out, expected_lse);
    }
  }
}

// With split_size a sequence's bits do not depend on whether one CTA takes all of its splits, which it does
// where the tables leave room for so many keys that the splits' states would take too much memory.
TEST(kernel_attention_split_invariance) {
  AttentionShape shape{BF16, BF16, 16, 8, 1, 16, {16}, {600}, 0, 64};
  AttentionCase spread(shape);
  Bytes spread_out, gathered_out;
  std::vector<float> spread_lse, gathered_lse;
  CHECK(spread.run(true, spread_out, spread_lse) == cudaSuccess);
  spread.params.max_blocks_per_seq = int64_t{1} << 20;  // of one sequence, whose entries are read as needed
  CHECK(spread.run(true, gathered_out, gathered_lse) == cudaSuccess);
  CHECK(spread.scratch.size() < gathered_out.size() * 1000);
  CHECK(spread_out == gathered_out);
  CHECK(spread_lse == gathered_lse);
}

}  // namespace
}  // namespace pagedkv::emulator
