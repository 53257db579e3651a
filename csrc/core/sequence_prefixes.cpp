// Sequences and the prefix cache: what is found when one is added, what becomes known when a batch is
// committed.
#include <algorithm>
#include <string>

#include "core/sequences.h"

namespace pagedkv {

// Sets hit.blocks and hit.host_blocks to what there is of the leading full blocks, and returns how many of
// these make the longest prefix that can be used.
int64_t Sequences::find_full_blocks(std::span<const int64_t> token_ids, PrefixHit& hit) const {
  const int64_t block_size = allocator_->block_size();
  const int64_t num_ids = static_cast<int64_t>(token_ids.size());
  std::vector<int64_t> num_in_a_row(windows_.size(), 0);  // blocks that end where the search stands
  std::vector<int64_t> ends;                              // of prefixes, in blocks
  for (int64_t i = 0; (i + 1) * block_size <= num_ids; ++i) {
    const std::optional<BlockKey> key = keys_.find(hit.keys.back(), block_tokens(token_ids, i));
    if (!key) break;
    hit.keys.push_back(*key);
    bool complete = true, dead_end = false;
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t block = prefix_cache_.find(*key, static_cast<int32_t>(group));
      hit.blocks[group].push_back(block);
      bool known = block != NO_BLOCK;
      if (host_prefix_cache_) {
        hit.host_blocks[group].push_back(known ? NO_BLOCK
                                               : host_prefix_cache_->find(*key, static_cast<int32_t>(group)));
        known = known || hit.host_blocks[group].back() != NO_BLOCK;
      }
      num_in_a_row[group] = known ? num_in_a_row[group] + 1 : 0;
      const int64_t last_query = std::min((i + 1) * block_size, num_ids - 1);
      complete = complete && i + 1 - num_in_a_row[group] <= first_visible(group, last_query) / block_size;
      dead_end = dead_end || (!known && windows_[group] == NO_WINDOW);
    }
    if (dead_end) break;
    if (complete) ends.push_back(i + 1);
  }
  return longest_that_fits(ends, num_ids, hit);
}

// The last of `ends` whose blocks can be had: those on the host need a free block each, and so do those that
// nobody uses where the number of used blocks is limited.
int64_t Sequences::longest_that_fits(std::span<const int64_t> ends, int64_t num_ids,
                                     const PrefixHit& hit) const {
  if (ends.empty()) return 0;
  if (!host_prefix_cache_ && allocator_->max_used_blocks() == allocator_->num_blocks()) return ends.back();
  std::vector<std::vector<int64_t>> num_taken;  // [num_groups][i] free blocks that the first i take
  for (int64_t group = 0; group < num_groups(); ++group) {
    std::vector<int64_t>& sums = num_taken.emplace_back(1, 0);
    for (int64_t i = 0; i < ends.back(); ++i) {
      const int32_t block = hit.blocks[group][i];
      const bool on_host = host_prefix_cache_ && hit.host_blocks[group][i] != NO_BLOCK;
      sums.push_back(sums.back() + (on_host || (block != NO_BLOCK && !allocator_->is_used(block))));
    }
  }
  const int64_t block_size = allocator_->block_size();
  for (auto end = ends.rbegin(); end != ends.rend(); ++end) {
    const int64_t num_tokens = std::min(*end * block_size, num_ids - 1);
    int64_t num_needed = 0;
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int64_t num_unseen = std::min(first_visible(group, num_tokens) / block_size, *end);
      num_needed += num_taken[group][*end] - num_taken[group][num_unseen];
    }
    if (num_needed <= allocator_->num_available_blocks()) return *end;
  }
  return 0;
}

// Cuts the lists of a hit to the blocks that a sequence with so many computed tokens needs.
void Sequences::cut(PrefixHit& hit, int64_t num_tokens) const {
  hit.num_tokens = num_tokens;
  const int64_t block_size = allocator_->block_size(), num_blocks = blocks_for(num_tokens, block_size);
  for (std::vector<std::vector<int32_t>>* lists : {&hit.blocks, &hit.host_blocks}) {
    for (size_t group = 0; group < lists->size(); ++group) {
      std::vector<int32_t>& blocks = (*lists)[group];
      blocks.resize(num_blocks, NO_BLOCK);
      const int64_t num_unseen = first_visible(static_cast<int64_t>(group), num_tokens) / block_size;
      std::fill_n(blocks.begin(), std::min(num_unseen, num_blocks), NO_BLOCK);
    }
  }
}

Sequences::PrefixHit Sequences::find_prefix(std::span<const int64_t> token_ids, const BlockKey& root) const {
  PrefixHit hit;
  hit.keys = {root};
  hit.blocks.resize(windows_.size());
  if (host_prefix_cache_) hit.host_blocks.resize(windows_.size());
  const int64_t num_blocks = find_full_blocks(token_ids, hit);
  // The last token is always computed: somebody wants to know what comes after it.
  const int64_t num_ids = static_cast<int64_t>(token_ids.size());
  cut(hit, std::clamp<int64_t>(num_ids - 1, 0, num_blocks * allocator_->block_size()));
  if (keys_.compares_tokens()) find_partial_block(token_ids, hit);
  return hit;
}

// Adds the block behind a hit that agrees with the tokens in its beginning.
void Sequences::find_partial_block(std::span<const int64_t> token_ids, PrefixHit& hit) const {
  const int64_t block_size = allocator_->block_size(), num_ids = static_cast<int64_t>(token_ids.size());
  const int64_t num_full = hit.num_tokens / block_size;
  const int64_t num_left = std::min(num_ids - 1 - hit.num_tokens, block_size - 1);
  if (hit.num_tokens % block_size != 0 || num_left < 1) return;
  const auto on_device = [&](const BlockKey& key) {
    for (int64_t group = 0; group < num_groups(); ++group) {
      if (prefix_cache_.find(key, static_cast<int32_t>(group)) == NO_BLOCK) return false;
    }
    return true;
  };
  const auto [key, num_tokens] =
      keys_.find_partial(hit.keys[num_full], token_ids.subspan(hit.num_tokens, num_left), on_device);
  if (num_tokens == 0) return;
  PrefixHit longer = hit;
  for (int64_t group = 0; group < num_groups(); ++group) {
    longer.blocks[group].push_back(prefix_cache_.find(key, static_cast<int32_t>(group)));
  }
  longer.keep_tail = true;
  cut(longer, hit.num_tokens + num_tokens);
  // The block that is copied stays in use until then: not where it is needed as room for the rest.
  if (blocks_needed(longer, num_ids) <= allocator_->num_available_blocks()) hit = std::move(longer);
}

// The free blocks that a new sequence of num_tokens tokens takes until all are computed.
int64_t Sequences::blocks_needed(const PrefixHit& hit, int64_t num_tokens) const {
  const int64_t block_size = allocator_->block_size();
  const bool partial = hit.num_tokens % block_size != 0;
  int64_t num_needed = 0;
  for (int64_t group = 0; group < num_groups(); ++group) {
    const std::vector<int32_t>& blocks = hit.blocks[group];
    num_needed += blocks_for(num_tokens, block_size) - static_cast<int64_t>(blocks.size());
    // A hit that nobody uses is among the free blocks until now.
    for (const int32_t block : blocks) num_needed += block != NO_BLOCK && !allocator_->is_used(block);
    // The sequence writes into its last block, and copies it where others need it as it is.
    if (partial && blocks.back() != NO_BLOCK) {
      num_needed += hit.keep_tail || allocator_->num_owners(blocks.back()) > 0;
    }
  }
  for (const std::vector<int32_t>& blocks : hit.host_blocks) {
    num_needed += std::ranges::count_if(blocks, [](int32_t block) { return block != NO_BLOCK; });
  }
  return num_needed;
}

// Gives the blocks of a hit that are on the host a block on the device.
void Sequences::bring_back(PrefixHit& hit) {
  std::vector<CopyPair> pairs;
  for (int64_t group = 0; group < num_groups(); ++group) {
    for (size_t i = 0; i < hit.host_blocks[group].size(); ++i) {
      const int32_t host_block = hit.host_blocks[group][i];
      if (host_block == NO_BLOCK) continue;
      const int32_t block = hit.blocks[group][i] = allocator_->allocate();
      pairs.push_back({host_block, block});
      link_twins(block, host_block);
      prefix_cache_.insert(hit.keys[i + 1], static_cast<int32_t>(group), block);
    }
  }
  prefix_counts_.num_host_hits += static_cast<int64_t>(pairs.size());
  arrivals_.push_back(open_transfer(*host_allocator_, std::move(pairs)));
}

void Sequences::adopt_prefix(Sequence& sequence) {
  PrefixHit hit = find_prefix(sequence.token_ids, *sequence.root);
  sequence.num_computed_tokens = sequence.num_cached_tokens = hit.num_tokens;
  sequence.num_keyed_blocks = hit.num_tokens / allocator_->block_size();
  const bool some_on_host = std::ranges::any_of(hit.host_blocks, [](const std::vector<int32_t>& blocks) {
    return std::ranges::any_of(blocks, [](int32_t block) { return block != NO_BLOCK; });
  });
  if (some_on_host) {
    // The blocks that are on the device are not to be evicted for the others.
    for (const std::vector<int32_t>& blocks : hit.blocks) {
      for (const int32_t block : blocks) {
        if (block != NO_BLOCK) allocator_->acquire(block);
      }
    }
    bring_back(hit);
  }
  for (int64_t group = 0; group < num_groups(); ++group) {
    sequence.tables[group].adopt(hit.blocks[group], hit.num_tokens, hit.keep_tail);
    if (!some_on_host) continue;
    for (const int32_t block : hit.blocks[group]) {
      if (block != NO_BLOCK) allocator_->release(block);  // the table owns it too by now
    }
  }
  const BlockKey& key = hit.keys[sequence.num_keyed_blocks];
  sequence.key = sequence.num_keyed_blocks == 0 ? KeyHandle(key) : KeyHandle(key, keys_);
  prefix_counts_.num_queried_tokens += static_cast<int64_t>(sequence.token_ids.size());
  prefix_counts_.num_hit_tokens += hit.num_tokens;
}

void Sequences::cache_full_blocks(Sequence& sequence) {
  const int64_t block_size = allocator_->block_size();
  const std::span<const int64_t> token_ids(sequence.token_ids);
  const int64_t num_known = std::min(sequence.num_computed_tokens, static_cast<int64_t>(token_ids.size()));
  if ((sequence.num_keyed_blocks + 1) * block_size > num_known) return;
  std::vector<KeyHandle> keys;
  for (int64_t i = sequence.num_keyed_blocks; (i + 1) * block_size <= num_known; ++i) {
    const BlockKey& parent = keys.empty() ? *sequence.key : *keys.back();
    keys.push_back(keys_.make(parent, block_tokens(token_ids, i)));
    for (int32_t group = 0; group < num_groups(); ++group) prefix_cache_.prefetch(*keys.back(), group);
  }
  for (KeyHandle& key : keys) {
    const int64_t i = sequence.num_keyed_blocks++;
    for (int64_t group = 0; group < num_groups(); ++group) {
      BlockTable& table = sequence.tables[group];
      const int32_t block = table.blocks()[i];
      if (block == NO_BLOCK || prefix_cache_.insert(*key, static_cast<int32_t>(group), block)) continue;
      // Of two blocks with the same tokens the first stays. So the blocks of a chain always have a common
      // owner, and come into the list of unused ones in the order in which they are to be evicted.
      const int32_t known = prefix_cache_.find(*key, static_cast<int32_t>(group));
      if (known != block) table.replace(i, known);
    }
  }
  sequence.key = std::move(keys.back());
}

// Makes the host blocks of a sequence that is about to be swapped out findable by their tokens.
void Sequences::cache_on_host(const Sequence& sequence) {
  for (int64_t group = 0; group < num_groups(); ++group) {
    const std::vector<int32_t>& blocks = sequence.tables[group].blocks();
    for (int64_t i = 0; i < sequence.num_keyed_blocks; ++i) {
      const int32_t host_block = sequence.host_tables[group].blocks()[i];
      if (host_block == NO_BLOCK || host_allocator_->is_cached(host_block)) continue;
      host_prefix_cache_->insert(prefix_cache_.key(blocks[i]), static_cast<int32_t>(group), host_block);
    }
  }
}

void Sequences::forget_keys_after(Sequence& sequence, int64_t num_blocks) {
  if (num_blocks >= sequence.num_keyed_blocks) return;
  sequence.num_keyed_blocks = num_blocks;
  if (num_blocks == 0) {
    sequence.key = KeyHandle(*sequence.root);
    return;
  }
  if (const int32_t last = sequence.tables[0].blocks()[num_blocks - 1]; last != NO_BLOCK) {
    sequence.key = KeyHandle(prefix_cache_.key(last), keys_);
    return;
  }
  BlockKey key = *sequence.root;
  for (int64_t i = 0; i < num_blocks; ++i) key = *keys_.find(key, block_tokens(sequence.token_ids, i));
  sequence.key = KeyHandle(key, keys_);
}

int64_t Sequences::probe(std::span<const int64_t> token_ids, const BlockKey& root) const {
  return find_prefix(token_ids, root).num_tokens;
}

int64_t Sequences::num_shared_tokens(Id id) const {
  const Sequence& sequence = at(id);
  int64_t num_shared = 0;
  for (const BlockTable& table : sequence.tables) {
    int64_t i = table.num_blocks();
    const int64_t first = std::max(num_shared, table.num_released());
    while (i > first && allocator_->num_owners(table.blocks()[i - 1]) == 1) --i;
    if (i > first) num_shared = i;
  }
  return std::min(num_shared * allocator_->block_size(), sequence.num_tokens);
}

bool Sequences::can_allocate(int64_t num_tokens, int64_t num_spare) const {
  const int64_t num_blocks = blocks_for(num_tokens, allocator_->block_size());
  return num_tokens <= max_tokens_per_seq_ &&
         num_blocks <= (allocator_->num_available_blocks() - num_spare) / num_groups();
}

bool Sequences::can_allocate(std::span<const int64_t> token_ids, const BlockKey& root,
                             int64_t num_spare) const {
  const int64_t num_tokens = static_cast<int64_t>(token_ids.size());
  if (num_tokens > max_tokens_per_seq_) return false;
  return blocks_needed(find_prefix(token_ids, root), num_tokens) <=
         allocator_->num_available_blocks() - num_spare;
}

void Sequences::reset_prefix_cache() {
  int64_t num_used = allocator_->num_used_blocks();
  if (host_allocator_) num_used += host_allocator_->num_used_blocks();
  if (num_used > 0) {
    throw std::invalid_argument("cannot reset the prefix cache while sequences use " +
                                std::to_string(num_used) + " blocks: free them first");
  }
  allocator_->evict(allocator_->num_cached_blocks());
  if (host_allocator_) host_allocator_->evict(host_allocator_->num_cached_blocks());
}

}  // namespace pagedkv
