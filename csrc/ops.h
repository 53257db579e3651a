// Table of contents: the two entry points of every operator. csrc/cpu/<op>.cpp and csrc/cuda/<op>.cu define
// them.
#pragma once

#include "params.h"

namespace pagedkv::cpu {

void paged_attention(const PagedAttentionParams& params);
void reshape_and_cache(const ReshapeAndCacheParams& params);
void rope_and_cache(const RopeAndCacheParams& params);
void copy_blocks(const CopyBlocksParams& params);
void swap_blocks(const CopyBlocksParams& params);
void gather_kv(const GatherKvParams& params);
void merge_attn_states(const MergeAttnStatesParams& params);

}  // namespace pagedkv::cpu

#if defined(PAGEDKV_WITH_CUDA) || defined(PAGEDKV_EMULATED)
#include "common/device.h"

namespace pagedkv::cuda {

cudaError_t reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream);
cudaError_t copy_blocks(const CopyBlocksParams& params, cudaStream_t stream);
cudaError_t swap_blocks(const CopyBlocksParams& params, cudaStream_t stream);
cudaError_t gather_kv(const GatherKvParams& params, cudaStream_t stream);
cudaError_t merge_attn_states(const MergeAttnStatesParams& params, cudaStream_t stream);

}  // namespace pagedkv::cuda
#endif
