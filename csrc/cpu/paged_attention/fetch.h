// Memory asked for before it is needed.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// Into the L2 cache: from memory, which takes many times as long as the work on a line does. The L1 cache is
// too small to run so far ahead in.
inline void fetch_to_l2(const void* bytes, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) _mm_prefetch(static_cast<const char*>(bytes) + i, _MM_HINT_T1);
}

// Into the L1 cache, from the L2 cache: what will be written. Stores wait for their line one after the other.
inline void fetch_to_l1(const void* bytes, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) _mm_prefetch(static_cast<const char*>(bytes) + i, _MM_HINT_T0);
}

// Lines for the L2 cache that are asked for one by one among other work: of a burst, some get lost.
struct FetchList {
  static constexpr int CAPACITY = 256;

  const char* line[CAPACITY];
  int size = 0;

  void add(const void* bytes, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) {
      const char* place = static_cast<const char*>(bytes) + i;
      if (size < CAPACITY) {
        line[size++] = place;
      } else {
        _mm_prefetch(place, _MM_HINT_T1);
      }
    }
  }
  void fetch_from(int i) const {
    for (; i < size; ++i) _mm_prefetch(line[i], _MM_HINT_T1);
  }
};

}  // namespace
}  // namespace pagedkv::cpu
