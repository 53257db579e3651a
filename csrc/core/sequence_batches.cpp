// Batches of sequences: taking their blocks, their arrays, their end.
#include <algorithm>
#include <limits>
#include <string>

#include "core/sequence_checks.h"
#include "core/sequences.h"

namespace pagedkv {

namespace {

// The arrays of a batch are int32, except slot_mapping.
constexpr int64_t MAX_TOKENS = std::numeric_limits<int32_t>::max();

void require_room(const char* what, int64_t needed, int64_t room) {
  if (needed <= room) return;
  throw std::invalid_argument("the batch has " + std::to_string(needed) + " " + what +
                              ", but its buffers hold " + std::to_string(room));
}

}  // namespace

std::vector<Sequences::Member> Sequences::distinct_members(std::span<const Id> ids) {
  ++num_visits_;
  std::vector<Member> members;
  members.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    Sequence* sequence = find(ids[i]);
    if (sequence == nullptr) throw std::invalid_argument(entry("sequences", i) + " was freed");
    if (sequence->swapped_out) {
      throw std::invalid_argument(entry("sequences", i) + " is swapped out: swap it in first");
    }
    if (sequence->last_visit == num_visits_) {
      throw std::invalid_argument(entry("sequences", i) + " is listed twice");
    }
    sequence->last_visit = num_visits_;
    members.push_back({sequence, sequence->num_tokens - sequence->tables[0].num_tokens()});
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
    for (const BlockTable& table : sequence->tables) {
      // Beyond the pool is beyond the pool: a sum of large counts must not wrap around.
      num_needed += std::min(table.num_new_blocks(num_new_tokens), BlockAllocator::MAX_BLOCKS);
      const int32_t tail = table.shared_tail();
      if (tail == NO_BLOCK) continue;
      const bool last_owner = ++tail_writers[tail] == allocator_->num_owners(tail);
      num_needed += table.is_tail_kept() || !last_owner;
    }
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

void Sequences::check_room(std::span<const Member> members, const BatchArrays& arrays) const {
  int64_t max_blocks = 0, num_query_tokens = 0;
  for (const auto& [sequence, query_len] : members) {
    const BlockTable& table = sequence->tables[0];
    max_blocks = std::max(max_blocks, table.num_blocks() + table.num_new_blocks(query_len));
    num_query_tokens += query_len;
  }
  require_room("groups of layers", num_groups(), arrays.num_groups);
  require_room("sequences", static_cast<int64_t>(members.size()), arrays.max_seqs);
  require_room("blocks of a sequence", max_blocks, arrays.max_blocks);
  require_room("tokens", num_query_tokens, arrays.max_tokens);
}

BatchShape Sequences::open_batch(std::span<const Id> ids, std::optional<std::span<const int64_t>> query_lens,
                                 const BatchArrays* arrays) {
  if (query_lens) require_same_length(ids.size(), query_lens->size(), "query_lens");
  std::vector<Member> members = distinct_members(ids);
  check_members(members, query_lens.value_or(std::span<const int64_t>()));
  if (query_lens) {
    for (size_t i = 0; i < members.size(); ++i) members[i].num_new_tokens = (*query_lens)[i];
  }
  if (arrays != nullptr) check_room(members, *arrays);
  allocator_->require_available(blocks_needed(members), "the batch");

  BatchShape shape{
      .batch_id = next_batch_id_++, .num_groups = num_groups(), .num_seqs = static_cast<int64_t>(ids.size())};
  OpenBatch& batch = open_batches_[shape.batch_id];
  batch.ids.assign(ids.begin(), ids.end());
  batch.query_lens.reserve(ids.size());
  for (const auto& [sequence, query_len] : members) {
    for (int64_t group = 0; group < num_groups(); ++group) {
      sequence->tables[group].grow(query_len);
      // Not at the commit before: until now the sequence could be truncated to any token of that batch.
      sequence->tables[group].release_before(first_visible(group, sequence->num_computed_tokens));
    }
    sequence->open_batch = shape.batch_id;
    batch.query_lens.push_back(query_len);
    shape.max_blocks = std::max(shape.max_blocks, sequence->tables[0].num_blocks());
    shape.num_tokens += query_len;
    shape.max_query_len = std::max(shape.max_query_len, query_len);
  }
  batch.num_tokens = shape.num_tokens;
  return shape;
}

int64_t Sequences::num_batch_tokens(int64_t batch_id) const {
  const auto batch = open_batches_.find(batch_id);
  return batch == open_batches_.end() ? 0 : batch->second.num_tokens;
}

void Sequences::fill_batch(const BatchShape& shape, BatchArrays& arrays) const {
  const OpenBatch& batch = open_batches_.at(shape.batch_id);
  int64_t num_query_tokens = 0;
  arrays.query_start_loc[0] = 0;
  for (size_t seq_idx = 0; seq_idx < batch.ids.size(); ++seq_idx) {
    const std::vector<BlockTable>& tables = at(batch.ids[seq_idx]).tables;
    const int64_t query_len = batch.query_lens[seq_idx], context_len = tables[0].num_tokens();
    for (int64_t group = 0; group < shape.num_groups; ++group) {
      const BlockTable& table = tables[group];
      const int64_t row_idx = group * arrays.max_seqs + static_cast<int64_t>(seq_idx);
      auto& [revision, num_blocks] = arrays.rows[row_idx];
      int32_t* row = arrays.block_tables + row_idx * arrays.max_blocks;
      if (revision != table.revision()) {
        num_blocks = 0;
        revision = table.revision();
        std::fill(row + table.num_blocks(), row + arrays.max_blocks, NO_BLOCK);
      }
      std::copy(table.blocks().begin() + num_blocks, table.blocks().end(), row + num_blocks);
      num_blocks = table.num_blocks();
      table.write_slots(context_len - query_len, context_len,
                        arrays.slot_mapping + group * arrays.max_tokens + num_query_tokens);
    }
    arrays.context_lens[seq_idx] = static_cast<int32_t>(context_len);
    num_query_tokens += query_len;
    arrays.query_start_loc[seq_idx + 1] = static_cast<int32_t>(num_query_tokens);
  }
}

std::vector<CopyPair> Sequences::take_pending_copies(int64_t batch_id) {
  std::vector<CopyPair> pairs;
  for (const Id id : open_batches_.at(batch_id).ids) {
    for (BlockTable& table : at(id).tables) {
      if (!table.may_have_pending_copies()) continue;
      const std::vector<CopyPair> taken = table.take_pending_copies();
      pairs.insert(pairs.end(), taken.begin(), taken.end());
    }
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
    sequence.num_computed_tokens = sequence.tables[0].num_tokens();
    sequence.open_batch = NO_BATCH;
    if (sequence.root) cache_full_blocks(sequence);
  }
  open_batches_.erase(batch);
}

void Sequences::abandon(int64_t batch_id) {
  const auto batch = open_batches_.find(batch_id);
  if (batch == open_batches_.end()) throw std::invalid_argument("the batch is not open");
  for (const Id id : batch->second.ids) {
    Sequence* sequence = find(id);
    if (sequence == nullptr) continue;  // freed since
    for (BlockTable& table : sequence->tables) table.truncate(sequence->num_computed_tokens);
    sequence->open_batch = NO_BATCH;
  }
  open_batches_.erase(batch);
}

bool Sequences::can_append(std::span<const Id> ids, std::span<const int64_t> counts) {
  require_same_length(ids.size(), counts.size(), "counts");
  std::vector<Member> members = distinct_members(ids);
  for (size_t i = 0; i < members.size(); ++i) {
    require_count(counts[i], "counts", i);
    if (counts[i] > max_tokens_per_seq_ - members[i].sequence->num_tokens) return false;
    members[i].num_new_tokens += counts[i];
  }
  return blocks_needed(members) <= allocator_->num_available_blocks();
}

}  // namespace pagedkv
