#include "cuda/paged_attention/float32.h"

namespace pagedkv::cuda {

cudaError_t paged_attention_float32(const AttentionLaunch& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.num_row_tiles * args.p.num_kv_heads));
  const auto kernel = args.p.cache_dtype == DType::float32 ? float32_kernel<4> : float32_kernel<1>;
  return launch(kernel, grid, dim3(CTA_THREADS), sizeof(Float32Shared), stream, args);
}

}  // namespace pagedkv::cuda
