// What prefill.h fetches into the L2 cache ahead of its use, a little at each step of the work on a tile.
#pragma once

#include "common/paging.h"
#include "cpu/paged_attention/fetch.h"
#include "cpu/paged_attention/task.h"
#include "cpu/paged_attention/tile_rows.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// The items [next, end), some at each step.
struct FetchPlan {
  int64_t next = 0, end = 0, per_step = 0;

  FetchPlan() = default;
  FetchPlan(int64_t begin, int64_t end, int64_t num_steps)
      : next(begin), end(end), per_step(ceil_div(end - begin, max_of<int64_t>(1, num_steps))) {}

  template <class Body>
  void step(Body&& body) {
    const int64_t step_end = min_of(end, next + per_step);
    for (; next < step_end; ++next) body(next);
  }
};

template <class Cache, int TOKENS>
class PrefillFetcher {
 public:
  explicit PrefillFetcher(const PagedAttentionParams& p)
      : p_(p), group_(p.num_heads / p.num_kv_heads), query_size_(p.query_dtype == DType::float32 ? 4 : 2) {}

  // From now on: the tile, of keys of the task.
  void plan_tile(const AttentionTask& task, const TileRows<TOKENS>& tile, int num_steps) {
    tile_ = &tile;
    keys_ = static_cast<const Cache*>(p_.key_cache) + task.kv_head_idx * p_.key_cache_head_stride;
    values_ = static_cast<const Cache*>(p_.value_cache) + task.kv_head_idx * p_.value_cache_head_stride;
    tokens_ = FetchPlan(0, tile.num_tokens, num_steps);
  }
  // Rows of the task's queries.
  void plan_queries(const AttentionTask& task, int64_t row_begin, int64_t row_end, int num_steps) {
    query_task_ = &task;
    queries_ = FetchPlan(row_begin, row_end, num_steps);
  }
  // Rows of the task's out: stores wait for memory as loads do.
  void plan_out(const AttentionTask& task, int64_t row_begin, int64_t row_end, int num_steps) {
    out_task_ = &task;
    out_ = FetchPlan(row_begin, row_end, num_steps);
  }

  // The lines of the next step.
  const FetchList& step() {
    list_.size = 0;
    tokens_.step([&](int64_t token) {
      if (tile_->key[token] < 0) return;
      list_.add(keys_ + tile_->key[token], p_.head_dim * sizeof(Cache));
      list_.add(values_ + tile_->value[token], p_.value_head_dim * sizeof(Cache));
    });
    queries_.step([&](int64_t row) {
      fetch_row(*query_task_, row, p_.query, p_.query_token_stride, p_.query_head_stride, p_.head_dim);
    });
    out_.step([&](int64_t row) {
      fetch_row(*out_task_, row, p_.out, p_.out_token_stride, p_.out_head_stride, p_.value_head_dim);
    });
    return list_;
  }

 private:
  void fetch_row(const AttentionTask& task, int64_t row, const void* tensor, int64_t token_stride,
                 int64_t head_stride, int64_t dim) {
    const int64_t token_idx = task.query_begin + row / group_;
    const int64_t head_idx = task.kv_head_idx * group_ + row % group_;
    const int64_t offset = token_idx * token_stride + head_idx * head_stride;
    list_.add(static_cast<const char*>(tensor) + offset * query_size_, dim * query_size_);
  }

  const PagedAttentionParams& p_;
  int64_t group_, query_size_;
  const TileRows<TOKENS>* tile_ = nullptr;
  const Cache *keys_ = nullptr, *values_ = nullptr;
  const AttentionTask *query_task_ = nullptr, *out_task_ = nullptr;
  FetchPlan tokens_, queries_, out_;
  FetchList list_;
};

}  // namespace
}  // namespace pagedkv::cpu
