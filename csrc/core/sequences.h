// All sequences of one cache, and the batches that compute them.
//
// A sequence's tokens are known first (added or appended), get their blocks when a batch covers them, and
// count as computed when that batch is committed: num_computed_tokens <= tokens with a slot <= num_tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/block_table.h"

namespace pagedkv {

// What a batch's arrays look like; fill_batch() fills them.
struct BatchShape {
  int64_t batch_id = 0;
  int64_t num_seqs = 0, max_blocks = 0, num_tokens = 0, max_query_len = 0;
};

// Who uses each block of the pool.
struct PoolUsage {
  std::vector<int32_t> owners;  // [num_blocks] tables that map the block
  std::vector<int64_t> filled;  // [num_blocks] slots with a token
  std::vector<int32_t> label;   // [num_blocks] a small number for the first sequence that maps it; -1: free
};

// Not thread-safe: the Python bindings call it with the GIL held.
class Sequences {
 public:
  using Id = int64_t;
  static constexpr int64_t NO_BATCH = -1;

  Sequences(int64_t num_blocks, int64_t block_size);

  const BlockAllocator& allocator() const { return *allocator_; }

  // A sequence of num_tokens tokens, the ids of the leading ones given. No block is taken before a batch
  // needs it.
  Id add(std::vector<int64_t> token_ids, int64_t num_tokens);
  void append(Id id, std::span<const int64_t> token_ids);
  void append(Id id, int64_t num_tokens);
  Id fork(Id id);
  void truncate(Id id, int64_t num_tokens);
  // Returns the open batch that became stale by it, or NO_BATCH. Freeing twice does nothing.
  int64_t free(Id id);

  bool is_live(Id id) const { return find(id) != nullptr; }
  int64_t num_tokens(Id id) const { return at(id).num_tokens; }
  int64_t num_computed_tokens(Id id) const { return at(id).num_computed_tokens; }
  const std::vector<int64_t>& token_ids(Id id) const { return at(id).token_ids; }
  const std::vector<int32_t>& blocks(Id id) const { return at(id).table.blocks(); }

  // Takes the blocks for the next query_lens[i] uncomputed tokens of ids[i] (nullopt: all of them), all or
  // nothing.
  BatchShape open_batch(std::span<const Id> ids, std::optional<std::span<const int64_t>> query_lens);
  // block_tables [num_seqs, max_blocks] padded with -1, context_lens [num_seqs], query_start_loc [num_seqs +
  // 1], slot_mapping [num_tokens].
  void fill_batch(const BatchShape& shape, int32_t* block_tables, int32_t* context_lens,
                  int32_t* query_start_loc, int64_t* slot_mapping) const;
  // The copies due before the batch is written; the caller has to run them.
  std::vector<CopyPair> take_pending_copies(int64_t batch_id);
  void commit(int64_t batch_id);
  void abandon(int64_t batch_id);

  // Whether a batch of all uncomputed tokens and counts[i] more of ids[i] would find its blocks.
  bool can_append(std::span<const Id> ids, std::span<const int64_t> counts);

  PoolUsage usage() const;
  void check_integrity() const;  // throws std::logic_error

 private:
  struct Sequence {
    BlockTable table;                     // computed tokens and those of an open batch
    std::vector<int64_t> token_ids = {};  // of the leading tokens, as far as they were given
    int64_t num_tokens = 0;
    int64_t num_computed_tokens = 0;
    int64_t open_batch = NO_BATCH;
    int64_t last_visit = 0;  // finds a sequence listed twice in one call
  };
  // An id is slot + generation * 2**32, so that the id of a freed sequence is not mistaken for its slot's
  // next one.
  struct Slot {
    int64_t generation = 0;
    std::unique_ptr<Sequence> sequence;
  };
  struct Member {
    Sequence* sequence;
    int64_t num_new_tokens;
  };
  struct OpenBatch {
    std::vector<Id> ids;
    std::vector<int64_t> query_lens;  // [ids]
    bool stale = false;               // one of its sequences was freed
  };

  Sequence* find(Id id) const;                      // null: freed
  Sequence& at(Id id) const;                        // throws std::invalid_argument if freed
  Sequence& closed(Id id, const char* verb) const;  // throws std::invalid_argument while a batch is open
  Id insert(Sequence sequence);
  // With num_new_tokens = all that have no slot yet; throws std::invalid_argument for a freed or repeated
  // sequence.
  std::vector<Member> distinct_members(std::span<const Id> ids);
  void check_members(std::span<const Member> members, std::span<const int64_t> query_lens) const;
  int64_t blocks_needed(std::span<const Member> members) const;

  std::shared_ptr<BlockAllocator> allocator_;
  std::vector<Slot> slots_;
  std::vector<int64_t> free_slots_;
  std::unordered_map<int64_t, OpenBatch> open_batches_;
  int64_t next_batch_id_ = 0;
  int64_t num_visits_ = 0;
};

}  // namespace pagedkv
