// One row of a key or value on its way into the cache: what reshape_and_cache and rope_and_cache store alike.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/dtypes.h"
#include "cpu/stream_copy.h"

namespace pagedkv::cpu {

// cache_row[i] = round(row[i] / scale), both of `size` contiguous elements; with `stream` by stream_copy.
template <class Input, class Cache>
void store_row(const Input* row, Cache* cache_row, int64_t size, float scale, bool stream) {
  if constexpr (std::is_same_v<Input, Cache>) {
    if (stream) {
      constexpr int64_t AHEAD = 512 / sizeof(Cache);
      stream_copy(cache_row, row, size * sizeof(Cache), row + AHEAD);  // rows come one after the other
    } else {
      std::memcpy(cache_row, row, size * sizeof(Cache));
    }
  } else {
    for (int64_t i = 0; i < size; ++i) cache_row[i] = from_float<Cache>(to_float(row[i]) / scale);
  }
}

}  // namespace pagedkv::cpu
