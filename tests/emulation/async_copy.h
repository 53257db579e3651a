// cp.async: copies from global to shared memory that complete at a wait.
//
// A real copy may land at any moment between its issue and the wait that covers it, so the emulator destroys
// the destination when the copy is issued and delivers the data at the wait: whoever reads in between reads
// NaN. All accesses happen in this header, compiled with the kernel, where AddressSanitizer and
// ThreadSanitizer see them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "emulator.h"

namespace pagedkv::emulator {

struct AsyncCopy {
  unsigned char* destination;
  const unsigned char* source;
  int num_bytes, num_source_bytes;  // the rest of the destination becomes zero
};

// The copies of one thread, oldest first, and the groups that they were committed in.
class AsyncCopyQueue {
 public:
  void push(const AsyncCopy& copy) { copies_.push_back(copy); }
  void commit() { group_ends_.push_back(copies_.size()); }

  // How many copies must be delivered so that at most num_groups committed groups remain.
  size_t num_due(size_t num_groups);
  AsyncCopy pop() { return copies_[num_delivered_++]; }

  size_t num_pending() const { return copies_.size() - num_delivered_; }
  void clear();

 private:
  std::vector<AsyncCopy> copies_;
  std::vector<size_t> group_ends_;  // past the last copy of each committed group
  size_t num_delivered_ = 0, num_groups_done_ = 0;
};

void enqueue_async_copy(const AsyncCopy& copy);
void commit_async_copies();
size_t num_async_copies_due(size_t num_groups);
AsyncCopy pop_async_copy();

// cp.async of 4, 8 or 16 bytes; num_source_bytes below NUM_BYTES fills the rest with zeros, and with 0
// `source` is not touched, as with cp.async's src-size operand.
template <int NUM_BYTES>
void async_copy(void* destination, const void* source, int num_source_bytes = NUM_BYTES,
                Place place = Place::current()) {
  static_assert(NUM_BYTES == 4 || NUM_BYTES == 8 || NUM_BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  if (num_source_bytes < 0 || num_source_bytes > NUM_BYTES) {
    fault(place, "cp.async: source size %d outside 0 to %d", num_source_bytes, NUM_BYTES);
  }
  if (num_source_bytes > 0 && reinterpret_cast<uintptr_t>(source) % NUM_BYTES != 0) {
    fault(place, "cp.async: source %p is not aligned to %d bytes", source, NUM_BYTES);
  }
  check_shared_access("cp.async", destination, NUM_BYTES, place);
  trace_access(AccessKind::write, destination, NUM_BYTES, place);
  if (num_source_bytes > 0) {
    trace_access(AccessKind::read, source, static_cast<size_t>(num_source_bytes), place);
  }
  // Volatile: of a memset the compiler makes stores that ThreadSanitizer does not see.
  auto* words = static_cast<volatile uint32_t*>(destination);
  for (int i = 0; i < NUM_BYTES / 4; ++i) words[i] = 0xffffffffu;
  enqueue_async_copy({static_cast<unsigned char*>(destination), static_cast<const unsigned char*>(source),
                      NUM_BYTES, num_source_bytes});
  preempt();
}

// cp.async.commit_group
inline void async_copy_commit() { commit_async_copies(); }

// cp.async.wait_group: returns when at most num_groups of the thread's committed groups are under way. Only
// the calling thread may then read its own copies; a barrier shows them to others.
inline void async_copy_wait(size_t num_groups) {
  for (size_t num_due = num_async_copies_due(num_groups); num_due > 0; --num_due) {
    const AsyncCopy copy = pop_async_copy();
    std::memset(copy.destination, 0, static_cast<size_t>(copy.num_bytes));
    if (copy.num_source_bytes > 0) {  // the source may be null where nothing is read
      std::memcpy(copy.destination, copy.source, static_cast<size_t>(copy.num_source_bytes));
    }
  }
  preempt();
}

// cp.async.wait_all: also waits for copies that were never committed.
inline void async_copy_wait_all() {
  async_copy_commit();
  async_copy_wait(0);
}

}  // namespace pagedkv::emulator
