// The trace of the launches summed up by instruction of the PTX, for traffic.py.
#include <map>
#include <string>
#include <tuple>

#include "access_trace.h"

#define PAGEDKV_EXPORT extern "C" __attribute__((visibility("default")))

namespace pagedkv::emulator {

PAGEDKV_EXPORT void pagedkv_start_trace() {
  set_options(Options{.trace = true});
  take_trace();
}

// A line for each instruction, valid until the next call: place, "read" or "write", "shared" or "global", and
// the sums over its requests by warp of requests, bytes, turns (sectors of global memory, wavefronts of
// shared memory) and the least turns that could move these bytes.
PAGEDKV_EXPORT const char* pagedkv_take_traffic() {
  set_options(std::nullopt);
  struct Sums {
    uint64_t requests, bytes, turns, least;
  };
  std::map<std::tuple<std::string, bool, bool>, Sums> instructions;
  for (const Request& request : requests_of(take_trace())) {
    const std::string place =
        std::string(request.place.file_name()) + ":" + std::to_string(request.place.line());
    Sums& sums = instructions[{place, request.kind == AccessKind::write, request.is_shared}];
    ++sums.requests;
    sums.bytes += request.num_bytes();
    sums.turns += request.is_shared ? request.num_wavefronts() : request.num_sectors();
    sums.least += request.is_shared ? request.min_wavefronts() : (request.num_bytes() + 31) / 32;
  }
  static std::string text;
  text.clear();
  for (const auto& [instruction, sums] : instructions) {
    const auto& [place, is_write, is_shared] = instruction;
    text += place + "\t" + (is_write ? "write" : "read") + "\t" + (is_shared ? "shared" : "global");
    for (const uint64_t sum : {sums.requests, sums.bytes, sums.turns, sums.least}) {
      text += "\t" + std::to_string(sum);
    }
    text += "\n";
  }
  return text.c_str();
}

}  // namespace pagedkv::emulator
