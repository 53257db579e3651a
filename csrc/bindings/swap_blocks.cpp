#include "bindings/block_pairs.h"

namespace pagedkv::bindings {

static void swap_blocks(at::TensorList sources, at::TensorList destinations, const Tensor& block_mapping) {
  const BlockCopy copy = plan_block_copy(sources, "source", destinations, "destination", block_mapping);
  if (copy.pairs.empty() || copy.sources.empty()) return;
  // Where one side is on a device, its stream orders the copies.
  const at::Device device = sources[0].is_cpu() ? destinations[0].device() : sources[0].device();
  PAGEDKV_RUN(swap_blocks, device, copy.params());
}

}  // namespace pagedkv::bindings

PAGEDKV_OP(swap_blocks, "(Tensor[] sources, Tensor(a!)[] destinations, Tensor block_mapping) -> ()")
