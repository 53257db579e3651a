// The pool of cache blocks: which are free, and who still needs the others.
//
// A block is referenced in two ways, counted apart. An *owner* is a table that maps it and may write to it. A
// *hold* is a copy out of it that is due or under way: the block may not be reused, yet its owners write as
// they like. So a lone owner never copies a block only because a copy out of it is pending. When both counts
// are 0 the block can be handed out again.
//
// A block may also be *cached*: the prefix cache knows what it holds. Without references it then waits in a
// list, least recently used first, from which it is either acquired again or, when nothing else is free,
// evicted.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pagedkv {

// Block ids are int32, as the block tables the kernels read. Sizes and counts are int64.
inline constexpr int32_t NO_BLOCK = -1;

// Thrown before anything is changed.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One entry of a block mapping: copy the whole block `source` over `destination`.
struct CopyPair {
  int64_t source, destination;
};

// Blocks needed for `num_tokens` tokens; never overflows for num_tokens >= 0.
constexpr int64_t blocks_for(int64_t num_tokens, int64_t block_size) {
  return num_tokens / block_size + (num_tokens % block_size != 0);
}

// Not thread-safe: whoever shares it has to see to it that no two calls overlap.
class BlockAllocator {
 public:
  static constexpr int64_t MAX_BLOCKS = std::numeric_limits<int32_t>::max();

  // Costs O(1): a block's state is made when the block is first handed out, so a pool of MAX_BLOCKS is one
  // that grows. At most max_used blocks (nullopt: all) are referenced at a time; the others can only be
  // cached.
  BlockAllocator(int64_t num_blocks, int64_t block_size, std::optional<int64_t> max_used = std::nullopt);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_size() const { return block_size_; }
  int64_t max_used_blocks() const { return max_used_; }
  // Blocks without a reference; the cached ones are among them.
  int64_t num_free_blocks() const { return num_blocks_ - num_used_blocks(); }
  int64_t num_available_blocks() const { return max_used_ - num_used_blocks(); }  // that can be handed out
  int64_t num_cached_blocks() const { return num_waiting_; }
  int64_t num_used_blocks() const {
    return num_touched() - static_cast<int64_t>(free_stack_.size()) - num_waiting_;
  }
  int64_t num_touched_blocks() const { return num_touched(); }  // ids below it were handed out before
  int64_t peak_used_blocks() const { return peak_used_; }
  int64_t num_evictions() const { return num_evictions_; }
  std::vector<int32_t> free_blocks() const;       // in the order they will be handed out
  std::vector<int32_t> block_ref_counts() const;  // [num_blocks] owners + holds

  // Throws OutOfMemory where fewer than `count` blocks are available; `who` ("the batch") needs them.
  void require_available(int64_t count, const char* who) const {
    if (count > num_available_blocks()) throw_out_of_memory(count, who);
  }

  // Ids of blocks that were handed out; unchecked, for the tables.
  int32_t num_owners(int32_t block) const { return states_[block].owners; }
  bool is_used(int32_t block) const { return states_[block].owners > 0 || states_[block].holds > 0; }
  bool is_cached(int32_t block) const { return states_[block].cached; }
  bool has_pending_copy(int32_t destination) const { return states_[destination].copy_source != NO_BLOCK; }
  // Changes whenever the content of a block may have become another.
  uint32_t version(int32_t block) const { return states_[block].version; }

  int32_t allocate();
  std::vector<int32_t> allocate_many(int64_t count);
  void append_blocks(int64_t count, std::vector<int32_t>& blocks);  // allocate_many onto the end of `blocks`
  void free(int64_t block) { free_many({&block, 1}); }
  void free_many(std::span<const int64_t> blocks);
  void incr_ref(int64_t block);
  // incr_ref in two steps, for the tables: the first throws, the second cannot fail.
  void require_used(int32_t block) const {
    if (!is_used(block)) reject("reference", block);
  }
  void share(int32_t block) noexcept { ++states_[block].owners; }

  // One more owner of a block that is used or cached; unchecked, for the tables.
  void acquire(int32_t block) noexcept;
  void release(int32_t block) noexcept;                          // one owner less
  void hold(int32_t block) noexcept { ++states_[block].holds; }  // of a used block
  void unhold(int32_t block) noexcept;

  // One owner of `block` gives it up for a fresh block, which is returned with a copy into it pending.
  int32_t copy_on_write(int32_t block);
  // Ends the hold of the pending copy into `destination`; whoever takes the pair has to run it.
  CopyPair take_copy(int32_t destination);
  // The only owner of `block` is about to write to it: it is cached no longer.
  void begin_write(int32_t block) noexcept {
    if (states_[block].cached) uncache(block);
    ++states_[block].version;
  }

  // Fetches what a table looks at before it writes into the block.
  void prefetch(int32_t block) const noexcept { __builtin_prefetch(&states_[block]); }

  // A number that no table of this pool had as its revision before.
  int64_t new_revision() { return ++last_revision_; }

  // `on_uncached` is called for each cached block that ceases to be; it must not throw.
  void set_uncached_handler(std::function<void(int32_t)> on_uncached) {
    on_uncached_ = std::move(on_uncached);
  }
  void mark_cached(int32_t block);       // of a used block
  void uncache(int32_t block) noexcept;  // of a used block
  int64_t evict(int64_t count);          // frees the cached blocks that are next to go; how many there were
  std::vector<int32_t> next_to_evict(int64_t count) const;  // in this order; fewer where there are no more

  // Throws std::logic_error naming the broken invariant.
  void check_integrity() const;

 private:
  struct BlockState {
    int32_t owners = 0;
    int32_t holds = 0;               // pending copies that read this block
    int32_t copy_source = NO_BLOCK;  // the pending copy that fills this block
    uint32_t version : 31 = 0;
    uint32_t cached : 1 = false;
  };
  static_assert(sizeof(BlockState) == 16, "a block's state lies in one line of the CPU's cache");
  // Of a cached block without references.
  struct Neighbours {
    int32_t older = NO_BLOCK, newer = NO_BLOCK;
  };

  int64_t num_touched() const { return static_cast<int64_t>(states_.size()); }
  [[noreturn]] void reject(const char* verb,
                           int64_t block) const;  // throws std::invalid_argument that says why
  [[noreturn]] void throw_out_of_memory(int64_t count, const char* who) const;
  void recycle(int32_t block) noexcept;  // it lost its last reference
  void unlink(int32_t block) noexcept;
  int32_t evict_oldest() noexcept;
  void hand_out(int32_t block) noexcept;
  void check_waiting(std::vector<bool>& is_free) const;

  int64_t num_blocks_, block_size_, max_used_;
  int64_t peak_used_ = 0;
  int64_t last_revision_ = 0;
  std::vector<BlockState> states_;  // ids from states_.size() on were never handed out
  std::vector<int32_t>
      free_stack_;  // handed out before and free again; its capacity covers states_: release() cannot fail

  std::vector<Neighbours> neighbours_;  // covers every cached block
  int32_t oldest_ = NO_BLOCK, newest_ = NO_BLOCK;
  int64_t num_waiting_ = 0;  // cached blocks without references
  int64_t num_evictions_ = 0;
  std::function<void(int32_t)> on_uncached_ = [](int32_t) {};
};

}  // namespace pagedkv
