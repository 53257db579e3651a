// What a CTA of decode.h and one of prefill.h have in common.
#pragma once

#include "cuda/paged_attention/pages.h"
#include "cuda/paged_attention/scores.h"
#include "cuda/paged_attention/widen.h"

namespace pagedkv::cuda {

class AttentionCta {
 protected:
  PAGEDKV_DEVICE AttentionCta(const AttentionLaunch& launch, unsigned char* shared, const Chunk& chunk)
      : launch_(launch),
        p_(launch.p),
        shared_(shared),
        chunk_(chunk),
        pages_(launch, chunk),
        rule_(launch.p, chunk.piece.kv_head_idx),
        widener_(launch.p.cache_dtype) {
    warp_ = threadIdx.x / WARP_THREADS;
    lane_ = threadIdx.x % WARP_THREADS;
  }

  const AttentionLaunch& launch_;
  const PagedAttentionParams& p_;
  unsigned char* shared_;
  const Chunk& chunk_;
  PageCursor pages_;
  ScoreRule rule_;
  Widener widener_;
  int warp_, lane_;
};

}  // namespace pagedkv::cuda
