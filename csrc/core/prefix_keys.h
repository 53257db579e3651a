// The keys by which full blocks are found: each stands for the tokens from the start of a sequence to the end
// of the block, and for a root (salt, adapter, block size: everything that must agree).
//
// Usually the key is the SHA-256 state after a message that names the root and then these tokens. No two
// different messages lead to the same state unless SHA-256's compression function collides, so the key is all
// that has to be compared.
//
// Where tokens are to be compared, they are kept in a tree, a node for each block of tokens behind another.
// The key is the node's number then, which no other node has before or after it, and a hash only serves to
// find the node. It stays in the tree as long as anybody holds it: a cached block, a sequence, a node behind.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/block_index.h"
#include "core/sha256.h"

namespace pagedkv {

using BlockKey = Sha256State;

// The SHA-256 state after these tokens, from the one before them.
BlockKey extend_key(const BlockKey& parent, std::span<const int64_t> token_ids);

class KeyHandle;

class PrefixKeys {
 public:
  static constexpr int ALL_BITS = 256;

  // A key and how many of its block's tokens are those that were looked for, from the first one on.
  struct PartialMatch {
    BlockKey key = {};
    int64_t num_tokens = 0;
  };

  // With fewer than all bits hashes collide, which is the only way to see what happens then.
  PrefixKeys(int64_t block_size, bool compare_tokens, int num_bits = ALL_BITS);
  PrefixKeys(const PrefixKeys&) = delete;
  PrefixKeys& operator=(const PrefixKeys&) = delete;

  bool compares_tokens() const { return compare_tokens_; }

  // The key of a block of these tokens behind `parent`, a key or a root. nullopt: nobody holds it.
  std::optional<BlockKey> find(const BlockKey& parent, std::span<const int64_t> token_ids) const {
    if (!compare_tokens_) return hash(parent, token_ids);
    const int32_t node = find_node(hash(parent, token_ids)[0], parent, token_ids);
    return node == NO_BLOCK ? std::nullopt : std::optional(key_of(node));
  }
  // The same, made where nobody holds it.
  KeyHandle make(const BlockKey& parent, std::span<const int64_t> token_ids);
  // Of the blocks behind `parent` that start with token_ids[0] (the first few that came) and that are
  // `wanted`, the one that starts with the most of token_ids. Finds nothing where tokens are not compared.
  PartialMatch find_partial(const BlockKey& parent, std::span<const int64_t> token_ids,
                            const std::function<bool(const BlockKey&)>& wanted) const;

  // One holder more or less. Roots need none.
  void retain(const BlockKey& key) noexcept {
    if (compare_tokens_) retain_node(node_of(key));
  }
  void release(const BlockKey& key) noexcept {
    if (compare_tokens_) release_node(node_of(key));
  }

  int64_t num_nodes() const { return static_cast<int64_t>(by_tokens_.size()); }

 private:
  // Where many blocks have one parent and first token, only so many are looked at.
  static constexpr int MAX_SIBLINGS = 8;

  struct Node {
    uint64_t number = 0;  // 0: not in use
    BlockKey parent = {};
    int32_t parent_node = NO_BLOCK;  // NO_BLOCK: the parent is a root
    int32_t num_holders = 0;
    uint32_t hash = 0;
    bool has_siblings_entry = false;  // whether by_first_token_ has it
  };

  BlockKey hash(const BlockKey& parent, std::span<const int64_t> token_ids) const {
    BlockKey key = extend_key(parent, token_ids);
    if (num_bits_ < ALL_BITS) key = {key[0] & ((uint32_t{1} << num_bits_) - 1)};
    return key;
  }
  static uint32_t first_token_hash(const BlockKey& parent, int64_t token_id) {
    return parent[0] + static_cast<uint32_t>(token_id * 0x9e3779b97f4a7c15 >> 32);
  }
  int32_t find_node(uint32_t hash, const BlockKey& parent, std::span<const int64_t> token_ids) const;
  BlockKey key_of(int32_t node) const;
  int32_t node_of(const BlockKey& key) const noexcept;  // NO_BLOCK: a root
  std::span<const int64_t> tokens_of(int32_t node) const {
    return {tokens_.data() + node * block_size_, static_cast<size_t>(block_size_)};
  }
  int32_t add_node(uint32_t hash, const BlockKey& parent, std::span<const int64_t> token_ids);
  void retain_node(int32_t node) noexcept {
    if (node != NO_BLOCK) ++nodes_[node].num_holders;
  }
  void release_node(int32_t node) noexcept;

  const int64_t block_size_;
  const bool compare_tokens_;
  const int num_bits_;
  std::vector<Node> nodes_;
  std::vector<int64_t> tokens_;      // [nodes, block_size]
  std::vector<int32_t> free_nodes_;  // its capacity covers nodes_: release() cannot fail
  uint64_t last_number_ = 0;
  BlockIndex by_tokens_;       // of parent and tokens
  BlockIndex by_first_token_;  // of parent and first token
};

// A key that is held.
class KeyHandle {
 public:
  KeyHandle() = default;
  explicit KeyHandle(const BlockKey& root) : key_(root) {}
  KeyHandle(const BlockKey& key, PrefixKeys& keys) : key_(key), keys_(&keys) { keys.retain(key); }
  KeyHandle(const KeyHandle& other) : key_(other.key_), keys_(other.keys_) {
    if (keys_ != nullptr) keys_->retain(key_);
  }
  KeyHandle(KeyHandle&& other) noexcept : key_(other.key_), keys_(std::exchange(other.keys_, nullptr)) {}
  KeyHandle& operator=(KeyHandle other) noexcept {
    std::swap(key_, other.key_);
    std::swap(keys_, other.keys_);
    return *this;
  }
  ~KeyHandle() {
    if (keys_ != nullptr) keys_->release(key_);
  }

  const BlockKey& operator*() const { return key_; }

 private:
  BlockKey key_ = {};
  PrefixKeys* keys_ = nullptr;  // null: a root
};

}  // namespace pagedkv
