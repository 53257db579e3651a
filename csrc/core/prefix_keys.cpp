#include "core/prefix_keys.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pagedkv {

namespace {

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

PrefixKeys::PrefixKeys(int64_t block_size, bool compare_tokens, int num_bits)
    : block_size_(block_size), compare_tokens_(compare_tokens), num_bits_(num_bits) {
  if (num_bits != ALL_BITS && (num_bits < 1 || num_bits > 31)) {
    throw std::invalid_argument("key_bits must be 1 to 31, or 256, got " + std::to_string(num_bits));
  }
}

int32_t PrefixKeys::find_node(uint32_t hash, const BlockKey& parent,
                              std::span<const int64_t> token_ids) const {
  return by_tokens_.find(hash, [&](int32_t node) {
    return nodes_[node].parent == parent && std::ranges::equal(tokens_of(node), token_ids);
  });
}

// Number and place of the node. That it is no root's key is as certain as anything is of SHA-256.
BlockKey PrefixKeys::key_of(int32_t node) const {
  const uint64_t number = nodes_[node].number;
  return {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), static_cast<uint32_t>(node)};
}

int32_t PrefixKeys::node_of(const BlockKey& key) const noexcept {
  const uint64_t number = key[0] | static_cast<uint64_t>(key[1]) << 32;
  const bool exists = key[2] < nodes_.size() && number != 0 && nodes_[key[2]].number == number &&
                      key_of(static_cast<int32_t>(key[2])) == key;
  return exists ? static_cast<int32_t>(key[2]) : NO_BLOCK;
}

KeyHandle PrefixKeys::make(const BlockKey& parent, std::span<const int64_t> token_ids) {
  const BlockKey key = hash(parent, token_ids);
  if (!compare_tokens_) return KeyHandle(key);
  int32_t node = find_node(key[0], parent, token_ids);
  if (node == NO_BLOCK) node = add_node(key[0], parent, token_ids);
  return KeyHandle(key_of(node), *this);
}

int32_t PrefixKeys::add_node(uint32_t hash, const BlockKey& parent, std::span<const int64_t> token_ids) {
  if (free_nodes_.empty()) {
    free_nodes_.push_back(static_cast<int32_t>(nodes_.size()));
    nodes_.emplace_back();
    tokens_.resize(nodes_.size() * block_size_);
    free_nodes_.reserve(nodes_.capacity());
  }
  const int32_t node = free_nodes_.back();
  free_nodes_.pop_back();
  nodes_[node] = {.number = ++last_number_, .parent = parent, .parent_node = node_of(parent), .hash = hash};
  retain_node(nodes_[node].parent_node);
  std::ranges::copy(token_ids, tokens_.begin() + node * block_size_);
  by_tokens_.insert(hash, node);
  const uint32_t first_hash = first_token_hash(parent, token_ids[0]);
  int num_siblings = 0;
  by_first_token_.find(first_hash, [&](int32_t) { return ++num_siblings == MAX_SIBLINGS; });
  if (num_siblings < MAX_SIBLINGS) {
    by_first_token_.insert(first_hash, node);
    nodes_[node].has_siblings_entry = true;
  }
  return node;
}

void PrefixKeys::release_node(int32_t node) noexcept {
  while (node != NO_BLOCK && --nodes_[node].num_holders == 0) {
    Node& old = nodes_[node];
    by_tokens_.erase(old.hash, node);
    if (old.has_siblings_entry) by_first_token_.erase(first_token_hash(old.parent, tokens_of(node)[0]), node);
    free_nodes_.push_back(node);
    node = old.parent_node;
    old = {};
  }
}

PrefixKeys::PartialMatch PrefixKeys::find_partial(const BlockKey& parent, std::span<const int64_t> token_ids,
                                                  const std::function<bool(const BlockKey&)>& wanted) const {
  PartialMatch best;
  by_first_token_.find(first_token_hash(parent, token_ids[0]), [&](int32_t node) {
    if (nodes_[node].parent != parent) return false;
    const std::span<const int64_t> tokens = tokens_of(node);
    const int64_t num_equal = std::ranges::mismatch(tokens, token_ids).in1 - tokens.begin();
    if (num_equal > best.num_tokens && wanted(key_of(node)))
      best = {.key = key_of(node), .num_tokens = num_equal};
    return false;  // look at all of them
  });
  return best;
}

}  // namespace pagedkv
