// The pool of cache blocks: which are free, and who still needs the others.
//
// A block is referenced in two ways, counted apart. An *owner* is a table that maps it and may write to it. A
// *hold* is a copy out of it that is due but not yet taken: the block may not be reused, yet its owners write
// as they like. So a lone owner never copies a block only because a copy out of it is pending. The block is
// free when both counts are 0.
#pragma once

#include <cstdint>
#include <limits>
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

// Not thread-safe: the Python bindings call it with the GIL held.
class BlockAllocator {
 public:
  static constexpr int64_t MAX_BLOCKS = std::numeric_limits<int32_t>::max();

  // Costs O(1): a block's state is made when the block is first handed out, so a pool of MAX_BLOCKS is one
  // that grows.
  BlockAllocator(int64_t num_blocks, int64_t block_size);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_size() const { return block_size_; }
  int64_t num_free_blocks() const { return num_blocks_ - num_used_blocks(); }
  int64_t num_used_blocks() const { return num_touched() - static_cast<int64_t>(free_stack_.size()); }
  int64_t peak_used_blocks() const { return peak_used_; }
  std::vector<int32_t> free_blocks() const;       // in the order they will be handed out
  std::vector<int32_t> block_ref_counts() const;  // [num_blocks] owners + holds

  // Ids of used blocks only; unchecked, for the tables.
  int32_t num_owners(int32_t block) const { return states_[block].owners; }
  bool has_pending_copy(int32_t destination) const { return states_[destination].copy_source != NO_BLOCK; }

  int32_t allocate();
  std::vector<int32_t> allocate_many(int64_t count);
  void append_blocks(int64_t count, std::vector<int32_t>& blocks);  // allocate_many onto the end of `blocks`
  void free(int64_t block) { free_many({&block, 1}); }
  void free_many(std::span<const int64_t> blocks);
  void incr_ref(int64_t block);

  // One owner of `block` gives it up for a fresh block, which is returned with a copy into it pending.
  int32_t copy_on_write(int32_t block);
  // Ends the hold of the pending copy into `destination`; whoever takes the pair has to run it.
  CopyPair take_copy(int32_t destination);

  // Throws std::logic_error naming the broken invariant.
  void check_integrity() const;

 private:
  struct BlockState {
    int32_t owners = 0;
    int32_t holds = 0;               // pending copies that read this block
    int32_t copy_source = NO_BLOCK;  // the pending copy that fills this block
  };

  int64_t num_touched() const { return static_cast<int64_t>(states_.size()); }
  [[noreturn]] void reject(const char* verb,
                           int64_t block) const;  // throws std::invalid_argument that says why
  void release(int32_t block) noexcept;           // one owner less
  void require_free(int64_t count) const;

  int64_t num_blocks_, block_size_;
  int64_t peak_used_ = 0;
  std::vector<BlockState> states_;  // ids from states_.size() on were never handed out
  std::vector<int32_t>
      free_stack_;  // handed out before and free again; its capacity covers states_: release() cannot fail
};

}  // namespace pagedkv
