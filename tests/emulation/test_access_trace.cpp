// What the trace sees, and how a device's memory would take it.
#include "access_trace.h"

#include "common/device.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

// One warp, one access a lane at `offset_of(lane)` of a buffer in shared or in global memory.
template <class Vector, class OffsetOf>
Request only_request(bool is_shared, OffsetOf offset_of) {
  alignas(256) static unsigned char global[32 * 1024];
  set_options(Options{.trace = true});
  take_trace();
  const cudaError_t error = run_grid({1, 32, sizeof(global)}, [&] {
    unsigned char* buffer = is_shared ? shared_memory() : global;
    load_vector<Vector>(buffer + offset_of(static_cast<int>(threadIdx.x)));
  });
  CHECK(error == cudaSuccess);
  const std::vector<Request> requests = requests_of(take_trace());
  CHECK(requests.size() == 1);
  CHECK(requests[0].accesses.size() == 32);
  CHECK(requests[0].is_shared == is_shared);
  CHECK(requests[0].kind == AccessKind::read);
  return requests[0];
}

TEST(trace_counts_sectors) {
  CHECK(only_request<uint4>(false, [](int lane) { return 16 * lane; }).num_sectors() == 16);
  CHECK(only_request<uint4>(false, [](int lane) { return 16 * lane + 16; }).num_sectors() == 17);
  CHECK(only_request<uint32_t>(false, [](int lane) { return 512 * lane; }).num_sectors() == 32);
  CHECK(only_request<uint32_t>(false, [](int) { return 64; }).num_sectors() == 1);
}

TEST(trace_counts_bank_conflicts) {
  const auto turns = [](const Request& request) {
    return std::pair{request.num_wavefronts(), request.min_wavefronts()};
  };
  using Turns = std::pair<uint64_t, uint64_t>;
  CHECK(turns(only_request<uint32_t>(true, [](int lane) { return 4 * lane; })) == Turns(1, 1));
  CHECK(turns(only_request<uint32_t>(true, [](int) { return 4; })) == Turns(1, 1));  // all the same word
  CHECK(turns(only_request<uint32_t>(true, [](int lane) { return 8 * lane; })) == Turns(2, 1));
  CHECK(turns(only_request<uint32_t>(true, [](int lane) { return 128 * lane; })) == Turns(32, 1));
  CHECK(turns(only_request<uint4>(true, [](int lane) { return 16 * lane; })) == Turns(4, 4));
  CHECK(turns(only_request<uint4>(true, [](int lane) { return 256 * lane; })) == Turns(32, 4));
}

TEST(trace_tells_turns_apart) {
  set_options(Options{.trace = true});
  take_trace();
  const cudaError_t error = run_grid({2, 64, 4096}, [] {
    for (int turn = 0; turn < 3; ++turn) store_vector(shared_memory() + 4 * threadIdx.x, 1u);
  });
  CHECK(error == cudaSuccess);
  CHECK(requests_of(take_trace()).size() == 2 * 2 * 3);  // CTAs, warps, turns
  CHECK(take_trace().empty());
}

}  // namespace
}  // namespace pagedkv::emulator
