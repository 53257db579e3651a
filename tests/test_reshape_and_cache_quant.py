"""reshape_and_cache: what a quantised cache stores, code by code, and that a float cache stores every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    QUANTIZED_DTYPES,
    Backend,
    assert_same_bits,
    dtype_name,
    poisoned_caches,
)
from torch import Tensor

from pagedkv import reference

OPERATORS = ("reshape_and_cache",)


def stored_bytes(backend: Backend, values: Tensor, cache_dtype: torch.dtype, **scales: Any) -> Tensor:
    """What a write of `values [n]` leaves in the cache, `[n]`."""
    head_dim = 64 if values.numel() % 64 == 0 else 1
    rows = values.view(-1, 1, head_dim).to(backend.device)
    caches = [
        torch.zeros(len(rows), 1, 1, head_dim, dtype=cache_dtype, device=backend.device) for _ in range(2)
    ]
    backend.ops.reshape_and_cache(
        rows, rows, *caches, torch.arange(len(rows), device=backend.device), **scales
    )
    assert_same_bits(caches[0], caches[1])
    return caches[0].flatten().cpu()


def test_fp8_overflow_semantics(backend: Backend) -> None:
    values = [
        1000,
        -1000,
        448,
        464,
        465,
        torch.inf,
        -torch.inf,
        torch.nan,
        2**-9,
        2**-10,
        1.5 * 2**-9,
        0.0,
        -0.0,
    ]
    expected = torch.tensor([448, -448, 448, 448, 448, 448, -448, torch.nan, 2**-9, 0, 2**-8, 0.0, -0.0])
    for dtype in FLOAT_DTYPES:
        codes = stored_bytes(backend, torch.tensor(values, dtype=dtype), torch.float8_e4m3fn)
        assert codes.view(torch.uint8)[7] == 0x7F
        torch.testing.assert_close(codes.float(), expected, rtol=0, atol=0, equal_nan=True)
        assert codes.view(torch.uint8)[11:].tolist() == [0, 0x80]


def test_fp8_e5m2_overflow_semantics(backend: Backend) -> None:
    limit = 57344.0
    values = torch.tensor(
        [1e9, -1e9, limit, 61439.0, 61440.0, torch.inf, -torch.inf, torch.nan, 2**-16, 2**-17, 1.5 * 2**-16]
    )
    expected = torch.tensor([limit, -limit, limit, limit, limit, limit, -limit, torch.nan, 2**-16, 0, 2**-15])
    codes = stored_bytes(backend, values, torch.float8_e5m2)
    torch.testing.assert_close(codes.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", FLOAT8_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_fp8_software_rounding(backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    every_value = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    codes = stored_bytes(backend, every_value, cache_dtype)
    limit = torch.finfo(cache_dtype).max
    expected = every_value.float().clamp(-limit, limit).to(cache_dtype)
    nan = every_value.isnan()
    assert_same_bits(codes[~nan], expected[~nan])
    assert codes[nan].float().isnan().all()
    if cache_dtype == torch.float8_e4m3fn:
        spots = stored_bytes(backend, torch.tensor([300.0, 272.0, 304.0, 440.0]), cache_dtype)
        assert spots.float().tolist() == [288, 256, 320, 448]


@pytest.mark.parametrize("cache_dtype", FLOAT8_DTYPES, ids=dtype_name)
def test_fp8_rounds_float32_once(backend: Backend, cache_dtype: torch.dtype) -> None:
    # All codes, the midpoints between neighbours, and the floats next to those: rounding by way of a half
    # type would get the last ones wrong. The oracle is arithmetic, not a cast.
    positive = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    positive = positive[positive.isfinite() & (positive >= 0)].unique()
    middle = (positive[:-1] + positive[1:]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(x)) for x in (torch.inf, 0.0))
    even = torch.where(torch.arange(len(middle)) % 2 == 0, positive[:-1], positive[1:])
    for values, expected in ((positive, positive), (middle, even), (up, positive[1:]), (down, positive[:-1])):
        assert stored_bytes(backend, values, cache_dtype).float().equal(expected)
        assert stored_bytes(backend, -values, cache_dtype).float().equal(-expected)


def test_int8_semantics(backend: Backend) -> None:
    values = torch.tensor(
        [
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            126.5,
            127.0,
            127.5,
            128.0,
            1000000000.0,
            -126.5,
            -127.5,
            -128.0,
            -1000000000.0,
            torch.inf,
            -torch.inf,
            torch.nan,
            -torch.nan,
            3e38,
        ]
    )
    expected = [0, 2, 2, 0, -2, 126, 127, 127, 127, 127, -126, -127, -127, -127, 127, -127, 0, 0, 127]
    assert stored_bytes(backend, values, torch.int8, k_scale=1.0, v_scale=1.0).tolist() == expected
    halved = stored_bytes(backend, values, torch.int8, k_scale=2.0, v_scale=2.0)
    assert halved[:8].tolist() == [0, 1, 1, 0, -1, 63, 64, 64]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("scale", [0.1, 0.37, 3.0, 1e-3, 127.0])
def test_values_are_divided_by_the_scale(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, scale: float
) -> None:
    # A multiplication by the reciprocal differs from the division in the last place, so at times in a code.
    values = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 60 * scale).to(dtype)
    # Values that the division takes right onto a tie, where the last place decides.
    values[:254] = ((torch.arange(254) - 126.5) * torch.tensor(scale)).to(dtype)
    codes = stored_bytes(backend, values, cache_dtype, k_scale=scale, v_scale=scale)
    assert_same_bits(codes, reference.quantize(values.view(-1, 1, 1), scale, cache_dtype).flatten())
    per_head = torch.tensor([scale], device=backend.device)
    assert_same_bits(stored_bytes(backend, values, cache_dtype, k_scale=per_head, v_scale=per_head), codes)


def test_key_and_value_have_scales_of_their_own(backend: Backend) -> None:
    caches = poisoned_caches(1, 2, 2, (8, 8), torch.int8, "contiguous", backend.device)
    ones = torch.ones(2, 2, 8, device=backend.device)
    per_head = torch.tensor([0.5, 0.25], device=backend.device)
    backend.ops.reshape_and_cache(ones, ones, *caches, backend.slots([0, 1]), k_scale=0.1, v_scale=per_head)
    assert (caches[0] == 10).all()
    assert (caches[1][..., 0, :] == 2).all()
    assert (caches[1][..., 1, :] == 4).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_float_caches_keep_every_bit(backend: Backend, dtype: torch.dtype) -> None:
    # NaN payloads, signalling NaN, subnormals, -0: a copy, not arithmetic.
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    patterns = torch.randint(-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1), (64, 1, 16))
    patterns[0, 0, :4] = (
        torch.tensor([0x7F800001, 0x7FC00001, 1, -(2**31)])
        if dtype.itemsize == 4
        else (torch.tensor([0x7C01, 0x7F81, 1, -(2**15)]))
    )
    key = patterns.to(integer).view(dtype).to(backend.device)
    caches = poisoned_caches(8, 8, 1, (16, 16), dtype, "contiguous", backend.device)
    backend.ops.reshape_and_cache(key, key, *caches, torch.arange(64, device=backend.device))
    for cache in caches:
        assert_same_bits(cache.view(64, 1, 16), key)
