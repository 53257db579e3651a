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
    """A fault in the tensor-core kernels, or in what they share."""
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
        "no barrier before the masks are read",
        "masks()[threadIdx.x] = mask;\n    }\n    __syncthreads();",
        "masks()[threadIdx.x] = mask;\n    }",
    ),
    decode_race(
        "no __syncwarp before keys are read",
        "__syncwarp();\n      multiply_keys(",
        "multiply_keys(",
    ),
    decode_race(
        "no __syncwarp before the keys' slot is used again",
        "mask_scores(tile, score, seen);\n      __syncwarp();",
        "mask_scores(tile, score, seen);",
    ),
    decode_race(
        "no __syncwarp before values are read",
        "__syncwarp();\n      multiply_values(",
        "multiply_values(",
    ),
    decode_race(
        "no __syncwarp before the values' slot is used again",
        "score, sure, seen);\n      __syncwarp();",
        "score, sure, seen);",
    ),
    decode_race(
        "no barrier before the merge takes the ring's memory",
        "__syncthreads();  // all warps are done with the ring",
        "//",
    ),
    decode_race(
        "no barrier before the warps' states are read",
        "__syncthreads();\n    for (int i = threadIdx.x; i < num_rows_ * D;",
        "for (int i = threadIdx.x; i < num_rows_ * D;",
    ),
    decode_race(
        "no barrier before the folded maximum is replaced",
        "__syncthreads();\n    if (static_cast<int>(threadIdx.x) < num_rows_) {\n      float max, sum;",
        "if (static_cast<int>(threadIdx.x) < num_rows_) {\n      float max, sum;",
        test="attention_split_invariance",
    ),
    decode_race(
        "no barrier after a chunk was folded",
        "is_first_ = false;\n    __syncthreads();",
        "is_first_ = false;",
    ),
    float32_race(
        "no barrier before the query is read",
        "shared.query[dim] = query[dim];\n  __syncthreads();",
        "shared.query[dim] = query[dim];",
    ),
    float32_race(
        "no barrier before scores are read",
        "tile_begin, shared);\n    __syncthreads();",
        "tile_begin, shared);",
    ),
    float32_race(
        "no barrier before scores are replaced",
        "    __syncthreads();\n  }\n  const Normaliser",
        "  }\n  const Normaliser",
    ),
]

ASYNC_COPIES = [
    decode(
        "wait for keys one group short",
        "cp_async_wait<Tile::SLOTS - 1>();\n      __syncwarp();\n      multiply_keys(",
        "cp_async_wait<Tile::SLOTS>();\n      __syncwarp();\n      multiply_keys(",
    ),
    decode(
        "wait for values one group short",
        "cp_async_wait<Tile::SLOTS - 1>();\n      __syncwarp();\n      multiply_values(",
        "cp_async_wait<Tile::SLOTS>();\n      __syncwarp();\n      multiply_values(",
    ),
    decode(
        "copies keys that have no block",
        "cp_async_16(destination, source, offset >= 0 && first < head_dim)",
        "cp_async_16(destination, source, first < head_dim)",
        build="asan",
        report=r"cp.async: source \S+ is not aligned|AddressSanitizer",
    ),
    decode(
        "copies inverted: the keys that have no block",
        "cp_async_16(destination, source, offset >= 0 && first < head_dim)",
        "cp_async_16(destination, source, offset < 0 && first < head_dim)",
        build="asan",
        report=r"cp.async: source \S+ is not aligned|AddressSanitizer",
    ),
    decode(
        "ring of shared memory without a swizzle",
        "return row * BYTES_PER_ROW + ((chunk ^ (row & 7)) << 4);",
        "return row * BYTES_PER_ROW + (chunk << 4);",
        report=r"num_ldmatrix_with_conflicts == 0",
        test="traffic_shared_memory_without_conflicts",
    ),
    decode(
        "a tile's tail is copied past the sequence's end",
        "if (token >= keys_begin_ && token < chunk_end_) block",
        "if (token >= keys_begin_) block",
        report=r"num_bytes ==",
        test="traffic_reads_visible_keys_alone",
    ),
    decode(
        "keys before the window are copied",
        "if (token >= keys_begin_ && token < chunk_end_) block",
        "if (token < chunk_end_) block",
        report=r"num_bytes ==",
        test="traffic_reads_visible_keys_alone",
    ),
]

FRAGMENTS = [
    decode(
        "values loaded without .trans",
        "ldmatrix_x4_trans(loaded, values + Tile::template swizzled<Tile::ROW_BYTES>(token, chunk));\n"
        "        multiply_value_step(step, loaded,",
        "ldmatrix_x4(loaded, values + Tile::template swizzled<Tile::ROW_BYTES>(token, chunk));\n"
        "        multiply_value_step(step, loaded,",
    ),
    decode(
        "the weights' two registers swapped",
        "b[nt][0] = movmatrix_trans(pack2<Query>(weight[nt][0], weight[nt][1]));\n"
        "      b[nt][1] = movmatrix_trans(pack2<Query>(weight[nt][2], weight[nt][3]));",
        "b[nt][1] = movmatrix_trans(pack2<Query>(weight[nt][0], weight[nt][1]));\n"
        "      b[nt][0] = movmatrix_trans(pack2<Query>(weight[nt][2], weight[nt][3]));",
    ),
    decode(
        "weights not transposed",
        "b[nt][1] = movmatrix_trans(pack2<Query>(weight[nt][2], weight[nt][3]));",
        "b[nt][1] = pack2<Query>(weight[nt][2], weight[nt][3]);",
    ),
    decode(
        "matrices of keys in another order",
        "const int token = matrix_row + (matrix & 1) * 8, half = matrix >> 1;",
        "const int token = matrix_row + (matrix >> 1) * 8, half = matrix & 1;",
    ),
    decode(
        "second half of the query's registers read twice",
        "chunk = 2 * step + lane_ / 8 % 2;",
        "chunk = 2 * step + 1;",
    ),
]

MASKS_AND_INDICES = [
    decode(
        "hidden keys are scored",
        "if (!visible) value = NEGATIVE_INFINITY;",
        "",
    ),
    decode(
        "keys without a block are scored",
        "row < num_rows_ && (has_block >> key & 1) != 0 &&",
        "row < num_rows_ &&",
        test="attention_hole",
    ),
    decode(
        "values of hidden keys meet weight 0",
        "a[0] &= keep_low;",
        "",
        test="attention_options",
    ),
    decode(
        "unguarded look-up of a page",
        "block = block_of_token(p_, piece_.seq_idx, token);",
        "block = p_.block_tables[piece_.seq_idx * p_.block_tables_seq_stride + token / p_.block_size];",
        build="asan",
        report="AddressSanitizer",
        test="attention_hole",
    ),
    decode(
        "offset of a key in 32 bits",
        "block < 0 ? -1 : cache_offset(key_cache_strides(p_),",
        "block < 0 ? -1 : (int)cache_offset(key_cache_strides(p_),",
        test="huge_cache",
    ),
    decode(
        "offset of a value in 32 bits",
        "block < 0 ? -1 : cache_offset(value_cache_strides(p_),",
        "block < 0 ? -1 : (int)cache_offset(value_cache_strides(p_),",
        test="huge_cache",
    ),
    decode(
        "values of KV head 0 for every head",
        "cache_offset(value_cache_strides(p_), block, token_in_block, piece_.kv_head_idx);\n"
        "    const uint32_t has_block",
        "cache_offset(value_cache_strides(p_), block, token_in_block, 0);\n    const uint32_t has_block",
    ),
    decode(
        "scale of KV head 0 for every head",
        "p_.softmax_scale * scale_of(p_.k_scale, p_.k_scale_value, piece_.kv_head_idx)",
        "p_.softmax_scale * scale_of(p_.k_scale, p_.k_scale_value, 0)",
        test="attention_options",
    ),
    float32(
        "unguarded look-up of a page",
        "mask.visible(token) ? block_of_token(p, piece.seq_idx, token) : -1;",
        "mask.visible(token) ? p.block_tables[piece.seq_idx * p.block_tables_seq_stride\n"
        "        + token / p.block_size] : -1;",
        build="asan",
        report="AddressSanitizer",
        test="attention_hole",
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
        "sum_[nt][e] *= factor;",
        "",
    ),
    decode(
        "log-sum-exp in base 2",
        "normaliser_of(p_, head_idx, fold_max()[row] * LN_2, fold_sum()[row])",
        "normaliser_of(p_, head_idx, fold_max()[row], fold_sum()[row])",
        report="lse_is_close",
    ),
    decode(
        "combine: chunks out of order",
        "for (int64_t chunk = 0; chunk < launch.num_chunks; ++chunk) {",
        "for (int64_t chunk = launch.num_chunks; chunk-- > 0;) {",
        report=r"spread_\w+ == gathered_\w+",
        test="attention_split_invariance",
    ),
    decode(
        "combine: empty chunks taken for the full ones",
        "if (state.x == NEGATIVE_INFINITY) continue;",
        "if (state.x != NEGATIVE_INFINITY) continue;",
        test="attention_chunks",
    ),
]

MUTANTS = [*BARRIERS, *ASYNC_COPIES, *FRAGMENTS, *MASKS_AND_INDICES, *SOFTMAX]
