// out[t, h] = softmax(mask(softcap(query[t, h] . K * softmax_scale) + alibi), sink) V over the pages of t's
// sequence (Kwon et al. 2023, "Efficient memory management for large language model serving with
// PagedAttention", section 4.1).
//
//   host_plan.h, plan.h, schedule.h   how the work is cut: on the host, and by each CTA
//   decode.h, decode_state.h          the kernel for 16-bit queries and few rows a sequence
//   prefill.h                         the kernel for 16-bit queries and many rows
//   cta.h, row_tile.h, pages.h,
//   scores.h, widen.h                 what the two share: queries and results, pages, masks, 8-bit caches
//   combine.h, state.h                what follows where several CTAs share a row's keys
//   float32.h                         the kernel for float32 queries
#include "cuda/paged_attention/host_plan.h"
#include "ops.h"

namespace pagedkv::cuda {

cudaError_t paged_attention_float16(const AttentionLaunch& args, cudaStream_t stream);
cudaError_t paged_attention_bfloat16(const AttentionLaunch& args, cudaStream_t stream);
cudaError_t paged_attention_float32(const AttentionLaunch& args, cudaStream_t stream);

cudaError_t paged_attention(const PagedAttentionParams& p, cudaStream_t stream) {
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  AttentionLaunch args = make_launch(p, num_sms);
  if (is_combined(args)) {
    const int64_t num_rows = p.num_kv_heads * args.num_states * args.state_rows;
    float* scratch =
        p.allocate_scratch(p.scratch_context, num_rows * (p.value_head_dim + 2) + 2 * args.num_row_tiles);
    args.partial_acc = scratch;
    args.partial_max_sum = reinterpret_cast<float2*>(scratch + num_rows * p.value_head_dim);
    args.partial_chunks = reinterpret_cast<int2*>(args.partial_max_sum + num_rows);
  }
  if (p.query_dtype == DType::float16) return paged_attention_float16(args, stream);
  if (p.query_dtype == DType::bfloat16) return paged_attention_bfloat16(args, stream);
  return paged_attention_float32(args, stream);
}

}  // namespace pagedkv::cuda
