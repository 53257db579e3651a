#include <memory>
#include <optional>

#include "core/bindings.h"
#include "core/block_allocator.h"
#include "core/block_table.h"

namespace py = pybind11;

namespace pagedkv {

void bind_block_allocator(py::module_& module) {
  py::class_<BlockAllocator, std::shared_ptr<BlockAllocator>>(module, "BlockAllocator", R"doc(
A pool of equally sized cache blocks with reference counts.

Ids are 0 to num_blocks - 1. The most recently freed block is handed out first, then blocks never used, in ascending
order. Every call but the views `free_blocks` and `block_ref_count` is O(1) a block. Calls hold the GIL, so threads may
share an allocator.

Args:
    num_blocks: blocks in the pool, at least 1
    block_size: tokens in a block, any integer of at least 1

Raises:
    ValueError: an argument below 1

>>> pool = BlockAllocator(num_blocks=4, block_size=16)
>>> pool.allocate(), pool.allocate_many(2), pool.num_free_blocks
(0, [1, 2], 1)
)doc")
      .def(py::init<int64_t, int64_t>(), py::arg("num_blocks"), py::arg("block_size"))
      .def_property_readonly("num_blocks", &BlockAllocator::num_blocks, "Blocks in the pool.")
      .def_property_readonly("block_size", &BlockAllocator::block_size, "Tokens in a block.")
      .def_property_readonly("num_free_blocks", &BlockAllocator::num_free_blocks,
                             "Blocks that can be handed out.")
      .def_property_readonly("peak_used_blocks", &BlockAllocator::peak_used_blocks,
                             "The most blocks that were in use at one time.")
      .def_property_readonly(
          "free_blocks", &BlockAllocator::free_blocks,
          "Free ids in the order they will be handed out: most recently freed first, then unused "
          "ones ascending.")
      .def_property_readonly(
          "block_ref_count", &BlockAllocator::block_ref_counts,
          "One count per block: the tables that own it and the pending copies that read it; 0 is "
          "free.")
      .def("allocate", &BlockAllocator::allocate, R"doc(
Takes one block.

Returns:
    its id

Raises:
    OutOfMemoryError: no block is free; nothing was changed

>>> BlockAllocator(4, 16).allocate()
0
)doc")
      .def("allocate_many", &BlockAllocator::allocate_many, py::arg("n"), R"doc(
Takes n blocks, or none where fewer are free.

Returns:
    n ids in the order of `free_blocks`; [] for n = 0

Raises:
    OutOfMemoryError: fewer than n are free; nothing was changed
    ValueError: n is negative

>>> BlockAllocator(4, 16).allocate_many(3)
[0, 1, 2]
)doc")
      .def(
          "allocate_array",
          [](BlockAllocator& self, int64_t n) {
            const std::vector<int32_t> blocks = self.allocate_many(n);
            return py::array_t<int32_t>(static_cast<py::ssize_t>(blocks.size()), blocks.data());
          },
          py::arg("n"), R"doc(
`allocate_many` as an array, which is faster.

Returns:
    [n] int32 array

Raises:
    OutOfMemoryError: fewer than n are free; nothing was changed
    ValueError: n is negative

>>> BlockAllocator(4, 16).allocate_array(3)
array([0, 1, 2], dtype=int32)
)doc")
      .def("free", &BlockAllocator::free, py::arg("block"), R"doc(
Gives up one reference; with the last one the block is free.

Raises:
    ValueError: the block is already free or outside the pool

>>> pool = BlockAllocator(4, 16)
>>> pool.free(pool.allocate()); pool.num_free_blocks
4
)doc")
      .def(
          "free_many",
          [](BlockAllocator& self, const py::object& blocks) { self.free_many(to_ints(blocks, "blocks")); },
          py::arg("blocks"), R"doc(
Gives up one reference per entry, or none where one of them is not to be had. A block may be listed as often as it is
referenced.

Args:
    blocks: [n] ids, a sequence of integers or an integer array

Raises:
    ValueError: a block is already free, listed too often, or outside the pool; nothing was changed

>>> pool = BlockAllocator(4, 16)
>>> pool.free_many(pool.allocate_many(3)); pool.free_blocks
[2, 1, 0, 3]
)doc")
      .def("incr_ref", &BlockAllocator::incr_ref, py::arg("block"), R"doc(
Adds a reference to a block that is in use.

Raises:
    ValueError: the block is free or outside the pool

>>> pool = BlockAllocator(2, 16)
>>> pool.incr_ref(pool.allocate()); pool.block_ref_count
[2, 0]
)doc")
      .def("check_integrity", &BlockAllocator::check_integrity, R"doc(
Recounts everything in O(num_blocks).

Raises:
    RuntimeError: an invariant is broken; the message names it

>>> BlockAllocator(4, 16).check_integrity()
)doc")
      .def("__repr__", [](const BlockAllocator& self) {
        return "BlockAllocator(num_blocks=" + std::to_string(self.num_blocks()) +
               ", block_size=" + std::to_string(self.block_size()) +
               ", num_free_blocks=" + std::to_string(self.num_free_blocks()) + ")";
      });
}

namespace {

std::vector<int32_t> allocate_tokens(BlockTable& table, int64_t num_tokens) {
  const int64_t num_old = table.num_blocks();
  table.grow(num_tokens);
  return {table.blocks().begin() + num_old, table.blocks().end()};
}

py::dict logical_to_physical(const BlockTable& table) {
  py::dict mapping;
  for (int64_t i = 0; i < table.num_blocks(); ++i) mapping[py::int_(i)] = table.blocks()[i];
  return mapping;
}

py::array_t<int64_t> slot_mapping(const BlockTable& table, int64_t start, int64_t stop) {
  // A range that is not inside the table is refused by write_slots before it writes.
  const bool valid = 0 <= start && start <= stop && stop <= table.num_tokens();
  py::array_t<int64_t> slots(valid ? stop - start : 0);
  table.write_slots(start, stop, slots.mutable_data());
  return slots;
}

py::list take_pending_copies(BlockTable& table) {
  py::list pairs;
  for (const auto& [source, destination] : table.take_pending_copies()) {
    pairs.append(py::make_tuple(source, destination));
  }
  return pairs;
}

}  // namespace

void bind_block_table(py::module_& module) {
  py::class_<BlockTable>(module, "BlockTable", R"doc(
The blocks of one sequence: logical block i holds tokens i * block_size to (i + 1) * block_size - 1.

Forks share blocks. The first of them to write into a shared, partly filled block gets a copy of its own
(`take_pending_copies`); the last one left writes in place. A table that dies gives its blocks back, and keeps its
allocator alive until then.

Args:
    block_size: tokens in a block; by default the allocator's, or 16 without one
    allocator: where blocks come from; None: a private allocator that grows, with ids 0, 1, 2, ...

Raises:
    ValueError: block_size is below 1 or not the allocator's

>>> table = BlockTable(block_size=4)
>>> table.allocate(6), table.slot_mapping(3, 6).tolist()
([0, 1], [3, 4, 5])
)doc")
      .def(py::init<std::optional<int64_t>, std::shared_ptr<BlockAllocator>>(),
           py::arg("block_size") = py::none(), py::arg("allocator") = py::none())
      .def_property_readonly("num_tokens", &BlockTable::num_tokens, "Tokens the table has slots for.")
      .def_property_readonly("num_blocks", &BlockTable::num_blocks, "ceil(num_tokens / block_size).")
      .def_property_readonly("block_size", &BlockTable::block_size, "Tokens in a block.")
      .def_property_readonly("physical_blocks", &BlockTable::blocks, "Physical ids in logical order.")
      .def_property_readonly("logical_to_physical", &logical_to_physical, "{logical id: physical id}.")
      .def("allocate", &allocate_tokens, py::arg("num_tokens"), R"doc(
Makes room for num_tokens more tokens that are about to be written.

Slack in the last block is used first. Where another table owns that block too, this one gets a copy of it: see
`take_pending_copies`.

Returns:
    the physical ids of the new logical blocks; the copy of a shared one is not among them

Raises:
    OutOfMemoryError: too few blocks are free; nothing was changed
    ValueError: num_tokens is negative

>>> table = BlockTable(block_size=4)
>>> table.allocate(3), table.allocate(2), table.num_tokens
([0], [1], 5)
)doc")
      .def("get_physical_block", &BlockTable::physical_block, py::arg("logical_block_id"), R"doc(
The physical id of a logical block.

Raises:
    IndexError: the table has no such block

>>> table = BlockTable(block_size=4)
>>> table.allocate(6)[1] == table.get_physical_block(1)
True
)doc")
      .def("slot_mapping", &slot_mapping, py::arg("start"), py::arg("stop"), R"doc(
The cache slots of tokens start to stop - 1: physical block * block_size + offset.

Returns:
    [stop - start] int64 array

Raises:
    IndexError: not 0 <= start <= stop <= num_tokens

>>> table = BlockTable(block_size=4)
>>> _ = table.allocate(6); table.slot_mapping(4, 6)
array([4, 5])
)doc")
      .def("fork", &BlockTable::fork, R"doc(
A table of the same tokens that shares every block with this one.

>>> table = BlockTable(block_size=4)
>>> _ = table.allocate(6); table.fork().physical_blocks
[0, 1]
)doc")
      .def("take_pending_copies", &take_pending_copies, R"doc(
Hands out the copies that this table's blocks wait for, once. They are due before the next write to the cache.

A source stays referenced until its pair is taken. `truncate` and `free` drop the pairs of blocks that go away.

Returns:
    (source, destination) pairs, the block_mapping of `copy_blocks`

>>> table = BlockTable(block_size=4)
>>> _ = table.allocate(6); child = table.fork(); child.allocate(1), child.take_pending_copies()
([], [(1, 2)])
)doc")
      .def("truncate", &BlockTable::truncate, py::arg("num_tokens"), R"doc(
Forgets the tokens from num_tokens on and gives back the blocks that only they used.

A later write into a block that is shared by then copies it first.

Raises:
    ValueError: num_tokens is negative or above the table's

>>> table = BlockTable(block_size=4)
>>> _ = table.allocate(6); table.truncate(4); table.physical_blocks
[0]
)doc")
      .def("free", &BlockTable::free, R"doc(
Gives back every block. A second call does nothing; the empty table can be used again.

>>> table = BlockTable(block_size=4)
>>> _ = table.allocate(6); table.free(); table.free(); table.num_blocks
0
)doc")
      .def("__repr__", [](const BlockTable& self) {
        return "BlockTable(num_tokens=" + std::to_string(self.num_tokens()) +
               ", num_blocks=" + std::to_string(self.num_blocks()) +
               ", block_size=" + std::to_string(self.block_size()) + ")";
      });
}

}  // namespace pagedkv
