// Work sharing on the CPU: OpenMP, so that torch.set_num_threads holds here too (torch shares the runtime).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace pagedkv::cpu {

// Calls body(task) for every task in [0, num_tasks), by as many threads as give each at least min_tasks.
// Tasks are handed out one by one, so they may differ in length; they must not depend on who runs them.
template <class Body>
void parallel_for(int64_t num_tasks, int64_t min_tasks, Body&& body) {
  const int num_threads =
      std::min<int64_t>(omp_get_max_threads(), num_tasks / std::max<int64_t>(1, min_tasks));
  if (num_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t task = 0; task < num_tasks; ++task) body(task);
}

}  // namespace pagedkv::cpu
