"""paged_attention: contexts of 2**24 tokens and more, sinks near float32's end, weights of 0 or nearly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import QUANTIZED_DTYPES, Backend, dtype_name
from torch import Tensor

from pagedkv import reference

OPERATORS = ("paged_attention",)
BLOCK_SIZE = 1024


def long_call(backend: Backend, context_len: int, split_size: int | None, **options: Any) -> Tensor:
    """The lse of a query that sees the last five of so many equal keys, which all lie in one block."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    cache = torch.zeros(1, BLOCK_SIZE, 1, 8, device=backend.device)
    _, lse = backend.ops.paged_attention(
        torch.ones(1, 1, 8, device=backend.device),
        torch.zeros(1, num_blocks, dtype=torch.int32, device=backend.device),
        cache,
        cache,
        backend.tensor([context_len]),
        window=5,
        split_size=split_size,
        return_lse=True,
        **options,
    )
    assert isinstance(lse, Tensor)
    return lse


@pytest.mark.parametrize("split_size", [None, 2**24])
def test_alibi_of_distances_between_far_positions(backend: Backend, split_size: int | None) -> None:
    """Positions beyond 2**24 are no float32, their difference is."""
    slopes = torch.full((1,), 0.5, device=backend.device)
    lse = long_call(backend, 2**24 + 10, split_size, alibi_slopes=slopes)
    assert lse.item() == pytest.approx(0.84710, abs=1e-5)


@pytest.mark.parametrize("split_size", [None, 2**30])
def test_the_longest_context(backend: Backend, split_size: int | None) -> None:
    longest = 2**31 - 256
    assert long_call(backend, longest, split_size).item() == pytest.approx(1.60944, abs=1e-5)
    with backend.index_checks(), pytest.raises(IndexError, match=rf"context_lens\[0\].* at most {longest}"):
        long_call(backend, longest + 1, split_size)


@pytest.mark.parametrize("context_len", [0, 2])
@pytest.mark.parametrize(
    "sink", [torch.finfo(torch.float32).min, -3e38, 3e38, torch.finfo(torch.float32).max]
)
def test_sinks_at_the_end_of_float32(backend: Backend, sink: float, context_len: int) -> None:
    """Some use the smallest number for "no sink"."""
    key_cache = torch.zeros(1, 4, 1, 8, device=backend.device)
    arguments = (
        torch.zeros(1, 1, 8, device=backend.device),
        backend.tensor([[0]]),
        key_cache,
        key_cache + 1,
        backend.tensor([context_len]),
    )
    options: dict[str, Any] = {"sinks": torch.full((1,), sink, device=backend.device), "return_lse": True}
    out, lse = backend.ops.paged_attention(*arguments, **options)
    expected_out, expected_lse = reference.paged_attention(*arguments, **options)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("context_len", [60, 256, 1000])
@pytest.mark.parametrize("gap", [8, 11])
@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
def test_small_weights_beside_a_large_one_keep_their_digits(
    backend: Backend, cache_dtype: torch.dtype, gap: int, context_len: int
) -> None:
    """A first token of a large score and no value, as many models have: the result is the others' sum."""
    generator = torch.Generator().manual_seed(gap)
    keys, values = torch.randint(-30, 31, (2, 64, 16, 1, 128), generator=generator).float()
    keys[..., 0] = 0
    keys[0, 0] = 0
    keys[0, 0, 0, 0] = 96
    values[0, 0] = 0
    query = torch.randn(1, 4, 128, generator=generator).bfloat16()
    query[..., 0] = gap * 128**0.5 / 4.8
    arguments = (
        query.to(backend.device),
        torch.arange(64, dtype=torch.int32, device=backend.device)[None],
        keys.to(backend.device, cache_dtype),
        values.to(backend.device, cache_dtype),
        backend.tensor([context_len]),
    )
    scales = {"k_scale": 0.05, "v_scale": 0.05}
    out = backend.ops.paged_attention(*arguments, **scales)
    expected = reference.paged_attention(*arguments, **scales, compute_dtype=torch.float64)
    assert isinstance(expected, Tensor)
    assert (out.double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("split_size", [None, 8])
def test_a_visible_nan_of_no_weight_is_seen_by_all_rows_that_see_its_key(
    backend: Backend, split_size: int | None
) -> None:
    """A score of -inf is not a mask: 0 * NaN is NaN, whether or not other rows see less."""
    keys, values = (
        torch.zeros(1, 4, 1, 8, device=backend.device),
        torch.ones(1, 4, 1, 8, device=backend.device),
    )
    keys[0, 0] = -torch.inf
    values[0, 0, 0, 0] = torch.nan
    out = backend.ops.paged_attention(
        torch.ones(3, 1, 8, device=backend.device),
        backend.tensor([[0]]),
        keys,
        values,
        backend.tensor([3]),
        window=2,
        split_size=split_size,
        query_start_loc=backend.tensor([0, 3]),
        max_query_len=3,
    )
    expected = torch.ones(2, 1, 8, device=backend.device)
    expected[0, 0, 0] = torch.nan
    torch.testing.assert_close(out[1:], expected, equal_nan=True)
