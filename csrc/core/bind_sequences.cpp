#include <memory>
#include <optional>
#include <utility>

#include "core/bind_shared.h"
#include "core/bindings.h"

namespace py = pybind11;

namespace pagedkv {
namespace {

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple to_tuple(const Transfer& transfer) {
  return py::make_tuple(transfer.transfer_id, to_mapping(transfer.pairs));
}

py::tuple usage(const SharedSequences& sequences) {
  PoolUsage pool;
  {
    const Exclusive lock(sequences, sequences.allocator().num_blocks());
    pool = sequences.usage();
  }
  return py::make_tuple(to_array(pool.owners), to_array(pool.filled), to_array(pool.label),
                        to_array(pool.cached));
}

int64_t add_sequence(SharedSequences& sequences, const py::object& token_ids, int64_t num_tokens,
                     const std::optional<py::bytes>& root) {
  std::vector<int64_t> ids;
  std::optional<BlockKey> key;
  if (!token_ids.is_none()) {
    ids = to_ints(token_ids, "token_ids");
    num_tokens = static_cast<int64_t>(ids.size());
    if (root) key = key_from_bytes(*root);
  }
  const Exclusive lock(sequences, static_cast<int64_t>(ids.size()));
  return sequences.add(std::move(ids), num_tokens, key);
}

// A function of token ids and the root of their keys.
template <typename Question>
auto about_prefix(Question question) {
  return [question](const SharedSequences& self, const py::object& token_ids, const py::bytes& root) {
    const std::vector<int64_t> ids = to_ints(token_ids, "token_ids");
    const BlockKey key = key_from_bytes(root);
    const Exclusive lock(self, static_cast<int64_t>(ids.size()));
    return question(self, ids, key);
  };
}

void bind_prefixes(py::class_<SharedSequences>& sequences) {
  sequences
      .def("num_cached_tokens", exclusive(&Sequences::num_cached_tokens), py::arg("id"),
           "Tokens that were found computed when the sequence was added.")
      .def("num_shared_tokens", exclusive(&Sequences::num_shared_tokens), py::arg("id"),
           "Leading tokens up to the last whose block others own too.")
      .def("probe",
           about_prefix([](const Sequences& self, const std::vector<int64_t>& ids, const BlockKey& root) {
             return self.probe(ids, root);
           }),
           py::arg("token_ids"), py::arg("root"),
           "The tokens that a sequence of these ids would find computed.")
      .def("evict", exclusive(&Sequences::evict), py::arg("count"),
           "Frees the least recently used blocks that only the prefix cache keeps. Returns how many.")
      .def("reset_prefix_cache", exclusive(&Sequences::reset_prefix_cache),
           "Forgets all prefixes; ValueError while a sequence has blocks.")
      .def("can_allocate",
           exclusive(py::overload_cast<int64_t, int64_t>(&Sequences::can_allocate, py::const_)),
           py::arg("num_tokens"), py::arg("num_spare") = 0,
           "Whether a batch of a new sequence would find its blocks, num_spare left over.")
      .def(
          "can_allocate_ids",
          [](const SharedSequences& self, const py::object& token_ids, const py::bytes& root,
             int64_t num_spare) {
            return about_prefix([=](const Sequences& core, const std::vector<int64_t>& ids,
                                    const BlockKey& key) { return core.can_allocate(ids, key, num_spare); })(
                self, token_ids, root);
          },
          py::arg("token_ids"), py::arg("root"), py::arg("num_spare") = 0,
          "The same, with the blocks that it would find in the prefix cache.");
}

// swap_out or swap_in as a function.
auto swapping(Transfer (Sequences::*direction)(int64_t)) {
  return [direction](SharedSequences& self, int64_t id) {
    Transfer transfer;
    {
      Exclusive lock(self);
      lock.expect(self.num_tokens(id));
      transfer = (self.*direction)(id);
    }
    return to_tuple(transfer);
  };
}

void bind_swapping(py::class_<SharedSequences>& sequences) {
  sequences
      .def("swap_out", swapping(&Sequences::swap_out), py::arg("id"),
           "Moves the sequence to host blocks. Returns a transfer and its copies, [num_pairs, 2] int64 "
           "(device, host), which the caller runs.")
      .def("swap_in", swapping(&Sequences::swap_in), py::arg("id"),
           "Moves it back. Returns a transfer and its copies, [num_pairs, 2] int64 (host, device).")
      .def(
          "swap_out_prefixes",
          [](SharedSequences& self, int64_t count) {
            int64_t num_moved = 0;
            Transfer transfer;
            {
              const Exclusive lock(self, count);
              transfer = self.swap_out_prefixes(count, num_moved);
            }
            return py::make_tuple(num_moved, transfer.transfer_id, to_mapping(transfer.pairs));
          },
          py::arg("count"),
          "Moves the blocks that `evict` would free to the host. Returns how many, a transfer and its "
          "copies.")
      .def(
          "take_arrivals",
          [](SharedSequences& self) {
            std::vector<Transfer> arrivals;
            {
              const Exclusive lock(self);
              arrivals = self.take_arrivals();
            }
            std::vector<py::tuple> tuples;
            for (const Transfer& transfer : arrivals) tuples.push_back(to_tuple(transfer));
            return tuples;
          },
          "What `add` has brought back from the host since the last call: transfers and their copies.")
      .def("finish_transfer", exclusive(&Sequences::finish_transfer), py::arg("transfer_id"),
           "The copies have run: the blocks that they read may be handed out.")
      .def("is_swapped_out", exclusive(&Sequences::is_swapped_out), py::arg("id"))
      .def(
          "can_swap_in",
          [](const SharedSequences& self, int64_t id) {
            Exclusive lock(self);
            lock.expect(self.num_tokens(id));
            return self.can_swap_in(id);
          },
          py::arg("id"),
          "Whether the sequence, and then a batch of all its tokens or of one more, would find its blocks.");
}

void bind_counts(py::module_& module, py::class_<SharedSequences>& sequences) {
  py::class_<Counts>(module, "Counts", "What `Sequences.counts` returns: numbers of one moment.")
      .def_readonly("num_used", &Counts::num_used)
      .def_readonly("num_cached", &Counts::num_cached)
      .def_readonly("num_filled_slots", &Counts::num_filled_slots)
      .def_readonly("peak_used", &Counts::peak_used)
      .def_readonly("num_evictions", &Counts::num_evictions)
      .def_readonly("num_queried_tokens", &Counts::num_queried_tokens)
      .def_readonly("num_hit_tokens", &Counts::num_hit_tokens)
      .def_readonly("num_host_used", &Counts::num_host_used)
      .def_readonly("num_host_cached", &Counts::num_host_cached)
      .def_readonly("num_host_hits", &Counts::num_host_hits);
  sequences
      .def(
          "counts",
          [](const SharedSequences& self) {
            const Exclusive lock(self, self.allocator().num_blocks());
            return self.counts();
          },
          "Counts blocks, filled slots and hits; O(num_blocks).")
      .def_property_readonly("num_free_blocks", exclusive(&Sequences::num_free_blocks))
      .def_property_readonly("num_free_host_blocks", exclusive(&Sequences::num_free_host_blocks))
      .def_property_readonly("num_cached_blocks", exclusive(&Sequences::num_cached_blocks),
                             "Blocks that only the prefix cache keeps; they count as free too.")
      .def("usage", &usage,
           "Per block: owners (int32), filled slots (int64), a label of the first sequence that maps it "
           "(int32, -1: none), whether the prefix cache knows it (uint8).")
      .def(
          "check_integrity",
          [](const SharedSequences& self) {
            const Exclusive lock(self, self.allocator().num_blocks());
            self.check_integrity();
          },
          "Recounts everything; RuntimeError names what is broken.");
}

}  // namespace

void bind_sequences(py::module_& module) {
  py::class_<SharedSequences> sequences(module, "Sequences", R"doc(
The sequences of one cache and the allocator they share: what `PagedKVCache` is built on, in terms of ids.

windows has an entry for each group of layers: how many keys a query sees, 0 for all. max_used_blocks and
max_tokens_per_seq are limits, None for none. compare_tokens: see `PagedKVCache`. key_bits cuts the keys of blocks, to see
what happens when they collide.

Threads may share it: calls exclude each other, and long ones run without the GIL.

>>> sequences = Sequences(num_blocks=8, block_size=4)
>>> first = sequences.add([11, 12, 13, 14, 15]); batch = sequences.open_batch([first])
>>> batch.block_tables.tolist(), batch.slot_mapping.tolist()
([[[0, 1]]], [[0, 1, 2, 3, 4]])
)doc");
  bind_counts(module, sequences);
  bind_prefixes(sequences);
  bind_swapping(sequences);
  bind_open_batch(sequences);
  sequences
      .def(py::init([](int64_t num_blocks, int64_t block_size, std::vector<int64_t> windows,
                       int64_t num_host_blocks, std::optional<int64_t> max_used_blocks,
                       std::optional<int64_t> max_tokens_per_seq, bool compare_tokens, int key_bits) {
             SequencesOptions options{.windows = std::move(windows),
                                      .num_host_blocks = num_host_blocks,
                                      .max_used_blocks = max_used_blocks,
                                      .max_tokens_per_seq = max_tokens_per_seq,
                                      .compare_tokens = compare_tokens,
                                      .key_bits = key_bits};
             return std::make_unique<SharedSequences>(num_blocks, block_size, std::move(options));
           }),
           py::arg("num_blocks"), py::arg("block_size"),
           py::arg("windows") = std::vector<int64_t>{Sequences::NO_WINDOW}, py::arg("num_host_blocks") = 0,
           py::arg("max_used_blocks") = py::none(), py::arg("max_tokens_per_seq") = py::none(),
           py::arg("compare_tokens") = false, py::arg("key_bits") = PrefixKeys::ALL_BITS)
      .def("add", &add_sequence, py::arg("token_ids") = py::none(), py::arg("num_tokens") = 0,
           py::arg("root") = py::none(),
           "A new sequence of these tokens, or of num_tokens unnamed ones. With a root (32 bytes) what the "
           "prefix cache knows of that root is reused. Returns its id.")
      .def(
          "append_ids",
          [](SharedSequences& self, int64_t id, const py::object& token_ids) {
            const std::vector<int64_t> tokens = to_ints(token_ids, "token_ids");
            const Exclusive lock(self);
            self.append(id, tokens);
          },
          py::arg("id"), py::arg("token_ids"), "More known tokens.")
      .def("append_count", exclusive(py::overload_cast<int64_t, int64_t>(&Sequences::append)), py::arg("id"),
           py::arg("num_tokens"), "More known tokens, unnamed.")
      .def(
          "append_each",
          [](SharedSequences& self, const py::object& ids, const py::object& token_ids) {
            const std::vector<int64_t> id_list = to_ints(ids, "ids");
            std::vector<int64_t> tokens;
            if (!token_ids.is_none()) tokens = to_ints(token_ids, "token_ids");
            const Exclusive lock(self);
            self.append_each(id_list, tokens);
          },
          py::arg("ids"), py::arg("token_ids") = py::none(), "One more token for each, unnamed without ids.")
      .def("fork", exclusive(&Sequences::fork), py::arg("id"),
           "A sequence with the same tokens that shares every block.")
      .def(
          "reorder",
          [](SharedSequences& self, const py::object& ids, const py::object& parents) {
            const std::vector<int64_t> id_list = to_ints(ids, "ids"),
                                       parent_list = to_ints(parents, "parents");
            const Exclusive lock(self);
            self.reorder(id_list, parent_list);
          },
          py::arg("ids"), py::arg("parents"), "ids[i] becomes what ids[parents[i]] was.")
      .def("truncate", exclusive(&Sequences::truncate), py::arg("id"), py::arg("num_tokens"),
           "Forgets the tokens behind.")
      .def("free", exclusive(&Sequences::free), py::arg("id"),
           "Gives the blocks back. Returns the open batch that became stale by it, or -1. A second call does "
           "nothing.")
      .def("is_live", exclusive(&Sequences::is_live), py::arg("id"))
      .def("num_tokens", exclusive(&Sequences::num_tokens), py::arg("id"))
      .def("num_computed_tokens", exclusive(&Sequences::num_computed_tokens), py::arg("id"))
      .def("token_ids", exclusive(&Sequences::token_ids), py::arg("id"),
           "Ids of the leading tokens, as far as they were given.")
      .def("blocks", exclusive(&Sequences::blocks), py::arg("id"), py::arg("group") = 0,
           "Physical ids in logical order.")
      .def(
          "can_append",
          [](SharedSequences& self, const py::object& ids, const py::object& counts) {
            const std::vector<int64_t> id_list = to_ints(ids, "ids"), count_list = to_ints(counts, "counts");
            const Exclusive lock(self);
            return self.can_append(id_list, count_list);
          },
          py::arg("ids"), py::arg("counts"),
          "Whether a batch of all uncomputed tokens and counts[i] more would find its blocks.");
}

}  // namespace pagedkv
