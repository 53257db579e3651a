// The emulator's own interface: what a test sets and reads (Options, Counters), how a grid is started, and
// what the CUDA words of device_functions.h, async_copy.h and matrix_ops.h are made of. README.md describes
// the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <source_location>
#include <vector>

#include "cuda_types.h"
#include "host_runtime.h"

namespace pagedkv::emulator {

using Place = std::source_location;  // where in the kernel something happened

// ---- Options and counters
// -----------------------------------------------------------------------------------------

enum class Schedule { ascending, descending, random };

// How launches run. Unless set_options was called, each launch reads the environment:
//   PAGEDKV_EMULATOR_SCHEDULE   ascending, descending or random:SEED
//   PAGEDKV_EMULATOR_WORKERS    OS threads that run CTAs
struct Options {
  Schedule schedule = Schedule::ascending;  // the order in which CTAs run, and the ready threads of each
  uint64_t seed = 1;  // of a random schedule; a CTA's threads depend on it and the CTA alone
  int preempt_permille =
      50;  // random schedule: how often a thread gives way at an emulator call it need not wait in
  int num_workers = 1;  // more than one makes CTAs overlap, as they do on a device
  bool trace = false;   // keep every access that the emulator sees: access_trace.h
};

void set_options(const std::optional<Options>& options);  // nullopt: back to the environment

struct Counters {
  uint64_t ctas = 0;
  uint64_t barriers = 0;             // of a CTA: __syncthreads and its kin
  uint64_t warp_collectives = 0;     // shuffles, votes, __syncwarp, ldmatrix, movmatrix, mma
  uint64_t mma = 0;                  // mma.m16n8k16, by warp
  uint64_t ldmatrix = 0;             // by warp, whatever the number of matrices
  uint64_t ldmatrix_wavefronts = 0;  // one for each 8x8 matrix without bank conflicts, up to eight with them
  uint64_t vector_bytes = 0;         // through load_vector and store_vector
  uint64_t async_copies = 0;         // cp.async, by thread
  uint64_t async_copy_bytes_read = 0;  // from global memory
  uint64_t context_switches = 0;       // times a thread was resumed

  Counters& operator+=(const Counters& other);
};

// Sums over every launch of the process since the last reset.
Counters counters();
void reset_counters();

// ---- Launching
// ----------------------------------------------------------------------------------------------------

struct LaunchShape {
  dim3 grid, cta;
  size_t shared_bytes;
};

// The most dynamic shared memory that a CTA can have on any architecture (compute capability 9.0 and 10.0:
// 227 KiB).
inline constexpr size_t MAX_SHARED_BYTES = 227 * 1024;

using KernelBody = void (*)(const void* context);  // one CUDA thread, from start to return

// Runs body(context) once for each thread of the grid. A fault inside the kernel ends the launch with
// cudaErrorLaunchFailure, a shape that no device takes with cudaErrorInvalidConfiguration; cudaGetErrorString
// tells more.
// `kernel` is the address of the __global__ function that `body` calls, by which record_launch knows it.
cudaError_t run_grid(const LaunchShape& shape, KernelBody body, const void* context,
                     const void* kernel = nullptr);

template <class Callable>
cudaError_t run_grid(const LaunchShape& shape, const Callable& body, const void* kernel = nullptr) {
  return run_grid(
      shape, [](const void* context) { (*static_cast<const Callable*>(context))(); }, &body, kernel);
}

// A kernel in another form: the function that runs in its place, of the kernel's parameters as bytes.
struct Replacement {
  const char* name;  // mangled
  void (*body)(const unsigned char* params);
  unsigned max_threads;  // that a CTA may have; 0: as many as CUDA allows
  int architecture;      // that it was compiled for, 80 and up
};

// Of a kernel's replacements the one for the latest architecture up to PAGEDKV_EMULATOR_ARCHITECTURE (80 if
// unset) runs. The first replacement of any kernel makes them the rule: a kernel without one is then an
// error.
void replace_kernel(const void* kernel, const Replacement& replacement);

// Runs what replaces `kernel` on a grid.
cudaError_t run_replaced(const LaunchShape& shape, const void* kernel, const void* params);
bool has_replacements();

template <class Params>
cudaError_t run_kernel(const LaunchShape& shape, void (*kernel)(Params), const Params& params) {
  if (has_replacements()) return run_replaced(shape, reinterpret_cast<const void*>(kernel), &params);
  return run_grid(shape, [&] { kernel(params); }, reinterpret_cast<const void*>(kernel));
}

// ---- Seen from inside a kernel
// ------------------------------------------------------------------------------------

struct Access;
class AsyncCopyQueue;
class Scheduler;

struct Cta {
  uint3 block_idx;
  dim3 grid_dim, cta_dim;
  unsigned char* shared;
  size_t shared_bytes;
};

struct Thread {
  uint3 thread_idx;
  int linear_idx, warp_idx, lane_idx;
  const Cta* cta;
  Scheduler* scheduler;
  AsyncCopyQueue* async_copies;
  Counters* counters;          // of the launch, on this OS thread
  std::vector<Access>* trace;  // likewise; null: not wanted
};

// The CUDA thread that runs on this OS thread. __thread rather than thread_local: a plain load, without the
// initialisation wrapper that UBSan takes for a null function.
extern __thread Thread* current_thread __attribute__((tls_model("initial-exec")));

inline unsigned char* shared_memory() { return current_thread->cta->shared; }

// Ends the launch: reports `text` and the thread that runs, and never returns. Kernels hold no destructors,
// so nothing is lost by leaving their frames behind.
[[noreturn]] void fault(const Place& place, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Under a random schedule, sometimes lets other threads go first.
void preempt();

enum class AccessKind : uint8_t { read, write };

// A fault unless `address` is aligned to num_bytes and, where it touches shared memory, lies wholly inside
// it.
void check_vector_access(const char* what, AccessKind kind, const void* address, size_t num_bytes,
                         const Place& place);

// A fault unless [address, address + num_bytes) is aligned to num_bytes and lies in dynamic shared memory.
void check_shared_access(const char* what, const void* address, size_t num_bytes, const Place& place);

// Adds an access to the launch's trace where there is one.
void trace_access(AccessKind kind, const void* address, size_t num_bytes, const Place& place);

// All lanes of a warp collective, met at one place.
struct Collective {
  void* const* arguments;  // [32] one of each lane; set where mask has the lane's bit
  uint32_t mask;
  const char* name;
  Place place;
  Counters* counters;

  bool has(int lane_idx) const { return mask >> lane_idx & 1; }
  template <class Argument>
  Argument& argument(int lane_idx) const {
    return *static_cast<Argument*>(arguments[lane_idx]);
  }
};

using WarpOperation = void (*)(const Collective& collective);

enum class MemoryOrder { none, fence };  // does the collective make earlier writes visible to its lanes?

// Waits until every lane of `mask` has called with the same mask, name and place; then one of them runs
// `operation` (may be null) over all arguments. A fault where the lanes cannot meet. Lanes beyond the CTA's
// last thread are ignored.
void warp_collective(uint32_t mask, const char* name, void* argument, WarpOperation operation,
                     MemoryOrder order, const Place& place);

// Waits until every thread of the CTA has called at the same place, and returns how many came with a true
// predicate.
int cta_barrier(const char* name, bool predicate, const Place& place);

}  // namespace pagedkv::emulator
