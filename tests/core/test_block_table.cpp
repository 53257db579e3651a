#include "core/block_table.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"

namespace pagedkv::test {

using Ids = std::vector<int32_t>;

std::shared_ptr<BlockAllocator> pool_of(int64_t num_blocks, int64_t block_size) {
  return std::make_shared<BlockAllocator>(num_blocks, block_size);
}

void grows_block_by_block() {
  for (const int64_t block_size : {1, 3, 16}) {
    BlockTable table(block_size, nullptr);
    for (int64_t num_tokens = 1; num_tokens <= 40; ++num_tokens) {
      table.grow(1);
      CHECK(table.num_blocks() == (num_tokens + block_size - 1) / block_size);
      int64_t slot = -1;
      table.write_slots(num_tokens - 1, num_tokens, &slot);
      CHECK(slot ==
            table.physical_block((num_tokens - 1) / block_size) * block_size + (num_tokens - 1) % block_size);
    }
  }
}

void a_moved_from_table_dies_quietly() {
  auto pool = pool_of(4, 4);
  {
    BlockTable table(std::nullopt, pool);
    table.grow(6);
    BlockTable other = std::move(table);
    CHECK(other.num_tokens() == 6);
  }
  CHECK(pool->num_free_blocks() == 4);
}

void the_last_owner_writes_in_place() {
  auto pool = pool_of(8, 4);
  BlockTable parent(std::nullopt, pool);
  parent.grow(6);
  BlockTable child = parent.fork();
  child.grow(1);
  CHECK(child.blocks() == (Ids{0, 2}));
  parent.grow(1);  // the copy out of its tail is still pending, but nobody else owns it
  CHECK(parent.blocks() == (Ids{0, 1}));
  CHECK(parent.take_pending_copies().empty());
  const std::vector<CopyPair> pairs = child.take_pending_copies();
  CHECK(pairs.size() == 1 && pairs[0].source == 1 && pairs[0].destination == 2);
  CHECK(child.take_pending_copies().empty());
  pool->check_integrity();
}

void a_fork_inherits_pending_copies() {
  auto pool = pool_of(8, 4);
  BlockTable parent(std::nullopt, pool);
  parent.grow(2);
  BlockTable child = parent.fork();
  child.grow(1);
  BlockTable grandchild = child.fork();
  child.free();
  const std::vector<CopyPair> pairs = grandchild.take_pending_copies();
  CHECK(pairs.size() == 1 && pairs[0].source == 0 && pairs[0].destination == 1);
  pool->check_integrity();
}

void a_failed_growth_changes_nothing() {
  auto pool = pool_of(3, 4);
  BlockTable parent(std::nullopt, pool);
  parent.grow(6);
  BlockTable child = parent.fork();
  CHECK(throws<OutOfMemory>([&] { child.grow(3); }));  // the copy and one more, where one is free
  CHECK(throws<OutOfMemory>([&] { child.grow(std::numeric_limits<int64_t>::max()); }));
  CHECK(child.num_tokens() == 6 && child.blocks() == parent.blocks() && child.take_pending_copies().empty());
  CHECK(pool->num_free_blocks() == 1);
  child.grow(2);
  pool->check_integrity();
}

void truncation_drops_stale_copies() {
  auto pool = pool_of(4, 4);
  BlockTable parent(std::nullopt, pool);
  parent.grow(6);
  BlockTable child = parent.fork();
  child.grow(1);
  child.truncate(4);
  CHECK(child.take_pending_copies().empty());
  CHECK(pool->num_free_blocks() == 2);
  CHECK(throws<std::invalid_argument>([&] { child.truncate(5); }));
  pool->check_integrity();
}

void a_table_keeps_its_allocator_alive() {
  std::weak_ptr<BlockAllocator> watched;
  {
    auto pool = pool_of(4, 4);
    watched = pool;
    BlockTable table(std::nullopt, std::move(pool));
    table.grow(5);
    CHECK(!watched.expired());
  }
  CHECK(watched.expired());
}

}  // namespace pagedkv::test

int main() {
  using namespace pagedkv::test;
  grows_block_by_block();
  a_moved_from_table_dies_quietly();
  the_last_owner_writes_in_place();
  a_fork_inherits_pending_copies();
  a_failed_growth_changes_nothing();
  truncation_drops_stale_copies();
  a_table_keeps_its_allocator_alive();
  return num_failures == 0 ? 0 : 1;
}
