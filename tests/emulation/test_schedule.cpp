// How the attention kernels share out their work: every key of every piece goes to exactly one CTA, no chunk
// is too small, and no CTA has much more than its part.
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "cuda/paged_attention/host_plan.h"
#include "cuda/paged_attention/schedule.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

using cuda::AttentionLaunch;
using cuda::Chunk;
using cuda::MIN_CHUNK_TILES;
using cuda::OVERHEAD_TILES;
using cuda::TILE_TOKENS;

constexpr int MAX_CHUNKS_PER_CTA = 64;

struct Record {
  AttentionLaunch launch;
  Chunk* chunks;  // [num_ctas, MAX_CHUNKS_PER_CTA]
  int* counts;    // [num_ctas]
};

// Writes down the chunks of every CTA.
void record_kernel(const Record record) {
  PAGEDKV_SHARED(shared);
  auto& work = *reinterpret_cast<cuda::Work*>(shared);
  int num_chunks = 0;
  while (find_chunk(record.launch, work, num_chunks == 0)) {
    if (threadIdx.x == 0 && num_chunks < MAX_CHUNKS_PER_CTA) {
      record.chunks[blockIdx.x * MAX_CHUNKS_PER_CTA + num_chunks] = work.chunk;
    }
    ++num_chunks;
  }
  if (threadIdx.x == 0) record.counts[blockIdx.x] = num_chunks;
}

struct Batch {
  std::vector<int32_t> context_lens, query_start_loc;
  PagedAttentionParams params{};

  // With empty query_lens every sequence has one query token.
  Batch(std::vector<int32_t> lens, const std::vector<int32_t>& query_lens, int64_t group,
        int64_t num_kv_heads)
      : context_lens(std::move(lens)) {
    params.num_seqs = params.num_tokens = static_cast<int64_t>(context_lens.size());
    params.max_query_len = 1;
    if (!query_lens.empty()) {
      query_start_loc.push_back(0);
      for (const int32_t len : query_lens) query_start_loc.push_back(query_start_loc.back() + len);
      params.query_start_loc = query_start_loc.data();
      params.num_tokens = query_start_loc.back();
      params.max_query_len = *std::max_element(query_lens.begin(), query_lens.end());
    }
    params.context_lens = context_lens.data();
    params.query_dtype = params.cache_dtype = DType::bfloat16;
    params.num_heads = group * num_kv_heads;
    params.num_kv_heads = num_kv_heads;
    params.head_dim = params.value_head_dim = 64;
    params.block_size = 16;
    params.max_blocks_per_seq = *std::max_element(context_lens.begin(), context_lens.end()) / 16 + 1;
    params.causal = true;
    params.window = NO_WINDOW;
  }
};

std::vector<std::vector<Chunk>> chunks_by_cta(const AttentionLaunch& launch, bool& ran) {
  const int ctas_per_head =
      launch.num_parts > 0 ? launch.num_parts : launch.num_row_tiles * launch.num_splits;
  const size_t num_ctas = static_cast<size_t>(ctas_per_head * launch.p.num_kv_heads);
  std::vector<Chunk> chunks(num_ctas * MAX_CHUNKS_PER_CTA);
  std::vector<int> counts(num_ctas);
  const Record record{launch, chunks.data(), counts.data()};
  ran = pagedkv::launch(record_kernel, dim3(static_cast<unsigned>(num_ctas)), dim3(64), cuda::WORK_BYTES,
                        nullptr, record) == cudaSuccess;
  std::vector<std::vector<Chunk>> result;
  for (size_t cta = 0; cta < num_ctas; ++cta) {
    const auto* first = chunks.data() + cta * MAX_CHUNKS_PER_CTA;
    ran &= counts[cta] <= MAX_CHUNKS_PER_CTA;
    result.emplace_back(first, first + std::min(counts[cta], MAX_CHUNKS_PER_CTA));
  }
  return result;
}

// All pieces of the launch with the keys that their rows may see, from the definition.
std::map<std::pair<int, int>, cuda::KeyRange> all_pieces(const Batch& batch, const AttentionLaunch& launch) {
  std::map<std::pair<int, int>, cuda::KeyRange> pieces;
  const PagedAttentionParams& p = batch.params;
  for (int seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
    const int query_begin = p.query_start_loc != nullptr ? batch.query_start_loc[seq_idx] : seq_idx;
    const int query_len = p.query_start_loc != nullptr ? batch.query_start_loc[seq_idx + 1] - query_begin : 1;
    const int rows = query_len * launch.group, tile_rows = launch.tile_rows();
    const int first_tile = p.query_start_loc != nullptr
                               ? query_begin * launch.group / tile_rows + seq_idx
                               : seq_idx * static_cast<int>(ceil_div(launch.group, tile_rows));
    for (int row = 0; row < rows; row += tile_rows) {
      int begin = std::numeric_limits<int>::max(), end = 0;
      for (int query = row / launch.group; query <= (std::min(row + tile_rows, rows) - 1) / launch.group;
           ++query) {
        const RowMask mask = row_mask(p, seq_idx, query_len, query, query_begin + query);
        begin = std::min(begin, mask.begin);
        end = std::max(end, mask.end);
      }
      for (int head = 0; head < p.num_kv_heads; ++head) {
        pieces[{first_tile + row / tile_rows, head}] = {begin, std::max(begin, end)};
      }
    }
  }
  return pieces;
}

void check_schedule(const Batch& batch, int64_t num_sms, bool is_shared) {
  const AttentionLaunch launch = cuda::make_launch(batch.params, num_sms);
  CHECK((launch.num_parts > 0) == is_shared);
  bool ran = false;
  const auto ctas = chunks_by_cta(launch, ran);
  CHECK(ran);
  std::map<std::pair<int, int>, std::vector<Chunk>> by_piece;
  int64_t total_work = 0, most_work = 0;
  for (const auto& chunks : ctas) {
    int64_t work = 0;
    for (const Chunk& chunk : chunks) {
      by_piece[{chunk.piece.row_tile_idx, chunk.piece.kv_head_idx}].push_back(chunk);
      work += num_tiles_of(chunk.keys) + OVERHEAD_TILES;
    }
    total_work += work;
    most_work = std::max(most_work, work);
  }
  const auto pieces = all_pieces(batch, launch);
  CHECK(by_piece.size() == pieces.size());
  bool covered = true, large_enough = true;
  for (auto& [key, chunks] : by_piece) {
    std::sort(chunks.begin(), chunks.end(),
              [](const Chunk& a, const Chunk& b) { return a.number < b.number; });
    covered &= pieces.contains(key) && chunks.front().is_first && chunks.back().is_last &&
               chunks.front().keys.begin == pieces.at(key).begin &&
               chunks.back().keys.end == pieces.at(key).end;
    for (size_t i = 0; i < chunks.size(); ++i) {
      covered &= chunks[i].is_first == (i == 0) && chunks[i].is_last == (i + 1 == chunks.size());
      covered &= i == 0 || chunks[i].keys.begin == chunks[i - 1].keys.end;
      covered &= i == 0 || chunks[i].number == chunks[i - 1].number + 1;
      large_enough &= chunks.size() == 1 || num_tiles_of(chunks[i].keys) >= MIN_CHUNK_TILES;
    }
  }
  CHECK(covered);
  CHECK(large_enough);
  if (!is_shared) return;
  // Cuts move by less than MIN_CHUNK_TILES at either end, and a cut piece's overhead counts twice.
  const int64_t part = ceil_div(total_work, launch.num_parts * batch.params.num_kv_heads);
  CHECK(most_work <=
        std::max<int64_t>(part, MIN_CHUNK_TILES + OVERHEAD_TILES) + 2 * MIN_CHUNK_TILES + OVERHEAD_TILES);
}

TEST(schedule_shares_a_long_sequence) { check_schedule(Batch({8000}, {}, 4, 2), 8, true); }

TEST(schedule_shares_unequal_sequences) {
  check_schedule(Batch({2300, 1, 0, 900, 64, 65, 255, 256, 0, 1030, 3, 640}, {}, 1, 3), 8, true);
  check_schedule(Batch({5000, 0, 40, 300}, {5, 0, 3, 1}, 2, 1), 8, true);    // decode tiles, ragged
  check_schedule(Batch({3000, 0, 40, 900}, {20, 0, 3, 1}, 8, 1), 64, true);  // prefill tiles
  check_schedule(Batch({3000}, {}, 71, 1), 16, true);                        // a large group
}

TEST(schedule_of_random_batches) {
  std::mt19937 random_bits(3);
  for (int repeat = 0; repeat < 30; ++repeat) {
    std::vector<int32_t> lens{4000}, query_lens{1};
    const int num_seqs = 1 + static_cast<int>(random_bits() % 150);
    for (int i = 1; i < num_seqs; ++i) {
      lens.push_back(
          static_cast<int32_t>(random_bits() % 8 == 0 ? random_bits() % 3000 : random_bits() % 200));
      query_lens.push_back(static_cast<int32_t>(random_bits() % 3));
    }
    check_schedule(Batch(lens, {}, 1 + random_bits() % 32, 1), 8, true);
    check_schedule(Batch(lens, query_lens, 1 + random_bits() % 4, 1), 16, true);
  }
}

TEST(schedule_leaves_many_pieces_whole) {
  check_schedule(Batch(std::vector<int32_t>(400, 700), {}, 1, 1), 8, false);
  check_schedule(Batch({900, 700}, {600, 0}, 4, 2), 8, false);
}

TEST(schedule_finds_window_and_start) {
  Batch batch({6000, 500, 1000}, {}, 1, 1);
  const std::vector<int32_t> kv_starts{1000, 499, 0};
  batch.params.kv_starts = kv_starts.data();
  check_schedule(batch, 8, true);
  batch.params.window = 900;
  check_schedule(batch, 8, true);
}

}  // namespace
}  // namespace pagedkv::emulator
