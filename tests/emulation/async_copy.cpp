#include "async_copy.h"

namespace pagedkv::emulator {

size_t AsyncCopyQueue::num_due(size_t num_groups) {
  const size_t num_open_groups = group_ends_.size() - num_groups_done_;
  if (num_open_groups <= num_groups) return 0;
  num_groups_done_ += num_open_groups - num_groups;
  return group_ends_[num_groups_done_ - 1] - num_delivered_;
}

void AsyncCopyQueue::clear() {
  copies_.clear();
  group_ends_.clear();
  num_delivered_ = num_groups_done_ = 0;
}

void enqueue_async_copy(const AsyncCopy& copy) {
  current_thread->async_copies->push(copy);
  ++current_thread->counters->async_copies;
  current_thread->counters->async_copy_bytes_read += static_cast<uint64_t>(copy.num_source_bytes);
}

void commit_async_copies() { current_thread->async_copies->commit(); }

size_t num_async_copies_due(size_t num_groups) { return current_thread->async_copies->num_due(num_groups); }

AsyncCopy pop_async_copy() { return current_thread->async_copies->pop(); }

}  // namespace pagedkv::emulator
