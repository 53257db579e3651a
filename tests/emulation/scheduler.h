// Runs the threads of one CTA as fibers on the calling OS thread: who runs next, who waits where, and what is
// wrong when nobody can run. One Scheduler serves all CTAs that its OS thread runs, one after the other.
#pragma once

#include <cstdarg>
#include <memory>
#include <string>
#include <vector>

#include "access_trace.h"
#include "async_copy.h"
#include "emulator.h"
#include "fiber.h"

namespace pagedkv::emulator {

class Scheduler {
 public:
  Scheduler() = default;
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // From the host. After a fault run_cta returns false and fault_text() tells of it; the launch is then at
  // its end.
  void begin_launch(const LaunchShape& shape, const Options& options, KernelBody body, const void* context);
  bool run_cta(uint64_t cta_idx);
  void end_launch();
  const std::string& fault_text() const { return fault_text_; }
  const Counters& counters() const { return counters_; }
  const std::vector<Access>& trace() const { return trace_; }

  // From the thread that runs; emulator.h says what each means.
  void warp_collective(uint32_t mask, const char* name, void* argument, WarpOperation operation,
                       MemoryOrder order, const Place& place);
  int cta_barrier(const char* name, bool predicate, const Place& place);
  void preempt();
  [[noreturn]] void fault(const Place& place, const char* format, va_list arguments);

 private:
  enum class Status : uint8_t { ready, waiting, returned };

  struct ThreadRecord : Thread {
    Status status = Status::ready;
    Fiber* fiber = nullptr;  // while started and not returned
    void* race_context = nullptr;
    AsyncCopyQueue copies;
    const char* waits_in = nullptr;
    Place waits_at;
  };

  // Where the lanes of one warp collective meet.
  struct Rendezvous {
    uint32_t mask = 0, arrived = 0;
    const char* name = nullptr;
    Place place;
    void* arguments[32] = {};
    bool parity = false;  // tags alternate, so that a late lane's acquire does not see the next release
    char tags[2] = {};
  };

  // Lanes of disjoint masks may meet at the same time, so a warp has up to 32 meetings under way.
  struct Warp {
    uint32_t num_lanes = 0, open = 0;  // open: the bits of the rendezvous in use
    Rendezvous rendezvous[32];
  };

  struct Barrier {
    int num_arrived = 0, num_true = 0;
    const char* name = nullptr;
    Place place;
    bool parity = false;  // results and tags alternate: one barrier is read while the next one fills
    int results[2] = {};
    char tags[2] = {};
  };

  struct FreeShared {
    void operator()(unsigned char* shared) const;
  };

  static void run_threads(void* scheduler);  // the body of every fiber
  void begin_cta(uint64_t cta_idx);
  bool end_cta();
  bool abandon_cta();
  void allocate_shared(size_t num_bytes);
  void resume(ThreadRecord& thread);
  void suspend();
  void recycle_fiber(ThreadRecord& thread);
  void destroy_race_contexts();
  void shuffle_order();
  void wait(const char* name, const Place& place);
  Rendezvous& join_rendezvous(Warp& warp, uint32_t mask, const char* name, const Place& place);
  std::string describe_deadlock() const;
  ThreadRecord& running() { return *static_cast<ThreadRecord*>(current_thread); }
  uint64_t next_random();

  // Of the launch.
  Options options_;
  KernelBody body_ = nullptr;
  const void* context_ = nullptr;
  Cta cta_{};
  int num_threads_ = 0;
  std::vector<ThreadRecord> threads_;
  std::vector<Warp> warps_;
  std::vector<int> order_;  // in which ready threads run
  std::unique_ptr<unsigned char, FreeShared> shared_;
  void* host_race_context_ = nullptr;
  Counters counters_;
  std::vector<Access> trace_;

  // Of the CTA.
  std::string fault_text_;
  Barrier barrier_;
  uint64_t random_state_ = 1;
  char start_tag_ = 0,
       end_tag_ = 0;  // order the CTA between what the host did before and what it does next

  // Kept between launches.
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_fibers_;
  std::vector<void*> race_contexts_;  // one for each thread of the largest CTA so far
};

}  // namespace pagedkv::emulator
