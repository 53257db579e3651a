#include "bindings/block_pairs.h"

namespace pagedkv::bindings {

static void copy_blocks(at::TensorList key_caches, at::TensorList value_caches, const Tensor& block_mapping) {
  TORCH_CHECK_VALUE(key_caches.size() == value_caches.size(), "key_caches has ", key_caches.size(),
                    " tensors, but value_caches has ", value_caches.size(), "; there is one of each a layer");
  std::vector<Tensor> caches(key_caches.begin(), key_caches.end());
  caches.insert(caches.end(), value_caches.begin(), value_caches.end());
  const BlockCopy copy = plan_block_copy(caches, "key_caches and value_caches", caches,
                                         "key_caches and value_caches", block_mapping);
  if (copy.pairs.empty() || copy.sources.empty()) return;
  PAGEDKV_RUN(copy_blocks, caches[0].device(), copy.params());
}

}  // namespace pagedkv::bindings

PAGEDKV_OP(copy_blocks, "(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()")
