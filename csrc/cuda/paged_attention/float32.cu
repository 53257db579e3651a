#include "cuda/paged_attention/float32.h"

#include "common/dispatch.h"
#include "cuda/paged_attention/launch.h"

namespace pagedkv::cuda {

cudaError_t paged_attention_float32(const AttentionLaunch& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.num_row_tiles * args.p.num_kv_heads));
  cudaError_t error = cudaSuccess;
  dispatch_cache_pair(args.p.query_dtype, args.p.cache_dtype, [&]<class Query, class Cache>() {
    if constexpr (std::is_same_v<Query, float>) {
      error = launch(float32_kernel<Cache>, grid, dim3(CTA_THREADS), sizeof(Float32Shared), stream, args);
    }
  });
  return error;
}

}  // namespace pagedkv::cuda
