#include "access_trace.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

namespace pagedkv::emulator {
namespace {

// Lanes whose accesses of this size go at once.
uint64_t lanes_at_once(const Access& access) { return std::min<uint64_t>(32, 128 / access.num_bytes); }

}  // namespace

uint64_t Request::num_bytes() const {
  uint64_t total = 0;
  for (const Access& access : accesses) total += access.num_bytes;
  return total;
}

uint64_t Request::num_sectors() const {
  std::set<uint64_t> sectors;
  for (const Access& access : accesses) {
    for (uint64_t sector = access.address / 32; sector <= (access.address + access.num_bytes - 1) / 32;
         ++sector) {
      sectors.insert(sector);
    }
  }
  return sectors.size();
}

uint64_t Request::num_wavefronts() const {
  std::map<uint64_t, std::set<uint64_t>> words_of_group;
  for (const Access& access : accesses) {
    const uint64_t group = static_cast<uint64_t>(access.lane_idx) / lanes_at_once(access);
    for (uint64_t word = access.address / 4; word <= (access.address + access.num_bytes - 1) / 4; ++word) {
      words_of_group[group].insert(word);
    }
  }
  uint64_t total = 0;
  for (const auto& [group, words] : words_of_group) {
    uint64_t words_of_bank[32] = {};
    for (const uint64_t word : words) ++words_of_bank[word % 32];
    total += *std::max_element(words_of_bank, words_of_bank + 32);
  }
  return total;
}

uint64_t Request::min_wavefronts() const {
  std::set<uint64_t> groups;
  for (const Access& access : accesses) {
    groups.insert(static_cast<uint64_t>(access.lane_idx) / lanes_at_once(access));
  }
  return groups.size();
}

std::vector<Request> requests_of(const std::vector<Access>& trace) {
  using Instruction = std::tuple<std::string_view, uint32_t, uint32_t, AccessKind, bool>;
  using Warp = std::tuple<Instruction, uint64_t, int>;
  std::map<std::pair<Warp, int>, uint64_t> turns;  // how often a lane has come by
  std::map<std::pair<Warp, uint64_t>, Request> requests;
  for (const Access& access : trace) {
    const Instruction instruction{access.place.file_name(), access.place.line(), access.place.column(),
                                  access.kind, access.is_shared};
    const Warp warp{instruction, access.cta_idx, access.warp_idx};
    const uint64_t turn = turns[{warp, access.lane_idx}]++;
    Request& request =
        requests.try_emplace({warp, turn}, Request{access.place, access.kind, access.is_shared, {}})
            .first->second;
    request.accesses.push_back(access);
  }
  std::vector<Request> result;
  for (auto& [key, request] : requests) result.push_back(std::move(request));
  return result;
}

}  // namespace pagedkv::emulator
