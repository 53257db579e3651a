// What the two operators that write into a cache, reshape_and_cache and rope_and_cache, do alike: a CTA takes
// its tokens' slots into shared memory and leaves out those that a later token of the call names too, so that
// of several rows for one slot one whole row ends there.
#pragma once

#include "common/device.h"
#include "common/paging.h"
#include "params.h"

namespace pagedkv::cuda {

inline constexpr int WRITE_CTA_THREADS = 256;
// Looking through all slots costs a CTA num_tokens reads. While that is little, one token per CTA spreads the
// work best; beyond, MAX_TOKENS_PER_CTA tokens share the look.
inline constexpr int64_t SCAN_FREELY_BELOW = 1024;
inline constexpr int64_t MAX_TOKENS_PER_CTA = 16;

inline int64_t tokens_per_cta(int64_t num_tokens) {
  return num_tokens < SCAN_FREELY_BELOW ? 1 : MAX_TOKENS_PER_CTA;
}

// The threads that write a token together: all of a CTA that has one token, else a warp, so that a CTA has as
// many tokens under way as warps.
struct TokenGroup {
  int size, idx, lane, num_groups;

  PAGEDKV_DEVICE explicit TokenGroup(int64_t tokens_per_cta) {
    size = tokens_per_cta == 1 ? WRITE_CTA_THREADS : 32;
    num_groups = WRITE_CTA_THREADS / size;
    idx = static_cast<int>(threadIdx.x) / size;
    lane = static_cast<int>(threadIdx.x) % size;
  }
};

struct CtaSlots {
  int64_t slot[MAX_TOKENS_PER_CTA];
  int superseded[MAX_TOKENS_PER_CTA];  // 1: a later token writes this slot

  // The slot to write for the CTA's token i, or -1 for none.
  PAGEDKV_DEVICE int64_t writable(const ReshapeAndCacheParams& p, int64_t i) const {
    return slot[i] < p.num_blocks * p.block_size && superseded[i] == 0 ? slot[i] : -1;
  }
};

// Fills `slots`, in shared memory, for tokens [token_begin, token_begin + num_tokens); all threads of the CTA
// take part. Tokens past the end of slot_mapping are not written.
PAGEDKV_DEVICE void find_slots(const ReshapeAndCacheParams& p, int64_t token_begin, int64_t num_tokens,
                               CtaSlots& slots) {
  if (threadIdx.x < num_tokens) {
    const int64_t token_idx = token_begin + threadIdx.x;
    slots.slot[threadIdx.x] = token_idx < p.num_tokens ? p.slot_mapping[token_idx] : -1;
    slots.superseded[threadIdx.x] = 0;
  }
  __syncthreads();
  for (int64_t later_idx = token_begin + 1 + threadIdx.x; later_idx < p.num_tokens;
       later_idx += WRITE_CTA_THREADS) {
    const int64_t slot = p.slot_mapping[later_idx];
    for (int64_t i = 0; i < num_tokens && token_begin + i < later_idx; ++i) {
      if (slots.slot[i] == slot) atomicExch(&slots.superseded[i], 1);
    }
  }
  __syncthreads();
}

}  // namespace pagedkv::cuda
