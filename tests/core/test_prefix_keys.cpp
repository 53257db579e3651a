#include "core/prefix_keys.h"

#include <optional>
#include <vector>

#include "check.h"

namespace pagedkv::test {

using Longs = std::vector<int64_t>;

const BlockKey ROOT = SHA256_INITIAL_STATE;

void hashes_need_nobody_to_hold_them() {
  PrefixKeys keys(4, false);
  const Longs tokens{1, 2, 3, 4};
  CHECK(*keys.find(ROOT, tokens) == extend_key(ROOT, tokens));
  CHECK(*keys.make(ROOT, tokens) == extend_key(ROOT, tokens));
  CHECK(keys.num_nodes() == 0);
}

void a_node_lives_as_long_as_somebody_holds_it() {
  PrefixKeys keys(2, true, 1);
  const Longs first{1, 2}, second{3, 4}, other{5, 6};
  std::optional<KeyHandle> parent = keys.make(ROOT, first);
  const BlockKey parent_key = **parent;
  std::optional<KeyHandle> child = keys.make(parent_key, second);
  CHECK(keys.num_nodes() == 2 && **child != parent_key);
  CHECK(*keys.make(ROOT, first) == parent_key);
  CHECK(*keys.find(parent_key, second) == **child);
  CHECK(!keys.find(ROOT, second) && !keys.find(parent_key, other) && !keys.find(**child, second));

  parent.reset();  // the child still holds it
  CHECK(keys.num_nodes() == 2 && *keys.find(ROOT, first) == parent_key);
  KeyHandle copy = *child;
  child.reset();
  CHECK(keys.num_nodes() == 2);
  copy = KeyHandle(ROOT);
  CHECK(keys.num_nodes() == 0 && !keys.find(ROOT, first));
  CHECK(*keys.make(ROOT, first) != parent_key);  // a number is never used again
}

void a_long_chain_ends() {
  PrefixKeys keys(1, true);
  KeyHandle last(ROOT);
  for (int64_t token = 0; token < 300000; ++token) last = keys.make(*last, Longs{token});
  CHECK(keys.num_nodes() == 300000);
  last = KeyHandle();
  CHECK(keys.num_nodes() == 0);
}

void the_longest_match_among_siblings() {
  PrefixKeys keys(4, true);
  const Longs wanted{1, 2, 3, 9};
  std::vector<KeyHandle> handles;
  for (const Longs& tokens : {Longs{1, 5, 5, 5}, Longs{1, 2, 3, 5}, Longs{1, 2, 5, 5}, Longs{2, 2, 3, 9}}) {
    handles.push_back(keys.make(ROOT, tokens));
  }
  const auto any = [](const BlockKey&) { return true; };
  const auto match = keys.find_partial(ROOT, wanted, any);
  CHECK(match.num_tokens == 3 && match.key == *handles[1]);
  const auto next = keys.find_partial(ROOT, wanted, [&](const BlockKey& key) { return key != *handles[1]; });
  CHECK(next.num_tokens == 2 && next.key == *handles[2]);
  CHECK(keys.find_partial(*handles[0], wanted, any).num_tokens == 0);
  CHECK(keys.find_partial(ROOT, Longs{7}, any).num_tokens == 0);
}

}  // namespace pagedkv::test

int main() {
  using namespace pagedkv::test;
  hashes_need_nobody_to_hold_them();
  a_node_lives_as_long_as_somebody_holds_it();
  a_long_chain_ends();
  the_longest_match_among_siblings();
  return num_failures == 0 ? 0 : 1;
}
