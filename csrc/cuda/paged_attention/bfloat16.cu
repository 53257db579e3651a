#include "cuda/paged_attention/launch.h"

namespace pagedkv::cuda {

cudaError_t paged_attention_bfloat16(const AttentionLaunch& args, cudaStream_t stream) {
  return launch_tensor_core_attention<bfloat16>(args, stream);
}

}  // namespace pagedkv::cuda
