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
  sequences.fill_batch(shape, block_tables.data(), context_lens.data(), query_start_loc.data(), slots.data());
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

}  // namespace pagedkv::test

int main() {
  using namespace pagedkv::test;
  a_batch_as_arrays();
  an_id_is_never_reused();
  all_writers_of_a_tail_in_one_batch();
  random_use_is_predicted_exactly();
  return num_failures == 0 ? 0 : 1;
}
