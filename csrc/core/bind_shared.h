// `Sequences` as Python's threads share it.
#pragma once

#include <pybind11/pybind11.h>

#include <mutex>
#include <optional>
#include <type_traits>

#include "core/sequences.h"

namespace pagedkv {

struct SharedSequences : Sequences {
  using Sequences::Sequences;
  mutable std::mutex mutex;  // held by whoever calls
};

// Work on so many tokens or blocks takes tens of microseconds and more.
inline constexpr int64_t LONG_CALL = 4096;

// Keeps other threads out of the sequences. Long calls do their work without the GIL. No thread waits for the
// mutex with the GIL in hand, since the holder of the mutex may be about to ask for the GIL; and no Python
// object is made while the mutex is held, since that may run a finaliser that wants the mutex.
class Exclusive {
 public:
  explicit Exclusive(const SharedSequences& sequences, int64_t amount_of_work = 0)
      : lock_(sequences.mutex, std::defer_lock) {
    if (amount_of_work >= LONG_CALL) gil_released_.emplace();
    if (lock_.try_lock()) return;
    if (gil_released_) {
      lock_.lock();
    } else {
      const pybind11::gil_scoped_release released;
      lock_.lock();
    }
  }

  // For those who know the amount of work only now.
  void expect(int64_t amount_of_work) {
    if (amount_of_work >= LONG_CALL) gil_released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> gil_released_;  // destroyed last
  std::unique_lock<std::mutex> lock_;
};

// A short method of Sequences as a function that keeps other threads out.
template <typename Result, typename... Args>
auto exclusive(Result (Sequences::*method)(Args...)) {
  return [method](SharedSequences& self, Args... args) -> std::decay_t<Result> {
    const Exclusive lock(self);
    return (self.*method)(args...);
  };
}

template <typename Result, typename... Args>
auto exclusive(Result (Sequences::*method)(Args...) const) {
  return [method](const SharedSequences& self, Args... args) -> std::decay_t<Result> {
    const Exclusive lock(self);
    return (self.*method)(args...);
  };
}

}  // namespace pagedkv
