"""paged_attention: the ways it is called, and the odd batches that serving makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FLOAT_DTYPES,
    Backend,
    assert_same_bits,
    build_case,
    check_attention,
    dtype_name,
    poisoned,
)

OPERATORS = ("paged_attention",)


def test_unbatched_form(backend: Backend) -> None:
    case = build_case([11], device=backend.device)
    options: dict[str, Any] = {"softcap": 3.0, "window": 6, "split_size": 4}
    batched_out, batched_lse = case.run(backend, return_lse=True, **options)
    query, block_tables, context_len = case.query[0], case.block_tables[0], 11
    arguments = (query, block_tables, case.key_cache, case.value_cache, context_len)
    out, lse = backend.ops.paged_attention(*arguments, return_lse=True, **options)
    assert_same_bits(out, batched_out[0])
    assert_same_bits(lse, batched_lse[0])
    assert_same_bits(backend.ops.paged_attention(*arguments, **options), out)
    buffer = poisoned(4, 16, dtype=torch.float32, device=backend.device)
    assert backend.ops.paged_attention(*arguments, out=buffer, **options).data_ptr() == buffer.data_ptr()
    assert_same_bits(buffer, out)


@pytest.mark.parametrize("query_lens", [None, [2, 1]], ids=["decode", "prefill"])
def test_out_is_written_and_returned(backend: Backend, query_lens: list[int] | None) -> None:
    case = build_case([9, 4], query_lens, device=backend.device)
    expected = case.run(backend, split_size=64)
    # A slice of something bigger: heads and tokens apart, poison between them that must stay.
    buffer = poisoned(expected.shape[0] + 1, 2, 4, 24, dtype=torch.float32, device=backend.device)
    before = buffer.clone()
    view = buffer[1:, 1, :, 8:]
    returned = case.run(backend, out=view, split_size=64)
    assert returned.data_ptr() == view.data_ptr()
    assert returned.stride() == view.stride()
    assert_same_bits(view.contiguous(), expected)
    view.copy_(before[1:, 1, :, 8:])
    assert_same_bits(buffer, before)
    out, lse = case.run(backend, out=view, return_lse=True, split_size=64)
    assert out.data_ptr() == view.data_ptr()
    assert lse.shape == expected.shape[:2]


def test_query_layouts(backend: Backend) -> None:
    case = build_case([9, 4], [5, 2], device=backend.device, dtype=torch.bfloat16)
    expected = case.run(backend, split_size=64)
    fused = poisoned(
        7, 8 * 16, dtype=torch.bfloat16, device=backend.device
    )  # query, key and value of a projection
    sliced = fused[:, 16 : 16 + 64].view(7, 4, 16)
    sliced.copy_(case.query)
    transposed = case.query.transpose(0, 1).contiguous().transpose(0, 1)  # heads outermost
    repeated = case.query[:, :1].expand(7, 4, 16)  # stride 0: multi-query heads that are all one
    for query in (sliced, transposed):
        out = backend.ops.paged_attention(query, *case.arguments[1:], **case.keywords, split_size=64)
        assert_same_bits(out, expected)
    out = backend.ops.paged_attention(repeated, *case.arguments[1:], **case.keywords, split_size=64)
    expected = backend.ops.paged_attention(
        repeated.contiguous(), *case.arguments[1:], **case.keywords, split_size=64
    )
    assert_same_bits(out, expected)


def test_zero_query_len(backend: Backend) -> None:
    case = build_case([0, 3, 0, 5], [0, 1, 0, 1], device=backend.device, num_heads=9, num_kv_heads=3)
    out = check_attention(backend, case)
    assert out.shape == (2, 9, 16)
    # Sequences without a query: their blocks are not needed, so their tables may hold anything.
    case = build_case([7, 3, 9], [0, 2, 0], device=backend.device)
    assert (case.block_tables[0] != case.block_tables[0].clamp(0, 5)).all()
    check_attention(backend, case)


@pytest.mark.parametrize("batch", ["no tokens", "no sequences", "decode without sequences"])
def test_empty_batches(backend: Backend, batch: str) -> None:
    lens, query_lens = {
        "no tokens": ([0, 3], [0, 0]),
        "no sequences": ([], []),
        "decode without sequences": ([], None),
    }[batch]
    case = build_case([1], device=backend.device)
    query_start_loc = None
    if query_lens is not None:
        query_start_loc = backend.tensor([0] * (len(query_lens) + 1))
    out, lse = backend.ops.paged_attention(
        case.query[:0],
        torch.full((len(lens), 2), -1, dtype=torch.int32, device=backend.device),
        case.key_cache,
        case.value_cache,
        backend.tensor(lens),
        query_start_loc=query_start_loc,
        return_lse=True,
    )
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_seq_len_zero(backend: Backend, dtype: torch.dtype) -> None:
    case = build_case([5, 0, 17, 0], device=backend.device, dtype=dtype, extra_table_entries=0)
    assert (case.block_tables[[1, 3]] < 0).any()
    out = poisoned(4, 4, 16, dtype=dtype, device=backend.device)
    _, lse = case.run(backend, out=out, return_lse=True)
    assert (out[[1, 3]] == 0).all()
    assert (lse[[1, 3]] == -torch.inf).all()
    check_attention(backend, case)


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_rows_of_query_start_loc(backend: Backend, sinks: bool) -> None:
    options = {"sinks": torch.ones(4, device=backend.device)} if sinks else {}
    case = build_case([9, 4], [3, 2], device=backend.device, num_padding_rows=4, **options)
    buffer = poisoned(9, 4, 16, dtype=torch.float32, device=backend.device)
    out, lse = case.run(backend, out=buffer, return_lse=True)
    assert (out[5:] == 0).all()
    assert (lse[5:] == -torch.inf).all()
    check_attention(backend, case)
    without = build_case([9, 4], [3, 2], device=backend.device, **options)
    assert_same_bits(
        case.run(backend, split_size=64)[:5], without.run(backend, split_size=64, max_query_len=3)
    )


def test_table_ignored_on_prefix_hit(backend: Backend) -> None:
    # 32 cached tokens in blocks 9 and 2, 5 new ones in block 4: the last rows of a prefill of all 37.
    case = build_case([37], [37], device=backend.device, block_size=16)
    whole = check_attention(backend, case)
    moved = [torch.full_like(cache, torch.nan)[:1].repeat(10, 1, 1, 1) for cache in case.arguments[2:4]]
    for cache, source in zip(moved, case.arguments[2:4], strict=True):
        cache[[9, 2, 4]] = source[case.block_tables[0, :3].long()]
    chunk = backend.ops.paged_attention(
        case.query[32:],
        backend.tensor([[9, 2, 4]]),
        *moved,
        case.context_lens,
        query_start_loc=backend.tensor([0, 5]),
    )
    torch.testing.assert_close(chunk, whole[32:], rtol=1e-5, atol=1e-6)


@pytest.mark.operators("paged_attention", "reshape_and_cache")
def test_graph_padded_batch(backend: Backend) -> None:
    # Three sequences in a batch padded to eight: length 0, slot -1, garbage tables, poisoned rows.
    case = build_case([5, 9, 12], device=backend.device)
    padded_query = poisoned(8, 4, 16, dtype=torch.float32, device=backend.device)
    padded_query[:3] = case.query
    tables = torch.full((8, case.block_tables.shape[1]), 77_777, dtype=torch.int32, device=backend.device)
    tables[:3] = case.block_tables
    lens = backend.tensor([5, 9, 12, 0, 0, 0, 0, 0])
    rows = poisoned(8, 2, 16, dtype=torch.float32, device=backend.device)
    rows[:3] = torch.randn(3, 2, 16).to(backend.device)
    last = case.context_lens.long() - 1
    slots = case.block_tables.gather(1, (last // 4)[:, None])[:, 0].long() * 4 + last % 4
    slot_mapping = torch.cat([slots, torch.full((5,), -1, device=backend.device)])
    before = [case.key_cache.clone(), case.value_cache.clone()]
    backend.ops.reshape_and_cache(rows, rows, case.key_cache, case.value_cache, slot_mapping)
    for cache, old in zip(case.arguments[2:4], before, strict=True):
        old.view(-1, 2, 16)[slots] = rows[:3]
        assert_same_bits(cache, old)
    for loc in (None, backend.tensor([0, 1, 2, 3, 3, 3, 3, 3, 3])):
        out = backend.ops.paged_attention(
            padded_query, tables, case.key_cache, case.value_cache, lens, query_start_loc=loc, split_size=64
        )
        assert (out[3:] == 0).all()
        assert_same_bits(out[:3], case.run(backend, split_size=64))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("split_size", [None, 4])
def test_visible_nan_and_infinity_are_not_swallowed(
    backend: Backend, split_size: int | None, phase: str
) -> None:
    # In a value: that element, for the heads of that KV head. In a key: those heads wholly, and their lse.
    for bad in (torch.nan, torch.inf):
        case = build_case([9, 5], [2, 2] if phase == "prefill" else None, device=backend.device)
        rows = case.query.shape[0] // 2
        case.value_cache[int(case.block_tables[0, 1]), 2, 1, 3] = bad
        out, lse = case.run(backend, split_size=split_size, return_lse=True)
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[:rows, 2:, 3] = True
        assert torch.equal(out.isfinite(), ~hit)
        assert (out[hit].isnan() if bad != bad else out[hit] == bad).all()
        assert lse.isfinite().all()
        case.key_cache[int(case.block_tables[1, 0]), 1, 0, 3] = torch.nan
        out, lse = case.run(backend, split_size=split_size, return_lse=True)
        assert out[rows:, :2].isnan().all()
        assert lse[rows:, :2].isnan().all()
        assert out[rows:, 2:].isfinite().all()
        assert lse[:, 2:].isfinite().all()


def test_only_padding(backend: Backend) -> None:
    case = build_case([0, 0], [0, 0], device=backend.device, num_padding_rows=3)
    out, lse = case.run(backend, return_lse=True)
    assert out.shape == (3, 4, 16)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_tables_without_columns_and_pools_without_blocks(backend: Backend) -> None:
    # Sequences without keys need neither.
    case = build_case([0, 0], device=backend.device)
    out, lse = backend.ops.paged_attention(
        case.query,
        case.block_tables[:, :0],
        case.key_cache[:0],
        case.value_cache[:0],
        case.context_lens,
        return_lse=True,
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("causal", [True, False])
def test_enormous_integers(backend: Backend, causal: bool) -> None:
    # Options that say "all": sums with them must not overflow.
    case = build_case([9, 30], [3, 1], device=backend.device)
    expected = case.run(backend, causal=causal, split_size=64)
    for huge in (2**31 - 1, 2**31, 2**62, 2**63 - 1):
        assert_same_bits(case.run(backend, causal=causal, split_size=64, window=huge), expected)
        assert_same_bits(case.run(backend, causal=causal, split_size=64, max_query_len=huge), expected)
        torch.testing.assert_close(case.run(backend, causal=causal, split_size=huge), expected)


def test_negative_kv_starts_hide_nothing(backend: Backend) -> None:
    case = build_case([9, 30], [3, 1], device=backend.device)
    expected = case.run(backend, split_size=64)
    starts = backend.tensor([-3, -(2**31)])
    assert_same_bits(case.run(backend, split_size=64, kv_starts=starts), expected)


def test_a_hint_that_is_too_small_gives_no_wrong_numbers(backend: Backend) -> None:
    # `max_query_len` is a promise; a broken one is refused where the lengths are seen, or does not matter.
    case = build_case([9, 30], [3, 20], device=backend.device)
    expected = case.run(backend)
    with backend.index_checks():
        try:
            out = case.run(backend, max_query_len=4)
        except ValueError as error:
            assert "max_query_len" in str(error)  # noqa: PT017
        else:
            torch.testing.assert_close(out, expected)
