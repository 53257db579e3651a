#include "cuda/paged_attention/launch.h"

namespace pagedkv::cuda {

cudaError_t paged_attention_float16(const AttentionLaunch& args, int64_t tile_rows, cudaStream_t stream) {
  return launch_tensor_core_attention<float16>(args, tile_rows, stream);
}

}  // namespace pagedkv::cuda
