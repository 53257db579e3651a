#include "core/sequences.h"

#include <algorithm>
#include <limits>
#include <string>

namespace pagedkv {

namespace {

constexpr int SLOT_BITS = 32;
constexpr int64_t SLOT_MASK = (int64_t{1} << SLOT_BITS) - 1;
constexpr int64_t MAX_GENERATION = (int64_t{1} << 31) - 1;

// The arrays of a batch are int32, except slot_mapping.
constexpr int64_t MAX_TOKENS = std::numeric_limits<int32_t>::max();

std::string entry(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

void require_same_length(size_t num_ids, size_t num_counts, const char* counts) {
  if (num_ids == num_counts) return;
  throw std::invalid_argument(std::string(counts) + " has " + std::to_string(num_counts) + " entries for " +
                              std::to_string(num_ids) + " sequences");
}

void require_count(int64_t count, const std::string& name) {
  if (count < 0) throw std::invalid_argument(name + " must not be negative, got " + std::to_string(count));
}

void require_sum(int64_t num_tokens, int64_t count) {
  if (count <= std::numeric_limits<int64_t>::max() - num_tokens) return;
  throw std::invalid_argument("a sequence cannot have 2**63 tokens");
}

void require(bool holds, const char* invariant) {
  if (!holds) throw std::logic_error(std::string("Sequences is corrupt: ") + invariant);
}

}  // namespace

Sequences::Sequences(int64_t num_blocks, int64_t block_size)
    : allocator_(std::make_shared<BlockAllocator>(num_blocks, block_size)) {}

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

Sequences::Id Sequences::add(std::vector<int64_t> token_ids, int64_t num_tokens) {
  require_count(num_tokens, "num_tokens");
  return insert({.table = BlockTable(std::nullopt, allocator_),
                 .token_ids = std::move(token_ids),
                 .num_tokens = num_tokens});
}

void Sequences::append(Id id, std::span<const int64_t> token_ids) {
  Sequence& sequence = at(id);
  const int64_t num_new = static_cast<int64_t>(token_ids.size());
  require_sum(sequence.num_tokens, num_new);
  // Behind tokens whose ids are not known, ids are of no use: only a prefix can be looked up.
  if (static_cast<int64_t>(sequence.token_ids.size()) == sequence.num_tokens) {
    sequence.token_ids.insert(sequence.token_ids.end(), token_ids.begin(), token_ids.end());
  }
  sequence.num_tokens += num_new;
}

void Sequences::append(Id id, int64_t num_tokens) {
  Sequence& sequence = at(id);
  require_count(num_tokens, "the number of tokens to append");
  require_sum(sequence.num_tokens, num_tokens);
  sequence.num_tokens += num_tokens;
}

Sequences::Id Sequences::fork(Id id) {
  const Sequence& parent = closed(id, "fork");
  return insert({.table = parent.table.fork(),
                 .token_ids = parent.token_ids,
                 .num_tokens = parent.num_tokens,
                 .num_computed_tokens = parent.num_computed_tokens});
}

void Sequences::truncate(Id id, int64_t num_tokens) {
  Sequence& sequence = closed(id, "truncate");
  if (num_tokens < 0 || num_tokens > sequence.num_tokens) {
    throw std::invalid_argument("num_tokens must be 0 to " + std::to_string(sequence.num_tokens) +
                                " to truncate, got " + std::to_string(num_tokens));
  }
  if (num_tokens < sequence.num_computed_tokens) {
    sequence.table.truncate(num_tokens);
    sequence.num_computed_tokens = num_tokens;
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

std::vector<Sequences::Member> Sequences::distinct_members(std::span<const Id> ids) {
  ++num_visits_;
  std::vector<Member> members;
  members.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    Sequence* sequence = find(ids[i]);
    if (sequence == nullptr) throw std::invalid_argument(entry("sequences", i) + " was freed");
    if (sequence->last_visit == num_visits_) {
      throw std::invalid_argument(entry("sequences", i) + " is listed twice");
    }
    sequence->last_visit = num_visits_;
    members.push_back({sequence, sequence->num_tokens - sequence->table.num_tokens()});
  }
  return members;
}

int64_t Sequences::blocks_needed(std::span<const Member> members) const {
  int64_t num_needed = 0;
  // Of all owners of a tail that are written here, each copies it while others are left, in the order of the
  // batch.
  std::unordered_map<int32_t, int32_t> tail_writers;
  for (const auto& [sequence, num_new_tokens] : members) {
    if (num_new_tokens == 0) continue;
    const int64_t num_new_blocks = sequence->table.num_new_blocks(num_new_tokens);
    // Beyond the pool is beyond the pool: a sum of large counts must not wrap around.
    num_needed += std::min(num_new_blocks, BlockAllocator::MAX_BLOCKS);
    const int32_t tail = sequence->table.shared_tail();
    if (tail != NO_BLOCK && ++tail_writers[tail] < allocator_->num_owners(tail)) ++num_needed;
  }
  return num_needed;
}

void Sequences::check_members(std::span<const Member> members, std::span<const int64_t> query_lens) const {
  int64_t num_query_tokens = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    const Sequence& sequence = *members[i].sequence;
    if (sequence.open_batch != NO_BATCH) {
      throw std::invalid_argument(entry("sequences", i) +
                                  " is in a batch that was neither committed nor abandoned: do either first");
    }
    const int64_t query_len = query_lens.empty() ? members[i].num_new_tokens : query_lens[i];
    const int64_t num_uncomputed = sequence.num_tokens - sequence.num_computed_tokens;
    if (query_len < 0 || query_len > num_uncomputed) {
      throw std::invalid_argument(entry("query_lens", i) + " is " + std::to_string(query_len) +
                                  ", but the sequence has " + std::to_string(num_uncomputed) +
                                  " uncomputed tokens (" + std::to_string(sequence.num_tokens) + " known, " +
                                  std::to_string(sequence.num_computed_tokens) + " computed)");
    }
    if (query_len > MAX_TOKENS - sequence.num_computed_tokens) {
      throw std::invalid_argument(entry("sequences", i) + " would have more than 2**31 - 1 computed tokens");
    }
    num_query_tokens += query_len;
    if (num_query_tokens > MAX_TOKENS) {
      throw std::invalid_argument("a batch can compute at most 2**31 - 1 tokens, this one has more");
    }
  }
}

BatchShape Sequences::open_batch(std::span<const Id> ids,
                                 std::optional<std::span<const int64_t>> query_lens) {
  if (query_lens) require_same_length(ids.size(), query_lens->size(), "query_lens");
  std::vector<Member> members = distinct_members(ids);
  check_members(members, query_lens.value_or(std::span<const int64_t>()));
  if (query_lens) {
    for (size_t i = 0; i < members.size(); ++i) members[i].num_new_tokens = (*query_lens)[i];
  }
  if (const int64_t num_needed = blocks_needed(members); num_needed > allocator_->num_free_blocks()) {
    throw OutOfMemory("No free blocks available: the batch needs " + std::to_string(num_needed) + ", " +
                      std::to_string(allocator_->num_free_blocks()) + " of " +
                      std::to_string(allocator_->num_blocks()) + " are free");
  }

  BatchShape shape{.batch_id = next_batch_id_++, .num_seqs = static_cast<int64_t>(ids.size())};
  OpenBatch& batch = open_batches_[shape.batch_id];
  batch.ids.assign(ids.begin(), ids.end());
  batch.query_lens.reserve(ids.size());
  for (const auto& [sequence, query_len] : members) {
    sequence->table.grow(query_len);
    sequence->open_batch = shape.batch_id;
    batch.query_lens.push_back(query_len);
    shape.max_blocks = std::max(shape.max_blocks, sequence->table.num_blocks());
    shape.num_tokens += query_len;
    shape.max_query_len = std::max(shape.max_query_len, query_len);
  }
  return shape;
}

void Sequences::fill_batch(const BatchShape& shape, int32_t* block_tables, int32_t* context_lens,
                           int32_t* query_start_loc, int64_t* slot_mapping) const {
  const OpenBatch& batch = open_batches_.at(shape.batch_id);
  int64_t num_query_tokens = 0;
  query_start_loc[0] = 0;
  for (size_t seq_idx = 0; seq_idx < batch.ids.size(); ++seq_idx) {
    const BlockTable& table = at(batch.ids[seq_idx]).table;
    const int64_t query_len = batch.query_lens[seq_idx];
    int32_t* row = block_tables + seq_idx * shape.max_blocks;
    std::fill(std::copy(table.blocks().begin(), table.blocks().end(), row), row + shape.max_blocks, NO_BLOCK);
    context_lens[seq_idx] = static_cast<int32_t>(table.num_tokens());
    table.write_slots(table.num_tokens() - query_len, table.num_tokens(), slot_mapping + num_query_tokens);
    num_query_tokens += query_len;
    query_start_loc[seq_idx + 1] = static_cast<int32_t>(num_query_tokens);
  }
}

std::vector<CopyPair> Sequences::take_pending_copies(int64_t batch_id) {
  std::vector<CopyPair> pairs;
  for (const Id id : open_batches_.at(batch_id).ids) {
    const std::vector<CopyPair> taken = at(id).table.take_pending_copies();
    pairs.insert(pairs.end(), taken.begin(), taken.end());
  }
  return pairs;
}

void Sequences::commit(int64_t batch_id) {
  const auto batch = open_batches_.find(batch_id);
  if (batch == open_batches_.end()) throw std::invalid_argument("the batch is not open");
  if (batch->second.stale) {
    throw std::invalid_argument("a sequence of the batch was freed: abandon the batch");
  }
  for (const Id id : batch->second.ids) {
    Sequence& sequence = at(id);
    sequence.num_computed_tokens = sequence.table.num_tokens();
    sequence.open_batch = NO_BATCH;
  }
  open_batches_.erase(batch);
}

void Sequences::abandon(int64_t batch_id) {
  const auto batch = open_batches_.find(batch_id);
  if (batch == open_batches_.end()) throw std::invalid_argument("the batch is not open");
  for (const Id id : batch->second.ids) {
    Sequence* sequence = find(id);
    if (sequence == nullptr) continue;  // freed since
    sequence->table.truncate(sequence->num_computed_tokens);
    sequence->open_batch = NO_BATCH;
  }
  open_batches_.erase(batch);
}

bool Sequences::can_append(std::span<const Id> ids, std::span<const int64_t> counts) {
  require_same_length(ids.size(), counts.size(), "counts");
  std::vector<Member> members = distinct_members(ids);
  for (size_t i = 0; i < members.size(); ++i) {
    require_count(counts[i], entry("counts", i));
    require_sum(members[i].sequence->num_tokens, counts[i]);
    members[i].num_new_tokens += counts[i];
  }
  return blocks_needed(members) <= allocator_->num_free_blocks();
}

PoolUsage Sequences::usage() const {
  const int64_t num_blocks = allocator_->num_blocks();
  PoolUsage usage{.owners = std::vector<int32_t>(num_blocks, 0),
                  .filled = std::vector<int64_t>(num_blocks, 0),
                  .label = std::vector<int32_t>(num_blocks, -1)};
  for (size_t slot_idx = 0; slot_idx < slots_.size(); ++slot_idx) {
    if (!slots_[slot_idx].sequence) continue;
    const BlockTable& table = slots_[slot_idx].sequence->table;
    int64_t num_tokens_left = table.num_tokens();
    for (const int32_t block : table.blocks()) {
      // A block that is the tail of one sequence may be full in another.
      usage.filled[block] = std::max(usage.filled[block], std::min(num_tokens_left, table.block_size()));
      if (usage.owners[block]++ == 0) usage.label[block] = static_cast<int32_t>(slot_idx);
      num_tokens_left -= table.block_size();
    }
  }
  return usage;
}

void Sequences::check_integrity() const {
  allocator_->check_integrity();
  const PoolUsage pool = usage();
  const std::vector<int32_t> ref_counts = allocator_->block_ref_counts();
  require(pool.owners == ref_counts, "a block is not owned by as many sequences as map it");
  for (const Slot& slot : slots_) {
    if (!slot.sequence) continue;
    const Sequence& sequence = *slot.sequence;
    const int64_t num_slots = sequence.table.num_tokens();
    require(sequence.table.num_blocks() == blocks_for(num_slots, allocator_->block_size()),
            "a table has spare blocks");
    require(sequence.num_computed_tokens <= num_slots && num_slots <= sequence.num_tokens,
            "more tokens are computed than have slots, or more have slots than are known");
    require(static_cast<int64_t>(sequence.token_ids.size()) <= sequence.num_tokens, "more ids than tokens");
    const bool open = open_batches_.contains(sequence.open_batch);
    require(open == (sequence.open_batch != NO_BATCH), "a sequence is in a batch that does not exist");
    require(open || num_slots == sequence.num_computed_tokens,
            "tokens outside a batch have slots but no values");
  }
}

}  // namespace pagedkv
