#include <algorithm>
#include <optional>
#include <utility>

#include "core/bindings.h"
#include "core/sequences.h"

namespace py = pybind11;

namespace pagedkv {
namespace {

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// [num_pairs, 2] (source, destination).
py::array_t<int64_t> to_mapping(const std::vector<CopyPair>& pairs) {
  py::array_t<int64_t> mapping({static_cast<py::ssize_t>(pairs.size()), py::ssize_t{2}});
  int64_t* entry = mapping.mutable_data();
  for (const auto& [source, destination] : pairs) {
    *entry++ = source;
    *entry++ = destination;
  }
  return mapping;
}

py::tuple to_tuple(const Transfer& transfer) {
  return py::make_tuple(transfer.transfer_id, to_mapping(transfer.pairs));
}

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

BatchShape open_shape(Sequences& sequences, const py::object& ids, const py::object& query_lens,
                      const BatchArrays* arrays) {
  const std::vector<int64_t> id_list = to_ints(ids, "ids");
  if (query_lens.is_none()) return sequences.open_batch(id_list, std::nullopt, arrays);
  const std::vector<int64_t> lens = to_ints(query_lens, "query_lens");
  return sequences.open_batch(id_list, lens, arrays);
}

Batch open_batch(Sequences& sequences, const py::object& ids, const py::object& query_lens,
                 BatchBuffers* buffers) {
  const BatchShape shape =
      open_shape(sequences, ids, query_lens, buffers == nullptr ? nullptr : &buffers->arrays);
  try {
    std::optional<BatchBuffers> own;
    if (buffers == nullptr) {
      own = make_buffers(shape.num_groups, shape.num_seqs, shape.max_blocks, shape.num_tokens);
      buffers = &*own;
    }
    sequences.fill_batch(shape, buffers->arrays);
    return {.batch_id = shape.batch_id,
            .max_query_len = shape.max_query_len,
            .num_tokens = shape.num_tokens,
            .block_tables = buffers->block_tables,
            .context_lens = buffers->context_lens,
            .query_start_loc = buffers->query_start_loc,
            .slot_mapping = buffers->slot_mapping,
            .copies = to_mapping(sequences.take_pending_copies(shape.batch_id))};
  } catch (...) {
    sequences.abandon(shape.batch_id);
    throw;
  }
}

py::tuple usage(const Sequences& sequences) {
  const PoolUsage pool = sequences.usage();
  return py::make_tuple(to_array(pool.owners), to_array(pool.filled), to_array(pool.label),
                        to_array(pool.cached));
}

int64_t add_sequence(Sequences& sequences, const py::object& token_ids, int64_t num_tokens,
                     const std::optional<py::bytes>& root) {
  if (token_ids.is_none()) return sequences.add({}, num_tokens, std::nullopt);
  std::vector<int64_t> ids = to_ints(token_ids, "token_ids");
  const int64_t num_ids = static_cast<int64_t>(ids.size());
  return sequences.add(std::move(ids), num_ids, root ? std::optional(key_from_bytes(*root)) : std::nullopt);
}

void bind_prefixes(py::class_<Sequences>& sequences) {
  sequences
      .def_property_readonly(
          "num_cached_blocks", [](const Sequences& self) { return self.allocator().num_cached_blocks(); },
          "Blocks that only the prefix cache keeps; they count as free too.")
      .def_property_readonly("num_evictions",
                             [](const Sequences& self) { return self.allocator().num_evictions(); })
      .def_property_readonly(
          "prefix_counts",
          [](const Sequences& self) {
            const PrefixCounts counts = self.prefix_counts();
            return py::make_tuple(counts.num_queried_tokens, counts.num_hit_tokens);
          },
          "(tokens looked up, tokens found), over all sequences added with a root.")
      .def("num_cached_tokens", &Sequences::num_cached_tokens, py::arg("id"),
           "Tokens that were found computed when the sequence was added.")
      .def(
          "probe",
          [](const Sequences& self, const py::object& token_ids, const py::bytes& root) {
            return self.probe(to_ints(token_ids, "token_ids"), key_from_bytes(root));
          },
          py::arg("token_ids"), py::arg("root"),
          "The tokens that a sequence of these ids would find computed.")
      .def("evict", &Sequences::evict, py::arg("count"),
           "Frees the least recently used blocks that only the prefix cache keeps. Returns how many.")
      .def("reset_prefix_cache", &Sequences::reset_prefix_cache,
           "Forgets all prefixes; ValueError while a sequence has blocks.")
      .def(
          "can_allocate",
          [](const Sequences& self, int64_t num_tokens, int64_t num_spare) {
            return self.can_allocate(num_tokens, num_spare);
          },
          py::arg("num_tokens"), py::arg("num_spare") = 0,
          "Whether a batch of a new sequence would find its blocks, num_spare left over.")
      .def(
          "can_allocate_ids",
          [](const Sequences& self, const py::object& token_ids, const py::bytes& root, int64_t num_spare) {
            return self.can_allocate(to_ints(token_ids, "token_ids"), key_from_bytes(root), num_spare);
          },
          py::arg("token_ids"), py::arg("root"), py::arg("num_spare") = 0,
          "The same, with the blocks that it would find in the prefix cache.");
}

void bind_swapping(py::class_<Sequences>& sequences) {
  sequences
      .def_property_readonly("num_free_host_blocks",
                             [](const Sequences& self) {
                               return self.host_allocator() ? self.host_allocator()->num_free_blocks() : 0;
                             })
      .def(
          "swap_out", [](Sequences& self, int64_t id) { return to_tuple(self.swap_out(id)); }, py::arg("id"),
          "Moves the sequence to host blocks. Returns a transfer and its copies, [num_pairs, 2] int64 "
          "(device, host), "
          "which the caller runs.")
      .def(
          "swap_in", [](Sequences& self, int64_t id) { return to_tuple(self.swap_in(id)); }, py::arg("id"),
          "Moves it back. Returns a transfer and its copies, [num_pairs, 2] int64 (host, device).")
      .def("finish_transfer", &Sequences::finish_transfer, py::arg("transfer_id"),
           "The copies have run: the blocks that they read may be handed out.")
      .def("is_swapped_out", &Sequences::is_swapped_out, py::arg("id"))
      .def("can_swap_in", &Sequences::can_swap_in, py::arg("id"),
           "Whether the sequence, and then a batch of all its tokens or of one more, would find its blocks.");
}

}  // namespace

void bind_sequences(py::module_& module) {
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

  py::class_<Sequences> sequences(module, "Sequences", R"doc(
The sequences of one cache and the allocator they share: what `PagedKVCache` is built on, in terms of ids.

windows has an entry for each group of layers: how many keys a query sees, 0 for all.

>>> sequences = Sequences(num_blocks=8, block_size=4)
>>> first = sequences.add([11, 12, 13, 14, 15]); batch = sequences.open_batch([first])
>>> batch.block_tables.tolist(), batch.slot_mapping.tolist()
([[[0, 1]]], [[0, 1, 2, 3, 4]])
)doc");
  bind_prefixes(sequences);
  bind_swapping(sequences);
  sequences
      .def(py::init<int64_t, int64_t, std::vector<int64_t>, int64_t>(), py::arg("num_blocks"),
           py::arg("block_size"), py::arg("windows") = std::vector<int64_t>{Sequences::NO_WINDOW},
           py::arg("num_host_blocks") = 0)
      .def_property_readonly("num_free_blocks",
                             [](const Sequences& self) { return self.allocator().num_free_blocks(); })
      .def_property_readonly("peak_used_blocks",
                             [](const Sequences& self) { return self.allocator().peak_used_blocks(); })
      .def("add", &add_sequence, py::arg("token_ids") = py::none(), py::arg("num_tokens") = 0,
           py::arg("root") = py::none(),
           "A new sequence of these tokens, or of num_tokens unnamed ones. With a root (32 bytes) what the "
           "prefix "
           "cache knows of that root is reused. Returns its id.")
      .def(
          "append_ids",
          [](Sequences& self, int64_t id, const py::object& token_ids) {
            self.append(id, to_ints(token_ids, "token_ids"));
          },
          py::arg("id"), py::arg("token_ids"), "More known tokens.")
      .def("append_count", py::overload_cast<int64_t, int64_t>(&Sequences::append), py::arg("id"),
           py::arg("num_tokens"), "More known tokens, unnamed.")
      .def(
          "append_each",
          [](Sequences& self, const py::object& ids, const py::object& token_ids) {
            self.append_each(to_ints(ids, "ids"),
                             token_ids.is_none() ? std::vector<int64_t>() : to_ints(token_ids, "token_ids"));
          },
          py::arg("ids"), py::arg("token_ids") = py::none(), "One more token for each, unnamed without ids.")
      .def("fork", &Sequences::fork, py::arg("id"),
           "A sequence with the same tokens that shares every block.")
      .def(
          "reorder",
          [](Sequences& self, const py::object& ids, const py::object& parents) {
            self.reorder(to_ints(ids, "ids"), to_ints(parents, "parents"));
          },
          py::arg("ids"), py::arg("parents"), "ids[i] becomes what ids[parents[i]] was.")
      .def("truncate", &Sequences::truncate, py::arg("id"), py::arg("num_tokens"),
           "Forgets the tokens behind.")
      .def("free", &Sequences::free, py::arg("id"),
           "Gives the blocks back. Returns the open batch that became stale by it, or -1. A second call does "
           "nothing.")
      .def("is_live", &Sequences::is_live, py::arg("id"))
      .def("num_tokens", &Sequences::num_tokens, py::arg("id"))
      .def("num_computed_tokens", &Sequences::num_computed_tokens, py::arg("id"))
      .def("token_ids", &Sequences::token_ids, py::arg("id"),
           "Ids of the leading tokens, as far as they were given.")
      .def("blocks", &Sequences::blocks, py::arg("id"), py::arg("group") = 0,
           "Physical ids in logical order.")
      .def(
          "open_batch", &open_batch, py::arg("ids"), py::arg("query_lens") = py::none(),
          py::arg("buffers") = nullptr,
          "Takes the blocks of the next query_lens[i] uncomputed tokens (None: all) of each, all or nothing. "
          "The caller runs the copies. With buffers the arrays are theirs, and ValueError where they are too "
          "small.")
      .def("commit", &Sequences::commit, py::arg("batch_id"), "Counts the batch's tokens as computed.")
      .def("abandon", &Sequences::abandon, py::arg("batch_id"), "Gives back the blocks that the batch took.")
      .def(
          "can_append",
          [](Sequences& self, const py::object& ids, const py::object& counts) {
            return self.can_append(to_ints(ids, "ids"), to_ints(counts, "counts"));
          },
          py::arg("ids"), py::arg("counts"),
          "Whether a batch of all uncomputed tokens and counts[i] more would find its blocks.")
      .def("usage", &usage,
           "Per block: owners (int32), filled slots (int64), a label of the first sequence that maps it "
           "(int32, -1: none), whether the prefix cache knows it (uint8).")
      .def("check_integrity", &Sequences::check_integrity,
           "Recounts everything; RuntimeError names what is broken.");
}

}  // namespace pagedkv
