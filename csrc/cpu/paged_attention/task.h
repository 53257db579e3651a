// What one thread does at a time, and what it leaves behind. paged_attention.cpp makes the tasks; one
// implementation for each instruction set runs them.
#pragma once

#include <cstdint>
#include <limits>

#include "params.h"

namespace pagedkv::cpu {

inline constexpr int64_t MAX_HEAD_DIM = 256;  // that the bindings let through

// The rows [row_begin, row_end) of a sequence's query_len * group rows (token-major) for each of num_kv_heads
// KV heads, and the keys [keys_begin, keys_end) of the sequence.
struct AttentionTask {
  int64_t seq_idx, kv_head_idx, num_kv_heads;
  int64_t query_begin, query_len, row_begin, row_end;
  int32_t keys_begin, keys_end;
  // What this thread probably does next, whose memory it may fetch ahead; null: unknown.
  const AttentionTask* next;
};

// What is known of a row after some of its keys: [value_head_dim] the sum of weight * value, then the largest
// score and the sum of weights 2 ** (score - largest). Scores are in units of log2: exp2 is cheaper than exp.
// Rows follow each other by KV head, then by row.
struct PartialRows {
  static constexpr int64_t EXTRA = 2;
  // The largest score of no key: finite, so that differences of it are not NaN.
  static constexpr float NO_SCORE = std::numeric_limits<float>::lowest();

  static int64_t stride(const PagedAttentionParams& p) { return p.value_head_dim + EXTRA; }
};

// An instruction set's implementation of a task. partial_rows is where its rows go; null: the task has all
// keys of its rows, so it stores out and lse at once.
struct AttentionKernels {
  // Few rows that all see the same keys: one query token, its heads of a KV head, no tree mask.
  static constexpr int64_t DECODE_ROWS = 8;
  void (*decode)(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows);
  // Any rows.
  void (*prefill)(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows);
  // Merges the partial rows of num_chunks tasks that differ in their keys alone and stores out and lse.
  void (*store)(const PagedAttentionParams& p, const AttentionTask& task, const float* partial_rows,
                int64_t num_chunks);
};

// At least num_bytes of memory of this thread's own, on a cache line's boundary; valid until the next call.
unsigned char* thread_scratch(int64_t num_bytes);

// Hands out pieces of one piece of memory, each on a cache line's boundary. With no memory it only counts.
class Arena {
 public:
  explicit Arena(unsigned char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* memory_;
  int64_t used_ = 0;
};

}  // namespace pagedkv::cpu
