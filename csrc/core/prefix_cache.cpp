#include "core/prefix_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace pagedkv {

namespace {

constexpr size_t MIN_SLOTS = 64;
constexpr size_t NARROW_PER_CHUNK = SHA256_CHUNK_BYTES / sizeof(int32_t);
constexpr size_t WIDE_PER_CHUNK = SHA256_CHUNK_BYTES / sizeof(int64_t);
// Roots are digests of messages that start with another tag, see `prefix_root` in pagedkv/_prefix.py.
constexpr char WIDE_TAG[SHA256_CHUNK_BYTES] = "pagedkv prefix cache: block of 64-bit tokens";

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory");

void compress(BlockKey& key, const void* chunk) {
  sha256_compress(key, static_cast<const uint8_t*>(chunk), 1);
}

// Token ids beyond 32 bits are rare (hashes of images, say). Such a block is a message of its own, with a tag
// that no root's message starts with and the parent's key in it.
BlockKey extend_key_wide(const BlockKey& parent, std::span<const int64_t> token_ids) {
  BlockKey key = SHA256_INITIAL_STATE;
  compress(key, WIDE_TAG);
  int64_t chunk[WIDE_PER_CHUNK] = {};
  std::memcpy(chunk, parent.data(), sizeof(parent));
  compress(key, chunk);
  for (size_t begin = 0; begin < token_ids.size(); begin += WIDE_PER_CHUNK) {
    const auto part = token_ids.subspan(begin, std::min(WIDE_PER_CHUNK, token_ids.size() - begin));
    std::fill(std::copy(part.begin(), part.end(), chunk), chunk + WIDE_PER_CHUNK, 0);
    compress(key, chunk);
  }
  return key;
}

void require(bool holds, const char* invariant) {
  if (!holds) throw std::logic_error(std::string("PrefixCache is corrupt: ") + invariant);
}

}  // namespace

BlockKey extend_key(const BlockKey& parent, std::span<const int64_t> token_ids) {
  int64_t beyond_32_bits = 0;
  for (const int64_t id : token_ids) beyond_32_bits |= id ^ static_cast<int32_t>(id);
  if (beyond_32_bits != 0) return extend_key_wide(parent, token_ids);
  // The message that led to `parent` goes on. The block size is bound in the root, so the zeros that fill up
  // the last chunk are not mistaken for tokens.
  BlockKey key = parent;
  int32_t chunk[NARROW_PER_CHUNK];
  for (size_t begin = 0; begin < token_ids.size(); begin += NARROW_PER_CHUNK) {
    const size_t count = std::min(NARROW_PER_CHUNK, token_ids.size() - begin);
    for (size_t i = 0; i < count; ++i) chunk[i] = static_cast<int32_t>(token_ids[begin + i]);
    std::fill(chunk + count, chunk + NARROW_PER_CHUNK, 0);
    compress(key, chunk);
  }
  return key;
}

PrefixCache::PrefixCache(std::shared_ptr<BlockAllocator> allocator)
    : allocator_(std::move(allocator)), slots_(MIN_SLOTS) {
  allocator_->set_uncached_handler([this](int32_t block) { erase(block); });
}

PrefixCache::~PrefixCache() {
  // The allocator may live on; nobody will ask for its cached blocks again.
  allocator_->set_uncached_handler([](int32_t) {});
}

size_t PrefixCache::slot_of(const BlockKey& key, int32_t group) const {
  const uint32_t home = home_of(key, group);
  const size_t mask = slots_.size() - 1;
  size_t index = home & mask;
  for (;; index = (index + 1) & mask) {
    const auto& [slot_home, block] = slots_[index];
    if (block == NO_BLOCK) return index;
    if (slot_home == home && entries_[block].group == group && entries_[block].key == key) return index;
  }
}

int32_t PrefixCache::find(const BlockKey& key, int32_t group) const {
  return slots_[slot_of(key, group)].block;
}

void PrefixCache::insert(const BlockKey& key, int32_t group, int32_t block) {
  if (2 * (size_ + 1) > static_cast<int64_t>(slots_.size())) grow();
  if (entries_.size() <= static_cast<size_t>(block)) entries_.resize(block + 1);
  allocator_->mark_cached(block);
  entries_[block] = {key, group};
  slots_[slot_of(key, group)] = {home_of(key, group), block};
  ++size_;
}

void PrefixCache::grow() {
  std::vector<Slot> old(2 * slots_.size());
  old.swap(slots_);
  const size_t mask = slots_.size() - 1;
  for (const Slot& slot : old) {
    if (slot.block == NO_BLOCK) continue;
    size_t index = slot.home & mask;
    while (slots_[index].block != NO_BLOCK) index = (index + 1) & mask;
    slots_[index] = slot;
  }
}

void PrefixCache::erase(int32_t block) noexcept {
  const size_t mask = slots_.size() - 1;
  size_t hole = home_of(entries_[block].key, entries_[block].group) & mask;
  while (slots_[hole].block != block) hole = (hole + 1) & mask;
  // Entries behind the hole move up unless their home lies behind it, so that no search ends at it too early.
  for (size_t next = (hole + 1) & mask; slots_[next].block != NO_BLOCK; next = (next + 1) & mask) {
    if (((next - slots_[next].home) & mask) < ((next - hole) & mask)) continue;
    slots_[hole] = slots_[next];
    hole = next;
  }
  slots_[hole] = {};
  --size_;
}

void PrefixCache::check_integrity() const {
  int64_t num_found = 0;
  for (const Slot& slot : slots_) {
    if (slot.block == NO_BLOCK) continue;
    ++num_found;
    require(allocator_->is_cached(slot.block), "an entry's block is not cached");
    const Entry& entry = entries_[slot.block];
    require(find(entry.key, entry.group) == slot.block, "an entry is not found by its key");
  }
  require(num_found == size_, "the number of entries is wrong");
  int64_t num_cached = 0;
  for (size_t block = 0; block < entries_.size(); ++block) {
    num_cached += allocator_->is_cached(static_cast<int32_t>(block));
  }
  require(num_cached == size_, "a cached block has no entry");
}

}  // namespace pagedkv
