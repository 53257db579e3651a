// Moving sequences, and cached prefixes, between the pool of the device and that of the host.
#include <algorithm>
#include <string>
#include <utility>

#include "core/sequences.h"

namespace pagedkv {

// Blocks of the two pools that hold the same are twins: swapping one out or in leads to the other as long as
// it exists. That keeps sharing: the second of two sequences finds what the first has moved. A twin ceases to
// be one when it is written or handed out again, which its version tells. Where tokens tell what a block
// holds, the prefix caches of the two pools find more.
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

// As an owner of the blocks that it reads, a transfer keeps them from being handed out, and whoever else
// writes into one of them copies it first.
Transfer Sequences::open_transfer(BlockAllocator& source, std::vector<CopyPair> pairs) {
  Transfer transfer{.transfer_id = next_transfer_id_++, .pairs = std::move(pairs)};
  OpenTransfer& open = open_transfers_[transfer.transfer_id];
  open.source = &source;
  open.blocks.reserve(transfer.pairs.size());
  for (const CopyPair& pair : transfer.pairs) {
    open.blocks.push_back(static_cast<int32_t>(pair.source));
    source.acquire(open.blocks.back());
  }
  return transfer;
}

void Sequences::finish_transfer(int64_t transfer_id) {
  const auto transfer = open_transfers_.find(transfer_id);
  if (transfer == open_transfers_.end()) throw std::invalid_argument("the transfer is not open");
  for (const int32_t block : transfer->second.blocks) transfer->second.source->release(block);
  open_transfers_.erase(transfer);
}

Sequences::Move Sequences::plan_departure(const Sequence& sequence) const {
  Move plan;
  for (int64_t group = 0; group < num_groups(); ++group) {
    std::vector<int32_t>& there = plan.blocks.emplace_back();
    for (const int32_t block : sequence.tables[group].blocks()) {
      int32_t host_block = NO_BLOCK;
      if (block != NO_BLOCK) {
        host_block = twin_of(block, host_twins_, *allocator_, *host_allocator_);
        if (host_block == NO_BLOCK && allocator_->is_cached(block)) {
          host_block = host_prefix_cache_->find(prefix_cache_.key(block), static_cast<int32_t>(group));
        }
        plan.num_new += host_block == NO_BLOCK;
        plan.num_waiting += host_block != NO_BLOCK && !host_allocator_->is_used(host_block);
      }
      there.push_back(host_block);
    }
  }
  return plan;
}

Sequences::Move Sequences::plan_arrival(const Sequence& sequence) const {
  const std::span<const int64_t> token_ids(sequence.token_ids);
  Move plan;
  for (const BlockTable& table : sequence.host_tables) plan.blocks.emplace_back(table.num_blocks(), NO_BLOCK);
  BlockKey key = sequence.root.value_or(BlockKey{});
  for (int64_t i = 0; i < sequence.host_tables[0].num_blocks(); ++i) {
    const bool keyed = i < sequence.num_keyed_blocks;
    if (keyed) key = *keys_.find(key, block_tokens(token_ids, i));  // which the sequence holds
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t host_block = sequence.host_tables[group].blocks()[i];
      if (host_block == NO_BLOCK) continue;
      const int32_t block = keyed ? prefix_cache_.find(key, static_cast<int32_t>(group))
                                  : twin_of(host_block, device_twins_, *host_allocator_, *allocator_);
      plan.blocks[group][i] = block;
      plan.num_new += block == NO_BLOCK;
      plan.num_waiting += block != NO_BLOCK && !allocator_->is_used(block);
    }
  }
  return plan;
}

// Makes the empty tables `to` what `from` are, with blocks of `pool`. Returns the copies.
std::vector<CopyPair> Sequences::relocate(std::span<const BlockTable> from, std::span<BlockTable> to,
                                          Move plan, BlockAllocator& pool) {
  const bool to_host = &pool == host_allocator_.get();
  // Waiting blocks are among the free ones, but no longer when they are used again.
  pool.require_available(plan.num_new + plan.num_waiting,
                         to_host ? "on the host, the sequence" : "the sequence");
  for (const std::vector<int32_t>& blocks : plan.blocks) {
    for (const int32_t block : blocks) {
      if (block != NO_BLOCK) pool.acquire(block);
    }
  }
  std::vector<CopyPair> pairs;
  for (size_t group = 0; group < to.size(); ++group) {
    std::vector<int32_t>& blocks = plan.blocks[group];
    // A tail that is there and cached may hold more than these tokens.
    const bool keep_tail = !blocks.empty() && blocks.back() != NO_BLOCK && pool.is_cached(blocks.back()) &&
                           from[group].num_tokens() % pool.block_size() != 0;
    for (int64_t i = from[group].num_released(); i < from[group].num_blocks(); ++i) {
      if (blocks[i] != NO_BLOCK) continue;
      const int32_t source = from[group].blocks()[i];
      blocks[i] = pool.allocate();
      to_host ? link_twins(source, blocks[i]) : link_twins(blocks[i], source);
      pairs.push_back({source, blocks[i]});
    }
    to[group].adopt(blocks, from[group].num_tokens(), keep_tail);
    for (const int32_t block : blocks) {
      if (block != NO_BLOCK) pool.release(block);  // the table owns it too by now
    }
  }
  return pairs;
}

Transfer Sequences::swap_out(Id id) {
  Sequence& sequence = closed(id, "swap out");
  if (!host_allocator_) throw std::invalid_argument("cannot swap: the cache was made without host blocks");
  std::vector<BlockTable> host_tables = empty_tables(host_allocator_);
  Transfer transfer = open_transfer(
      *allocator_, relocate(sequence.tables, host_tables, plan_departure(sequence), *host_allocator_));
  sequence.host_tables = std::move(host_tables);
  cache_on_host(sequence);
  for (BlockTable& table : sequence.tables) table.free();
  sequence.swapped_out = true;
  return transfer;
}

Transfer Sequences::swap_in(Id id) {
  Sequence& sequence = at(id);
  if (!sequence.swapped_out) throw std::invalid_argument("cannot swap in a sequence that is not swapped out");
  Transfer transfer = open_transfer(
      *host_allocator_, relocate(sequence.host_tables, sequence.tables, plan_arrival(sequence), *allocator_));
  sequence.host_tables.clear();
  sequence.swapped_out = false;
  if (sequence.root) {
    // Its blocks are known again, the copied ones too.
    sequence.key = KeyHandle(*sequence.root);
    sequence.num_keyed_blocks = 0;
    cache_full_blocks(sequence);
  }
  return transfer;
}

bool Sequences::can_swap_in(Id id) const {
  const Sequence& sequence = at(id);
  if (!sequence.swapped_out) throw std::invalid_argument("cannot swap in a sequence that is not swapped out");
  const Move plan = plan_arrival(sequence);
  int64_t num_needed = plan.num_new + plan.num_waiting;
  const int64_t num_new_tokens = std::max<int64_t>(1, sequence.num_tokens - sequence.num_computed_tokens);
  for (int64_t group = 0; group < num_groups(); ++group) {
    num_needed +=
        std::min(sequence.host_tables[group].num_new_blocks(num_new_tokens), BlockAllocator::MAX_BLOCKS);
    if (sequence.num_computed_tokens % allocator_->block_size() == 0) continue;
    // The batch writes into the last block, and copies it where others need it as it is.
    const int32_t tail = plan.blocks[group].back();
    num_needed += tail != NO_BLOCK && (allocator_->num_owners(tail) > 0 || allocator_->is_cached(tail));
  }
  return num_needed <= allocator_->num_available_blocks();
}

Transfer Sequences::swap_out_prefixes(int64_t count, int64_t& num_moved) {
  if (!host_allocator_) throw std::invalid_argument("cannot swap: the cache was made without host blocks");
  std::vector<int32_t> moved, host_blocks;  // of which this function is an owner
  std::vector<CopyPair> pairs;
  for (const int32_t block : allocator_->next_to_evict(count)) {
    const BlockKey& key = prefix_cache_.key(block);
    const int32_t group = prefix_cache_.group(block);
    int32_t host_block = host_prefix_cache_->find(key, group);
    if (host_block != NO_BLOCK) {
      host_allocator_->acquire(host_block);
    } else {
      if (host_allocator_->num_available_blocks() == 0) break;
      host_block = host_allocator_->allocate();
      host_prefix_cache_->insert(key, group, host_block);
      link_twins(block, host_block);
      pairs.push_back({block, host_block});
    }
    host_blocks.push_back(host_block);
    allocator_->acquire(block);
    allocator_->uncache(block);
    moved.push_back(block);
  }
  Transfer transfer = open_transfer(*allocator_, std::move(pairs));
  for (const int32_t block : moved) allocator_->release(block);
  // In the order in which they left the device: a prefix is evicted from its end here, too.
  for (const int32_t block : host_blocks) host_allocator_->release(block);
  num_moved = static_cast<int64_t>(moved.size());
  return transfer;
}

}  // namespace pagedkv
