// Which full blocks hold which tokens, so that a new sequence can reuse the blocks of an old one.
//
// A block is known by the key of the tokens from the start of the sequence to the end of the block: the
// SHA-256 state after a message that names the root (salt, adapter, block size: everything that must agree)
// and then these tokens. No two different messages lead to the same state unless SHA-256's compression
// function collides, so a key stands for its tokens and they need not be compared.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/block_allocator.h"
#include "core/sha256.h"

namespace pagedkv {

using BlockKey = Sha256State;

// The key of a full block, from the key of the block before it (or the root) and its own tokens.
BlockKey extend_key(const BlockKey& parent, std::span<const int64_t> token_ids);

// Finds blocks by key. The keys of different layer groups are apart: their blocks hold different layers.
class PrefixCache {
 public:
  explicit PrefixCache(std::shared_ptr<BlockAllocator> allocator);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;
  ~PrefixCache();

  int32_t find(const BlockKey& key, int32_t group) const;  // NO_BLOCK where it is not known
  // `block` is used, full and written, and no other block has the key.
  void insert(const BlockKey& key, int32_t group, int32_t block);
  const BlockKey& key(int32_t block) const { return entries_[block].key; }  // of a cached block

  // Fetches what a find or an insertion of this key reads first: in a big pool it is in no cache of the CPU.
  void prefetch(const BlockKey& key, int32_t group) const {
    __builtin_prefetch(&slots_[home_of(key, group) & (slots_.size() - 1)]);
  }

  int64_t size() const { return size_; }
  void check_integrity() const;  // throws std::logic_error

 private:
  struct Entry {
    BlockKey key;
    int32_t group;
  };
  // The key's first words, so that a probe rarely has to look at an entry, and a deletion never.
  struct Slot {
    uint32_t home = 0;
    int32_t block = NO_BLOCK;
  };

  static uint32_t home_of(const BlockKey& key, int32_t group) {
    return key[0] + static_cast<uint32_t>(group) * 0x9e3779b9;
  }
  size_t slot_of(const BlockKey& key,
                 int32_t group) const;  // where it is, or the empty slot where it would be
  void erase(int32_t block) noexcept;
  void grow();

  std::shared_ptr<BlockAllocator> allocator_;
  std::vector<Entry> entries_;  // by block, valid where the block is cached
  // Open addressing with linear probing; a power of two, at most half full.
  std::vector<Slot> slots_;
  int64_t size_ = 0;
};

}  // namespace pagedkv
