// Copies of more bytes than the CPU's caches hold. An ordinary store first reads the line that it is about to
// overwrite; a streaming store does not, and leaves the caches to what will be read again.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pagedkv::cpu {

// Operators stream when they write at least this much. Less is likely to be read while it is still cached.
inline constexpr int64_t STREAM_BYTES = 8 << 20;

inline constexpr int64_t CACHE_LINE_BYTES = 64;

// Copies num_bytes that do not overlap, and asks for as many bytes at `ahead`, which are to be copied later.
// A thread that called it calls stream_fence() before others may read.
inline void stream_copy(void* to, const void* from, int64_t num_bytes, const void* ahead) {
#ifdef __SSE2__
  // Only whole lines: what a streaming store leaves of a line has to be merged with memory.
  if (num_bytes % CACHE_LINE_BYTES == 0 && reinterpret_cast<uintptr_t>(to) % CACHE_LINE_BYTES == 0) {
    auto* destination = static_cast<__m128i*>(to);
    const auto* source = static_cast<const __m128i*>(from);
    const auto* later = static_cast<const __m128i*>(ahead);
    for (int64_t i = 0; i < num_bytes / 16; i += 4) {
      _mm_prefetch(later + i, _MM_HINT_T1);
      for (int64_t j = i; j < i + 4; ++j) _mm_stream_si128(destination + j, _mm_loadu_si128(source + j));
    }
    return;
  }
#endif
  std::memcpy(to, from, num_bytes);
}

inline void stream_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace pagedkv::cpu
