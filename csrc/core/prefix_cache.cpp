#include "core/prefix_cache.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace pagedkv {

namespace {

void require(bool holds, const char* invariant) {
  if (!holds) throw std::logic_error(std::string("PrefixCache is corrupt: ") + invariant);
}

}  // namespace

PrefixCache::PrefixCache(std::shared_ptr<BlockAllocator> allocator, PrefixKeys& keys)
    : allocator_(std::move(allocator)), keys_(keys) {
  allocator_->set_uncached_handler([this](int32_t block) { erase(block); });
}

PrefixCache::~PrefixCache() {
  // The allocator may live on; nobody will ask for its cached blocks again.
  allocator_->set_uncached_handler([](int32_t) {});
}

bool PrefixCache::insert(const BlockKey& key, int32_t group, int32_t block) {
  if (find(key, group) != NO_BLOCK) return false;
  if (entries_.size() <= static_cast<size_t>(block)) entries_.resize(block + 1);
  by_key_.insert(hash_of(key, group), block);
  allocator_->mark_cached(block);
  entries_[block] = {.key = key, .group = group};
  keys_.retain(key);
  return true;
}

void PrefixCache::erase(int32_t block) noexcept {
  const auto& [key, group] = entries_[block];
  by_key_.erase(hash_of(key, group), block);
  keys_.release(key);
}

void PrefixCache::check_integrity() const {
  size_t num_cached = 0;
  for (int32_t block = 0; block < static_cast<int32_t>(entries_.size()); ++block) {
    if (!allocator_->is_cached(block)) continue;
    ++num_cached;
    require(find(entries_[block].key, entries_[block].group) == block, "an entry is not found by its key");
  }
  require(num_cached == by_key_.size(), "the number of entries is wrong");
}

}  // namespace pagedkv
