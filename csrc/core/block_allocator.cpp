#include "core/block_allocator.h"

#include <algorithm>
#include <utility>

namespace pagedkv {

namespace {

void require(bool holds, const std::string& invariant) {
  if (!holds) throw std::logic_error("BlockAllocator is corrupt: " + invariant);
}

void require_count(int64_t count) {
  if (count >= 0) return;
  throw std::invalid_argument("the number of blocks must not be negative, got " + std::to_string(count));
}

}  // namespace

BlockAllocator::BlockAllocator(int64_t num_blocks, int64_t block_size, std::optional<int64_t> max_used)
    : num_blocks_(num_blocks), block_size_(block_size), max_used_(max_used.value_or(num_blocks)) {
  if (num_blocks < 1 || num_blocks > MAX_BLOCKS) {
    throw std::invalid_argument("num_blocks must be 1 to " + std::to_string(MAX_BLOCKS) + ", got " +
                                std::to_string(num_blocks));
  }
  if (block_size < 1) {
    throw std::invalid_argument("block_size must be at least 1, got " + std::to_string(block_size));
  }
  if (max_used_ < 1 || max_used_ > num_blocks) {
    throw std::invalid_argument("max_used_blocks must be 1 to num_blocks = " + std::to_string(num_blocks) +
                                ", got " + std::to_string(max_used_));
  }
}

std::vector<int32_t> BlockAllocator::free_blocks() const {
  std::vector<int32_t> blocks(free_stack_.rbegin(), free_stack_.rend());
  for (int64_t block = num_touched(); block < num_blocks_; ++block) {
    blocks.push_back(static_cast<int32_t>(block));
  }
  for (int32_t block = oldest_; block != NO_BLOCK; block = neighbours_[block].newer) blocks.push_back(block);
  return blocks;
}

std::vector<int32_t> BlockAllocator::block_ref_counts() const {
  std::vector<int32_t> counts(num_blocks_, 0);
  for (size_t block = 0; block < states_.size(); ++block) {
    counts[block] = states_[block].owners + states_[block].holds;
  }
  return counts;
}

void BlockAllocator::throw_out_of_memory(int64_t count, const char* who) const {
  std::string message = "No free blocks available: " + std::string(who) + " needs " + std::to_string(count) +
                        ", " + std::to_string(num_available_blocks()) + " of " + std::to_string(max_used_) +
                        " are free";
  if (max_used_ < num_blocks_) message += " (the limit of a pool of " + std::to_string(num_blocks_) + ")";
  if (count > max_used_) message += "; it does not fit into this pool";
  throw OutOfMemory(message);
}

void BlockAllocator::hand_out(int32_t block) noexcept {
  states_[block].owners = 1;
  ++states_[block].version;
}

int32_t BlockAllocator::allocate() {
  if (num_available_blocks() < 1) throw OutOfMemory("No free blocks available");
  int32_t block;
  if (!free_stack_.empty()) {
    block = free_stack_.back();
    free_stack_.pop_back();
  } else if (num_touched() < num_blocks_) {
    block = static_cast<int32_t>(states_.size());
    if (free_stack_.capacity() <= states_.size()) free_stack_.reserve(2 * states_.size() + 64);
    states_.emplace_back();
  } else {
    block = evict_oldest();
  }
  hand_out(block);
  peak_used_ = std::max(peak_used_, num_used_blocks());
  return block;
}

std::vector<int32_t> BlockAllocator::allocate_many(int64_t count) {
  std::vector<int32_t> blocks;
  append_blocks(count, blocks);
  return blocks;
}

void BlockAllocator::append_blocks(int64_t count, std::vector<int32_t>& blocks) {
  require_count(count);
  require_available(count, "the call");
  const size_t old_size = blocks.size();
  const size_t num_reused = std::min<size_t>(count, free_stack_.size());
  const size_t num_fresh = std::min<size_t>(count - num_reused, num_blocks_ - states_.size());
  const size_t num_touched = states_.size() + num_fresh;
  // All memory is taken first, so that a std::bad_alloc leaves the pool as it was.
  if (free_stack_.capacity() < num_touched) {
    free_stack_.reserve(std::max(num_touched, 2 * free_stack_.capacity()));
  }
  blocks.resize(old_size + count);
  int32_t fresh = static_cast<int32_t>(states_.size());
  try {
    states_.resize(num_touched);
  } catch (...) {
    blocks.resize(old_size);
    throw;
  }

  int32_t* next = blocks.data() + old_size;
  next = std::copy(free_stack_.rbegin(), free_stack_.rbegin() + num_reused, next);
  free_stack_.resize(free_stack_.size() - num_reused);
  for (size_t i = 0; i < num_fresh; ++i) *next++ = fresh++;
  while (next != blocks.data() + blocks.size()) *next++ = evict_oldest();
  for (size_t i = old_size; i < blocks.size(); ++i) hand_out(blocks[i]);
  peak_used_ = std::max(peak_used_, num_used_blocks());
}

void BlockAllocator::reject(const char* verb, int64_t block) const {
  std::string message = std::string("cannot ") + verb + " block " + std::to_string(block) + ": ";
  if (block < 0 || block >= num_blocks_) {
    message += "the pool has blocks 0 to " + std::to_string(num_blocks_ - 1);
  } else if (block < num_touched() && states_[block].holds > 0) {
    message += "it has no owner left, only a pending copy reads it";
  } else {
    message += "it is already free";
  }
  throw std::invalid_argument(message);
}

void BlockAllocator::free_many(std::span<const int64_t> blocks) {
  // Counting down and up again finds an id that is listed more often than it has owners.
  size_t num_valid = 0;
  for (; num_valid < blocks.size(); ++num_valid) {
    const int64_t block = blocks[num_valid];
    if (block < 0 || block >= num_touched() || states_[block].owners == 0) break;
    --states_[block].owners;
  }
  for (size_t i = 0; i < num_valid; ++i) ++states_[blocks[i]].owners;
  if (num_valid < blocks.size()) {
    const int64_t block = blocks[num_valid];
    const auto earlier = blocks.first(num_valid);
    if (const int64_t num_listed = std::count(earlier.begin(), earlier.end(), block); num_listed > 0) {
      throw std::invalid_argument("cannot free block " + std::to_string(block) +
                                  ": it is listed more often than its " + std::to_string(num_listed) +
                                  " references");
    }
    reject("free", block);
  }
  for (const int64_t block : blocks) release(static_cast<int32_t>(block));
}

void BlockAllocator::incr_ref(int64_t block) {
  const bool used =
      block >= 0 && block < num_touched() && (states_[block].owners > 0 || states_[block].holds > 0);
  if (!used) reject("reference", block);
  ++states_[block].owners;
}

void BlockAllocator::acquire(int32_t block) noexcept {
  if (!is_used(block)) {
    unlink(block);
    states_[block].owners = 1;
    peak_used_ = std::max(peak_used_, num_used_blocks());
  } else {
    ++states_[block].owners;
  }
}

void BlockAllocator::release(int32_t block) noexcept {
  BlockState& state = states_[block];
  if (--state.owners > 0) return;
  // A copy into a block that nobody owns any more is void.
  if (state.copy_source != NO_BLOCK) take_copy(block);
  if (state.holds == 0) recycle(block);
}

void BlockAllocator::unhold(int32_t block) noexcept {
  BlockState& state = states_[block];
  if (--state.holds == 0 && state.owners == 0) recycle(block);
}

void BlockAllocator::recycle(int32_t block) noexcept {
  if (!states_[block].cached) {
    free_stack_.push_back(block);
    return;
  }
  neighbours_[block] = {.older = newest_};
  (newest_ == NO_BLOCK ? oldest_ : neighbours_[newest_].newer) = block;
  newest_ = block;
  ++num_waiting_;
}

void BlockAllocator::unlink(int32_t block) noexcept {
  const auto [older, newer] = neighbours_[block];
  (older == NO_BLOCK ? oldest_ : neighbours_[older].newer) = newer;
  (newer == NO_BLOCK ? newest_ : neighbours_[newer].older) = older;
  --num_waiting_;
}

void BlockAllocator::uncache(int32_t block) noexcept {
  states_[block].cached = false;
  on_uncached_(block);
}

int32_t BlockAllocator::evict_oldest() noexcept {
  const int32_t block = oldest_;
  unlink(block);
  uncache(block);
  ++num_evictions_;
  return block;
}

void BlockAllocator::mark_cached(int32_t block) {
  if (neighbours_.size() <= static_cast<size_t>(block)) neighbours_.resize(states_.size());
  states_[block].cached = true;
}

int64_t BlockAllocator::evict(int64_t count) {
  require_count(count);
  count = std::min(count, num_waiting_);
  for (int64_t i = 0; i < count; ++i) free_stack_.push_back(evict_oldest());
  return count;
}

std::vector<int32_t> BlockAllocator::next_to_evict(int64_t count) const {
  require_count(count);
  std::vector<int32_t> blocks;
  for (int32_t block = oldest_; block != NO_BLOCK && count > 0; block = neighbours_[block].newer, --count) {
    blocks.push_back(block);
  }
  return blocks;
}

int32_t BlockAllocator::copy_on_write(int32_t block) {
  const int32_t destination = allocate();
  // Nothing was written since a copy into `block` was queued (copies are due before the next write), so its
  // content is still that copy's source. Copying from there keeps every mapping free of chains, which one
  // launch could not order.
  const int32_t pending_source = states_[block].copy_source;
  const int32_t source = pending_source == NO_BLOCK ? block : pending_source;
  states_[destination].copy_source = source;
  ++states_[source].holds;
  release(block);
  return destination;
}

CopyPair BlockAllocator::take_copy(int32_t destination) {
  const int32_t source = std::exchange(states_[destination].copy_source, NO_BLOCK);
  unhold(source);
  return {source, destination};
}

void BlockAllocator::check_waiting(std::vector<bool>& is_free) const {
  int64_t num_waiting = 0;
  int32_t older = NO_BLOCK;
  for (int32_t block = oldest_; block != NO_BLOCK; block = neighbours_[block].newer) {
    const std::string name = "block " + std::to_string(block);
    require(block >= 0 && block < num_touched(), name + " in the cached list was never handed out");
    require(!is_free[block], name + " waits to be reused twice");
    require(states_[block].cached, name + " is in the cached list, but not cached");
    require(neighbours_[block].older == older,
            name + " does not know the block before it in the cached list");
    is_free[block] = true;
    older = block;
    ++num_waiting;
  }
  require(newest_ == older && num_waiting == num_waiting_, "the cached list does not end where it should");
}

void BlockAllocator::check_integrity() const {
  require(num_touched() <= num_blocks_, "more blocks were handed out than the pool has");
  require(free_stack_.capacity() >= states_.size(), "the free list has no room for every block");
  require(num_used_blocks() <= peak_used_ && peak_used_ <= num_blocks_,
          "the peak is below the number of used blocks");
  std::vector<bool> is_free(states_.size(), false);
  for (const int32_t block : free_stack_) {
    const std::string name = "block " + std::to_string(block);
    require(block >= 0 && block < num_touched(), name + " in the free list was never handed out");
    require(!is_free[block], name + " is in the free list twice");
    require(!states_[block].cached, name + " is in the free list, but cached");
    is_free[block] = true;
  }
  check_waiting(is_free);
  std::vector<int32_t> holds(states_.size(), 0);
  for (size_t block = 0; block < states_.size(); ++block) {
    const int32_t source = states_[block].copy_source;
    if (source == NO_BLOCK) continue;
    const std::string name = "the pending copy into block " + std::to_string(block);
    require(source >= 0 && source < num_touched(), name + " reads a block that was never handed out");
    require(states_[block].owners > 0, name + " has no owner");
    require(states_[source].copy_source == NO_BLOCK, name + " reads the destination of another one");
    ++holds[source];
  }
  for (size_t block = 0; block < states_.size(); ++block) {
    const std::string name = "block " + std::to_string(block);
    require(states_[block].owners >= 0, name + " has a negative count");
    require(states_[block].holds >= holds[block], name + " is not held by every pending copy that reads it");
    const bool unreferenced = states_[block].owners == 0 && states_[block].holds == 0;
    require(is_free[block] == unreferenced, name + " is free and referenced, or neither");
  }
}

}  // namespace pagedkv
