// From a launch's parameters to kernels. Each query dtype has a .cu file of its own that instantiates this.
#pragma once

#include <algorithm>

#include "cuda/paged_attention/combine.h"
#include "cuda/paged_attention/decode.h"
#include "cuda/paged_attention/prefill.h"

namespace pagedkv::cuda {

template <class Query>
cudaError_t launch_with_combine(void (*kernel)(AttentionLaunch), int shared_bytes,
                                const AttentionLaunch& args, cudaStream_t stream) {
  const int64_t num_kv_heads = args.p.num_kv_heads;
  const int64_t ctas_per_head = args.num_parts > 0 ? args.num_parts : args.num_row_tiles * args.num_splits;
  const dim3 grid(static_cast<unsigned>(ctas_per_head * num_kv_heads));
  const cudaError_t error = launch(kernel, grid, dim3(CTA_THREADS), shared_bytes, stream, args);
  if (error != cudaSuccess || !is_combined(args)) return error;
  const int64_t num_ctas = args.num_row_tiles * num_kv_heads * ceil_div(args.state_rows, CTA_WARPS);
  return launch(combine_kernel<Query>, dim3(static_cast<unsigned>(num_ctas)), dim3(CTA_THREADS), 0, stream,
                args, /*early=*/true);
}

template <class Query, int CACHE_BYTES, int D, int NT>
cudaError_t launch_decode(const AttentionLaunch& args, cudaStream_t stream) {
  using Tile = DecodeTile<CACHE_BYTES, D, NT>;
  const int shared_bytes = takes_several_splits(args) ? Tile::KEPT_SHARED_BYTES : Tile::SHARED_BYTES;
  return launch_with_combine<Query>(decode_kernel<Query, CACHE_BYTES, D, NT>, shared_bytes, args, stream);
}

template <class Query, int CACHE_BYTES, int D>
cudaError_t launch_tile(const AttentionLaunch& args, cudaStream_t stream) {
  if (args.tile_rows() == 8) return launch_decode<Query, CACHE_BYTES, D, 1>(args, stream);
  if (args.tile_rows() <= 32) return launch_decode<Query, CACHE_BYTES, D, D == 256 ? 2 : 4>(args, stream);
  return launch_with_combine<Query>(prefill_kernel<Query, CACHE_BYTES, D>,
                                    PrefillTile<CACHE_BYTES, D>::SHARED_BYTES, args, stream);
}

template <class Query, int CACHE_BYTES>
cudaError_t launch_head_dim(const AttentionLaunch& args, cudaStream_t stream) {
  const int64_t dim = std::max(args.p.head_dim, args.p.value_head_dim);
  if (dim <= 64) return launch_tile<Query, CACHE_BYTES, 64>(args, stream);
  if (dim <= 128) return launch_tile<Query, CACHE_BYTES, 128>(args, stream);
  return launch_tile<Query, CACHE_BYTES, 256>(args, stream);
}

template <class Query>
cudaError_t launch_tensor_core_attention(const AttentionLaunch& args, cudaStream_t stream) {
  if (args.p.cache_dtype == args.p.query_dtype) return launch_head_dim<Query, 2>(args, stream);
  return launch_head_dim<Query, 1>(args, stream);
}

}  // namespace pagedkv::cuda
