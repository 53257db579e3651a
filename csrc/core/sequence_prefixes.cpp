// Sequences and the prefix cache: what is found when one is added, what becomes known when a batch is
// committed.
#include <algorithm>
#include <string>

#include "core/sequences.h"

namespace pagedkv {

Sequences::PrefixHit Sequences::find_prefix(std::span<const int64_t> token_ids, const BlockKey& root) const {
  const int64_t block_size = allocator_->block_size();
  const int64_t num_ids = static_cast<int64_t>(token_ids.size());
  // The last token is always computed: somebody wants to know what comes after it.
  const auto tokens_of = [&](int64_t num_blocks) { return std::min(num_blocks * block_size, num_ids - 1); };

  std::vector<BlockKey> keys = {root};  // keys[i] of the first i blocks
  std::vector<std::vector<int32_t>> found(windows_.size());
  std::vector<int64_t> num_in_a_row(windows_.size(), 0);  // blocks that end where the search stands
  int64_t num_blocks = 0;                                 // of the longest prefix so far
  for (int64_t i = 0; (i + 1) * block_size <= num_ids; ++i) {
    keys.push_back(extend_key(keys.back(), token_ids.subspan(i * block_size, block_size)));
    bool complete = true, dead_end = false;
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t block = prefix_cache_.find(keys.back(), static_cast<int32_t>(group));
      found[group].push_back(block);
      num_in_a_row[group] = block == NO_BLOCK ? 0 : num_in_a_row[group] + 1;
      const int64_t first_needed = first_visible(group, tokens_of(i + 1)) / block_size;
      complete = complete && i + 1 - num_in_a_row[group] <= first_needed;
      dead_end = dead_end || (block == NO_BLOCK && windows_[group] == NO_WINDOW);
    }
    if (dead_end) break;
    if (complete) num_blocks = i + 1;
  }

  PrefixHit hit;
  if (num_blocks > 0) hit.num_tokens = tokens_of(num_blocks);
  num_blocks = blocks_for(hit.num_tokens, block_size);  // one less where blocks have one token
  hit.key = keys[hit.num_tokens / block_size];
  hit.blocks = std::move(found);
  for (int64_t group = 0; group < num_groups(); ++group) {
    std::vector<int32_t>& blocks = hit.blocks[group];
    blocks.resize(num_blocks);
    const int64_t num_unseen = first_visible(group, hit.num_tokens) / block_size;
    std::fill_n(blocks.begin(), std::min(num_unseen, num_blocks), NO_BLOCK);
  }
  return hit;
}

void Sequences::adopt_prefix(Sequence& sequence) {
  const PrefixHit hit = find_prefix(sequence.token_ids, *sequence.root);
  for (int64_t group = 0; group < num_groups(); ++group) {
    sequence.tables[group].adopt(hit.blocks[group], hit.num_tokens);
  }
  sequence.num_computed_tokens = sequence.num_cached_tokens = hit.num_tokens;
  sequence.num_keyed_blocks = hit.num_tokens / allocator_->block_size();
  sequence.key = hit.key;
  prefix_counts_.num_queried_tokens += static_cast<int64_t>(sequence.token_ids.size());
  prefix_counts_.num_hit_tokens += hit.num_tokens;
}

void Sequences::cache_full_blocks(Sequence& sequence) {
  const int64_t block_size = allocator_->block_size();
  const std::span<const int64_t> token_ids(sequence.token_ids);
  const int64_t num_known = std::min(sequence.num_computed_tokens, static_cast<int64_t>(token_ids.size()));
  if ((sequence.num_keyed_blocks + 1) * block_size > num_known) return;
  std::vector<BlockKey> keys;
  for (int64_t i = sequence.num_keyed_blocks; (i + 1) * block_size <= num_known; ++i) {
    const BlockKey& parent = keys.empty() ? sequence.key : keys.back();
    keys.push_back(extend_key(parent, token_ids.subspan(i * block_size, block_size)));
    for (int32_t group = 0; group < num_groups(); ++group) prefix_cache_.prefetch(keys.back(), group);
  }
  for (const BlockKey& key : keys) {
    const int64_t i = sequence.num_keyed_blocks;
    for (int64_t group = 0; group < num_groups(); ++group) {
      BlockTable& table = sequence.tables[group];
      const int32_t block = table.blocks()[i];
      if (block == NO_BLOCK) continue;
      const int32_t known = prefix_cache_.find(key, static_cast<int32_t>(group));
      if (known == NO_BLOCK) {
        prefix_cache_.insert(key, static_cast<int32_t>(group), block);
      } else if (known != block) {
        // Of two blocks with the same tokens the first stays. So the blocks of a chain always have a common
        // owner, and come into the list of unused ones in the order in which they are to be evicted.
        table.replace(i, known);
      }
    }
    sequence.key = key;
    ++sequence.num_keyed_blocks;
  }
}

void Sequences::forget_keys_after(Sequence& sequence, int64_t num_blocks) const {
  if (num_blocks >= sequence.num_keyed_blocks) return;
  const int64_t block_size = allocator_->block_size();
  sequence.num_keyed_blocks = num_blocks;
  if (num_blocks == 0) {
    sequence.key = *sequence.root;
    return;
  }
  if (const int32_t last = sequence.tables[0].blocks()[num_blocks - 1]; last != NO_BLOCK) {
    sequence.key = prefix_cache_.key(last);
    return;
  }
  sequence.key = *sequence.root;
  const std::span<const int64_t> token_ids(sequence.token_ids);
  for (int64_t i = 0; i < num_blocks; ++i) {
    sequence.key = extend_key(sequence.key, token_ids.subspan(i * block_size, block_size));
  }
}

int64_t Sequences::probe(std::span<const int64_t> token_ids, const BlockKey& root) const {
  return find_prefix(token_ids, root).num_tokens;
}

bool Sequences::can_allocate(int64_t num_tokens, int64_t num_spare) const {
  const int64_t num_blocks = blocks_for(num_tokens, allocator_->block_size());
  return num_blocks <= (allocator_->num_free_blocks() - num_spare) / num_groups();
}

bool Sequences::can_allocate(std::span<const int64_t> token_ids, const BlockKey& root,
                             int64_t num_spare) const {
  const PrefixHit hit = find_prefix(token_ids, root);
  const int64_t block_size = allocator_->block_size();
  const int64_t num_blocks = blocks_for(static_cast<int64_t>(token_ids.size()), block_size);
  int64_t num_needed = 0;
  for (const std::vector<int32_t>& blocks : hit.blocks) {
    num_needed += num_blocks - static_cast<int64_t>(blocks.size());
    // A hit that nobody uses is among the free blocks until now.
    for (const int32_t block : blocks) num_needed += block != NO_BLOCK && !allocator_->is_used(block);
    // The sequence writes into its last block, and copies it where it is not alone.
    const bool partial = hit.num_tokens % block_size != 0;
    num_needed += partial && allocator_->num_owners(blocks.back()) > 0;
  }
  return num_needed <= allocator_->num_free_blocks() - num_spare;
}

void Sequences::reset_prefix_cache() {
  if (allocator_->num_used_blocks() > 0) {
    throw std::invalid_argument("cannot reset the prefix cache while sequences use " +
                                std::to_string(allocator_->num_used_blocks()) + " blocks: free them first");
  }
  allocator_->evict(allocator_->num_cached_blocks());
}

}  // namespace pagedkv
