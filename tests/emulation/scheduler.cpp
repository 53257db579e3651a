#include "scheduler.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <new>

#include "sanitizers.h"

namespace pagedkv::emulator {

__thread Thread* current_thread __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr std::align_val_t SHARED_ALIGNMENT{
    1024};                    // of a real CTA's window, so that addresses tell the banks
constexpr int POISON = 0xff;  // NaN in every floating-point format, -1 in every integer

// Without red zones, bytes past the end of shared memory that must still be poison when the CTA ends.
constexpr size_t CANARY_BYTES = sanitizers::HAS_RED_ZONES ? 0 : 256;

bool same_place(const Place& a, const Place& b) {
  if (a.line() != b.line() || a.column() != b.column()) return false;
  return a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0;
}

std::string to_string(const Place& place) {
  return std::string(place.file_name()) + ":" + std::to_string(place.line()) + ":" +
         std::to_string(place.column());
}

std::string to_string(const uint3& index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," + std::to_string(index.z) + ")";
}

uint3 unflatten(uint64_t linear_idx, const dim3& shape) {
  return {static_cast<unsigned>(linear_idx % shape.x), static_cast<unsigned>(linear_idx / shape.x % shape.y),
          static_cast<unsigned>(linear_idx / shape.x / shape.y)};
}

}  // namespace

void Scheduler::FreeShared::operator()(unsigned char* shared) const {
  ::operator delete(shared, SHARED_ALIGNMENT);
}

Scheduler::~Scheduler() { destroy_race_contexts(); }

// ---- The launch and its CTAs
// ---------------------------------------------------------------------------------------

void Scheduler::begin_launch(const LaunchShape& shape, const Options& options, KernelBody body,
                             const void* context) {
  options_ = options;
  body_ = body;
  context_ = context;
  counters_ = {};
  trace_.clear();
  fault_text_.clear();
  barrier_ = {};
  host_race_context_ = sanitizers::current_race_context();
  allocate_shared(shape.shared_bytes);
  cta_ = {{0, 0, 0}, shape.grid, shape.cta, shared_.get(), shape.shared_bytes};
  num_threads_ = static_cast<int>(shape.cta.x * shape.cta.y * shape.cta.z);
  threads_ = std::vector<ThreadRecord>(static_cast<size_t>(num_threads_));
  warps_.assign(static_cast<size_t>((num_threads_ + 31) / 32), Warp{});
  order_.resize(threads_.size());
  for (int thread_idx = 0; thread_idx < num_threads_; ++thread_idx) {
    ThreadRecord& thread = threads_[static_cast<size_t>(thread_idx)];
    thread.thread_idx = unflatten(static_cast<uint64_t>(thread_idx), shape.cta);
    thread.linear_idx = thread_idx;
    thread.warp_idx = thread_idx / 32;
    thread.lane_idx = thread_idx % 32;
    thread.cta = &cta_;
    thread.scheduler = this;
    thread.async_copies = &thread.copies;
    thread.counters = &counters_;
    thread.trace = options.trace ? &trace_ : nullptr;
    if (race_contexts_.size() < threads_.size()) race_contexts_.push_back(sanitizers::create_race_context());
    thread.race_context = race_contexts_[static_cast<size_t>(thread_idx)];
    ++warps_[static_cast<size_t>(thread.warp_idx)].num_lanes;
    const bool descending = options.schedule == Schedule::descending;
    order_[static_cast<size_t>(thread_idx)] = descending ? num_threads_ - 1 - thread_idx : thread_idx;
  }
}

void Scheduler::end_launch() {
  threads_.clear();
  shared_.reset();
}

void Scheduler::allocate_shared(size_t num_bytes) {
  shared_.reset(static_cast<unsigned char*>(::operator new(num_bytes + CANARY_BYTES, SHARED_ALIGNMENT)));
  std::memset(shared_.get() + num_bytes, POISON, CANARY_BYTES);
}

bool Scheduler::run_cta(uint64_t cta_idx) {
  begin_cta(cta_idx);
  for (int num_returned = 0; num_returned < num_threads_;) {
    if (options_.schedule == Schedule::random) shuffle_order();
    bool progress = false;
    for (const int thread_idx : order_) {
      ThreadRecord& thread = threads_[static_cast<size_t>(thread_idx)];
      if (thread.status != Status::ready) continue;
      progress = true;
      resume(thread);
      if (!fault_text_.empty()) return abandon_cta();
      if (thread.status == Status::returned) {
        ++num_returned;
        // The next thread runs on the same, warm stack; but where races are watched, it would seem to race
        // for it.
        if (!sanitizers::WATCHES_RACES) recycle_fiber(thread);
      }
    }
    if (!progress) {
      fault_text_ = describe_deadlock();
      return abandon_cta();
    }
  }
  return end_cta();
}

void Scheduler::begin_cta(uint64_t cta_idx) {
  cta_.block_idx = unflatten(cta_idx, cta_.grid_dim);
  std::memset(cta_.shared, POISON, cta_.shared_bytes);
  for (ThreadRecord& thread : threads_) thread.status = Status::ready;
  // Any odd constant spreads neighbouring CTAs over the generator's states; it must not start at zero.
  random_state_ = (options_.seed + 1) * 0x9e3779b97f4a7c15u ^ (cta_idx + 1) * 0xd1342543de82ef95u;
  if (random_state_ == 0) random_state_ = 1;
  ++counters_.ctas;
  sanitizers::release(&start_tag_);
}

bool Scheduler::end_cta() {
  sanitizers::acquire(&end_tag_);
  for (ThreadRecord& thread : threads_) recycle_fiber(thread);
  const unsigned char* canary = cta_.shared + cta_.shared_bytes;
  const bool intact =
      std::all_of(canary, canary + CANARY_BYTES, [](unsigned char byte) { return byte == POISON; });
  if (intact) return true;
  fault_text_ = "CTA " + to_string(cta_.block_idx) + ": a thread wrote past the end of the " +
                std::to_string(cta_.shared_bytes) + " bytes of shared memory";
  return false;
}

// Leaves every thread where it stands. Its frames hold no destructors, and its stack is rewound for the next
// user.
bool Scheduler::abandon_cta() {
  sanitizers::acquire(&end_tag_);
  for (ThreadRecord& thread : threads_) {
    if (thread.fiber != nullptr) thread.fiber->rewind();
    recycle_fiber(thread);
  }
  destroy_race_contexts();  // they stand in the middle of a kernel's calls
  return false;
}

// ---- Switching between threads
// -------------------------------------------------------------------------------------

void Scheduler::resume(ThreadRecord& thread) {
  if (thread.fiber == nullptr) {
    if (idle_fibers_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(run_threads, this));
      idle_fibers_.push_back(fibers_.back().get());
    }
    thread.fiber = idle_fibers_.back();
    idle_fibers_.pop_back();
  }
  ++counters_.context_switches;
  current_thread = &thread;
  sanitizers::switch_race_context(thread.race_context);
  thread.fiber->resume();
  sanitizers::switch_race_context(host_race_context_);
  current_thread = nullptr;
}

// Back to the host. Whatever the thread has done is ordered before what the host does with the CTA at its
// end.
void Scheduler::suspend() {
  sanitizers::release(&end_tag_);
  running().fiber->suspend();
}

void Scheduler::recycle_fiber(ThreadRecord& thread) {
  if (thread.fiber != nullptr) idle_fibers_.push_back(thread.fiber);
  thread.fiber = nullptr;
}

void Scheduler::destroy_race_contexts() {
  for (void* context : race_contexts_) sanitizers::destroy_race_context(context);
  race_contexts_.clear();
}

void Scheduler::run_threads(void* scheduler) {
  Scheduler& self = *static_cast<Scheduler*>(scheduler);
  for (;;) {
    sanitizers::acquire(&self.start_tag_);
    self.body_(self.context_);
    ThreadRecord& thread = self.running();
    if (thread.copies.num_pending() > 0) {
      emulator::fault(Place{}, "the thread returned with %zu cp.async copies that no wait covers",
                      thread.copies.num_pending());
    }
    thread.copies.clear();
    thread.status = Status::returned;
    self.suspend();
  }
}

void Scheduler::wait(const char* name, const Place& place) {
  ThreadRecord& thread = running();
  thread.status = Status::waiting;
  thread.waits_in = name;
  thread.waits_at = place;
  suspend();
}

void Scheduler::preempt() {
  if (options_.schedule != Schedule::random) return;
  if (static_cast<int>(next_random() % 1000) < options_.preempt_permille) suspend();
}

uint64_t Scheduler::next_random() {  // xorshift64
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

void Scheduler::shuffle_order() {
  for (size_t remaining = order_.size(); remaining > 1; --remaining) {
    std::swap(order_[remaining - 1], order_[next_random() % remaining]);
  }
}

// ---- Meeting points
// ------------------------------------------------------------------------------------------------

// The meeting of `mask` that is under way, or a new one. A fault where the calling thread and a lane that
// already waits can never meet: each waits for the other, at different places or with different masks.
Scheduler::Rendezvous& Scheduler::join_rendezvous(Warp& warp, uint32_t mask, const char* name,
                                                  const Place& place) {
  const int lane_idx = running().lane_idx;
  for (uint32_t open = warp.open; open != 0; open &= open - 1) {
    Rendezvous& other = warp.rendezvous[std::countr_zero(open)];
    const bool same = other.mask == mask && other.name == name && same_place(other.place, place);
    if (same) return other;
    if ((other.mask >> lane_idx & 1) && (other.arrived & mask)) {
      emulator::fault(
          place,
          "divergent %s with mask 0x%08x: lanes 0x%08x of the warp wait in %s with mask 0x%08x at %s:%u:%u",
          name, mask, other.arrived, other.name, other.mask, other.place.file_name(), other.place.line(),
          other.place.column());
    }
  }
  const int slot = std::countr_one(warp.open);
  warp.open |= 1u << slot;
  Rendezvous& rendezvous = warp.rendezvous[slot];
  rendezvous.mask = mask;
  rendezvous.arrived = 0;
  rendezvous.name = name;
  rendezvous.place = place;
  return rendezvous;
}

void Scheduler::warp_collective(uint32_t mask, const char* name, void* argument, WarpOperation operation,
                                MemoryOrder order, const Place& place) {
  preempt();
  ThreadRecord& thread = running();
  Warp& warp = warps_[static_cast<size_t>(thread.warp_idx)];
  if (warp.num_lanes < 32) mask &= (1u << warp.num_lanes) - 1;
  if (!(mask >> thread.lane_idx & 1)) {
    emulator::fault(place, "%s: the calling lane %d is not in mask 0x%08x", name, thread.lane_idx, mask);
  }
  Rendezvous& rendezvous = join_rendezvous(warp, mask, name, place);
  char* const tag = &rendezvous.tags[rendezvous.parity];
  if (order == MemoryOrder::fence) sanitizers::release(tag);
  rendezvous.arguments[thread.lane_idx] = argument;
  rendezvous.arrived |= 1u << thread.lane_idx;
  if (rendezvous.arrived == mask) {
    warp.open &= ~(1u << (&rendezvous - warp.rendezvous));
    rendezvous.parity = !rendezvous.parity;
    ++counters_.warp_collectives;
    if (operation != nullptr) operation({rendezvous.arguments, mask, name, place, &counters_});
    for (uint32_t lanes = mask; lanes != 0; lanes &= lanes - 1) {
      threads_[static_cast<size_t>(thread.warp_idx * 32 + std::countr_zero(lanes))].status = Status::ready;
    }
  } else {
    wait(name, place);
  }
  if (order == MemoryOrder::fence) sanitizers::acquire(tag);
}

int Scheduler::cta_barrier(const char* name, bool predicate, const Place& place) {
  preempt();
  const bool parity = barrier_.parity;
  sanitizers::release(&barrier_.tags[parity]);
  if (barrier_.num_arrived == 0) {
    barrier_.name = name;
    barrier_.place = place;
    barrier_.num_true = 0;
  } else if (barrier_.name != name || !same_place(barrier_.place, place)) {
    emulator::fault(place, "divergent %s: %d threads of the CTA wait in %s at %s:%u:%u", name,
                    barrier_.num_arrived, barrier_.name, barrier_.place.file_name(), barrier_.place.line(),
                    barrier_.place.column());
  }
  barrier_.num_true += predicate;
  if (++barrier_.num_arrived == num_threads_) {
    barrier_.num_arrived = 0;
    barrier_.parity = !parity;
    barrier_.results[parity] = barrier_.num_true;
    ++counters_.barriers;
    for (ThreadRecord& thread : threads_) thread.status = Status::ready;
  } else {
    wait(name, place);
  }
  sanitizers::acquire(&barrier_.tags[parity]);
  return barrier_.results[parity];
}

// ---- Faults
// --------------------------------------------------------------------------------------------------------

void Scheduler::fault(const Place& place, const char* format, va_list arguments) {
  ThreadRecord& thread = running();
  {
    char what[512];
    std::vsnprintf(what, sizeof(what), format, arguments);
    const std::string where = place.line() == 0 ? "" : to_string(place) + ": ";
    fault_text_ = where + "CTA " + to_string(cta_.block_idx) + ", thread " + to_string(thread.thread_idx) +
                  " (warp " + std::to_string(thread.warp_idx) + ", lane " + std::to_string(thread.lane_idx) +
                  "): " + what;
  }
  for (;;) suspend();  // the host abandons the CTA, so this suspends once
}

// Every run of neighbouring threads in the same situation is one line, up to a readable number of lines.
std::string Scheduler::describe_deadlock() const {
  constexpr int MAX_LINES = 8;
  const auto situation = [&](int thread_idx) {
    const ThreadRecord& thread = threads_[static_cast<size_t>(thread_idx)];
    if (thread.status == Status::returned) return std::string("returned from the kernel");
    return std::string("waiting in ") + thread.waits_in + " at " + to_string(thread.waits_at);
  };
  std::string text = "deadlock in CTA " + to_string(cta_.block_idx) + ":";
  int num_lines = 0;
  for (int begin = 0, end; begin < num_threads_; begin = end) {
    const std::string what = situation(begin);
    for (end = begin + 1; end < num_threads_ && situation(end) == what;) ++end;
    if (++num_lines > MAX_LINES) return text + "\n  ...";
    text += "\n  thread " + std::to_string(begin);
    if (end - begin > 1) text += " to " + std::to_string(end - 1);
    text += ": " + what;
  }
  return text;
}

}  // namespace pagedkv::emulator
