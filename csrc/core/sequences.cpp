#include "core/sequences.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/sequence_checks.h"

namespace pagedkv {

namespace {

constexpr int SLOT_BITS = 32;
constexpr int64_t SLOT_MASK = (int64_t{1} << SLOT_BITS) - 1;
constexpr int64_t MAX_GENERATION = (int64_t{1} << 31) - 1;

void require(bool holds, const char* invariant) {
  if (!holds) throw std::logic_error(std::string("Sequences is corrupt: ") + invariant);
}

}  // namespace

Sequences::Sequences(int64_t num_blocks, int64_t block_size, SequencesOptions options)
    : allocator_(std::make_shared<BlockAllocator>(num_blocks, block_size, options.max_used_blocks)),
      windows_(std::move(options.windows)),
      max_tokens_per_seq_(options.max_tokens_per_seq.value_or(std::numeric_limits<int64_t>::max())),
      keys_(block_size, options.compare_tokens, options.key_bits),
      prefix_cache_(allocator_, keys_) {
  if (max_tokens_per_seq_ < 1) {
    throw std::invalid_argument("max_tokens_per_seq must be at least 1, got " +
                                std::to_string(max_tokens_per_seq_));
  }
  require_count(options.num_host_blocks, "num_host_blocks");
  if (options.num_host_blocks > 0) {
    host_allocator_ = std::make_shared<BlockAllocator>(options.num_host_blocks, block_size);
    host_prefix_cache_.emplace(host_allocator_, keys_);
  }
  if (windows_.empty()) throw std::invalid_argument("windows must have an entry for each group of layers");
  for (size_t group = 0; group < windows_.size(); ++group) require_count(windows_[group], "windows", group);
}

Sequences::Sequence* Sequences::find(Id id) const {
  const size_t index = id & SLOT_MASK;
  if (index >= slots_.size() || slots_[index].generation != id >> SLOT_BITS) return nullptr;
  return slots_[index].sequence.get();
}

Sequences::Sequence& Sequences::at(Id id) const {
  Sequence* sequence = find(id);
  if (sequence == nullptr) throw std::invalid_argument("the sequence was freed");
  return *sequence;
}

Sequences::Sequence& Sequences::closed(Id id, const char* verb) const {
  Sequence& sequence = at(id);
  if (sequence.open_batch != NO_BATCH) {
    throw std::invalid_argument(std::string("cannot ") + verb +
                                " a sequence of an open batch: commit or abandon the batch first");
  }
  if (sequence.swapped_out) {
    throw std::invalid_argument(std::string("cannot ") + verb +
                                " a sequence that is swapped out: swap it in first");
  }
  return sequence;
}

Sequences::Id Sequences::insert(Sequence sequence) {
  auto owned = std::make_unique<Sequence>(std::move(sequence));
  if (free_slots_.empty()) {
    // Room for every slot, so that free() cannot fail.
    if (free_slots_.capacity() <= slots_.size()) free_slots_.reserve(2 * slots_.size() + 16);
    free_slots_.push_back(static_cast<int64_t>(slots_.size()));
    slots_.emplace_back();
  }
  const int64_t index = free_slots_.back();
  free_slots_.pop_back();
  slots_[index].sequence = std::move(owned);
  return index | slots_[index].generation << SLOT_BITS;
}

Sequences::Id Sequences::add(std::vector<int64_t> token_ids, int64_t num_tokens,
                             const std::optional<BlockKey>& root) {
  require_count(num_tokens, "num_tokens");
  require_length(Sequence{}, num_tokens);
  Sequence sequence{.tables = empty_tables(allocator_), .num_tokens = num_tokens, .root = root};
  sequence.token_ids = std::move(token_ids);
  if (root) adopt_prefix(sequence);
  return insert(std::move(sequence));
}

void Sequences::require_length(const Sequence& sequence, int64_t num_new_tokens) const {
  if (num_new_tokens <= max_tokens_per_seq_ - sequence.num_tokens) return;
  throw std::invalid_argument("a sequence can have at most " + std::to_string(max_tokens_per_seq_) +
                              " tokens; this one has " + std::to_string(sequence.num_tokens) + ", and " +
                              std::to_string(num_new_tokens) + " more are too many");
}

void Sequences::append(Id id, std::span<const int64_t> token_ids) {
  Sequence& sequence = at(id);
  const int64_t num_new = static_cast<int64_t>(token_ids.size());
  require_length(sequence, num_new);
  // Behind tokens whose ids are not known, ids are of no use: only a prefix can be looked up.
  if (static_cast<int64_t>(sequence.token_ids.size()) == sequence.num_tokens) {
    sequence.token_ids.insert(sequence.token_ids.end(), token_ids.begin(), token_ids.end());
  }
  sequence.num_tokens += num_new;
}

void Sequences::append(Id id, int64_t num_tokens) {
  Sequence& sequence = at(id);
  require_count(num_tokens, "the number of tokens to append");
  require_length(sequence, num_tokens);
  sequence.num_tokens += num_tokens;
}

void Sequences::append_each(std::span<const Id> ids, std::span<const int64_t> token_ids) {
  if (!token_ids.empty()) require_same_length(ids.size(), token_ids.size(), "token_ids");
  ++num_visits_;
  std::vector<Sequence*> sequences;
  sequences.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    Sequence& sequence = at(ids[i]);
    require_length(sequence, 1);
    if (sequence.last_visit == num_visits_) {
      throw std::invalid_argument(entry("sequences", i) + " is listed twice");
    }
    sequence.last_visit = num_visits_;
    sequences.push_back(&sequence);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& sequence = *sequences[i];
    const bool named = static_cast<int64_t>(sequence.token_ids.size()) == sequence.num_tokens;
    if (!token_ids.empty() && named) sequence.token_ids.push_back(token_ids[i]);
    ++sequence.num_tokens;
  }
}

std::vector<BlockTable> Sequences::empty_tables(const std::shared_ptr<BlockAllocator>& allocator) const {
  std::vector<BlockTable> tables;
  tables.reserve(windows_.size());
  for (size_t group = 0; group < windows_.size(); ++group) tables.emplace_back(std::nullopt, allocator);
  return tables;
}

Sequences::Sequence Sequences::fork_of(const Sequence& parent) const {
  Sequence child{.num_tokens = parent.num_tokens,
                 .num_computed_tokens = parent.num_computed_tokens,
                 .root = parent.root,
                 .token_ids = parent.token_ids,
                 .num_cached_tokens = parent.num_cached_tokens,
                 .key = parent.key,
                 .num_keyed_blocks = parent.num_keyed_blocks};
  child.tables.reserve(parent.tables.size());
  for (const BlockTable& table : parent.tables) child.tables.push_back(table.fork());
  return child;
}

Sequences::Id Sequences::fork(Id id) { return insert(fork_of(closed(id, "fork"))); }

void Sequences::reorder(std::span<const Id> ids, std::span<const int64_t> parents) {
  require_same_length(ids.size(), parents.size(), "parents");
  distinct_members(ids);
  for (size_t i = 0; i < ids.size(); ++i) {
    closed(ids[i], "reorder");
    if (parents[i] < 0 || parents[i] >= static_cast<int64_t>(ids.size())) {
      throw std::invalid_argument(entry("parents", i) + " is " + std::to_string(parents[i]) +
                                  ", but must be an index of sequences, 0 to " +
                                  std::to_string(static_cast<int64_t>(ids.size()) - 1));
    }
  }
  // All forks are made before the first sequence is replaced, which is a parent perhaps.
  std::vector<std::pair<Id, std::unique_ptr<Sequence>>> replacements;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (parents[i] == static_cast<int64_t>(i)) continue;
    replacements.emplace_back(ids[i], std::make_unique<Sequence>(fork_of(at(ids[parents[i]]))));
  }
  for (auto& [id, sequence] : replacements) slots_[id & SLOT_MASK].sequence = std::move(sequence);
}

void Sequences::truncate(Id id, int64_t num_tokens) {
  Sequence& sequence = closed(id, "truncate");
  if (num_tokens < 0 || num_tokens > sequence.num_tokens) {
    throw std::invalid_argument("num_tokens must be 0 to " + std::to_string(sequence.num_tokens) +
                                " to truncate, got " + std::to_string(num_tokens));
  }
  if (num_tokens < sequence.num_computed_tokens) {
    int64_t num_computed = num_tokens;
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int64_t num_lost = sequence.tables[group].num_released() * allocator_->block_size();
      if (first_visible(group, num_tokens) < num_lost) num_computed = 0;
    }
    forget_keys_after(sequence, num_computed / allocator_->block_size());
    for (BlockTable& table : sequence.tables) table.truncate(num_computed);
    sequence.num_computed_tokens = num_computed;
  }
  if (num_tokens < static_cast<int64_t>(sequence.token_ids.size())) sequence.token_ids.resize(num_tokens);
  sequence.num_tokens = num_tokens;
}

int64_t Sequences::free(Id id) {
  if (!is_live(id)) return NO_BATCH;
  const int64_t index = id & SLOT_MASK;
  Slot& slot = slots_[index];
  const int64_t batch_id = slot.sequence->open_batch;
  if (batch_id != NO_BATCH) open_batches_.at(batch_id).stale = true;
  slot.sequence.reset();
  // A slot whose generations are used up is retired.
  if (++slot.generation < MAX_GENERATION) free_slots_.push_back(index);
  return batch_id;
}

int64_t Sequences::first_visible(int64_t group, int64_t query) const {
  const int64_t window = windows_[group];
  return window == NO_WINDOW ? 0 : std::max<int64_t>(0, query - window + 1);
}

PoolUsage Sequences::usage() const {
  const int64_t num_blocks = allocator_->num_blocks(), block_size = allocator_->block_size();
  PoolUsage usage{.owners = std::vector<int32_t>(num_blocks, 0),
                  .filled = std::vector<int64_t>(num_blocks, 0),
                  .label = std::vector<int32_t>(num_blocks, -1),
                  .cached = std::vector<uint8_t>(num_blocks, 0)};
  for (int64_t block = 0; block < allocator_->num_touched_blocks(); ++block) {
    usage.cached[block] = allocator_->is_cached(static_cast<int32_t>(block));
  }
  for (size_t slot_idx = 0; slot_idx < slots_.size(); ++slot_idx) {
    if (!slots_[slot_idx].sequence) continue;
    for (const BlockTable& table : slots_[slot_idx].sequence->tables) {
      int64_t num_tokens_left = table.num_tokens();
      for (const int32_t block : table.blocks()) {
        if (block != NO_BLOCK) {
          // A block that is the tail of one sequence may be full in another.
          usage.filled[block] = std::max(usage.filled[block], std::min(num_tokens_left, block_size));
          if (usage.owners[block]++ == 0) usage.label[block] = static_cast<int32_t>(slot_idx);
        }
        num_tokens_left -= block_size;
      }
    }
  }
  return usage;
}

Counts Sequences::counts() const {
  Counts counts{prefix_counts_};
  counts.num_used = allocator_->num_used_blocks();
  counts.num_cached = allocator_->num_cached_blocks();
  for (const int64_t num_filled : usage().filled) counts.num_filled_slots += num_filled;
  counts.peak_used = allocator_->peak_used_blocks();
  counts.num_evictions = allocator_->num_evictions();
  if (host_allocator_) {
    counts.num_host_used = host_allocator_->num_used_blocks();
    counts.num_host_cached = host_allocator_->num_cached_blocks();
  }
  return counts;
}

void Sequences::check_sequence(const Sequence& sequence) const {
  const std::vector<BlockTable>& tables = sequence.swapped_out ? sequence.host_tables : sequence.tables;
  const int64_t block_size = allocator_->block_size(), num_slots = tables[0].num_tokens();
  require(sequence.num_computed_tokens <= num_slots && num_slots <= sequence.num_tokens,
          "more tokens are computed than have slots, or more have slots than are known");
  require(static_cast<int64_t>(sequence.token_ids.size()) <= sequence.num_tokens, "more ids than tokens");
  const bool open = open_batches_.contains(sequence.open_batch);
  require(open == (sequence.open_batch != NO_BATCH), "a sequence is in a batch that does not exist");
  require(open || num_slots == sequence.num_computed_tokens,
          "tokens outside a batch have slots but no values");
  for (int64_t group = 0; group < num_groups(); ++group) {
    const BlockTable& table = tables[group];
    require(table.num_tokens() == num_slots, "the tables of a sequence differ in tokens");
    require(table.num_blocks() == blocks_for(num_slots, block_size), "a table has spare blocks");
    for (int64_t i = 0; i < table.num_blocks(); ++i) {
      require((table.blocks()[i] == NO_BLOCK) == (i < table.num_released()), "a table has a hole");
    }
    require(table.num_released() * block_size <= first_visible(group, sequence.num_computed_tokens),
            "a window lacks a block");
  }
  if (!sequence.root || sequence.swapped_out) return;
  BlockKey key = *sequence.root;
  require(sequence.num_keyed_blocks * block_size <= sequence.num_computed_tokens,
          "a block is keyed too early");
  for (int64_t i = 0; i < sequence.num_keyed_blocks; ++i) {
    const std::optional<BlockKey> next = keys_.find(key, block_tokens(sequence.token_ids, i));
    require(next.has_value(), "a sequence has tokens that nobody holds");
    key = *next;
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t block = sequence.tables[group].blocks()[i];
      require(block == NO_BLOCK || prefix_cache_.find(key, static_cast<int32_t>(group)) == block,
              "a sequence's full block is not the one that its tokens lead to");
    }
  }
  require(key == *sequence.key, "a sequence has the key of other tokens");
}

// Each block has as many owners as tables of sequences and transfers have it.
void Sequences::check_owners(const BlockAllocator& pool, std::vector<BlockTable> Sequence::* tables) const {
  std::vector<int32_t> owners(pool.num_touched_blocks(), 0);
  for (const Slot& slot : slots_) {
    if (!slot.sequence) continue;
    for (const BlockTable& table : (*slot.sequence).*tables) {
      for (int64_t i = table.num_released(); i < table.num_blocks(); ++i) ++owners.at(table.blocks()[i]);
    }
  }
  for (const auto& [id, transfer] : open_transfers_) {
    if (transfer.source != &pool) continue;
    for (const int32_t block : transfer.blocks) ++owners.at(block);
  }
  for (size_t block = 0; block < owners.size(); ++block) {
    require(owners[block] == pool.num_owners(static_cast<int32_t>(block)),
            "a block is not owned by as many sequences and transfers as have it");
  }
}

void Sequences::check_integrity() const {
  allocator_->check_integrity();
  prefix_cache_.check_integrity();
  check_owners(*allocator_, &Sequence::tables);
  for (const Slot& slot : slots_) {
    if (slot.sequence) check_sequence(*slot.sequence);
  }
  if (!host_allocator_) return;
  host_allocator_->check_integrity();
  host_prefix_cache_->check_integrity();
  check_owners(*host_allocator_, &Sequence::host_tables);
}

}  // namespace pagedkv
