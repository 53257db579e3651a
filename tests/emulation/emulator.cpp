// Options, counters, the launch of a grid, and the calls from inside a kernel that are not a CTA's own
// business.
#include "emulator.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdarg>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "access_trace.h"
#include "launch_record.h"
#include "scheduler.h"

namespace pagedkv::emulator {
namespace {

std::mutex global_mutex;  // guards what follows
std::optional<Options> chosen_options;
Counters total_counters;
std::vector<Access> total_trace;

// The Scheduler of this OS thread keeps its stacks from launch to launch.
thread_local Scheduler own_scheduler;

template <class Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

// Throws std::invalid_argument for a value that means nothing.
Options options_from_environment() {
  Options options;
  if (const char* value = std::getenv("PAGEDKV_EMULATOR_SCHEDULE")) {
    const std::string_view schedule = value;
    constexpr std::string_view RANDOM = "random:";
    if (schedule == "descending") {
      options.schedule = Schedule::descending;
    } else if (schedule.starts_with(RANDOM) && parse_number(schedule.substr(RANDOM.size()), options.seed)) {
      options.schedule = Schedule::random;
    } else if (schedule != "ascending") {
      throw std::invalid_argument(
          "PAGEDKV_EMULATOR_SCHEDULE is '" + std::string(schedule) +
          "'; supported: ascending, descending, random:SEED with an unsigned integer");
    }
  }
  if (const char* value = std::getenv("PAGEDKV_EMULATOR_WORKERS")) {
    if (!parse_number(std::string_view(value), options.num_workers) || options.num_workers < 1) {
      throw std::invalid_argument("PAGEDKV_EMULATOR_WORKERS is '" + std::string(value) +
                                  "'; supported: an integer from 1");
    }
  }
  return options;
}

Options current_options() {
  {
    const std::lock_guard lock(global_mutex);
    if (chosen_options) return *chosen_options;
  }
  return options_from_environment();
}

std::string to_string(const dim3& shape) {
  return "(" + std::to_string(shape.x) + "," + std::to_string(shape.y) + "," + std::to_string(shape.z) + ")";
}

// What a device would refuse, or an empty text. The limits are those of every compute capability from 8.0.
std::string refusal(const LaunchShape& shape) {
  const dim3 &grid = shape.grid, &cta = shape.cta;
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return "grid " + to_string(grid) + "; supported: (1 to 2147483647, 1 to 65535, 1 to 65535)";
  }
  if (cta.x < 1 || cta.y < 1 || cta.z < 1 || cta.x > 1024 || cta.y > 1024 || cta.z > 64 ||
      cta.x * cta.y * cta.z > 1024) {
    return "CTA " + to_string(cta) +
           "; supported: (1 to 1024, 1 to 1024, 1 to 64), at most 1024 threads in all";
  }
  if (shape.shared_bytes > MAX_SHARED_BYTES) {
    return std::to_string(shape.shared_bytes) + " bytes of shared memory; supported: up to " +
           std::to_string(MAX_SHARED_BYTES);
  }
  return "";
}

// The n-th CTA to run: a device promises no order, so a schedule is one of CTAs too.
uint64_t nth_cta(const Options& options, uint64_t n, uint64_t num_ctas) {
  if (options.schedule == Schedule::ascending) return n;
  if (options.schedule == Schedule::descending) return num_ctas - 1 - n;
  const uint64_t rotated = (n + options.seed / 2) % num_ctas;
  return options.seed % 2 == 0 ? rotated : num_ctas - 1 - rotated;
}

// Runs CTAs as they come from `next_cta` until there are none left or one of them fails.
std::string run_ctas(const LaunchShape& shape, const Options& options, KernelBody body, const void* context,
                     std::atomic<uint64_t>& next_cta) {
  const uint64_t num_ctas = uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  Scheduler& scheduler = own_scheduler;
  scheduler.begin_launch(shape, options, body, context);
  for (uint64_t n; (n = next_cta.fetch_add(1)) < num_ctas;) {
    if (!scheduler.run_cta(nth_cta(options, n, num_ctas)))
      next_cta = num_ctas;  // the others finish the CTA they are at
  }
  scheduler.end_launch();
  const std::lock_guard lock(global_mutex);
  total_counters += scheduler.counters();
  const std::vector<Access>& trace = scheduler.trace();
  total_trace.insert(total_trace.end(), trace.begin(), trace.end());
  return scheduler.fault_text();
}

}  // namespace

void set_options(const std::optional<Options>& options) {
  const std::lock_guard lock(global_mutex);
  chosen_options = options;
}

Counters& Counters::operator+=(const Counters& other) {
  ctas += other.ctas;
  barriers += other.barriers;
  warp_collectives += other.warp_collectives;
  mma += other.mma;
  ldmatrix += other.ldmatrix;
  ldmatrix_wavefronts += other.ldmatrix_wavefronts;
  vector_bytes += other.vector_bytes;
  async_copies += other.async_copies;
  async_copy_bytes_read += other.async_copy_bytes_read;
  context_switches += other.context_switches;
  return *this;
}

Counters counters() {
  const std::lock_guard lock(global_mutex);
  return total_counters;
}

void reset_counters() {
  const std::lock_guard lock(global_mutex);
  total_counters = {};
}

std::vector<Access> take_trace() {
  const std::lock_guard lock(global_mutex);
  return std::exchange(total_trace, {});
}

cudaError_t run_grid(const LaunchShape& shape, KernelBody body, const void* context, const void* kernel) {
  Options options;
  try {
    options = current_options();
  } catch (const std::invalid_argument& error) {
    return report_error(cudaErrorInvalidValue, error.what());
  }
  if (const std::string reason = refusal(shape); !reason.empty()) {
    return report_error(cudaErrorInvalidConfiguration, "invalid launch configuration: " + reason);
  }
  record_launch(kernel, shape);
  std::atomic<uint64_t> next_cta{0};
  std::vector<std::string> faults(static_cast<size_t>(options.num_workers));
  std::vector<std::thread> workers;
  for (size_t worker_idx = 1; worker_idx < faults.size(); ++worker_idx) {
    workers.emplace_back(
        [&, worker_idx] { faults[worker_idx] = run_ctas(shape, options, body, context, next_cta); });
  }
  faults[0] = run_ctas(shape, options, body, context, next_cta);
  for (std::thread& worker : workers) worker.join();
  for (const std::string& fault_text : faults) {
    if (!fault_text.empty()) return report_error(cudaErrorLaunchFailure, "kernel fault: " + fault_text);
  }
  return cudaSuccess;
}

// ---- From inside a kernel
// ------------------------------------------------------------------------------------------

void fault(const Place& place, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  current_thread->scheduler->fault(place, format, arguments);
}

void preempt() { current_thread->scheduler->preempt(); }

void warp_collective(uint32_t mask, const char* name, void* argument, WarpOperation operation,
                     MemoryOrder order, const Place& place) {
  current_thread->scheduler->warp_collective(mask, name, argument, operation, order, place);
}

int cta_barrier(const char* name, bool predicate, const Place& place) {
  return current_thread->scheduler->cta_barrier(name, predicate, place);
}

void check_vector_access(const char* what, AccessKind kind, const void* address, size_t num_bytes,
                         const Place& place) {
  if (reinterpret_cast<uintptr_t>(address) % num_bytes != 0) {
    fault(place, "%s: address %p is not aligned to %zu bytes", what, address, num_bytes);
  }
  const auto* begin = static_cast<const unsigned char*>(address);
  const Cta& cta = *current_thread->cta;
  const unsigned char* shared_end = cta.shared + cta.shared_bytes;
  if (begin + num_bytes > cta.shared && begin < shared_end)
    check_shared_access(what, address, num_bytes, place);
  current_thread->counters->vector_bytes += num_bytes;
  trace_access(kind, address, num_bytes, place);
  preempt();
}

void check_shared_access(const char* what, const void* address, size_t num_bytes, const Place& place) {
  const auto* begin = static_cast<const unsigned char*>(address);
  const Cta& cta = *current_thread->cta;
  if (begin < cta.shared || begin + num_bytes > cta.shared + cta.shared_bytes) {
    fault(place, "%s: %zu bytes at offset %td are not inside the %zu bytes of shared memory", what, num_bytes,
          begin - cta.shared, cta.shared_bytes);
  }
  if (reinterpret_cast<uintptr_t>(address) % num_bytes != 0) {
    fault(place, "%s: shared memory offset %td is not aligned to %zu bytes", what, begin - cta.shared,
          num_bytes);
  }
}

void trace_access(AccessKind kind, const void* address, size_t num_bytes, const Place& place) {
  const Thread& thread = *current_thread;
  if (thread.trace == nullptr) return;
  const Cta& cta = *thread.cta;
  const auto* begin = static_cast<const unsigned char*>(address);
  const bool is_shared = begin >= cta.shared && begin < cta.shared + cta.shared_bytes;
  const uint3& block = cta.block_idx;
  const uint64_t cta_idx = (uint64_t{block.z} * cta.grid_dim.y + block.y) * cta.grid_dim.x + block.x;
  const uint64_t location = is_shared ? static_cast<uint64_t>(begin - cta.shared)
                                      : static_cast<uint64_t>(reinterpret_cast<uintptr_t>(address));
  thread.trace->push_back({place, cta_idx, thread.warp_idx, thread.lane_idx, kind, is_shared, location,
                           static_cast<uint32_t>(num_bytes)});
}

}  // namespace pagedkv::emulator
