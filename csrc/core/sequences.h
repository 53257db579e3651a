// All sequences of one cache, and the batches that compute them.
//
// A sequence's tokens are known first (added or appended), get their blocks when a batch covers them, and
// count as computed when that batch is committed: num_computed_tokens <= tokens with a slot <= num_tokens.
//
// Layers whose queries see equally far back form a group. A sequence has one table a group, all of them from
// one pool. A group with a window gives back the blocks behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/block_table.h"
#include "core/prefix_cache.h"

namespace pagedkv {

// What a batch's arrays look like; fill_batch() fills them.
struct BatchShape {
  int64_t batch_id = 0;
  int64_t num_groups = 0, num_seqs = 0, max_blocks = 0, num_tokens = 0, max_query_len = 0;
};

// Where a batch is written to. The rows of a table that has grown since the last batch are only added to.
struct BatchArrays {
  struct Row {
    int64_t revision = -1, num_blocks = 0;
  };

  int64_t num_groups, max_seqs, max_blocks, max_tokens;
  int32_t* block_tables;     // [num_groups, max_seqs, max_blocks]
  int32_t* context_lens;     // [max_seqs]
  int32_t* query_start_loc;  // [max_seqs + 1]
  int64_t* slot_mapping;     // [num_groups, max_tokens]
  std::vector<Row> rows;     // [num_groups * max_seqs] what block_tables holds
};

// Who uses each block of the pool.
struct PoolUsage {
  std::vector<int32_t> owners;  // [num_blocks] tables that map the block
  std::vector<int64_t> filled;  // [num_blocks] slots with a token
  std::vector<int32_t> label;   // [num_blocks] a small number for the first sequence that maps it; -1: none
  std::vector<uint8_t> cached;  // [num_blocks] the prefix cache knows what it holds
};

// Copies between the device's pool and the host's.
struct Transfer {
  int64_t transfer_id = 0;
  std::vector<CopyPair> pairs;  // (device, host) out, (host, device) in
};

struct PrefixCounts {
  int64_t num_queried_tokens = 0, num_hit_tokens = 0;  // of all sequences that were looked up
  int64_t num_host_hits = 0;                           // blocks that were brought back from the host for them
};

// Numbers of one moment.
struct Counts : PrefixCounts {
  int64_t num_used = 0, num_cached = 0, num_filled_slots = 0;
  int64_t peak_used = 0, num_evictions = 0;  // so far
  int64_t num_host_used = 0, num_host_cached = 0;
};

struct SequencesOptions {
  static constexpr int64_t NO_WINDOW = 0;

  // [num_groups] the most recent keys that a query of the group sees, itself included, or NO_WINDOW.
  std::vector<int64_t> windows = {NO_WINDOW};
  int64_t num_host_blocks = 0;
  std::optional<int64_t> max_used_blocks;     // that sequences use at a time; nullopt: all
  std::optional<int64_t> max_tokens_per_seq;  // nullopt: no limit
  bool compare_tokens = false;                // see PrefixKeys
  int key_bits = PrefixKeys::ALL_BITS;
};

// Not thread-safe: whoever shares it has to see to it that no two calls overlap.
class Sequences {
 public:
  using Id = int64_t;
  static constexpr int64_t NO_BATCH = -1;
  static constexpr int64_t NO_WINDOW = SequencesOptions::NO_WINDOW;

  Sequences(int64_t num_blocks, int64_t block_size, SequencesOptions options = {});

  const BlockAllocator& allocator() const { return *allocator_; }
  const BlockAllocator* host_allocator() const { return host_allocator_.get(); }  // null: no host blocks
  int64_t num_groups() const { return static_cast<int64_t>(windows_.size()); }

  // A sequence of num_tokens tokens, the ids of the leading ones given. No block is taken before a batch
  // needs it, except to bring back what is found on the host: see take_arrivals(). With a root, what blocks
  // of that root hold of the tokens is reused, except for the last token.
  Id add(std::vector<int64_t> token_ids, int64_t num_tokens,
         const std::optional<BlockKey>& root = std::nullopt);
  void append(Id id, std::span<const int64_t> token_ids);
  void append(Id id, int64_t num_tokens);
  // token_ids[i] onto ids[i], or with no token_ids an unnamed token each.
  void append_each(std::span<const Id> ids, std::span<const int64_t> token_ids);
  Id fork(Id id);
  // ids[i] becomes what ids[parents[i]] was.
  void reorder(std::span<const Id> ids, std::span<const int64_t> parents);
  // Where a window has passed what the tokens left over see, they become uncomputed.
  void truncate(Id id, int64_t num_tokens);
  // Returns the open batch that became stale by it, or NO_BATCH. Freeing twice does nothing.
  int64_t free(Id id);

  bool is_live(Id id) const { return find(id) != nullptr; }
  int64_t num_tokens(Id id) const { return at(id).num_tokens; }
  int64_t num_computed_tokens(Id id) const { return at(id).num_computed_tokens; }
  int64_t num_cached_tokens(Id id) const { return at(id).num_cached_tokens; }
  // Leading tokens up to the last whose block, in any group, somebody else owns too.
  int64_t num_shared_tokens(Id id) const;
  const std::vector<int64_t>& token_ids(Id id) const { return at(id).token_ids; }
  const std::vector<int32_t>& blocks(Id id, int64_t group) const { return at(id).tables.at(group).blocks(); }

  // Takes the blocks for the next query_lens[i] uncomputed tokens of ids[i] (nullopt: all of them), all or
  // nothing, and gives back those behind a window.
  // Throws std::invalid_argument, too, where the batch is too big for `arrays`.
  BatchShape open_batch(std::span<const Id> ids, std::optional<std::span<const int64_t>> query_lens,
                        const BatchArrays* arrays = nullptr);
  // Rows are padded with -1.
  void fill_batch(const BatchShape& shape, BatchArrays& arrays);
  // The copies due before the batch is written; the caller has to run them.
  std::vector<CopyPair> take_pending_copies(int64_t batch_id);
  // From here on the blocks that the batch filled can be found by their tokens.
  void commit(int64_t batch_id);
  int64_t num_batch_tokens(int64_t batch_id) const;  // 0 where the batch is not open
  void abandon(int64_t batch_id);

  // Whether a batch of all uncomputed tokens and counts[i] more of ids[i] would find its blocks.
  bool can_append(std::span<const Id> ids, std::span<const int64_t> counts);
  // Whether a new sequence would find its blocks in a batch of all its tokens, num_spare blocks left over.
  bool can_allocate(int64_t num_tokens, int64_t num_spare) const;
  bool can_allocate(std::span<const int64_t> token_ids, const BlockKey& root, int64_t num_spare) const;

  // The tokens that a sequence of these ids would find computed.
  int64_t probe(std::span<const int64_t> token_ids, const BlockKey& root) const;
  // Frees the least recently used blocks that only the prefix cache keeps; how many there were.
  int64_t evict(int64_t count) { return allocator_->evict(count); }
  // Forgets all prefixes. Throws std::invalid_argument while a sequence has blocks.
  void reset_prefix_cache();

  // Moves a sequence's blocks to the host's pool, or back. Sequences that share a block do so again when both
  // are there. All or nothing; the caller runs the copies and then ends the transfer. Until then the blocks
  // that they read are neither handed out nor written.
  Transfer swap_out(Id id);
  Transfer swap_in(Id id);
  // The same for the blocks that evict(count) would free, where the host has room. What leaves the device is
  // found on the host from then on. num_moved of them leave, not all of which have to be copied.
  Transfer swap_out_prefixes(int64_t count, int64_t& num_moved);
  // What add() has brought back since the last call: its sequences may not be read before the copies have
  // run.
  std::vector<Transfer> take_arrivals() { return std::exchange(arrivals_, {}); }
  void finish_transfer(int64_t transfer_id);
  bool is_swapped_out(Id id) const { return at(id).swapped_out; }
  // Whether the sequence could be swapped in and a batch compute all its tokens then, or one more where all
  // are computed.
  bool can_swap_in(Id id) const;

  int64_t num_free_blocks() const { return allocator_->num_free_blocks(); }
  int64_t num_free_host_blocks() const { return host_allocator_ ? host_allocator_->num_free_blocks() : 0; }
  int64_t num_cached_blocks() const { return allocator_->num_cached_blocks(); }
  Counts counts() const;
  PoolUsage usage() const;
  void check_integrity() const;  // throws std::logic_error

 private:
  struct Sequence {
    // What a decode step needs comes first, within a line of the CPU's cache.
    std::vector<BlockTable> tables = {};  // [num_groups] computed tokens and those of an open batch
    int64_t num_tokens = 0;
    int64_t num_computed_tokens = 0;
    int64_t open_batch = NO_BATCH;
    int64_t last_visit = 0;    // finds a sequence listed twice in one call
    bool swapped_out = false;  // then `tables` are empty, and `host_tables` hold the computed tokens

    std::optional<BlockKey> root;              // of its prefixes; nullopt: they are not cached
    std::vector<int64_t> token_ids = {};       // of the leading tokens, as far as they were given
    int64_t num_cached_tokens = 0;             // found in the prefix cache when the sequence was added
    KeyHandle key = {};                        // of its first num_keyed_blocks blocks
    int64_t num_keyed_blocks = 0;              // leading blocks that the prefix cache knows
    std::vector<BlockTable> host_tables = {};  // [num_groups]
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
  // The blocks that a batch of some members takes.
  struct RoomCount {
    int64_t num_blocks = 0;
    // Of all owners of a tail that are written here, each copies it while others are left, in the order of
    // the batch.
    std::unordered_map<int32_t, int32_t> tail_writers;

    void add(const Member& member, const BlockAllocator& allocator);
  };
  struct OpenBatch {
    std::vector<Id> ids;
    std::vector<Member> members;  // [ids] valid while it is not stale
    int64_t num_tokens = 0;
    bool stale = false;  // one of its sequences was freed
  };
  // A block of one pool with the content of a block of the other, as long as the versions are these.
  struct Twin {
    int32_t block = NO_BLOCK;
    uint32_t version = 0, own_version = 0;
  };
  struct OpenTransfer {
    BlockAllocator* source;
    std::vector<int32_t> blocks;  // of `source`; the transfer is one of their owners
  };
  // Where the blocks of a sequence are on the side that it is moved to.
  struct Move {
    std::vector<std::vector<int32_t>> blocks;  // [num_groups][blocks] those that are there; NO_BLOCK: not
    int64_t num_new = 0;                       // blocks to be copied
    int64_t num_waiting = 0;                   // of those that are there, the ones that nobody uses
  };
  struct PrefixHit {
    int64_t num_tokens = 0;
    std::vector<BlockKey> keys;                     // [i] of the first i blocks
    std::vector<std::vector<int32_t>> blocks;       // [num_groups][blocks of num_tokens] NO_BLOCK: not needed
    std::vector<std::vector<int32_t>> host_blocks;  // the same, for those that are on the host alone
    bool keep_tail = false;                         // the last block goes on with other tokens
  };

  Sequence* find(Id id) const;  // null: freed
  Sequence& at(Id id) const;    // throws std::invalid_argument if freed
  // Throws std::invalid_argument while a batch is open or the sequence is swapped out.
  Sequence& closed(Id id, const char* verb) const;
  Id insert(Sequence sequence);
  Sequence fork_of(const Sequence& parent) const;
  // With num_new_tokens = all that have no slot yet; throws std::invalid_argument for a freed or repeated
  // sequence.
  std::vector<Member> distinct_members(std::span<const Id> ids);
  void check_member(const Member& member, size_t index) const;
  static void check_room(const BatchShape& shape, const BatchArrays& arrays);
  OpenBatch& whole_batch(int64_t batch_id);  // throws std::invalid_argument where it is not open, or stale
  // The first token that a query at position `query` sees, in a group.
  int64_t first_visible(int64_t group, int64_t query) const;
  void check_sequence(const Sequence& sequence) const;
  void check_owners(const BlockAllocator& pool, std::vector<BlockTable> Sequence::* tables) const;

  void require_length(const Sequence& sequence, int64_t num_new_tokens) const;

  std::vector<BlockTable> empty_tables(const std::shared_ptr<BlockAllocator>& allocator) const;
  static int32_t twin_of(int32_t block, const std::vector<Twin>& twins, const BlockAllocator& pool,
                         const BlockAllocator& other);
  void link_twins(int32_t device_block, int32_t host_block);
  Move plan_departure(const Sequence& sequence) const;
  Move plan_arrival(const Sequence& sequence) const;
  std::vector<CopyPair> relocate(std::span<const BlockTable> from, std::span<BlockTable> to, Move plan,
                                 BlockAllocator& pool);
  Transfer open_transfer(BlockAllocator& source, std::vector<CopyPair> pairs);

  std::span<const int64_t> block_tokens(std::span<const int64_t> token_ids, int64_t logical_block) const {
    return token_ids.subspan(logical_block * allocator_->block_size(), allocator_->block_size());
  }
  PrefixHit find_prefix(std::span<const int64_t> token_ids, const BlockKey& root) const;
  int64_t find_full_blocks(std::span<const int64_t> token_ids, PrefixHit& hit) const;
  int64_t longest_that_fits(std::span<const int64_t> ends, int64_t num_ids, const PrefixHit& hit) const;
  void find_partial_block(std::span<const int64_t> token_ids, PrefixHit& hit) const;
  void cut(PrefixHit& hit, int64_t num_tokens) const;
  int64_t blocks_needed(const PrefixHit& hit, int64_t num_tokens) const;
  void adopt_prefix(Sequence& sequence);
  void bring_back(PrefixHit& hit);
  void cache_full_blocks(Sequence& sequence);
  void cache_on_host(const Sequence& sequence);
  void forget_keys_after(Sequence& sequence, int64_t num_blocks);

  std::shared_ptr<BlockAllocator> allocator_;
  std::vector<int64_t> windows_;  // [num_groups]
  int64_t max_tokens_per_seq_;
  PrefixKeys keys_;
  PrefixCache prefix_cache_;
  PrefixCounts prefix_counts_;
  std::shared_ptr<BlockAllocator> host_allocator_;
  std::optional<PrefixCache> host_prefix_cache_;  // where there are host blocks
  std::vector<Twin> host_twins_, device_twins_;   // of the device's blocks, of the host's
  std::vector<Transfer> arrivals_;                // not taken yet
  std::unordered_map<int64_t, OpenTransfer> open_transfers_;
  int64_t next_transfer_id_ = 0;
  std::vector<Slot> slots_;
  std::vector<int64_t> free_slots_;
  std::unordered_map<int64_t, OpenBatch> open_batches_;
  int64_t next_batch_id_ = 0;
  int64_t num_visits_ = 0;
};

}  // namespace pagedkv
