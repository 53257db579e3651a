// out[t, h] = softmax(mask(softcap(query[t, h] . K * softmax_scale) + alibi), sink) V over the pages of t's
// sequence (Kwon et al. 2023, "Efficient memory management for large language model serving with
// PagedAttention", section 4.1).
//
// This file shares the work out; the kernels are in paged_attention/: decode.h for the heads of one query
// token, prefill.h for the rest, each compiled for several instruction sets, and portable.cpp.
//
// Work: a unit is (sequence, KV head or heads, rows), a row being a query token and a head of the KV head's
// group, so that K and V are read once for the whole group. Where that makes too few units for many
// processors, the keys of each are cut into chunks, whose partial results are merged in order. How keys are
// cut depends on the shapes alone, never on the number of threads, which only decides how units are grouped.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "common/dispatch.h"
#include "common/masks.h"
#include "common/online_softmax.h"
#include "common/paging.h"
#include "cpu/paged_attention/isa.h"
#include "cpu/parallel.h"
#include "ops.h"

namespace pagedkv::cpu {

unsigned char* thread_scratch(int64_t num_bytes) {
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<unsigned char, Free> memory;
  thread_local int64_t size = 0;
  if (size < num_bytes) {
    memory.reset();
    size = 0;
    memory.reset(static_cast<unsigned char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64)));
    if (memory == nullptr) throw std::bad_alloc();
    size = num_bytes;
  }
  return memory.get();
}

namespace {

constexpr int64_t TASK_ROWS = 256;         // of prefill: what one copy of a tile of K and V serves
constexpr int64_t MIN_CHUNK_TOKENS = 512;  // a chunk's partial result is then below 1 % of its K and V ...
constexpr int64_t MIN_CHUNK_TOKENS_OF_MANY_ROWS = 1024;  // ... or its merging below 2 % of the arithmetic
constexpr int64_t CHUNK_UNIT = 128;                      // prefill.h cuts its tiles there
constexpr int64_t WANTED_TASKS = 128;                    // for processors of up to 32 cores, four each
constexpr int64_t TASKS_PER_THREAD = 4;

// A task for all keys of its rows, to be cut into num_chunks.
struct Unit {
  AttentionTask task;
  bool is_decode;
  int64_t num_chunks = 1;
  int64_t partial_begin = 0;  // of its first chunk in the partial results, where it has several

  int64_t num_rows() const { return task.num_kv_heads * (task.row_end - task.row_begin); }
};

// The keys that any of the task's rows may see.
void find_keys(const PagedAttentionParams& p, AttentionTask& task) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  task.keys_begin = std::numeric_limits<int32_t>::max();
  task.keys_end = 0;
  for (int64_t query = task.row_begin / group; query < ceil_div(task.row_end, group); ++query) {
    const RowMask mask = row_mask(p, task.seq_idx, task.query_len, query, task.query_begin + query);
    if (mask.begin >= mask.end) continue;
    task.keys_begin = std::min(task.keys_begin, mask.begin);
    task.keys_end = std::max(task.keys_end, mask.end);
  }
  task.keys_begin = std::min(task.keys_begin, task.keys_end);
}

// Where the keys of units that have num_tokens of them, counted for each KV head, are cut.
int64_t chunk_tokens_of(int64_t num_tokens, int64_t min_tokens) {
  return std::max(min_tokens, ceil_div(num_tokens, WANTED_TASKS * CHUNK_UNIT) * CHUNK_UNIT);
}

// How many KV heads of a sequence one decode task takes: all, since a longer task starts less often, but no
// more than leaves every thread some tasks.
int64_t heads_per_decode(const PagedAttentionParams& p) {
  const int64_t num_threads = omp_get_max_threads();
  if (num_threads == 1) return p.num_kv_heads;
  // Of a sequence, what its last query sees, which is all that a query of decode sees.
  std::vector<int64_t> seen(p.num_seqs);
  int64_t num_tokens = 0, num_chunks = 0;
  for (int64_t seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
    const int64_t begin = p.query_start_loc != nullptr ? p.query_start_loc[seq_idx] : seq_idx;
    const int64_t end = p.query_start_loc != nullptr ? p.query_start_loc[seq_idx + 1] : seq_idx + 1;
    if (begin == end) continue;
    const RowMask mask = row_mask(p, seq_idx, end - begin, end - begin - 1, end - 1);
    seen[seq_idx] = std::max<int64_t>(0, mask.end - mask.begin);
    num_tokens += seen[seq_idx];
  }
  const int64_t chunk_tokens = chunk_tokens_of(num_tokens * p.num_kv_heads, MIN_CHUNK_TOKENS);
  for (const int64_t tokens : seen) num_chunks += ceil_div(tokens, chunk_tokens);
  const int64_t num_tasks = num_chunks * p.num_kv_heads;  // of one head each
  return std::clamp<int64_t>(num_tasks / (TASKS_PER_THREAD * num_threads), 1, p.num_kv_heads);
}

std::vector<Unit> list_units(const PagedAttentionParams& p) {
  const int64_t group = p.num_heads / p.num_kv_heads, decode_heads = heads_per_decode(p);
  std::vector<Unit> units;
  for (int64_t seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
    AttentionTask task{};
    task.seq_idx = seq_idx;
    task.query_begin = p.query_start_loc != nullptr ? p.query_start_loc[seq_idx] : seq_idx;
    task.query_len = p.query_start_loc != nullptr ? p.query_start_loc[seq_idx + 1] - task.query_begin : 1;
    // With split_size every row is prefill's, whose arithmetic is the same for any number of rows.
    const bool is_decode = task.query_len == 1 && group <= AttentionKernels::DECODE_ROWS &&
                           p.tree_mask == nullptr && p.split_size == 0;
    const int64_t heads = is_decode ? decode_heads : 1, num_rows = task.query_len * group;
    // The last rows of a prompt see the most keys, so they come first.
    for (int64_t row = (num_rows - 1) / TASK_ROWS * TASK_ROWS; row >= 0 && num_rows > 0; row -= TASK_ROWS) {
      task.row_begin = row;
      task.row_end = std::min(row + TASK_ROWS, num_rows);
      find_keys(p, task);
      for (int64_t kv_head_idx = 0; kv_head_idx < p.num_kv_heads; kv_head_idx += heads) {
        task.kv_head_idx = kv_head_idx;
        task.num_kv_heads = std::min(heads, p.num_kv_heads - kv_head_idx);
        units.push_back({task, is_decode});
      }
    }
  }
  return units;
}

// How the keys of all units are cut: at multiples of chunk_tokens.
struct Chunks {
  int64_t chunk_tokens;
  int64_t num_floats;                              // of the partial results
  std::vector<std::pair<int64_t, int64_t>> tasks;  // of each task, its unit and its chunk
};

Chunks cut_keys(const PagedAttentionParams& p, std::vector<Unit>& units) {
  Chunks chunks{std::numeric_limits<int32_t>::max(), 0, {}};
  if (p.split_size == 0) {  // with it, one chunk: every split_size gives the same bits
    int64_t num_tokens = 0;
    bool all_decode = true;
    for (const Unit& unit : units) {
      all_decode &= unit.is_decode;
      num_tokens += (unit.task.keys_end - unit.task.keys_begin) * unit.task.num_kv_heads;
    }
    const int64_t min_tokens = all_decode ? MIN_CHUNK_TOKENS : MIN_CHUNK_TOKENS_OF_MANY_ROWS;
    chunks.chunk_tokens = chunk_tokens_of(num_tokens, min_tokens);
  }
  for (int64_t i = 0; i < static_cast<int64_t>(units.size()); ++i) {
    Unit& unit = units[i];
    const int64_t first = unit.task.keys_begin / chunks.chunk_tokens;
    unit.num_chunks = std::max<int64_t>(1, ceil_div(unit.task.keys_end, chunks.chunk_tokens) - first);
    for (int64_t chunk_idx = 0; chunk_idx < unit.num_chunks; ++chunk_idx)
      chunks.tasks.push_back({i, chunk_idx});
    if (unit.num_chunks == 1) continue;
    unit.partial_begin = chunks.num_floats;
    chunks.num_floats += unit.num_chunks * unit.num_rows() * PartialRows::stride(p);
  }
  return chunks;
}

// The keys of one of a unit's chunks; the first and the last are cut short by what the rows see.
AttentionTask chunk_of(const Unit& unit, int64_t chunk_idx, int64_t chunk_tokens) {
  AttentionTask task = unit.task;
  const int64_t first = unit.task.keys_begin / chunk_tokens + chunk_idx;
  task.keys_begin = static_cast<int32_t>(std::max<int64_t>(task.keys_begin, first * chunk_tokens));
  task.keys_end = static_cast<int32_t>(std::min<int64_t>(task.keys_end, (first + 1) * chunk_tokens));
  return task;
}

void attend(const PagedAttentionParams& p, const AttentionKernels& kernels) {
  std::vector<Unit> units = list_units(p);
  const Chunks chunks = cut_keys(p, units);
  // Not value-initialised: pages that no task writes are never touched.
  const std::unique_ptr<float[]> partial_rows(new float[chunks.num_floats]);
  parallel_for(static_cast<int64_t>(chunks.tasks.size()), 1, [&](int64_t task_idx) {
    const auto [unit_idx, chunk_idx] = chunks.tasks[task_idx];
    const Unit& unit = units[unit_idx];
    AttentionTask task = chunk_of(unit, chunk_idx, chunks.chunk_tokens), next;
    const int64_t next_idx = task_idx + omp_get_num_threads();
    if (next_idx < static_cast<int64_t>(chunks.tasks.size())) {
      const auto [next_unit_idx, next_chunk_idx] = chunks.tasks[next_idx];
      next = chunk_of(units[next_unit_idx], next_chunk_idx, chunks.chunk_tokens);
      task.next = &next;
    }
    float* rows = nullptr;
    if (unit.num_chunks > 1) {
      rows = partial_rows.get() + unit.partial_begin + chunk_idx * unit.num_rows() * PartialRows::stride(p);
    }
    (unit.is_decode ? kernels.decode : kernels.prefill)(p, task, rows);
  });
  if (chunks.num_floats == 0) return;
  parallel_for(static_cast<int64_t>(units.size()), 1, [&](int64_t unit_idx) {
    const Unit& unit = units[unit_idx];
    if (unit.num_chunks == 1) return;
    kernels.store(p, unit.task, partial_rows.get() + unit.partial_begin, unit.num_chunks);
  });
}

// Rows past the last sequence's are padding: out 0, lse -inf.
void fill_padding(const PagedAttentionParams& p) {
  const int64_t num_query_tokens = p.query_start_loc != nullptr ? p.query_start_loc[p.num_seqs] : p.num_seqs;
  dispatch_float_dtype(p.query_dtype, [&]<class Query>() {
    for (int64_t token_idx = num_query_tokens; token_idx < p.num_tokens; ++token_idx) {
      for (int64_t head_idx = 0; head_idx < p.num_heads; ++head_idx) {
        auto* out =
            static_cast<Query*>(p.out) + token_idx * p.out_token_stride + head_idx * p.out_head_stride;
        std::fill_n(out, p.value_head_dim, Query{});
        if (p.lse != nullptr) p.lse[token_idx * p.num_heads + head_idx] = NEG_INF;
      }
    }
  });
}

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
  const AttentionKernels* kernels = attention_kernels(chosen_isa(), p.query_dtype);
  if (kernels == nullptr) {
    portable_paged_attention(p);
  } else {
    attend(p, *kernels);
  }
  fill_padding(p);
}

}  // namespace pagedkv::cpu
