#include "bindings/block_pairs.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <unordered_set>

namespace pagedkv::bindings {

namespace {

void check_caches_of(at::TensorList caches, const char* name) {
  for (const Tensor& cache : caches) {
    dtype_of(cache, name);
    check_device(cache, name, caches[0], "its first tensor");
    check_layout(cache, name, "[num_blocks, block_size, num_kv_heads, head_dim]");
    check_size(cache, name, 0, caches[0].size(0), "num_blocks of its first tensor");
  }
}

void check_pair(const Tensor& source, const char* source_name, const Tensor& destination,
                const char* destination_name) {
  check_same_dtype(destination, destination_name, source, source_name);
  for (int64_t dim = 1; dim < 4; ++dim) {
    TORCH_CHECK_VALUE(source.size(dim) == destination.size(dim), destination_name,
                      " has blocks of the shape ", destination.sizes().slice(1), ", but those of ",
                      source_name, " are ", source.sizes().slice(1));
  }
}

std::vector<BlockPair> read_pairs(const Tensor& block_mapping, int64_t num_source_blocks,
                                  int64_t num_destination_blocks) {
  check_dtype(block_mapping, "block_mapping", at::kLong);
  TORCH_CHECK_VALUE(block_mapping.is_cpu(), "block_mapping is on ", block_mapping.device(),
                    "; it must be on the CPU, where the pairs come from");
  TORCH_CHECK_VALUE(block_mapping.dim() == 2 && block_mapping.size(1) == 2,
                    "block_mapping must be [num_pairs, 2] (source, destination), got the shape ",
                    block_mapping.sizes());
  const auto* ids = block_mapping.const_data_ptr<int64_t>();
  const int64_t row = block_mapping.stride(0), column = block_mapping.stride(1);
  std::vector<BlockPair> pairs(block_mapping.size(0));
  std::unordered_set<int64_t> seen(pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    const BlockPair pair{ids[i * row], ids[i * row + column]};
    TORCH_CHECK_INDEX(pair.source >= 0 && pair.source < num_source_blocks, "block_mapping[", i,
                      "] has the source ", pair.source, ", outside the pool of ", num_source_blocks,
                      " blocks");
    TORCH_CHECK_INDEX(pair.destination >= 0 && pair.destination < num_destination_blocks, "block_mapping[", i,
                      "] has the destination ", pair.destination, ", outside the pool of ",
                      num_destination_blocks, " blocks");
    TORCH_CHECK_VALUE(seen.insert(pair.destination).second, "block_mapping[", i, "] has the destination ",
                      pair.destination,
                      ", which another pair has too; a block can be written once in a call");
    pairs[i] = pair;
  }
  return pairs;
}

// The rows of a block, read in the same order from both sides, as few and as long as their strides allow.
void fill_layouts(const Tensor& source, const Tensor& destination, BlockLayout& from, BlockLayout& to) {
  struct Axis {
    int64_t size, source_stride, destination_stride;
  };
  Axis outer{source.size(1), source.stride(1), destination.stride(1)};
  Axis inner{source.size(2), source.stride(2), destination.stride(2)};
  if (inner.source_stride > outer.source_stride) std::swap(outer, inner);
  int64_t row = source.size(3);
  const auto absorb = [&row](Axis& axis) {
    if (axis.size != 1 && (axis.source_stride != row || axis.destination_stride != row)) return false;
    row *= axis.size;
    axis.size = 1;
    return true;
  };
  if (absorb(inner)) absorb(outer);
  const int64_t item = source.element_size();
  from = {static_cast<char*>(const_cast<void*>(source.const_data_ptr())),
          source.size(0),
          source.stride(0) * item,
          outer.size,
          outer.source_stride * item,
          inner.size,
          inner.source_stride * item,
          row * item};
  to = {static_cast<char*>(destination.mutable_data_ptr()),
        destination.size(0),
        destination.stride(0) * item,
        outer.size,
        outer.destination_stride * item,
        inner.size,
        inner.destination_stride * item,
        row * item};
}

int64_t block_extent(const BlockLayout& layout) {
  return (layout.outer_rows - 1) * layout.outer_stride_bytes +
         (layout.inner_rows - 1) * layout.inner_stride_bytes + layout.row_bytes;
}

bool same_blocks(const BlockLayout& a, const BlockLayout& b) {
  return a.base == b.base && a.block_stride_bytes == b.block_stride_bytes &&
         a.outer_stride_bytes == b.outer_stride_bytes && a.inner_stride_bytes == b.inner_stride_bytes;
}

// Whether a block of one cache may share a byte with a block of the other.
bool may_overlap(const BlockLayout& a, const BlockLayout& b) {
  const int64_t extent_a = block_extent(a), extent_b = block_extent(b);
  const char* end_a = a.base + (a.num_blocks - 1) * a.block_stride_bytes + extent_a;
  const char* end_b = b.base + (b.num_blocks - 1) * b.block_stride_bytes + extent_b;
  if (end_a <= b.base || end_b <= a.base) return false;
  if (a.block_stride_bytes != b.block_stride_bytes || a.block_stride_bytes == 0) return true;
  // K and V interleaved block by block: the ranges interlock without touching.
  const int64_t stride = a.block_stride_bytes;
  const int64_t shift = ((b.base - a.base) % stride + stride) % stride;
  return shift < extent_a || shift + extent_b > stride;
}

// Puts the pairs first whose source some pair writes. Every source is to be read as it was before the call,
// so those are read before anything is written.
int64_t count_staged(const std::vector<BlockLayout>& sources, const std::vector<BlockLayout>& destinations,
                     std::vector<BlockPair>& pairs) {
  bool within_caches = false;
  for (size_t i = 0; i < sources.size(); ++i) {
    for (size_t j = 0; j < destinations.size(); ++j) {
      if (i == j && same_blocks(sources[i], destinations[j])) {
        within_caches = true;
      } else if (may_overlap(sources[i], destinations[j])) {
        return static_cast<int64_t>(pairs.size());
      }
    }
  }
  if (!within_caches) return 0;
  std::unordered_set<int64_t> written;
  for (const BlockPair& pair : pairs) {
    if (pair.source != pair.destination) written.insert(pair.destination);
  }
  const auto middle = std::stable_partition(
      pairs.begin(), pairs.end(), [&](const BlockPair& pair) { return written.count(pair.source) != 0; });
  return middle - pairs.begin();
}

}  // namespace

CopyBlocksParams BlockCopy::params() const {
  CopyBlocksParams params;
  params.sources = sources.data();
  params.destinations = destinations.data();
  params.pairs = pairs.data();
  params.num_caches = static_cast<int64_t>(sources.size());
  params.num_pairs = static_cast<int64_t>(pairs.size());
  params.num_staged = num_staged;
  params.cross_device = cross_device;
  params.staging = staging.data();
  return params;
}

BlockCopy plan_block_copy(at::TensorList sources, const char* sources_name, at::TensorList destinations,
                          const char* destinations_name, const Tensor& block_mapping) {
  TORCH_CHECK_VALUE(sources.size() == destinations.size(), sources_name, " has ", sources.size(),
                    " tensors, but ", destinations_name, " has ", destinations.size(),
                    "; they are paired by position");
  check_caches_of(sources, sources_name);
  check_caches_of(destinations, destinations_name);
  for (size_t i = 0; i < sources.size(); ++i)
    check_pair(sources[i], sources_name, destinations[i], destinations_name);
  BlockCopy copy;
  copy.pairs = read_pairs(block_mapping, sources.empty() ? 0 : sources[0].size(0),
                          destinations.empty() ? 0 : destinations[0].size(0));
  if (copy.pairs.empty()) return copy;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].numel() == 0) continue;
    fill_layouts(sources[i], destinations[i], copy.sources.emplace_back(), copy.destinations.emplace_back());
  }
  copy.cross_device = !sources.empty() && sources[0].device() != destinations[0].device();
  if (copy.sources.empty() || copy.cross_device) return copy;
  copy.num_staged = count_staged(copy.sources, copy.destinations, copy.pairs);
  if (copy.num_staged == 0) return copy;
  for (const BlockLayout& source : copy.sources) {
    const int64_t block_bytes = source.outer_rows * source.inner_rows * source.row_bytes;
    copy.staging_tensors.push_back(
        at::empty({copy.num_staged * block_bytes}, sources[0].options().dtype(at::kByte)));
    copy.staging.push_back(static_cast<char*>(copy.staging_tensors.back().mutable_data_ptr()));
  }
  return copy;
}

}  // namespace pagedkv::bindings
