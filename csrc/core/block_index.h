// A hash table from hashes to blocks; several blocks may have one hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/block_allocator.h"

namespace pagedkv {

// Open addressing with linear probing. A slot holds the hash, so that a search rarely has to look at a block,
// and a deletion never.
class BlockIndex {
 public:
  // The first block of this hash for which `matches(block)`, or NO_BLOCK.
  template <typename Predicate>
  int32_t find(uint32_t hash, const Predicate& matches) const {
    const size_t mask = slots_.size() - 1;
    for (size_t index = hash & mask; slots_[index].block != NO_BLOCK; index = (index + 1) & mask) {
      if (slots_[index].hash == hash && matches(slots_[index].block)) return slots_[index].block;
    }
    return NO_BLOCK;
  }

  void insert(uint32_t hash, int32_t block) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    place({hash, block});
    ++size_;
  }

  void erase(uint32_t hash, int32_t block) noexcept {
    const size_t mask = slots_.size() - 1;
    size_t hole = hash & mask;
    while (slots_[hole].block != block) hole = (hole + 1) & mask;
    // Slots behind the hole move up unless their hash leads behind it, so that no search ends at it too
    // early.
    for (size_t next = (hole + 1) & mask; slots_[next].block != NO_BLOCK; next = (next + 1) & mask) {
      if (((next - slots_[next].hash) & mask) < ((next - hole) & mask)) continue;
      slots_[hole] = slots_[next];
      hole = next;
    }
    slots_[hole] = {};
    --size_;
  }

  // Fetches what a find or an insertion reads first: in a big pool it is in no cache of the CPU.
  void prefetch(uint32_t hash) const { __builtin_prefetch(&slots_[hash & (slots_.size() - 1)]); }

  size_t size() const { return size_; }

 private:
  static constexpr size_t MIN_SLOTS = 64;

  struct Slot {
    uint32_t hash = 0;
    int32_t block = NO_BLOCK;
  };

  void place(Slot slot) {
    const size_t mask = slots_.size() - 1;
    size_t index = slot.hash & mask;
    while (slots_[index].block != NO_BLOCK) index = (index + 1) & mask;
    slots_[index] = slot;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.block != NO_BLOCK) place(slot);
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(MIN_SLOTS);  // a power of two, at most half of them taken
  size_t size_ = 0;
};

}  // namespace pagedkv
