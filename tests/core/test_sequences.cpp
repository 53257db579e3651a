#include "core/sequences.h"

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "check.h"

namespace pagedkv::test {

using Ids = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

int64_t compute_all(Sequences& sequences, const Longs& ids) {
  const BatchShape shape = sequences.open_batch(ids, std::nullopt);
  sequences.take_pending_copies(shape.batch_id);
  sequences.commit(shape.batch_id);
  return shape.num_tokens;
}

void a_batch_as_arrays() {
  Sequences sequences(8, 4);
  const int64_t a = sequences.add({}, 6), b = sequences.add({7, 8}, 2), c = sequences.add({}, 0);
  const Longs query_lens{5, 1, 0};
  const BatchShape shape = sequences.open_batch(Longs{a, b, c}, query_lens);
  CHECK(shape.num_seqs == 3 && shape.max_blocks == 2 && shape.num_tokens == 6 && shape.max_query_len == 5);
  Ids block_tables(6), context_lens(3), query_start_loc(4);
  Longs slots(6);
  BatchArrays arrays{.num_groups = 1,
                     .max_seqs = 3,
                     .max_blocks = 2,
                     .max_tokens = 6,
                     .block_tables = block_tables.data(),
                     .context_lens = context_lens.data(),
                     .query_start_loc = query_start_loc.data(),
                     .slot_mapping = slots.data(),
                     .rows = std::vector<BatchArrays::Row>(3)};
  sequences.fill_batch(shape, arrays);
  CHECK(block_tables == (Ids{0, 1, 2, -1, -1, -1}));
  CHECK(context_lens == (Ids{5, 1, 0}));
  CHECK(query_start_loc == (Ids{0, 5, 6, 6}));
  CHECK(slots == (Longs{0, 1, 2, 3, 4, 8}));
  sequences.check_integrity();
}

void an_id_is_never_reused() {
  Sequences sequences(8, 4);
  const int64_t first = sequences.add({}, 1);
  sequences.free(first);
  const int64_t second = sequences.add({}, 2);
  CHECK(first != second && !sequences.is_live(first) && sequences.num_tokens(second) == 2);
  CHECK(sequences.free(first) == Sequences::NO_BATCH);
  CHECK(sequences.is_live(second));
  CHECK(!sequences.is_live(-1) && !sequences.is_live(12345));
}

void all_writers_of_a_tail_in_one_batch() {
  // Four tables own a tail. Two writers copy it; all four make three copies, and the last one writes in
  // place.
  for (const int num_writers : {2, 4}) {
    const int64_t num_copies = num_writers == 4 ? 3 : 2;
    Sequences sequences(2 + num_copies, 4);  // just enough
    const int64_t parent = sequences.add({}, 6);
    compute_all(sequences, {parent});
    Longs all{parent};
    for (int i = 0; i < 3; ++i) all.push_back(sequences.fork(parent));
    for (const int64_t id : all) sequences.append(id, int64_t{1});
    const Longs writers(all.begin(), all.begin() + num_writers);
    const BatchShape shape = sequences.open_batch(writers, std::nullopt);
    CHECK(static_cast<int64_t>(sequences.take_pending_copies(shape.batch_id).size()) == num_copies);
    CHECK(sequences.allocator().num_free_blocks() == 0);
    sequences.check_integrity();
  }
}

void random_use_is_predicted_exactly() {
  std::mt19937 random(2);
  Sequences sequences(24, 4);
  Longs live;
  int num_full = 0;
  for (int step = 0; step < 20000; ++step) {
    const auto pick = [&] { return live[random() % live.size()]; };
    const unsigned action = random() % 8;
    if (live.empty() || (action == 0 && live.size() < 12)) {
      live.push_back(sequences.add({}, random() % 20));
    } else if (action == 1 && live.size() < 12) {
      live.push_back(sequences.fork(pick()));
    } else if (action == 2) {
      std::swap(live[random() % live.size()], live.back());
      sequences.free(live.back());
      live.pop_back();
    } else if (action == 3) {
      const int64_t id = pick();
      sequences.truncate(id, random() % (sequences.num_tokens(id) + 1));
    } else if (action == 4) {
      sequences.append(pick(), static_cast<int64_t>(random() % 6));
    } else {
      std::shuffle(live.begin(), live.end(), random);
      const Longs members(live.begin(), live.begin() + random() % (live.size() + 1));
      const bool fits = sequences.can_append(members, Longs(members.size(), 0));
      if (!fits) {
        ++num_full;
        CHECK(throws<OutOfMemory>([&] { sequences.open_batch(members, std::nullopt); }));
      } else {
        const BatchShape shape = sequences.open_batch(members, std::nullopt);
        sequences.take_pending_copies(shape.batch_id);
        sequences.check_integrity();
        if (action == 5) {
          sequences.abandon(shape.batch_id);
        } else {
          sequences.commit(shape.batch_id);
        }
      }
    }
    sequences.check_integrity();
  }
  CHECK(num_full > 100);
  for (const int64_t id : live) sequences.free(id);
  CHECK(sequences.allocator().num_free_blocks() == 24);
}

// Prefixes, windows and a host pool, under constant eviction, with copies that take their time.
void random_use_of_everything(bool compare_tokens) {
  std::mt19937 random(3);
  const BlockKey root = SHA256_INITIAL_STATE;
  SequencesOptions options;
  options.windows = {Sequences::NO_WINDOW, 3};
  options.num_host_blocks = 12;
  options.compare_tokens = compare_tokens;
  if (compare_tokens) options.key_bits = 2;
  Sequences sequences(24, 2, options);
  Longs live, transfers;
  int num_moved_prefixes = 0;
  const auto some_tokens = [&] {
    Longs tokens(random() % 9);
    for (int64_t& token : tokens) token = random() % 8 == 0;
    return tokens;
  };
  const auto finish_some = [&](size_t num_left) {
    while (transfers.size() > num_left) {
      std::swap(transfers[random() % transfers.size()], transfers.back());
      sequences.finish_transfer(transfers.back());
      transfers.pop_back();
    }
  };
  for (int step = 0; step < 20000; ++step) {
    finish_some(random() % 4);
    const unsigned action = random() % 9;
    if (live.empty() || (action == 0 && live.size() < 8)) {
      Longs tokens = some_tokens();
      const bool fits = sequences.can_allocate(tokens, root, 0);
      const int64_t num_known = sequences.probe(tokens, root);
      const int64_t num_tokens = static_cast<int64_t>(tokens.size());
      live.push_back(sequences.add(std::move(tokens), num_tokens, root));
      CHECK(sequences.num_cached_tokens(live.back()) == num_known);
      CHECK(sequences.can_append(Longs{live.back()}, Longs{0}) == fits);
      for (const Transfer& arrival : sequences.take_arrivals()) transfers.push_back(arrival.transfer_id);
    }
    const size_t index = random() % live.size();
    const int64_t id = live[index];
    const bool away = sequences.is_swapped_out(id);
    if (action == 1) {
      sequences.free(id);
      live.erase(live.begin() + index);
    } else if (action == 2 || away) {
      try {
        transfers.push_back((away ? sequences.swap_in(id) : sequences.swap_out(id)).transfer_id);
      } catch (const OutOfMemory&) {
        CHECK(sequences.is_swapped_out(id) == away);
      }
    } else if (action == 3) {
      sequences.truncate(id, random() % (sequences.num_tokens(id) + 1));
    } else if (action == 4 && live.size() < 8) {
      live.push_back(sequences.fork(id));
    } else if (action == 5) {
      sequences.evict(random() % 3);
    } else if (action == 6) {
      int64_t num_moved = 0;
      transfers.push_back(sequences.swap_out_prefixes(random() % 3, num_moved).transfer_id);
      num_moved_prefixes += static_cast<int>(num_moved);
    } else {
      sequences.append(id, some_tokens());
      if (sequences.can_append(Longs{id}, Longs{0})) compute_all(sequences, {id});
    }
    sequences.check_integrity();
  }
  finish_some(0);
  const Counts counts = sequences.counts();
  CHECK(counts.num_hit_tokens > 1000 && counts.num_evictions > 500);
  CHECK(counts.num_host_hits > 100 && num_moved_prefixes > 100);
  for (const int64_t id : live) sequences.free(id);
  CHECK(sequences.allocator().num_free_blocks() == 24);
  CHECK(sequences.host_allocator()->num_free_blocks() == 12);
  sequences.reset_prefix_cache();
  CHECK(sequences.counts().num_cached + sequences.counts().num_host_cached == 0);
}

}  // namespace pagedkv::test

int main() {
  using namespace pagedkv::test;
  a_batch_as_arrays();
  an_id_is_never_reused();
  all_writers_of_a_tail_in_one_batch();
  random_use_is_predicted_exactly();
  random_use_of_everything(false);
  random_use_of_everything(true);
  return num_failures == 0 ? 0 : 1;
}
