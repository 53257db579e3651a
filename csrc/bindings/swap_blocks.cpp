#include "bindings/block_pairs.h"

namespace pagedkv::bindings {

static void swap_blocks(at::TensorList sources, at::TensorList destinations, const Tensor& block_mapping) {
  const BlockCopy copy = plan_block_copy(sources, "source", destinations, "destination", block_mapping);
  if (copy.pairs.empty() || copy.sources.empty()) return;
  // Where one side is on a device, its stream orders the copies.
  const at::Device source = sources[0].device(), destination = destinations[0].device();
  const at::Device device = source.is_cpu() ? destination : source;
  let_stream_wait(device, destination);
  PAGEDKV_RUN(swap_blocks, device, copy.params());
  let_stream_wait(destination, device);
}

}  // namespace pagedkv::bindings

PAGEDKV_OP(swap_blocks, "(Tensor[] sources, Tensor(a!)[] destinations, Tensor block_mapping) -> ()")
