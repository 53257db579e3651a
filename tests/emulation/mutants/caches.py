"""Planted faults in the kernels of the cache operators."""

from __future__ import annotations

from emulation.mutants.mutant import FAILED_CHECK, RACE, Mutant


def fault(
    operator: str,
    name: str,
    text: str,
    replacement: str,
    *,
    files: str | None = None,
    test: str | None = None,
    build: str = "plain",
    report: str = FAILED_CHECK,
) -> Mutant:
    return Mutant(
        f"{operator}: {name}",
        files or f"{operator}.cu",
        text,
        replacement,
        unit=f"{operator}.cu",
        test=test or f"kernel_{operator}",
        build=build,
        report=report,
    )


MUTANTS = [
    fault(
        "reshape_and_cache",
        "no barrier before the slots are read",
        "slots.superseded[threadIdx.x] = 0;\n  }\n  __syncthreads();",
        "slots.superseded[threadIdx.x] = 0;\n  }",
        files="slots.h",
        build="tsan",
        report=RACE,
    ),
    fault(
        "reshape_and_cache",
        "no barrier before superseded tokens are left out",
        "atomicExch(&slots.superseded[i], 1);\n    }\n  }\n  __syncthreads();",
        "atomicExch(&slots.superseded[i], 1);\n    }\n  }",
        files="slots.h",
        build="tsan",
        report=RACE,
    ),
    fault(
        "reshape_and_cache",
        "of two rows for a slot any may win",
        "if (slots.slot[i] == slot) atomicExch",
        "if (false) atomicExch",
        files="slots.h",
    ),
    fault(
        "reshape_and_cache",
        "slots past the cache are written",
        "slot[i] < p.num_blocks * p.block_size && superseded[i] == 0",
        "superseded[i] == 0",
        files="slots.h",
        build="asan",
        report="AddressSanitizer",
    ),
    fault(
        "reshape_and_cache",
        "aligned rows are taken for granted",
        "if (aligned) {\n    move_packs",
        "if (true) {\n    move_packs",
        files="rows.h",
        report=r"load_vector: address \S+ is not aligned|not true",
    ),
    fault(
        "rope_and_cache",
        "rotation in the other direction",
        "store(row, a * c - b * s)",
        "store(row, a * c + b * s)",
    ),
    fault(
        "rope_and_cache",
        "interleaved pairs taken from two halves",
        "if (aligned && p.interleaved) {\n    rotate_packs<true, N",
        "if (aligned && p.interleaved) {\n    rotate_packs<false, N",
    ),
    fault(
        "gather_kv",
        "no barrier before slices are added up",
        "sums[thread_idx] = sum;\n  __syncthreads();",
        "sums[thread_idx] = sum;",
        build="tsan",
        report=RACE,
    ),
    fault(
        "gather_kv",
        "no barrier between reading and adding",
        "sums[thread_idx - stride] : 0;\n    __syncthreads();",
        "sums[thread_idx - stride] : 0;",
        build="tsan",
        report=RACE,
    ),
    fault(
        "gather_kv",
        "no barrier after adding",
        "sums[thread_idx] += before;\n    __syncthreads();",
        "sums[thread_idx] += before;",
        build="tsan",
        report=RACE,
    ),
    fault(
        "gather_kv",
        "a sequence's first row counts for the one before it",
        "(p.token_offsets[middle] <= out_idx ? low : high) = middle;",
        "(p.token_offsets[middle] < out_idx ? low : high) = middle;",
    ),
    fault(
        "copy_blocks",
        "offset of a block in 32 bits",
        "launch.source[pair_idx] * launch.from.block_stride_bytes",
        "(int)(launch.source[pair_idx] * launch.from.block_stride_bytes)",
        test="huge_cache",
        build="asan",
        report=rf"AddressSanitizer|{FAILED_CHECK}",
    ),
    fault(
        "copy_blocks",
        "16-byte pieces for every row",
        "return bits % 16 == 0 ? 16 : (bits % 4 == 0 ? 4 : 1);",
        "return 16;",
        report=r"load_vector: address \S+ is not aligned|not true",
    ),
    fault(
        "copy_blocks",
        "pairs beside staged ones are left out",
        "direct, p.num_pairs - p.num_staged, stream);",
        "direct, 0, stream);",
    ),
    fault(
        "merge_attn_states",
        "weights swapped",
        "weight.a * to_float(out_a[i])",
        "weight.b * to_float(out_a[i])",
    ),
]
