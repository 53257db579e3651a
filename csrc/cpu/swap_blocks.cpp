// Blocks of one cache copied to blocks of another: in host memory the same work as copy_blocks.
#include "ops.h"

namespace pagedkv::cpu {

void swap_blocks(const CopyBlocksParams& params) { copy_blocks(params); }

}  // namespace pagedkv::cpu
