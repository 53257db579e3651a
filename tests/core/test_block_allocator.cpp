#include "core/block_allocator.h"

#include <random>
#include <vector>

#include "check.h"

namespace pagedkv::test {

using Ids = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

void hands_out_freed_blocks_first() {
  BlockAllocator pool(6, 16);
  CHECK(pool.allocate_many(4) == (Ids{0, 1, 2, 3}));
  pool.free(1);
  pool.free(3);
  CHECK(pool.free_blocks() == (Ids{3, 1, 4, 5}));
  CHECK(pool.allocate_many(3) == (Ids{3, 1, 4}));
  CHECK(pool.num_free_blocks() == 1);
  CHECK(pool.peak_used_blocks() == 5);
  pool.check_integrity();
}

void refuses_without_changing_anything() {
  BlockAllocator pool(3, 16);
  CHECK(throws<OutOfMemory>([&] { pool.allocate_many(4); }));
  CHECK(pool.num_free_blocks() == 3);
  CHECK(pool.allocate_many(3).size() == 3);
  CHECK(throws<OutOfMemory>([&] { pool.allocate(); }));
  CHECK(throws<std::invalid_argument>([&] { pool.free_many(Longs{0, 1, 1}); }));
  CHECK(throws<std::invalid_argument>([&] { pool.free_many(Longs{2, 3}); }));
  CHECK(throws<std::invalid_argument>([&] { pool.free(-1); }));
  CHECK(throws<std::invalid_argument>([&] { pool.free(int64_t{1} << 32); }));
  CHECK(throws<std::invalid_argument>([&] { pool.allocate_many(-1); }));
  CHECK(pool.block_ref_counts() == (Ids{1, 1, 1}));
  pool.free(0);
  CHECK(throws<std::invalid_argument>([&] { pool.free(0); }));
  CHECK(throws<std::invalid_argument>([&] { pool.incr_ref(0); }));
  pool.check_integrity();
}

void keeps_a_source_until_its_copy_is_taken() {
  BlockAllocator pool(4, 16);
  const int32_t source = pool.allocate();
  pool.incr_ref(source);
  const int32_t destination = pool.copy_on_write(source);
  CHECK(pool.num_owners(source) == 1);
  CHECK(pool.block_ref_counts() == (Ids{2, 1, 0, 0}));
  pool.free(source);
  CHECK(pool.num_free_blocks() == 2);
  CHECK(throws<std::invalid_argument>([&] { pool.free(source); }));
  pool.check_integrity();
  const CopyPair pair = pool.take_copy(destination);
  CHECK(pair.source == source && pair.destination == destination);
  CHECK(pool.num_free_blocks() == 3);
  pool.check_integrity();
}

void drops_a_copy_whose_destination_goes_away() {
  BlockAllocator pool(4, 16);
  const int32_t source = pool.allocate();
  pool.incr_ref(source);
  const int32_t destination = pool.copy_on_write(source);
  pool.free_many(Longs{source, destination});
  CHECK(pool.num_free_blocks() == 4);
  pool.check_integrity();
}

void copies_a_pending_destination_from_its_source() {
  BlockAllocator pool(4, 16);
  const int32_t source = pool.allocate();
  pool.incr_ref(source);
  const int32_t first = pool.copy_on_write(source);
  pool.incr_ref(first);
  const int32_t second = pool.copy_on_write(first);
  pool.check_integrity();
  CHECK(pool.take_copy(second).source == source);
  CHECK(pool.take_copy(first).source == source);
  pool.check_integrity();
}

void a_huge_pool_costs_nothing_until_used() {
  BlockAllocator pool(BlockAllocator::MAX_BLOCKS, 1);
  CHECK(pool.allocate() == 0);
  CHECK(pool.num_free_blocks() == BlockAllocator::MAX_BLOCKS - 1);
  pool.check_integrity();
}

void random_use_keeps_the_counts() {
  std::mt19937 random(1);
  BlockAllocator pool(50, 16);
  std::vector<int64_t> references;  // one entry per reference that this test holds
  for (int step = 0; step < 20000; ++step) {
    const auto pick = [&] { return references[random() % references.size()]; };
    const unsigned action = random() % 3;
    if (action == 0 || references.empty()) {
      const int64_t count = random() % 8;
      if (count > pool.num_free_blocks()) {
        CHECK(throws<OutOfMemory>([&] { pool.allocate_many(count); }));
      } else {
        for (const int32_t block : pool.allocate_many(count)) references.push_back(block);
      }
    } else if (action == 1 && references.size() < 200) {
      references.push_back(pick());
      pool.incr_ref(references.back());
    } else {
      std::swap(references[random() % references.size()], references.back());
      pool.free(references.back());
      references.pop_back();
    }
    if (step % 100 == 0) pool.check_integrity();
  }
  pool.free_many(references);
  CHECK(pool.num_free_blocks() == 50);
  pool.check_integrity();
}

}  // namespace pagedkv::test

int main() {
  using namespace pagedkv::test;
  hands_out_freed_blocks_first();
  refuses_without_changing_anything();
  keeps_a_source_until_its_copy_is_taken();
  drops_a_copy_whose_destination_goes_away();
  copies_a_pending_destination_from_its_source();
  a_huge_pool_costs_nothing_until_used();
  random_use_keeps_the_counts();
  return num_failures == 0 ? 0 : 1;
}
