// The table of an instruction set's kernels, from run-time dtypes and sizes to templates.
#pragma once

#include "common/dispatch.h"
#include "cpu/paged_attention/decode.h"
#include "cpu/paged_attention/prefill.h"
#include "cpu/paged_attention/store.h"

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

// MathOf::dispatch calls its body with the arithmetic for the call's dtypes.
template <class Isa, class MathOf>
struct KernelTable {
  static void decode(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows) {
    // A row a lane, unless that left half of the lanes or more without one.
    const bool few = p.num_heads / p.num_kv_heads <= Isa::LANES / 2;
    MathOf::dispatch(p, [&]<class Math>() {
      (few ? Decode<Math, 1>::run : Decode<Math, Isa::LANES>::run)(p, task, partial_rows);
    });
  }

  static void prefill(const PagedAttentionParams& p, const AttentionTask& task, float* partial_rows) {
    const int64_t num_rows = task.row_end - task.row_begin;
    MathOf::dispatch(p, [&]<class Math>() {
      if (num_rows <= Isa::WIDTH) return Prefill<Math, 1>::run(p, task, partial_rows);
      if constexpr (Isa::MAX_ROW_VECTORS == 4) {
        if (num_rows > 2 * Isa::WIDTH) return Prefill<Math, 4>::run(p, task, partial_rows);
      }
      Prefill<Math, 2>::run(p, task, partial_rows);
    });
  }

  static void store(const PagedAttentionParams& p, const AttentionTask& task, const float* partial_rows,
                    int64_t num_chunks) {
    dispatch_float_dtype(p.query_dtype,
                         [&]<class Query>() { store_rows<Isa, Query>(p, task, partial_rows, num_chunks); });
  }

  static constexpr AttentionKernels KERNELS{decode, prefill, store};
};

}  // namespace
}  // namespace pagedkv::cpu
