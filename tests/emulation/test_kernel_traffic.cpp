// What the attention kernels' copies cost on a device, counted exactly: bytes and sectors of the caches over
// the least possible, and the turns that shared memory takes.
//
// cp.async and ldmatrix are what the main loops move keys and values by; plain C++ accesses to shared memory
// (masks, the merge of the warps) are not counted.
#include "access_trace.h"
#include "attention_case.h"

namespace pagedkv::emulator {
namespace {

struct Traffic {
  uint64_t num_bytes = 0, num_sectors = 0;  // of reads of the key and value cache
  uint64_t num_ldmatrix = 0, num_ldmatrix_with_conflicts = 0;
  double worst_conflict = 0.0;  // of shared accesses: turns over the least possible
};

bool lies_in(const Bytes& buffer, const Access& access) {
  const auto begin = reinterpret_cast<uintptr_t>(buffer.data());
  return access.address >= begin && access.address < begin + buffer.size();
}

Traffic measure(AttentionCase& attention) {
  set_options(Options{.trace = true});
  take_trace();
  Bytes out;
  std::vector<float> lse;
  CHECK(attention.run(true, out, lse) == cudaSuccess);
  Traffic traffic;
  for (const Request& request : requests_of(take_trace())) {
    if (request.is_shared) {
      const uint64_t turns = request.num_wavefronts(), least = request.min_wavefronts();
      traffic.worst_conflict =
          std::max(traffic.worst_conflict, static_cast<double>(turns) / static_cast<double>(least));
      if (request.kind != AccessKind::read) continue;
      ++traffic.num_ldmatrix;
      traffic.num_ldmatrix_with_conflicts += turns != least;
    } else if (request.kind == AccessKind::read && (lies_in(attention.key_cache, request.accesses[0]) ||
                                                    lies_in(attention.value_cache, request.accesses[0]))) {
      traffic.num_bytes += request.num_bytes();
      traffic.num_sectors += request.num_sectors();
    }
  }
  return traffic;
}

double ratio(uint64_t count, int64_t least) {
  return static_cast<double>(count) / static_cast<double>(least);
}

// K and V of a sequence are read once, whatever the number of query heads that share them.
TEST(kernel_traffic_reads_keys_and_values_once) {
  for (const int64_t group : {1, 4, 8, 16}) {
    AttentionCase attention({DType::bfloat16, DType::bfloat16, 128, group, 1, 16, {1}, {4096}});
    const Traffic traffic = measure(attention);
    constexpr int64_t LEAST = 2 * 4096 * 128 * 2;
    std::printf("  context 4096, group %2d: KV bytes / least %.4f, sectors / least %.4f\n",
                static_cast<int>(group), ratio(traffic.num_bytes, LEAST),
                32 * ratio(traffic.num_sectors, LEAST));
    CHECK(traffic.num_bytes >= LEAST);
    CHECK(ratio(traffic.num_bytes, LEAST) <= 1.02);
    CHECK(32 * ratio(traffic.num_sectors, LEAST) <= 1.02);
  }
}

TEST(kernel_traffic_float32_reads_once_for_eight_heads) {
  for (const int64_t group : {1, 4, 8}) {
    AttentionCase attention({DType::float32, DType::float32, 128, group, 1, 16, {1}, {1000}});
    CHECK(measure(attention).num_bytes == 2 * 1000 * 128 * 4);
  }
}

// Also where a sequence ends inside a tile, and where a window hides its beginning.
TEST(kernel_traffic_reads_visible_keys_alone) {
  AttentionCase ragged({DType::bfloat16, DType::bfloat16, 128, 4, 1, 16, {1, 1}, {1001, 77}});
  CHECK(measure(ragged).num_bytes == 2 * (1001 + 77) * 128 * 2);
  AttentionShape shape{DType::bfloat16, DType::bfloat16, 128, 4, 1, 16, {1}, {1001}};
  shape.window = 100;
  AttentionCase window(shape);
  CHECK(measure(window).num_bytes == 2 * 100 * 128 * 2);
}

TEST(kernel_traffic_shared_memory_without_conflicts) {
  for (const DType cache_dtype : {DType::bfloat16, DType::float8_e4m3fn}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const int32_t query_len : {1, 9, 40}) {
        AttentionCase attention({DType::bfloat16, cache_dtype, head_dim, 4, 1, 16, {query_len}, {200}});
        const Traffic traffic = measure(attention);
        std::printf("  %s, head_dim %3d, %2d rows: %d ldmatrix, %d with conflicts; worst conflict %.2f\n",
                    bytes_of(cache_dtype) == 1 ? "8 bit" : "16 bit", static_cast<int>(head_dim),
                    4 * query_len, static_cast<int>(traffic.num_ldmatrix),
                    static_cast<int>(traffic.num_ldmatrix_with_conflicts), traffic.worst_conflict);
        CHECK(traffic.num_ldmatrix > 0);
        CHECK(traffic.num_ldmatrix_with_conflicts == 0);
        CHECK(traffic.worst_conflict <= 2.0);
      }
    }
  }
}

}  // namespace
}  // namespace pagedkv::emulator
