#include "core/block_table.h"

#include <algorithm>
#include <string>
#include <utility>

namespace pagedkv {

namespace {

std::shared_ptr<BlockAllocator> allocator_or_private(std::optional<int64_t> block_size,
                                                     std::shared_ptr<BlockAllocator> allocator) {
  if (!allocator) {
    return std::make_shared<BlockAllocator>(BlockAllocator::MAX_BLOCKS,
                                            block_size.value_or(BlockTable::DEFAULT_BLOCK_SIZE));
  }
  if (block_size && *block_size != allocator->block_size()) {
    throw std::invalid_argument("block_size is " + std::to_string(*block_size) +
                                ", but the allocator's blocks have " +
                                std::to_string(allocator->block_size()) + " tokens");
  }
  return allocator;
}

}  // namespace

BlockTable::BlockTable(std::optional<int64_t> block_size, std::shared_ptr<BlockAllocator> allocator)
    : allocator_(allocator_or_private(block_size, std::move(allocator))),
      revision_(allocator_->new_revision()) {}

BlockTable::~BlockTable() {
  if (blocks_.empty()) return;  // a table that was moved from has no allocator either
  try {
    free();
  } catch (...) {
    // Somebody freed blocks of this table through the allocator. Nobody can be told, and nothing was changed.
  }
}

int32_t BlockTable::physical_block(int64_t logical_block) const {
  if (logical_block < 0 || logical_block >= num_blocks()) {
    throw std::out_of_range("logical block " + std::to_string(logical_block) +
                            " is not mapped: the table has " + std::to_string(num_blocks()) + " blocks");
  }
  if (blocks_[logical_block] == NO_BLOCK) {
    throw std::out_of_range("logical block " + std::to_string(logical_block) +
                            " is not mapped: it lies behind the sliding window");
  }
  return blocks_[logical_block];
}

void BlockTable::grow_by_blocks(int64_t num_new_tokens) {
  if (num_new_tokens < 0) {
    throw std::invalid_argument("num_tokens must not be negative, got " + std::to_string(num_new_tokens));
  }
  if (num_new_tokens == 0) return;
  if (num_new_tokens > std::numeric_limits<int64_t>::max() - num_tokens_) {
    throw OutOfMemory("No free blocks available: a table cannot hold 2**63 tokens");
  }
  const int64_t num_new = num_new_blocks(num_new_tokens);
  const int32_t shared = shared_tail();
  const int64_t num_needed = num_new + (shared != NO_BLOCK);
  allocator_->require_available(num_needed, "the table");
  if (shared != NO_BLOCK) {
    std::erase(copy_destinations_, shared);
    copy_destinations_.reserve(copy_destinations_.size() + 1);
    blocks_.back() = allocator_->copy_on_write(shared);
    copy_destinations_.push_back(blocks_.back());
    keep_tail_ = false;
    revision_ = allocator_->new_revision();
  } else if (num_slack() > 0) {
    allocator_->begin_write(blocks_.back());
  }
  if (num_new > 0) allocator_->append_blocks(num_new, blocks_);
  num_tokens_ += num_new_tokens;
}

void BlockTable::write_slots(int64_t begin, int64_t end, int64_t* slots) const {
  if (begin < 0 || begin > end || end > num_tokens_) {
    throw std::out_of_range("slots of tokens " + std::to_string(begin) + " to " + std::to_string(end) +
                            " were asked for, but the table has room for tokens 0 to " +
                            std::to_string(num_tokens_) + " only");
  }
  if (begin == end) return;
  const int64_t size = block_size();
  // Mostly the token is in the last block, and there is nothing to divide.
  const int64_t last_block = num_blocks() - 1;
  int64_t block_idx = begin >= last_block * size ? last_block : begin / size;
  for (int64_t token = begin; token < end; ++block_idx) {
    const int64_t offset = token - block_idx * size;
    const int64_t first_slot = blocks_[block_idx] * size + offset;
    const int64_t count = std::min(size - offset, end - token);
    for (int64_t i = 0; i < count; ++i) slots[i] = first_slot + i;
    slots += count;
    token += count;
  }
}

BlockTable BlockTable::fork() const {
  BlockTable child(std::nullopt, allocator_);
  // Blocks that somebody freed through the allocator are found before the first is shared.
  for (int64_t i = num_released_; i < num_blocks(); ++i) allocator_->require_used(blocks_[i]);
  child.blocks_ = blocks_;
  for (int64_t i = num_released_; i < num_blocks(); ++i) allocator_->share(blocks_[i]);
  child.num_tokens_ = num_tokens_;
  child.num_released_ = num_released_;
  child.keep_tail_ = keep_tail_;
  child.copy_destinations_ = copy_destinations_;
  return child;
}

std::vector<CopyPair> BlockTable::take_pending_copies() {
  std::vector<CopyPair> pairs;
  for (const int32_t destination : copy_destinations_) {
    if (allocator_->has_pending_copy(destination)) pairs.push_back(allocator_->take_copy(destination));
  }
  copy_destinations_.clear();
  return pairs;
}

void BlockTable::adopt(std::span<const int32_t> blocks, int64_t num_tokens, bool keep_tail) {
  blocks_.assign(blocks.begin(), blocks.end());
  revision_ = allocator_->new_revision();
  num_tokens_ = num_tokens;
  keep_tail_ = keep_tail;
  while (num_released_ < num_blocks() && blocks_[num_released_] == NO_BLOCK) ++num_released_;
  for (int64_t i = num_released_; i < num_blocks(); ++i) allocator_->acquire(blocks_[i]);
}

void BlockTable::replace(int64_t logical_block, int32_t block) noexcept {
  allocator_->acquire(block);
  revision_ = allocator_->new_revision();
  const int32_t old = std::exchange(blocks_[logical_block], block);
  allocator_->release(old);
  std::erase(copy_destinations_, old);
}

void BlockTable::release_blocks(int64_t end) noexcept {
  end = std::min(end, num_blocks());
  revision_ = allocator_->new_revision();
  // Like truncate, the later block goes back before the earlier one.
  for (int64_t i = end - 1; i >= num_released_; --i) {
    const int32_t block = std::exchange(blocks_[i], NO_BLOCK);
    allocator_->release(block);
    std::erase(copy_destinations_, block);
  }
  num_released_ = end;
}

void BlockTable::truncate(int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > num_tokens_) {
    throw std::invalid_argument("num_tokens must be 0 to " + std::to_string(num_tokens_) +
                                " to truncate, got " + std::to_string(num_tokens));
  }
  const int64_t num_kept = blocks_for(num_tokens, block_size());
  if (num_kept < num_blocks()) {
    // The tail goes back first and the head last, so that the next table gets them in order again.
    const int64_t num_owned = std::max(num_kept, num_released_);
    const std::vector<int64_t> dropped(blocks_.rbegin(), blocks_.rend() - num_owned);
    allocator_->free_many(dropped);
    if (!copy_destinations_.empty()) {
      for (const int64_t block : dropped) std::erase(copy_destinations_, static_cast<int32_t>(block));
    }
    blocks_.resize(num_kept);
    revision_ = allocator_->new_revision();
    num_released_ = std::min(num_released_, num_kept);
    keep_tail_ = false;
  }
  num_tokens_ = num_tokens;
}

}  // namespace pagedkv
