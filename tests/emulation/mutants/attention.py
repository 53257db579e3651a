"""Planted faults in the attention kernels."""

from __future__ import annotations

from emulation.mutants.mutant import FAILED_CHECK, RACE, Mutant


def decode(
    name: str,
    text: str,
    replacement: str,
    *,
    test: str = "attention_bfloat16",
    build: str = "plain",
    report: str = FAILED_CHECK,
) -> Mutant:
    """A fault in the kernel for few query rows, or in what it shares with the others."""
    return Mutant(
        f"decode: {name}",
        "paged_attention/*.h",
        text,
        replacement,
        unit="paged_attention/bfloat16.cu",
        test=test,
        build=build,
        report=report,
    )


def decode_race(name: str, text: str, replacement: str, *, test: str = "attention_bfloat16") -> Mutant:
    """One that is a race."""
    return decode(name, text, replacement, test=test, build="tsan", report=RACE)


def prefill(
    name: str,
    text: str,
    replacement: str,
    *,
    test: str = "attention_bfloat16",
    report: str = FAILED_CHECK,
) -> Mutant:
    """A fault in the kernel for many query rows."""
    return Mutant(
        f"prefill: {name}",
        "paged_attention/*.h",
        text,
        replacement,
        unit="paged_attention/bfloat16.cu",
        test=test,
        build="tsan" if report == RACE else "plain",
        report=report,
    )


def float32(
    name: str,
    text: str,
    replacement: str,
    *,
    test: str = "attention_float32",
    build: str = "plain",
    report: str = FAILED_CHECK,
) -> Mutant:
    """A fault in the kernel for float32 queries."""
    return Mutant(
        f"float32: {name}",
        "paged_attention/*.h",
        text,
        replacement,
        unit="paged_attention/float32.cu",
        test=test,
        build=build,
        report=report,
    )


def float32_race(name: str, text: str, replacement: str) -> Mutant:
    """One that is a race."""
    return float32(name, text, replacement, build="tsan", report=RACE)


BARRIERS = [
    decode_race(
        "no barrier before query and masks are read",
        "load_rows();\n    __syncthreads();\n    tree_begin_",
        "load_rows();\n    tree_begin_",
    ),
    decode_race(
        "no __syncwarp before keys are read",
        "__syncwarp();\n      float score[NT][4];",
        "float score[NT][4];",
    ),
    decode_race(
        "no __syncwarp before the keys' slot is used again",
        "mask_scores(tile, score);\n      __syncwarp();",
        "mask_scores(tile, score);",
    ),
    decode_race(
        "no __syncwarp before values are read",
        "__syncwarp();\n      const int values_at",
        "const int values_at",
    ),
    decode_race(
        "no __syncwarp before the values' slot is used again",
        "multiply_values<false>(values_at, score);\n      }\n      __syncwarp();",
        "multiply_values<false>(values_at, score);\n      }",
    ),
    decode_race(
        "no __syncwarp after hidden values were cleared",
        "shared_ + values_at);\n        __syncwarp();",
        "shared_ + values_at);",
        test="attention_options",
    ),
    decode_race(
        "no barrier before the merge takes the ring's memory",
        "__syncthreads();  // all warps are done with the ring",
        "//",
    ),
    decode_race(
        "no barrier before the warps' states are read",
        "write_state(warps);\n      __syncthreads();",
        "write_state(warps);",
    ),
    decode_race(
        "no barrier before the factors of a fold are read",
        "new_factors[row] = fold.new_factor;\n  }\n  __syncthreads();",
        "new_factors[row] = fold.new_factor;\n  }",
    ),
    decode_race(
        "no barrier after a fold",
        "begin == chunk_.fold_begin);\n      __syncthreads();",
        "begin == chunk_.fold_begin);",
        test="attention_chunks",
    ),
    decode_race(
        "no barrier before normalisers are read",
        "= normaliser.lse;\n    }\n    __syncthreads();",
        "= normaliser.lse;\n    }",
    ),
    decode_race(
        "no barrier before the next chunk is looked for",
        "__syncthreads();\n  if (threadIdx.x < WARP_THREADS) {",
        "if (threadIdx.x < WARP_THREADS) {",
        test="attention_chunks",
    ),
    decode_race(
        "no barrier before the chunk is read",
        "__syncthreads();\n  return work.has_chunk;",
        "return work.has_chunk;",
    ),
    prefill(
        "no barrier before the query is read",
        "load_rows();\n    __syncthreads();\n    find_warp_keys();",
        "load_rows();\n    find_warp_keys();",
        report=RACE,
    ),
    prefill(
        "no barrier before the buffers take the query's place",
        "__syncthreads();  // the buffers take",
        "// the buffers take",
        report=RACE,
    ),
    prefill(
        "no barrier before a tile is read",
        "__syncthreads();  // the tile is there",
        "// the tile is there",
        report=RACE,
    ),
    prefill(
        "no barrier after hidden values were cleared",
        "first * Tile::ROW_BYTES);\n        __syncthreads();",
        "first * Tile::ROW_BYTES);",
        test="attention_options",
        report=RACE,
    ),
    prefill(
        "no barrier before the state takes the buffers' place",
        "__syncthreads();  // all warps are done with query",
        "// all warps are done with query",
        report=RACE,
    ),
    prefill(
        "no barrier before the state is read",
        "write_state(acc, max, max + PREFILL_ROWS);\n    __syncthreads();",
        "write_state(acc, max, max + PREFILL_ROWS);",
        report=RACE,
    ),
    float32_race(
        "no barrier before the query is read",
        "load_rows(launch, piece, shared);\n  __syncthreads();",
        "load_rows(launch, piece, shared);",
    ),
    float32_race(
        "no barrier before scores are read",
        "tile_begin, shared);\n    __syncthreads();",
        "tile_begin, shared);",
    ),
    float32_race(
        "no barrier before weights are read",
        "weigh_scores(shared, max, sum);\n    __syncthreads();",
        "weigh_scores(shared, max, sum);",
    ),
    float32_race(
        "no barrier before scores are replaced",
        "tile_begin, shared, acc);\n    __syncthreads();",
        "tile_begin, shared, acc);",
    ),
    float32_race(
        "no barrier before the state is read",
        "shared.sum[threadIdx.x / ROW_THREADS] = sum;\n  }\n  __syncthreads();",
        "shared.sum[threadIdx.x / ROW_THREADS] = sum;\n  }",
    ),
]

ASYNC_COPIES = [
    decode(
        "wait for keys one group short",
        "cp_async_wait<Tile::SLOTS - 1>();\n      __syncwarp();\n      float score",
        "cp_async_wait<Tile::SLOTS>();\n      __syncwarp();\n      float score",
    ),
    decode(
        "wait for values one group short",
        "cp_async_wait<Tile::SLOTS - 1>();\n      __syncwarp();\n      const int values_at",
        "cp_async_wait<Tile::SLOTS>();\n      __syncwarp();\n      const int values_at",
    ),
    prefill(
        "wait for a tile one group short",
        "cp_async_wait<0>();\n      __syncthreads();  // the tile",
        "cp_async_wait<1>();\n      __syncthreads();  // the tile",
    ),
    decode(
        "copies keys that have no block",
        "has_chunk && source != nullptr);",
        "has_chunk);",
        build="asan",
        report=r"cp.async: source \S+ is not aligned|null pointer|AddressSanitizer",
    ),
    decode(
        "inverted: copies the keys that have no block",
        "has_chunk && source != nullptr);",
        "has_chunk && source == nullptr);",
        build="asan",
        report=r"cp.async: source \S+ is not aligned|null pointer|AddressSanitizer",
    ),
    decode(
        "keys before the window are copied",
        "token >= keys_begin_ && token < end ?",
        "token < end ?",
        test="traffic_reads_visible_keys_alone",
        report=r"num_bytes ==",
    ),
    prefill(
        "a tile's tail is copied past the sequence's end",
        "token >= keys_begin_ && token < end ?",
        "token >= keys_begin_ ?",
    ),
]

FRAGMENTS = [
    decode(
        "values loaded without .trans",
        "ldmatrix_x4_trans(loaded, shared_ + values.at(CACHE_BYTES * step));",
        "ldmatrix_x4(loaded, shared_ + values.at(CACHE_BYTES * step));",
    ),
    prefill(
        "values loaded without .trans",
        "ldmatrix_x4_trans(loaded, shared_ + values.at(CACHE_BYTES * step) + column",
        "ldmatrix_x4(loaded, shared_ + values.at(CACHE_BYTES * step) + column",
    ),
    decode(
        "the weights' two registers swapped",
        "b[nt][0] = movmatrix_trans(pack2<Element>(weight[nt][0], weight[nt][1]));\n      b[nt][1] =",
        "b[nt][1] = movmatrix_trans(pack2<Element>(weight[nt][0], weight[nt][1]));\n      b[nt][0] =",
    ),
    decode(
        "weights not transposed",
        "b[nt][1] = movmatrix_trans(pack2<Element>(weight[nt][2], weight[nt][3]));",
        "b[nt][1] = pack2<Element>(weight[nt][2], weight[nt][3]);",
    ),
    decode(
        "matrices of keys in another order",
        "keys(keys_at, lane_ % 16, lane_ / 16);",
        "keys(keys_at, lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);",
    ),
    decode(
        "the query's two registers swapped",
        "a[1], {b[2], b[3]});",
        "a[1], {b[3], b[2]});",
    ),
    prefill(
        "the keys' two registers swapped",
        "score[column + 1], a, {loaded[2], loaded[3]});",
        "score[column + 1], a, {loaded[3], loaded[2]});",
    ),
    prefill(
        "halves of a weight swapped",
        "pack2<Element>(part[i % 2 * 2], part[i % 2 * 2 + 1]);",
        "pack2<Element>(part[i % 2 * 2 + 1], part[i % 2 * 2]);",
    ),
]

MASKS_AND_INDICES = [
    decode(
        "a float16 query is not scaled back",
        "if constexpr (IS_CONVERTED) scale_[nt][e] *=",
        "if constexpr (false) scale_[nt][e] *=",
    ),
    decode(
        "a tile's keys have the blocks of the one after it",
        "has_block_ >> (Tile::SLOTS - 1) / 2 * 16",
        "has_block_ >> 0",
        test="attention_hole",
    ),
    decode(
        "keys that the first row sees count as seen by all",
        "return {last.mask.begin, min_of(",
        "return {first.mask.begin, min_of(",
        test="attention_window_between_rows",
    ),
    decode(
        "keys that the last row sees count as seen by all",
        "min_of(first.mask.end, min_of(first.mask.causal_end, first.mask.tree_begin))",
        "min_of(last.mask.end, min_of(last.mask.causal_end, first.mask.tree_begin))",
    ),
    decode(
        "hidden keys are scored",
        "return is_visible ? score : NEGATIVE_INFINITY;",
        "return score;",
    ),
    decode(
        "keys without a block are scored",
        "(has_block >> key & 1) != 0 && row.mask",
        "row.mask",
        test="attention_hole",
    ),
    decode(
        "values of hidden keys meet weight 0",
        "if (__any_sync(FULL_WARP, is_seen)) continue;",
        "continue;",
        test="attention_options",
    ),
    decode(
        "unguarded look-up of a page",
        "? block_of_entry(p_, table_, entry)",
        "? table_[entry]",
        test="attention_hole",
        build="asan",
        report="AddressSanitizer",
    ),
    decode(
        "offset of a row in 32 bits",
        "cache_offset(strides, block_,",
        "(int)cache_offset(strides, block_,",
        test="huge_cache",
    ),
    decode(
        "rows of KV head 0 for every head",
        "block_, token_in_block_, kv_head_idx_)",
        "block_, token_in_block_, 0)",
    ),
    decode(
        "scale of KV head 0 for every head",
        "scale_of(p.k_scale, p.k_scale_value, kv_head_idx) * LOG2_E",
        "scale_of(p.k_scale, p.k_scale_value, 0) * LOG2_E",
        test="attention_options",
    ),
    float32(
        "unguarded look-up of a page",
        "seen != 0 ? block_of_token(p, piece.seq_idx, token) : -1;",
        "seen != 0\n"
        "    ? p.block_tables[piece.seq_idx * p.block_tables_seq_stride + token / p.block_size] : -1;",
        test="attention_hole",
        build="asan",
        report="AddressSanitizer",
    ),
    float32(
        "keys that another row sees",
        "is_seen ? score : NEGATIVE_INFINITY",
        "block >= 0 ? score : NEGATIVE_INFINITY",
    ),
    decode(
        "padding rows are not filled",
        "if (p.query_start_loc == nullptr) return;\n  for (int64_t token_idx",
        "return;\n  for (int64_t token_idx",
    ),
]

SOFTMAX = [
    decode(
        "the sum is not rescaled when the maximum rises",
        "sum[nt][e] *= factor;",
        "",
    ),
    prefill(
        "the sum is not rescaled when the maximum rises",
        "sum_[row] *= factor;",
        "",
    ),
    decode(
        "log-sum-exp in base 2",
        "max[row] * LN_2, sum[row])",
        "max[row], sum[row])",
        report="lse_is_close",
    ),
    decode(
        "combine: chunks out of order",
        "for (int chunk = chunks.x; chunk <= chunks.y; ++chunk) {",
        "for (int chunk = chunks.y; chunk >= chunks.x; --chunk) {",
        test="attention_split_invariance",
        report=r"spread_\w+ == gathered_\w+",
    ),
    decode(
        "combine: the first chunk's state taken from the wrong place",
        "state_idx_of(launch, chunk, chunk == chunks.x);",
        "state_idx_of(launch, chunk, chunk != chunks.x);",
        test="attention_chunks",
    ),
]

MUTANTS = [*BARRIERS, *ASYNC_COPIES, *FRAGMENTS, *MASKS_AND_INDICES, *SOFTMAX]
