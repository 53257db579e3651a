// Which keys of which rows a CTA takes.
//
// A KV head's pieces lie one after another on a line of work: a tile of 64 keys is one unit, a piece takes
// OVERHEAD_TILES more. The line is cut into num_parts equal parts, one a CTA, so that every CTA has about as
// much to do whatever the lengths are. Cuts never leave a chunk of less than MIN_CHUNK_TILES tiles: within
// that distance of a piece's end they move to the end.
//
// Example: two sequences of 6 and 18 tiles, 4 parts. The line is 8 + 20 = 28 units long, a part 7. The first
// cut falls 5 tiles into the first piece, too close to its end: CTA 0 takes the whole piece. The next cuts
// are at 14 and 21 units, 4 and 11 tiles into the second piece: CTAs 1, 2 and 3 take 4, 7 and 7 tiles of it.
#pragma once

#include "cuda/paged_attention/plan.h"
#include "cuda/primitives.h"

namespace pagedkv::cuda {

inline constexpr int OVERHEAD_TILES = 2;  // what a piece costs besides its keys: query, merge, result

struct KeyRange {
  int begin, end;  // positions fit int32, as context lengths do
};

struct Chunk {
  Piece piece;
  KeyRange keys;           // visible to some row
  int fold_begin;          // keys are taken from here on, those before keys.begin unseen ...
  int fold_keys;           // ... and the rows' states are folded after so many each
  int number;              // among the KV head's chunks
  bool is_first, is_last;  // of the piece
};

// Where the state of a chunk that is not a whole piece lies. A part has at most two: the end of the piece
// that it begins in, and the beginning of the one that it ends in.
PAGEDKV_DEVICE int64_t state_idx_of(const AttentionLaunch& launch, int number, bool is_first) {
  return launch.num_parts == 0 ? number : 2 * number + is_first;
}

// The keys that any row of the piece may see, and perhaps some before and after them. Both ends only rise
// from query to query.
PAGEDKV_DEVICE KeyRange find_keys(const AttentionLaunch& launch, const Piece& piece) {
  const PagedAttentionParams& p = launch.p;
  if (piece.query_len == 1) {
    const RowMask mask = row_mask(p, piece.seq_idx, 1, 0, piece.query_begin);
    return {mask.begin, max_of(mask.begin, mask.end)};
  }
  const int first = piece.row_begin / launch.group;
  const int last = (piece.row_begin + piece.num_rows - 1) / launch.group;
  const RowMask first_mask = row_mask(p, piece.seq_idx, piece.query_len, first, piece.query_begin + first);
  const RowMask last_mask = row_mask(p, piece.seq_idx, piece.query_len, last, piece.query_begin + last);
  return {first_mask.begin, max_of(first_mask.begin, last_mask.end)};
}

PAGEDKV_DEVICE int num_tiles_of(const KeyRange& keys) {
  return keys.begin == keys.end ? 0 : (keys.end + TILE_TOKENS - 1) / TILE_TOKENS - keys.begin / TILE_TOKENS;
}

// How far a row tile reaches on the line of work; nothing where it has no row.
PAGEDKV_DEVICE int work_of(const AttentionLaunch& launch, int row_tile_idx) {
  Piece piece;
  if (!find_row_tile(launch, row_tile_idx, piece)) return 0;
  return num_tiles_of(find_keys(launch, piece)) + OVERHEAD_TILES;
}

// How many of a piece's tiles lie before a cut that is `work` units behind its beginning.
PAGEDKV_DEVICE int tiles_before_cut(int64_t work, int num_tiles) {
  if (work >= num_tiles + OVERHEAD_TILES) return num_tiles;
  if (work < OVERHEAD_TILES + MIN_CHUNK_TILES) return 0;
  const int num_before = static_cast<int>(work) - OVERHEAD_TILES;
  return num_tiles - num_before < MIN_CHUNK_TILES ? num_tiles : num_before;
}

// A part of the line of work, and the piece that its beginning lies in.
struct Part {
  int64_t begin, end;
  int row_tile_idx;
  int64_t row_tile_begin;
};

// Finds a part by prefix sums: each lane adds up the work of a run of row tiles, the lane whose run the
// part's beginning lies in wins, and its run is shared out again until a run is one row tile. A warp does it
// together. False where the part has no work.
PAGEDKV_DEVICE bool find_part(const AttentionLaunch& launch, int64_t number, Part& part) {
  const int lane_idx = threadIdx.x % WARP_THREADS;
  int num_row_tiles = launch.num_row_tiles, run = 0;
  part.row_tile_idx = 0;
  part.row_tile_begin = 0;
  do {
    run = (num_row_tiles + WARP_THREADS - 1) / WARP_THREADS;
    const int run_begin = lane_idx * run, run_end = min_of(run_begin + run, num_row_tiles);
    int64_t work = 0;
#pragma unroll 1
    for (int i = run_begin; i < run_end; ++i) work += work_of(launch, part.row_tile_idx + i);
    int64_t work_end = work;
    for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
      const int64_t before = __shfl_up_sync(FULL_WARP, work_end, distance);
      if (lane_idx >= distance) work_end += before;
    }
    if (num_row_tiles == launch.num_row_tiles) {
      const int64_t total = __shfl_sync(FULL_WARP, work_end, WARP_THREADS - 1);
      const int64_t length =
          max_of<int64_t>(ceil_div(total, launch.num_parts), MIN_CHUNK_TILES + OVERHEAD_TILES);
      part.begin = number * length;
      part.end = min_of(part.begin + length, total);
      if (part.begin >= total) return false;
    }
    const bool ends_before = part.row_tile_begin + work_end <= part.begin;
    const int lane = __popc(__ballot_sync(FULL_WARP, ends_before));
    part.row_tile_begin += __shfl_sync(FULL_WARP, work_end - work, lane);
    part.row_tile_idx += lane * run;
    num_row_tiles = min_of(run, num_row_tiles - lane * run);
  } while (run > 1);
  return true;
}

// A CTA's work in shared memory, where it takes no registers of the main loop.
struct Work {
  Chunk chunk;  // the current one
  bool has_chunk;
  Part part;  // what is left of it begins with row_tile_idx
};

inline constexpr int WORK_BYTES = (static_cast<int>(sizeof(Work)) + 127) / 128 * 128;

// Goes on to the next chunk of the part; one thread does. False where there is none left.
PAGEDKV_DEVICE bool find_next_chunk(const AttentionLaunch& launch, Work& work) {
  Part& part = work.part;
  Chunk& chunk = work.chunk;
#pragma unroll 1
  while (part.row_tile_idx < launch.num_row_tiles && part.row_tile_begin < part.end) {
    if (!find_row_tile(launch, part.row_tile_idx++, chunk.piece)) continue;
    const KeyRange keys = find_keys(launch, chunk.piece);
    const int num_tiles = num_tiles_of(keys);
    const int64_t begin = part.row_tile_begin;
    part.row_tile_begin += num_tiles + OVERHEAD_TILES;
    const int first = tiles_before_cut(part.begin - begin, num_tiles);
    const int last = tiles_before_cut(part.end - begin, num_tiles);
    const bool has_empty_piece = num_tiles == 0 && part.begin <= begin;
    if (first == last && !has_empty_piece) continue;
    const int tile_idx = keys.begin / TILE_TOKENS;
    chunk.is_first = first == 0;
    chunk.is_last = last == num_tiles;
    chunk.keys = {max_of(keys.begin, (tile_idx + first) * TILE_TOKENS),
                  min_of(keys.end, (tile_idx + last) * TILE_TOKENS)};
    chunk.fold_begin = (tile_idx + first) * TILE_TOKENS;
    chunk.fold_keys = max_of(1, last - first) * TILE_TOKENS;
    return true;
  }
  return false;
}

// The chunk of a CTA whose piece has CTAs of its own: all its keys, or one split of them; one thread finds
// it. False where there is none.
PAGEDKV_DEVICE bool find_own_chunk(const AttentionLaunch& launch, Chunk& chunk) {
  const PagedAttentionParams& p = launch.p;
  const int num_splits = launch.num_splits;
  const int i = static_cast<int>(blockIdx.x) / static_cast<int>(p.num_kv_heads), split_idx = i % num_splits;
  // Backwards: the last rows of a causal sequence see the most keys, and the longest work should start first.
  const int row_tile_idx = launch.num_row_tiles - 1 - i / num_splits;
  if (!find_row_tile(launch, row_tile_idx, chunk.piece)) return false;
  const KeyRange keys = find_keys(launch, chunk.piece);
  chunk.keys = keys;
  chunk.number = row_tile_idx * num_splits + split_idx;
  chunk.is_first = chunk.is_last = true;
  if (p.split_size == 0) {
    chunk.fold_begin = keys.begin / TILE_TOKENS * TILE_TOKENS;
    chunk.fold_keys = max_of(1, num_tiles_of(keys)) * TILE_TOKENS;
    return true;
  }
  const int fold_keys = static_cast<int>(min_of<int64_t>(p.split_size, keys.end + 1));
  const int begin = (keys.begin / fold_keys + split_idx) * fold_keys, end = begin + fold_keys;
  chunk.fold_begin = begin;
  chunk.fold_keys = fold_keys;
  if (takes_several_splits(launch)) return true;
  if (split_idx > 0 && begin >= keys.end) return false;
  chunk.is_first = split_idx == 0;
  chunk.is_last = end >= keys.end;
  chunk.keys = {max_of(keys.begin, begin), min_of(keys.end, end)};
  return true;
}

// Finds the CTA's first chunk, or the one after work.chunk. False where there is none. All threads of the CTA
// call it together; it begins and ends with a barrier.
PAGEDKV_DEVICE bool find_chunk(const AttentionLaunch& launch, Work& work, bool is_first) {
  __syncthreads();
  if (threadIdx.x < WARP_THREADS) {
    const int num_kv_heads = static_cast<int>(launch.p.num_kv_heads);
    bool has_chunk = is_first || launch.num_parts > 0;
    if (is_first && launch.num_parts > 0) {
      const int number = static_cast<int>(blockIdx.x) / num_kv_heads;
      Part part;
      has_chunk = find_part(launch, number, part);
      if (threadIdx.x == 0) {
        work.part = part;
        work.chunk.number = number;
      }
    }
    if (threadIdx.x == 0) {
      work.chunk.piece.kv_head_idx = static_cast<int>(blockIdx.x) % num_kv_heads;
      if (has_chunk) {
        has_chunk = launch.num_parts > 0 ? find_next_chunk(launch, work) : find_own_chunk(launch, work.chunk);
      }
      work.has_chunk = has_chunk;
    }
  }
  __syncthreads();
  return work.has_chunk;
}

}  // namespace pagedkv::cuda
