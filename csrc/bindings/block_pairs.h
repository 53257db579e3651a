// What copy_blocks and swap_blocks check and fill alike: block layouts, the pairs, and which of them need
// staging.
#pragma once

#include <vector>

#include "bindings/checks.h"

namespace pagedkv::bindings {

// Owns what CopyBlocksParams points to.
struct BlockCopy {
  std::vector<BlockLayout> sources, destinations;
  std::vector<BlockPair> pairs;
  std::vector<Tensor> staging_tensors;
  std::vector<char*> staging;
  int64_t num_staged = 0;
  bool cross_device = false;

  CopyBlocksParams params() const;
};

// Checks everything about the call, then lays it out. sources and destinations are lists of caches, paired by
// position; the names are those of the operator's arguments.
BlockCopy plan_block_copy(at::TensorList sources, const char* sources_name, at::TensorList destinations,
                          const char* destinations_name, const Tensor& block_mapping);

}  // namespace pagedkv::bindings
