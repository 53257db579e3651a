// Batches of sequences as arrays.
#include <algorithm>
#include <optional>
#include <utility>

#include "core/bind_shared.h"
#include "core/bindings.h"

namespace py = pybind11;

namespace pagedkv {
namespace {

// An open batch as arrays.
struct Batch {
  int64_t batch_id, max_query_len, num_tokens;
  py::array_t<int32_t> block_tables, context_lens, query_start_loc;
  py::array_t<int64_t> slot_mapping, copies;
};

// Arrays that batches are written to, one after the other.
struct BatchBuffers {
  py::array_t<int32_t> block_tables, context_lens, query_start_loc;
  py::array_t<int64_t> slot_mapping;
  BatchArrays arrays;
};

// block_tables are not initialised: a row is written as a whole when its table is new.
BatchBuffers make_buffers(int64_t num_groups, int64_t max_seqs, int64_t max_blocks, int64_t max_tokens) {
  BatchBuffers buffers{.block_tables = py::array_t<int32_t>({num_groups, max_seqs, max_blocks}),
                       .context_lens = py::array_t<int32_t>(max_seqs),
                       .query_start_loc = py::array_t<int32_t>(max_seqs + 1),
                       .slot_mapping = py::array_t<int64_t>({num_groups, max_tokens}),
                       .arrays = {}};
  buffers.arrays = {.num_groups = num_groups,
                    .max_seqs = max_seqs,
                    .max_blocks = max_blocks,
                    .max_tokens = max_tokens,
                    .block_tables = buffers.block_tables.mutable_data(),
                    .context_lens = buffers.context_lens.mutable_data(),
                    .query_start_loc = buffers.query_start_loc.mutable_data(),
                    .slot_mapping = buffers.slot_mapping.mutable_data(),
                    .rows = std::vector<BatchArrays::Row>(num_groups * max_seqs)};
  return buffers;
}

Batch open_batch(SharedSequences& sequences, const py::object& ids, const py::object& query_lens,
                 BatchBuffers* buffers) {
  const std::vector<int64_t> id_list = to_ints(ids, "ids");
  std::optional<std::vector<int64_t>> lens;
  if (!query_lens.is_none()) lens = to_ints(query_lens, "query_lens");
  const int64_t num_seqs = static_cast<int64_t>(id_list.size());
  BatchShape shape;
  {
    const Exclusive lock(sequences, num_seqs);
    shape = sequences.open_batch(id_list, lens, buffers == nullptr ? nullptr : &buffers->arrays);
  }
  try {
    std::optional<BatchBuffers> own;
    if (buffers == nullptr) {
      own = make_buffers(shape.num_groups, shape.num_seqs, shape.max_blocks, shape.num_tokens);
      buffers = &*own;
    }
    std::vector<CopyPair> copies;
    {
      const Exclusive lock(sequences, num_seqs);
      sequences.fill_batch(shape, buffers->arrays);
      copies = sequences.take_pending_copies(shape.batch_id);
    }
    return {.batch_id = shape.batch_id,
            .max_query_len = shape.max_query_len,
            .num_tokens = shape.num_tokens,
            .block_tables = buffers->block_tables,
            .context_lens = buffers->context_lens,
            .query_start_loc = buffers->query_start_loc,
            .slot_mapping = buffers->slot_mapping,
            .copies = to_mapping(copies)};
  } catch (...) {
    const Exclusive lock(sequences);
    sequences.abandon(shape.batch_id);
    throw;
  }
}

}  // namespace

void bind_batches(py::module_& module) {
  py::class_<Batch>(module, "Batch",
                    "A batch that was opened: what `Sequences.open_batch` returns, as numpy arrays.")
      .def_readonly("batch_id", &Batch::batch_id)
      .def_readonly("max_query_len", &Batch::max_query_len)
      .def_readonly("num_tokens", &Batch::num_tokens)
      .def_readonly("block_tables", &Batch::block_tables,
                    "[num_groups, num_seqs, max_blocks] int32, rows padded with -1.")
      .def_readonly("context_lens", &Batch::context_lens, "[num_seqs] int32.")
      .def_readonly("query_start_loc", &Batch::query_start_loc, "[num_seqs + 1] int32.")
      .def_readonly("slot_mapping", &Batch::slot_mapping, "[num_groups, num_tokens] int64.")
      .def_readonly("copies", &Batch::copies, "[num_pairs, 2] int64, to be run before the batch is written.");

  py::class_<BatchBuffers>(module, "BatchBuffers", R"doc(
Arrays that `Sequences.open_batch` writes batches to, one after the other, so that a row is written anew only where its
table has changed otherwise than by new blocks at its end.

>>> sequences = Sequences(num_blocks=8, block_size=4); first = sequences.add([11, 12, 13])
>>> buffers = BatchBuffers(num_groups=1, max_seqs=2, max_blocks=3, max_tokens=4)
>>> sequences.open_batch([first], buffers=buffers).block_tables.tolist()
[[[0, -1, -1], [-1, -1, -1]]]
)doc")
      .def(py::init([](int64_t num_groups, int64_t max_seqs, int64_t max_blocks, int64_t max_tokens) {
             BatchBuffers buffers = make_buffers(num_groups, max_seqs, max_blocks, max_tokens);
             std::fill_n(buffers.arrays.block_tables, buffers.block_tables.size(), NO_BLOCK);
             std::fill_n(buffers.arrays.context_lens, max_seqs, 0);
             std::fill_n(buffers.arrays.query_start_loc, max_seqs + 1, 0);
             std::fill_n(buffers.arrays.slot_mapping, buffers.slot_mapping.size(), -1);
             return buffers;
           }),
           py::arg("num_groups"), py::arg("max_seqs"), py::arg("max_blocks"), py::arg("max_tokens"))
      .def_readonly("block_tables", &BatchBuffers::block_tables, "[num_groups, max_seqs, max_blocks] int32.")
      .def_readonly("context_lens", &BatchBuffers::context_lens, "[max_seqs] int32.")
      .def_readonly("query_start_loc", &BatchBuffers::query_start_loc, "[max_seqs + 1] int32.")
      .def_readonly("slot_mapping", &BatchBuffers::slot_mapping, "[num_groups, max_tokens] int64.");
}

void bind_open_batch(py::class_<SharedSequences>& sequences) {
  sequences
      .def(
          "open_batch", &open_batch, py::arg("ids"), py::arg("query_lens") = py::none(),
          py::arg("buffers") = nullptr,
          "Takes the blocks of the next query_lens[i] uncomputed tokens (None: all) of each, all or nothing. "
          "The caller runs the copies. With buffers the arrays are theirs, and ValueError where they are too "
          "small.")
      .def(
          "commit",
          [](SharedSequences& self, int64_t batch_id) {
            Exclusive lock(self);
            lock.expect(self.num_batch_tokens(batch_id));
            self.commit(batch_id);
          },
          py::arg("batch_id"), "Counts the batch's tokens as computed.")
      .def("abandon", exclusive(&Sequences::abandon), py::arg("batch_id"),
           "Gives back the blocks that the batch took.");
}

}  // namespace pagedkv
