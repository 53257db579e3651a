"""paged_attention: what must never show in a result, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    DTYPE_PAIRS,
    LAYOUTS,
    QUANTIZED_DTYPES,
    UNUSED_BLOCK_IDS,
    Backend,
    Case,
    assert_same_bits,
    build_case,
    check_attention,
    dtype_name,
    poison_,
)

from pagedkv import reference

OPERATORS = ("paged_attention",)

# Options that go with any batch; the tensors among them are a value a head.
INVARIANT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "scores": {"softcap": 3.0, "alibi_slopes": [0.5, 0.25, 0.1, 0.01], "sinks": [0.0, 1.0, -2.0, 3.0]},
}


def head_options(backend: Backend, name: str) -> dict[str, Any]:
    return {
        key: torch.tensor(value, device=backend.device) if isinstance(value, list) else value
        for key, value in INVARIANT_OPTIONS[name].items()
    }


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def permuted(case: Case, seed: int = 3) -> Case:
    """The same sequences in other blocks of a bigger pool, with a wider table full of other garbage."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = case.key_cache.shape[0]
    new_place = torch.randperm(num_blocks + 5, generator=generator)[:num_blocks].to(case.query.device)
    caches = []
    for cache in case.arguments[2:4]:
        moved = poison_(cache.new_empty(num_blocks + 5, *cache.shape[1:]))
        reference.as_bytes(moved)[new_place] = reference.as_bytes(cache).clone(
            memory_format=torch.contiguous_format
        )
        caches.append(moved)
    tables = case.block_tables.long()
    valid = (tables >= 0) & (tables < num_blocks)
    tables = torch.where(valid, new_place[tables.clamp(0, num_blocks - 1)], -tables - 7)
    tables = torch.cat([tables, torch.full((len(tables), 9), 2**31 - 1, device=tables.device)], dim=1)
    tables = tables.clamp(-(2**31), 2**31 - 1)
    return dataclasses.replace(
        case, key_cache=caches[0], value_cache=caches[1], block_tables=tables.to(torch.int32)
    )


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_physical_place_of_blocks(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, phase: str
) -> None:
    query_lens = [3, 1, 40] if phase == "prefill" else None
    case = build_case(
        [150, 1, 40], query_lens, device=backend.device, head_dim=32, dtype=dtype, cache_dtype=cache_dtype
    )
    moved = permuted(case)
    # The width of the table may only show as rounding, so the bitwise comparison keeps it.
    same_width = dataclasses.replace(moved, block_tables=moved.block_tables[:, : case.block_tables.shape[1]])
    assert_same_bits(same_width.run(backend), case.run(backend))
    check_attention(backend, moved)
    for split_size in (64, 10):
        out = moved.run(backend, split_size=split_size)
        assert_same_bits(out, case.run(backend, split_size=split_size))


@pytest.mark.parametrize("options", INVARIANT_OPTIONS)
@pytest.mark.parametrize("split_size", [64, 17, 256])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, torch.int8),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=dtype_name,
)
def test_batch_variance(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype | None, split_size: int, options: str
) -> None:
    context_lens = [300, 17, 1, 900, 64, 65, 128]
    case = build_case(
        context_lens, device=backend.device, head_dim=32, block_size=16, dtype=dtype, cache_dtype=cache_dtype
    )
    keywords = {**head_options(backend, options), "split_size": split_size, "return_lse": True}
    out, lse = case.run(backend, **keywords)
    for seq_idx in range(len(context_lens)):
        alone, alone_lse = case.sequence(seq_idx).run(backend, **keywords)
        assert_same_bits(alone, out[seq_idx : seq_idx + 1], f"sequence {seq_idx} alone")
        assert_same_bits(alone_lse, lse[seq_idx : seq_idx + 1], f"lse of sequence {seq_idx} alone")


@pytest.mark.parametrize("num_neighbours", [1, 32, 128])
def test_batch_variance_with_many_neighbours(backend: Backend, num_neighbours: int) -> None:
    case = build_case([77] + [200] * num_neighbours, device=backend.device, head_dim=8, block_size=16)
    alone = case.sequence(0).run(backend, split_size=64)
    for place in (0, num_neighbours // 2, num_neighbours):
        order = torch.arange(num_neighbours + 1, device=backend.device)
        order[[0, place]] = order[[place, 0]]
        batch = dataclasses.replace(
            case,
            query=case.query[order],
            block_tables=case.block_tables[order],
            context_lens=case.context_lens[order],
        )
        assert_same_bits(batch.run(backend, split_size=64)[place], alone[0])
        torch.testing.assert_close(batch.run(backend)[place], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", INVARIANT_OPTIONS)
@pytest.mark.parametrize("split_size", [64, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_decode_and_prefill_rows(backend: Backend, dtype: torch.dtype, split_size: int, options: str) -> None:
    query_len, context_len = 70, 260
    keywords = {**head_options(backend, options), "split_size": split_size, "return_lse": True}
    case = build_case(
        [context_len], [query_len], device=backend.device, head_dim=16, block_size=16, dtype=dtype
    )
    out, lse = case.run(backend, **keywords)
    for row in (0, 1, 5, 63, 64, 69):
        length = context_len - query_len + row + 1
        decode, decode_lse = backend.ops.paged_attention(
            case.query[row : row + 1], *case.arguments[1:4], backend.tensor([length]), **keywords
        )
        assert_same_bits(decode, out[row : row + 1], f"row {row}")
        assert_same_bits(decode_lse, lse[row : row + 1], f"lse of row {row}")
    # And in chunks of other sizes.
    begin = 0
    for chunk in (1, 30, 39):
        end = begin + chunk
        part = backend.ops.paged_attention(
            case.query[begin:end],
            *case.arguments[1:4],
            backend.tensor([context_len - query_len + end]),
            query_start_loc=backend.tensor([0, chunk]),
            **{**keywords, "return_lse": False},
        )
        assert_same_bits(part, out[begin:end], f"chunk of {chunk}")
        begin = end


@pytest.mark.parametrize("options", ["tree", "kv_starts", "non_causal"])
def test_batch_variance_of_row_options(backend: Backend, options: str) -> None:
    query_lens = [3, 1, 20]
    settings: dict[str, Any] = {
        "tree": {"tree_mask": torch.rand(24, 30, generator=torch.Generator().manual_seed(0)) < 0.5},
        "kv_starts": {"kv_starts": [70, 3, 0]},
        "non_causal": {"causal": False, "window": 50},
    }[options]
    if options == "tree":
        settings = {"tree_mask": settings["tree_mask"].to(backend.device)}
    case = build_case([150, 9, 130], query_lens, device=backend.device, **settings)
    out = case.run(backend, split_size=64)
    begin = 0
    for seq_idx, query_len in enumerate(query_lens):
        assert_same_bits(case.sequence(seq_idx).run(backend, split_size=64), out[begin : begin + query_len])
        begin += query_len


@pytest.mark.parametrize("split_size", [None, 64, 5])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8], ids=dtype_name)
def test_two_equal_calls_with_any_number_of_threads(
    backend: Backend, threads: Any, cache_dtype: torch.dtype, phase: str, split_size: int | None
) -> None:
    context_lens = [2000, 3, 0, 513, 64]
    query_lens = [17, 2, 0, 1, 64] if phase == "prefill" else None
    case = build_case(context_lens, query_lens, device=backend.device, block_size=16, cache_dtype=cache_dtype)
    results = []
    for num_threads in (1, 1, 2, 3, 16):
        threads(num_threads)
        results.append(case.run(backend, split_size=split_size, return_lse=True))
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])


@pytest.mark.parametrize("split_size", [None, 64, 5])
def test_split_size_one_long_sequence_with_any_number_of_threads(
    backend: Backend, threads: Any, split_size: int | None
) -> None:
    # One sequence and one head leave nothing to share out but splits.
    case = build_case([5000], device=backend.device, num_heads=1, num_kv_heads=1, head_dim=8, block_size=16)
    results = []
    for num_threads in (1, 2, 16):
        threads(num_threads)
        results.append(check_attention(backend, case, split_size=split_size))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_heads_that_any_number_of_threads_share_unevenly(backend: Backend, threads: Any) -> None:
    # On the CPU threads decide how many KV heads a task has; three make it eight, and one that is left over.
    case = build_case(
        [300 + 7 * i for i in range(11)], device=backend.device, num_heads=18, num_kv_heads=9, block_size=16
    )
    results = []
    for num_threads in (1, 2, 3, 5, 16):
        threads(num_threads)
        results.append(check_attention(backend, case))
    for out in results[1:]:
        assert_same_bits(out, results[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [*DTYPE_PAIRS[:4], (torch.bfloat16, torch.bfloat16)], ids=dtype_name
)
def test_strided_cache_view_read(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, phase: str, layout: str
) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype, "head_dim": 24, "block_size": 5}
    query_lens = [4, 1, 9] if phase == "prefill" else None
    case = build_case([33, 1, 9], query_lens, device=backend.device, layout=layout, **settings)
    contiguous = build_case([33, 1, 9], query_lens, device=backend.device, **settings)
    for split_size in (64, 7):
        keywords = {"split_size": split_size, "return_lse": True}
        for actual, expected in zip(
            case.run(backend, **keywords), contiguous.run(backend, **keywords), strict=True
        ):
            assert_same_bits(actual, expected)
    check_attention(backend, case)


def test_table_width_and_hints_with_split_size(backend: Backend) -> None:
    case = build_case([150, 33, 6], [4, 33, 1], device=backend.device, extra_table_entries=0)
    expected = case.run(backend, split_size=64)
    wide = torch.cat(
        [case.block_tables, torch.full((3, 100), -5, dtype=torch.int32, device=backend.device)], dim=1
    )
    strided = wide.t().contiguous().t()[:, : case.block_tables.shape[1]]
    for hint in (33, 38, 1000):
        for tables in (case.block_tables, wide, wide[:, : case.block_tables.shape[1]]):
            out = dataclasses.replace(case, block_tables=tables).run(
                backend, split_size=64, max_query_len=hint
            )
            assert_same_bits(out, expected)
    assert strided.stride(1) != 1
    with pytest.raises(ValueError, match=r"block_tables.*contiguous"):
        dataclasses.replace(case, block_tables=strided).run(backend, split_size=64)


# ------------------------------------------------------------- memory that no query may see or touch


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "cache_dtype", [torch.float32, torch.bfloat16, torch.float16, *QUANTIZED_DTYPES], ids=dtype_name
)
def test_nan_in_unused_tail_v(backend: Backend, cache_dtype: torch.dtype, phase: str, filler: float) -> None:
    block_size = 16
    context_lens = [1, block_size - 1, block_size, block_size + 1, 3 * block_size - 5]
    query_lens = [1, 2, 16, 17, 5] if phase == "prefill" else None
    dtype = torch.float32 if cache_dtype in QUANTIZED_DTYPES else cache_dtype
    case = build_case(
        context_lens,
        query_lens,
        device=backend.device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        block_size=block_size,
    )
    caches = []
    for fill in (filler, 0.0):
        rows = torch.full((1, 2, 16), fill)
        stored = reference.as_bytes(
            rows.to(cache_dtype) if cache_dtype != torch.int8 else rows.nan_to_num(99).to(torch.int8)
        )
        pair = []
        for cache in case.arguments[2:4]:
            filled = torch.empty_like(cache)
            reference.as_bytes(filled).copy_(stored.expand(cache.shape))
            for seq_idx, length in enumerate(context_lens):
                slots = reference.token_slots(case.block_tables, seq_idx, 0, length, cache)
                place = slots // block_size, slots % block_size
                reference.as_bytes(filled)[place] = reference.as_bytes(cache)[place]
            pair.append(filled)
        caches.append(pair)
    for split_size in (None, 8, 64):
        outs = [
            dataclasses.replace(case, key_cache=key, value_cache=value).run(
                backend, split_size=split_size, return_lse=True
            )
            for key, value in caches
        ]
        for actual, expected in zip(*outs, strict=True):
            assert actual.isfinite().all()
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_what_the_window_hides_may_be_nan(backend: Backend, phase: str) -> None:
    # Out of every row's window and before kv_starts: poisoned, and its table entries are garbage.
    query_lens = [5, 1, 2, 9] if phase == "prefill" else None
    case = build_case(
        [100, 33, 20, 9],
        query_lens,
        device=backend.device,
        window=7,
        kv_starts=[0, 30, 1, 2],
        causal=True,
    )
    first_entries = case.block_tables[0, :20]
    assert any(int(entry) in UNUSED_BLOCK_IDS for entry in first_entries)
    for options in ({}, {"causal": False}, {"split_size": 16}, {"split_size": 64}):
        out = check_attention(backend, case, **options)
        assert out.isfinite().all()


@pytest.mark.parametrize("split_size", [None, 3, 64])
def test_empty_split_nan(backend: Backend, split_size: int | None) -> None:
    for context_lens in ([1], [3], [64, 65], [128, 129], [1, 4096]):
        case = build_case(context_lens, device=backend.device, head_dim=8, block_size=16)
        check_attention(backend, case, split_size=split_size)
        check_attention(backend, case, split_size=split_size, window=2)


@pytest.mark.parametrize("block_size", [16, 5])
def test_block_table_overread(backend: Backend, block_size: int) -> None:
    # The table is exactly as wide as needed, and the last bytes of its buffer; what follows it is absurd.
    for context_len in range(1, 131, 1 if block_size == 16 else 6):
        case = build_case(
            [context_len],
            device=backend.device,
            num_heads=8,
            head_dim=8,
            block_size=block_size,
            extra_table_entries=0,
            seed=context_len,
        )
        width = -(-context_len // block_size)
        buffer = torch.full((width + 64,), 2**31 - 1, dtype=torch.int32, device=backend.device)
        buffer[:width] = case.block_tables[0]
        exact = dataclasses.replace(case, block_tables=case.block_tables.clone())
        followed = dataclasses.replace(case, block_tables=buffer[:width].view(1, width))
        wide = dataclasses.replace(case, block_tables=buffer[None])
        out = exact.run(backend)
        # How exact it is, other tests ask: over so many lengths the largest error is an unlikely one.
        torch.testing.assert_close(out, reference.paged_attention(*exact.arguments), rtol=1e-5, atol=1e-5)
        assert_same_bits(followed.run(backend), out)
        assert_same_bits(wide.run(backend, split_size=64), exact.run(backend, split_size=64))


def test_invalid_padding_block_ids(backend: Backend) -> None:
    case = build_case([20], device=backend.device, block_size=16, num_kv_heads=1)
    caches = [poison_(torch.empty(9, 16, 1, 16, device=backend.device)) for _ in range(2)]
    for cache, source in zip(caches, case.arguments[2:4], strict=True):
        cache[[3, 7]] = source[case.block_tables[0, :2].long()]
    outs = []
    for tail in ([-1, 99_999], [0, 0], [8, 8], [2**31 - 1, -(2**31)]):
        table = backend.tensor([[3, 7, *tail]])
        outs.append(backend.ops.paged_attention(case.query, table, *caches, case.context_lens))
        assert_same_bits(outs[-1], outs[0])
    assert outs[0].isfinite().all()
    for bad in (-1, 9, 99_999, -(2**31), 2**31 - 1):
        table = backend.tensor([[3, bad, -1, -1]])
        with (
            backend.index_checks(),
            pytest.raises(IndexError, match=rf"(?s)block_tables.*{bad}.*9 blocks"),
        ):
            backend.ops.paged_attention(case.query, table, *caches, case.context_lens)
        if not backend.checks_indices:  # its keys are not visible
            out = backend.ops.paged_attention(case.query, table, *caches, case.context_lens)
            expected = backend.ops.paged_attention(case.query, table, *caches, backend.tensor([16]))
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_seq_len_exceeds_table(backend: Backend) -> None:
    case = build_case([64, 64], device=backend.device, block_size=16, extra_table_entries=0)
    arguments = case.arguments[:4]
    backend.ops.paged_attention(*arguments, backend.tensor([64, 64]))
    with backend.index_checks(), pytest.raises(IndexError, match=r"(?s)context_lens\[1\].*65.*64"):
        backend.ops.paged_attention(*arguments, backend.tensor([64, 65]))
    if not backend.checks_indices:
        out = backend.ops.paged_attention(*arguments, backend.tensor([64, 65]))
        assert_same_bits(out[0], case.run(backend)[0])
