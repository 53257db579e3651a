// out[t, h] = softmax(mask(softcap(query[t, h] . K * softmax_scale) + alibi), sink) V over the pages of t's
// sequence (Kwon et al. 2023, "Efficient memory management for large language model serving with
// PagedAttention", section 4.1).
//
// decode.h has the kernel for 16-bit queries, float32.h the one for float32, combine.h what follows when
// several CTAs share a row's keys, plan.h how the work is cut.
#include "cuda/paged_attention/launch.h"
#include "ops.h"

namespace pagedkv::cuda {

namespace {

struct Plan {
  int64_t tile_rows, num_row_tiles, num_chunks;
};

cudaError_t make_plan(const PagedAttentionParams& p, Plan& plan) {
  if (p.query_dtype == DType::float32) {
    plan = {1, count_row_tiles(p, 1), 1};
    return cudaSuccess;
  }
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  plan.tile_rows = rows_per_tile(p);
  plan.num_row_tiles = count_row_tiles(p, plan.tile_rows);
  plan.num_chunks = choose_num_chunks(p, plan.num_row_tiles * p.num_kv_heads, num_sms);
  return cudaSuccess;
}

}  // namespace

cudaError_t paged_attention(const PagedAttentionParams& p, cudaStream_t stream) {
  Plan plan;
  const cudaError_t error = make_plan(p, plan);
  if (error != cudaSuccess) return error;
  AttentionLaunch args;
  args.p = p;
  args.num_chunks = plan.num_chunks;
  args.num_row_tiles = plan.num_row_tiles;
  if (plan.num_chunks > 1) {
    const int64_t num_states = p.num_tokens * p.num_heads * plan.num_chunks;
    float* scratch = p.allocate_scratch(p.scratch_context, num_states * (p.value_head_dim + 2));
    args.partial_max_sum = reinterpret_cast<float2*>(scratch);
    args.partial_acc = scratch + 2 * num_states;
  }
  args.rows_are_aligned = cache_rows_are_aligned(p);
  if (p.query_dtype == DType::float16) return paged_attention_float16(args, plan.tile_rows, stream);
  if (p.query_dtype == DType::bfloat16) return paged_attention_bfloat16(args, plan.tile_rows, stream);
  return paged_attention_float32(args, stream);
}

}  // namespace pagedkv::cuda
