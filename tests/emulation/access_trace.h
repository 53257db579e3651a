// What a kernel's threads read and write through load_vector, store_vector, __ldg and its kin, cp.async and
// ldmatrix, where Options::trace asks for it, and what a device would make of it. Plain C++ accesses are not
// seen.
#pragma once

#include <cstdint>
#include <vector>

#include "emulator.h"

namespace pagedkv::emulator {

struct Access {
  Place place;
  uint64_t cta_idx;
  int warp_idx, lane_idx;
  AccessKind kind;
  bool is_shared;
  uint64_t address;  // in shared memory its offset
  uint32_t num_bytes;
};

// Everything since the last call, of launches with Options::trace.
std::vector<Access> take_trace();

// What the lanes of a warp access by one instruction: their n-th accesses at one place of the source. (Lanes
// that skip a turn which others take are told apart wrongly.)
struct Request {
  Place place;
  AccessKind kind;
  bool is_shared;
  std::vector<Access> accesses;  // by lane

  uint64_t num_bytes() const;
  uint64_t num_sectors() const;  // 32-byte pieces of global memory
  // Turns that shared memory takes: the lanes of 128 bytes go at once, and again for each further word that
  // one of the 32 banks has to give them.
  uint64_t num_wavefronts() const;
  uint64_t min_wavefronts() const;  // without conflicts
};

std::vector<Request> requests_of(const std::vector<Access>& trace);

}  // namespace pagedkv::emulator
