#include "cuda/paged_attention/launch.h"

namespace pagedkv::cuda {

cudaError_t paged_attention_float16(const AttentionLaunch& args, cudaStream_t stream) {
  return launch_tensor_core_attention<float16>(args, stream);
}

}  // namespace pagedkv::cuda
