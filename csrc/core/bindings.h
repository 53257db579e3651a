// Shared by the files that make up the Python module pagedkv._core.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/prefix_cache.h"

namespace pagedkv {

struct SharedSequences;

// Integers of any kind: a numpy array of any integer dtype, or any sequence of Python or numpy integers. Else
// TypeError.
std::vector<int64_t> to_ints(const pybind11::object& object, const std::string& name);

// A block mapping as an array, [num_pairs, 2] (source, destination).
pybind11::array_t<int64_t> to_mapping(const std::vector<CopyPair>& pairs);

// A key or root from its 32 bytes, else ValueError.
BlockKey key_from_bytes(const pybind11::bytes& bytes);

void bind_block_allocator(pybind11::module_& module);
void bind_block_table(pybind11::module_& module);
void bind_batches(pybind11::module_& module);
void bind_open_batch(pybind11::class_<SharedSequences>& sequences);
void bind_sequences(pybind11::module_& module);
void bind_prefix_cache(pybind11::module_& module);

}  // namespace pagedkv
