// Moving sequences between the pool of the device and that of the host.
#include <algorithm>
#include <string>
#include <utility>

#include "core/sequences.h"

namespace pagedkv {

// Blocks of the two pools that hold the same are twins: swapping one out or in leads to the other as long as
// it exists. That keeps sharing: the second of two sequences finds what the first has moved. A twin ceases to
// be one when it is written or handed out again, which its version tells.
int32_t Sequences::twin_of(int32_t block, const std::vector<Twin>& twins, const BlockAllocator& pool,
                           const BlockAllocator& other) {
  if (static_cast<size_t>(block) >= twins.size()) return NO_BLOCK;
  const Twin& twin = twins[block];
  if (twin.block == NO_BLOCK || twin.own_version != pool.version(block)) return NO_BLOCK;
  const bool exists = other.is_used(twin.block) || other.is_cached(twin.block);
  return exists && twin.version == other.version(twin.block) ? twin.block : NO_BLOCK;
}

void Sequences::link_twins(int32_t device_block, int32_t host_block) {
  if (host_twins_.size() <= static_cast<size_t>(device_block)) host_twins_.resize(device_block + 1);
  if (device_twins_.size() <= static_cast<size_t>(host_block)) device_twins_.resize(host_block + 1);
  const uint32_t device_version = allocator_->version(device_block);
  const uint32_t host_version = host_allocator_->version(host_block);
  host_twins_[device_block] = {.block = host_block, .version = host_version, .own_version = device_version};
  device_twins_[host_block] = {.block = device_block, .version = device_version, .own_version = host_version};
}

Transfer Sequences::open_transfer(BlockAllocator& source, std::vector<CopyPair> pairs) {
  Transfer transfer{.transfer_id = next_transfer_id_++, .pairs = std::move(pairs)};
  OpenTransfer& open = open_transfers_[transfer.transfer_id];
  open.source = &source;
  open.held.reserve(transfer.pairs.size());
  for (const CopyPair& pair : transfer.pairs) {
    open.held.push_back(static_cast<int32_t>(pair.source));
    source.hold(open.held.back());
  }
  return transfer;
}

void Sequences::finish_transfer(int64_t transfer_id) {
  const auto transfer = open_transfers_.find(transfer_id);
  if (transfer == open_transfers_.end()) throw std::invalid_argument("the transfer is not open");
  for (const int32_t block : transfer->second.held) transfer->second.source->unhold(block);
  open_transfers_.erase(transfer);
}

Transfer Sequences::swap_out(Id id) {
  Sequence& sequence = closed(id, "swap out");
  if (!host_allocator_) throw std::invalid_argument("cannot swap: the cache was made without host blocks");
  int64_t num_new = 0;
  for (const BlockTable& table : sequence.tables) {
    for (const int32_t block : table.blocks()) {
      if (block == NO_BLOCK) continue;
      num_new += twin_of(block, host_twins_, *allocator_, *host_allocator_) == NO_BLOCK;
    }
  }
  if (num_new > host_allocator_->num_free_blocks()) {
    throw OutOfMemory("No free host blocks available: the sequence needs " + std::to_string(num_new) + ", " +
                      std::to_string(host_allocator_->num_free_blocks()) + " of " +
                      std::to_string(host_allocator_->num_blocks()) + " are free");
  }
  std::vector<CopyPair> pairs;
  sequence.host_tables = empty_tables(host_allocator_);
  for (int64_t group = 0; group < num_groups(); ++group) {
    std::vector<int32_t> blocks = sequence.tables[group].blocks(), fresh;
    for (int32_t& block : blocks) {
      if (block == NO_BLOCK) continue;
      const int32_t device_block = block;
      block = twin_of(device_block, host_twins_, *allocator_, *host_allocator_);
      if (block != NO_BLOCK) continue;
      block = host_allocator_->allocate();
      fresh.push_back(block);
      link_twins(device_block, block);
      pairs.push_back({device_block, block});
    }
    sequence.host_tables[group].adopt(blocks, sequence.num_computed_tokens);
    for (const int32_t block : fresh) host_allocator_->release(block);  // the table owns it too by now
  }
  Transfer transfer = open_transfer(*allocator_, std::move(pairs));
  for (BlockTable& table : sequence.tables) table.free();
  sequence.swapped_out = true;
  return transfer;
}

Sequences::Arrival Sequences::plan_arrival(const Sequence& sequence) const {
  const int64_t block_size = allocator_->block_size();
  const std::span<const int64_t> token_ids(sequence.token_ids);
  Arrival arrival;
  for (const BlockTable& table : sequence.host_tables)
    arrival.blocks.emplace_back(table.num_blocks(), NO_BLOCK);
  BlockKey key = sequence.root.value_or(BlockKey{});
  for (int64_t i = 0; i < sequence.host_tables[0].num_blocks(); ++i) {
    const bool keyed = i < sequence.num_keyed_blocks;
    if (keyed) key = extend_key(key, token_ids.subspan(i * block_size, block_size));
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t host_block = sequence.host_tables[group].blocks()[i];
      if (host_block == NO_BLOCK) continue;
      const int32_t block = keyed ? prefix_cache_.find(key, static_cast<int32_t>(group))
                                  : twin_of(host_block, device_twins_, *host_allocator_, *allocator_);
      arrival.blocks[group][i] = block;
      arrival.num_new += block == NO_BLOCK;
      arrival.num_waiting += block != NO_BLOCK && !allocator_->is_used(block);
    }
  }
  return arrival;
}

Transfer Sequences::swap_in(Id id) {
  Sequence& sequence = at(id);
  if (!sequence.swapped_out) throw std::invalid_argument("cannot swap in a sequence that is not swapped out");
  Arrival arrival = plan_arrival(sequence);
  // The waiting blocks are among the free ones, but no longer when they are used again.
  if (arrival.num_new > allocator_->num_free_blocks() - arrival.num_waiting) {
    throw OutOfMemory("No free blocks available: the sequence needs " + std::to_string(arrival.num_new) +
                      ", " + std::to_string(allocator_->num_free_blocks() - arrival.num_waiting) + " of " +
                      std::to_string(allocator_->num_blocks()) + " are free");
  }
  for (const std::vector<int32_t>& blocks : arrival.blocks) {
    for (const int32_t block : blocks) {
      if (block != NO_BLOCK) allocator_->acquire(block);
    }
  }
  std::vector<CopyPair> pairs;
  for (int64_t group = 0; group < num_groups(); ++group) {
    const BlockTable& host_table = sequence.host_tables[group];
    for (int64_t i = host_table.num_released(); i < host_table.num_blocks(); ++i) {
      int32_t& block = arrival.blocks[group][i];
      if (block != NO_BLOCK) continue;
      block = allocator_->allocate();
      link_twins(block, host_table.blocks()[i]);
      pairs.push_back({host_table.blocks()[i], block});
    }
    sequence.tables[group].adopt(arrival.blocks[group], host_table.num_tokens());
    for (const int32_t block : arrival.blocks[group]) {
      if (block != NO_BLOCK) allocator_->release(block);  // the table owns it too by now
    }
  }
  Transfer transfer = open_transfer(*host_allocator_, std::move(pairs));
  sequence.host_tables.clear();
  sequence.swapped_out = false;
  if (sequence.root) {
    // Its blocks are known again, the copied ones too.
    sequence.key = *sequence.root;
    sequence.num_keyed_blocks = 0;
    cache_full_blocks(sequence);
  }
  return transfer;
}

bool Sequences::can_swap_in(Id id) const {
  const Sequence& sequence = at(id);
  if (!sequence.swapped_out) throw std::invalid_argument("cannot swap in a sequence that is not swapped out");
  const Arrival arrival = plan_arrival(sequence);
  int64_t num_needed = arrival.num_new + arrival.num_waiting;
  const int64_t num_new_tokens = std::max<int64_t>(1, sequence.num_tokens - sequence.num_computed_tokens);
  for (int64_t group = 0; group < num_groups(); ++group) {
    num_needed +=
        std::min(sequence.host_tables[group].num_new_blocks(num_new_tokens), BlockAllocator::MAX_BLOCKS);
    if (sequence.num_computed_tokens % allocator_->block_size() == 0) continue;
    // The batch writes into the last block, and copies it where others use it.
    const int32_t tail = arrival.blocks[group].back();
    num_needed += tail != NO_BLOCK && allocator_->num_owners(tail) > 0;
  }
  return num_needed <= allocator_->num_free_blocks();
}

}  // namespace pagedkv
