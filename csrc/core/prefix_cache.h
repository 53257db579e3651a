// Which full blocks hold what a key stands for, so that a new sequence can reuse the blocks of an old one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/block_allocator.h"
#include "core/block_index.h"
#include "core/prefix_keys.h"

namespace pagedkv {

// Finds blocks by key. The blocks of different layer groups are apart: they hold different layers.
class PrefixCache {
 public:
  PrefixCache(std::shared_ptr<BlockAllocator> allocator, PrefixKeys& keys);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;
  ~PrefixCache();

  // NO_BLOCK where it is not known.
  int32_t find(const BlockKey& key, int32_t group) const {
    return by_key_.find(hash_of(key, group), [&](int32_t block) {
      return entries_[block].group == group && entries_[block].key == key;
    });
  }
  // `block` is used, full and written. False where another block has its key already; then nothing is
  // changed.
  bool insert(const BlockKey& key, int32_t group, int32_t block);

  const BlockKey& key(int32_t block) const { return entries_[block].key; }  // of a cached block
  int32_t group(int32_t block) const { return entries_[block].group; }

  // Fetches what a find or an insertion of this key reads first.
  void prefetch(const BlockKey& key, int32_t group) const { by_key_.prefetch(hash_of(key, group)); }

  void check_integrity() const;  // throws std::logic_error

 private:
  struct Entry {
    BlockKey key;
    int32_t group;
  };

  static uint32_t hash_of(const BlockKey& key, int32_t group) {
    return key[0] + static_cast<uint32_t>(group) * 0x9e3779b9;
  }
  void erase(int32_t block) noexcept;

  std::shared_ptr<BlockAllocator> allocator_;
  PrefixKeys& keys_;
  BlockIndex by_key_;
  std::vector<Entry> entries_;  // by block, valid where the block is cached
};

}  // namespace pagedkv
