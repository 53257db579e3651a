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
  for (const Member& member : members) {
    for (const BlockTable& table : member.sequence->tables) table.prefetch_tail();
  }
  return members;
}

void Sequences::RoomCount::add(const Member& member, const BlockAllocator& allocator) {
  const auto& [sequence, num_new_tokens] = member;
  if (num_new_tokens == 0) return;
  for (const BlockTable& table : sequence->tables) {
    // Beyond the pool is beyond the pool: a sum of large counts must not wrap around.
    num_blocks += std::min(table.num_new_blocks(num_new_tokens), BlockAllocator::MAX_BLOCKS);
    const int32_t tail = table.shared_tail();
    if (tail == NO_BLOCK) continue;
    const bool last_owner = ++tail_writers[tail] == allocator.num_owners(tail);
    num_blocks += table.is_tail_kept() || !last_owner;
  }
}

void Sequences::check_member(const Member& member, size_t index) const {
  const auto& [sequence, query_len] = member;
  if (sequence->open_batch != NO_BATCH) {
    throw std::invalid_argument(entry("sequences", index) +
                                " is in a batch that was neither committed nor abandoned: do either first");
  }
  const int64_t num_uncomputed = sequence->num_tokens - sequence->num_computed_tokens;
  if (query_len < 0 || query_len > num_uncomputed) {
    throw std::invalid_argument(entry("query_lens", index) + " is " + std::to_string(query_len) +
                                ", but the sequence has " + std::to_string(num_uncomputed) +
                                " uncomputed tokens (" + std::to_string(sequence->num_tokens) + " known, " +
                                std::to_string(sequence->num_computed_tokens) + " computed)");
  }
  if (query_len > MAX_TOKENS - sequence->num_computed_tokens) {
    throw std::invalid_argument(entry("sequences", index) +
                                " would have more than 2**31 - 1 computed tokens");
  }
}

void Sequences::check_room(const BatchShape& shape, const BatchArrays& arrays) {
  require_room("groups of layers", shape.num_groups, arrays.num_groups);
  require_room("sequences", shape.num_seqs, arrays.max_seqs);
  require_room("blocks of a sequence", shape.max_blocks, arrays.max_blocks);
  require_room("tokens", shape.num_tokens, arrays.max_tokens);
}

// A step of many sequences takes as long as the memory that it touches: as few passes over them as possible.
BatchShape Sequences::open_batch(std::span<const Id> ids, std::optional<std::span<const int64_t>> query_lens,
                                 const BatchArrays* arrays) {
  if (query_lens) require_same_length(ids.size(), query_lens->size(), "query_lens");
  std::vector<Member> members = distinct_members(ids);
  BatchShape shape{.num_groups = num_groups(), .num_seqs = static_cast<int64_t>(ids.size())};
  RoomCount needed;
  for (size_t i = 0; i < members.size(); ++i) {
    Member& member = members[i];
    if (query_lens) member.num_new_tokens = (*query_lens)[i];
    check_member(member, i);
    const BlockTable& table = member.sequence->tables[0];
    const int64_t query_len = member.num_new_tokens;
    shape.max_blocks = std::max(shape.max_blocks, table.num_blocks() + table.num_new_blocks(query_len));
    shape.max_query_len = std::max(shape.max_query_len, query_len);
    shape.num_tokens += query_len;
    if (shape.num_tokens > MAX_TOKENS) {
      throw std::invalid_argument("a batch can compute at most 2**31 - 1 tokens, this one has more");
    }
    needed.add(member, *allocator_);
  }
  if (arrays != nullptr) check_room(shape, *arrays);
  allocator_->require_available(needed.num_blocks, "the batch");

  shape.batch_id = next_batch_id_++;
  OpenBatch& batch = open_batches_[shape.batch_id];
  batch.ids.assign(ids.begin(), ids.end());
  batch.num_tokens = shape.num_tokens;
  for (const auto& [sequence, query_len] : members) {
    sequence->open_batch = shape.batch_id;
    for (int64_t group = 0; group < num_groups(); ++group) {
      BlockTable& table = sequence->tables[group];
      table.grow(query_len);
      // Not at the commit before: until now the sequence could be truncated to any token of that batch.
      if (windows_[group] != NO_WINDOW) {
        table.release_before(first_visible(group, sequence->num_computed_tokens));
      }
    }
  }
  batch.members = std::move(members);
  return shape;
}

int64_t Sequences::num_batch_tokens(int64_t batch_id) const {
  const auto batch = open_batches_.find(batch_id);
  return batch == open_batches_.end() ? 0 : batch->second.num_tokens;
}

// Sequences of an open batch stay where they are, unless they are freed.
Sequences::OpenBatch& Sequences::whole_batch(int64_t batch_id) {
  const auto batch = open_batches_.find(batch_id);
  if (batch == open_batches_.end()) throw std::invalid_argument("the batch is not open");
  if (batch->second.stale) {
    throw std::invalid_argument("a sequence of the batch was freed: abandon the batch");
  }
  return batch->second;
}

void Sequences::fill_batch(const BatchShape& shape, BatchArrays& arrays) {
  const OpenBatch& batch = whole_batch(shape.batch_id);
  int64_t num_query_tokens = 0, seq_idx = 0;
  arrays.query_start_loc[0] = 0;
  for (const auto& [sequence, query_len] : batch.members) {
    const std::vector<BlockTable>& tables = sequence->tables;
    const int64_t context_len = tables[0].num_tokens();
    for (int64_t group = 0; group < shape.num_groups; ++group) {
      const BlockTable& table = tables[group];
      const int64_t row_idx = group * arrays.max_seqs + seq_idx;
      auto& [revision, num_blocks] = arrays.rows[row_idx];
      int32_t* row = arrays.block_tables + row_idx * arrays.max_blocks;
      if (revision != table.revision()) {
        num_blocks = 0;
        revision = table.revision();
        std::fill(row + table.num_blocks(), row + arrays.max_blocks, NO_BLOCK);
      }
      // Mostly there is nothing new.
      if (num_blocks != table.num_blocks()) {
        std::copy(table.blocks().begin() + num_blocks, table.blocks().end(), row + num_blocks);
        num_blocks = table.num_blocks();
      }
      int64_t* slots = arrays.slot_mapping + group * arrays.max_tokens + num_query_tokens;
      if (query_len == 1) {
        *slots = table.last_slot();
      } else {
        table.write_slots(context_len - query_len, context_len, slots);
      }
    }
    arrays.context_lens[seq_idx++] = static_cast<int32_t>(context_len);
    num_query_tokens += query_len;
    arrays.query_start_loc[seq_idx] = static_cast<int32_t>(num_query_tokens);
  }
}

std::vector<CopyPair> Sequences::take_pending_copies(int64_t batch_id) {
  std::vector<CopyPair> pairs;
  for (const Member& member : whole_batch(batch_id).members) {
    for (BlockTable& table : member.sequence->tables) {
      if (!table.may_have_pending_copies()) continue;
      const std::vector<CopyPair> taken = table.take_pending_copies();
      pairs.insert(pairs.end(), taken.begin(), taken.end());
    }
  }
  return pairs;
}

void Sequences::commit(int64_t batch_id) {
  for (const Member& member : whole_batch(batch_id).members) {
    Sequence& sequence = *member.sequence;
    sequence.num_computed_tokens = sequence.tables[0].num_tokens();
    sequence.open_batch = NO_BATCH;
    if (sequence.root) cache_full_blocks(sequence);
  }
  open_batches_.erase(batch_id);
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
  for (size_t i = 0; i < members.size(); ++i) require_count(counts[i], "counts", i);
  RoomCount needed;
  for (size_t i = 0; i < members.size(); ++i) {
    if (counts[i] > max_tokens_per_seq_ - members[i].sequence->num_tokens) return false;
    members[i].num_new_tokens += counts[i];
    needed.add(members[i], *allocator_);
  }
  return needed.num_blocks <= allocator_->num_available_blocks();
}

}  // namespace pagedkv
