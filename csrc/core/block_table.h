// The blocks of one sequence, in order, with copy-on-write of blocks shared between forks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/block_allocator.h"

namespace pagedkv {

// Owns its blocks: they go back to the allocator when the table dies. The allocator lives as long as its last
// table.
class BlockTable {
 public:
  static constexpr int64_t DEFAULT_BLOCK_SIZE = 16;

  // Without an allocator the table gets a private one that grows. Without a block_size it is the allocator's.
  BlockTable(std::optional<int64_t> block_size, std::shared_ptr<BlockAllocator> allocator);
  BlockTable(BlockTable&&) noexcept = default;
  BlockTable& operator=(BlockTable&&) = delete;
  ~BlockTable();

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t block_size() const { return allocator_->block_size(); }
  const std::vector<int32_t>& blocks() const { return blocks_; }  // [num_blocks] physical ids
  int32_t physical_block(int64_t logical_block) const;
  // Two tables with one revision, or one table at two times, differ in the blocks at the end at most.
  int64_t revision() const { return revision_; }

  // Blocks that num_new_tokens more tokens add to the table, the copy of a shared tail not counted.
  int64_t num_new_blocks(int64_t num_new_tokens) const {
    // Most calls are for a token or two: they need no division.
    return num_new_tokens <= num_slack() ? 0 : blocks_for(num_new_tokens - num_slack(), block_size());
  }
  // The partly filled last block where others need it as it is, so that a write has to copy it first; else
  // NO_BLOCK. Others are other tables, transfers, and the prefix cache where `is_tail_kept()`.
  int32_t shared_tail() const {
    return num_slack() > 0 && (keep_tail_ || allocator_->num_owners(blocks_.back()) > 1) ? blocks_.back()
                                                                                         : NO_BLOCK;
  }
  bool is_tail_kept() const { return keep_tail_; }

  // Makes room for num_new_tokens more tokens that are about to be written. All or nothing.
  void grow(int64_t num_new_tokens) {
    // A decode step mostly goes on in a block of its own.
    if (num_new_tokens == 1 && num_slack() > 0 && shared_tail() == NO_BLOCK) {
      allocator_->begin_write(blocks_.back());
      ++num_tokens_;
    } else {
      grow_by_blocks(num_new_tokens);
    }
  }
  void prefetch_tail() const noexcept {
    if (num_slack() > 0) allocator_->prefetch(blocks_.back());
  }
  int64_t last_slot() const { return blocks_.back() * block_size() + block_size() - 1 - num_slack(); }
  // Writes the slots of tokens [begin, end) to slots [end - begin].
  void write_slots(int64_t begin, int64_t end, int64_t* slots) const;
  BlockTable fork() const;
  bool may_have_pending_copies() const { return !copy_destinations_.empty(); }
  std::vector<CopyPair> take_pending_copies();
  void truncate(int64_t num_tokens);

  // Makes an empty table one of num_tokens tokens in these blocks, which are used or cached. NO_BLOCK stands
  // for leading blocks that a window has passed. With keep_tail the last block is copied before it is
  // written, even when nobody else owns it: it holds more than these tokens, and stays cached as it is.
  void adopt(std::span<const int32_t> blocks, int64_t num_tokens, bool keep_tail = false);
  // Maps another block of the same content.
  void replace(int64_t logical_block, int32_t block) noexcept;
  // Gives back the blocks that hold only tokens before `token`; NO_BLOCK stands in their place.
  void release_before(int64_t token) noexcept {
    if (token >= (num_released_ + 1) * block_size()) release_blocks(token / block_size());
  }
  int64_t num_released() const { return num_released_; }
  void free() { truncate(0); }

 private:
  void grow_by_blocks(int64_t num_new_tokens);
  void release_blocks(int64_t end) noexcept;  // those before it, in logical order

  // Slots of the last block without a token. Unsigned, because the slots of all blocks may be 2**63.
  int64_t num_slack() const {
    const uint64_t num_slots = static_cast<uint64_t>(num_blocks()) * static_cast<uint64_t>(block_size());
    return static_cast<int64_t>(num_slots - static_cast<uint64_t>(num_tokens_));
  }

  std::shared_ptr<BlockAllocator> allocator_;
  std::vector<int32_t> blocks_;  // [ceil(num_tokens / block_size)]
  int64_t num_tokens_ = 0;
  int64_t revision_;
  int64_t num_released_ = 0;  // leading blocks that are NO_BLOCK
  bool keep_tail_ = false;
  // Blocks of this table that may wait for a copy into them. A fork inherits the list, and whichever table
  // asks first takes the pair: the allocator knows which are still due.
  std::vector<int32_t> copy_destinations_;
};

}  // namespace pagedkv
