"""Inputs of rope_and_cache, and the comparison with the reference."""

from __future__ import annotations

from typing import Any

import torch
from helpers import (
    QUANTIZED_DTYPES,
    Backend,
    assert_same_bits,
    bits,
    embed,
    poisoned_caches,
)
from torch import Tensor

from pagedkv import reference

Call = dict[str, Any]


def tables(
    max_position: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cos and sin of the usual frequencies, `[max_position, rotary_dim / 2]`."""
    frequencies = 10_000.0 ** -(torch.arange(0, rotary_dim, 2).double() / max(rotary_dim, 1))
    angles = torch.arange(max_position).double()[:, None] * frequencies
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


def rope_call(
    backend: Backend,
    *,
    num_tokens: int = 7,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 24,
    value_head_dim: int = 16,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    strided: bool = False,
    block_size: int = 4,
) -> Call:
    """Arguments by name; two of the seven tokens have no slot."""
    generator = torch.Generator().manual_seed(0)
    cache_dtype = dtype if cache_dtype is None else cache_dtype

    def rows(heads: int, dim: int) -> Tensor:
        x = torch.randn(num_tokens, heads, dim, generator=generator).to(dtype).to(backend.device)
        return embed(x, tail_dim=3) if strided else x

    num_blocks = 2 + num_tokens // block_size
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[1::3] = -1
    caches = poisoned_caches(
        num_blocks, block_size, num_kv_heads, (head_dim, value_head_dim), cache_dtype, layout, backend.device
    )
    cos, sin = tables(50, head_dim if rotary_dim is None else rotary_dim, table_dtype, backend.device)
    scales: Call = {}
    if cache_dtype in QUANTIZED_DTYPES:
        steps = 1 + torch.arange(num_kv_heads, dtype=torch.float32, device=backend.device)
        scales = {"k_scale": 0.02 * steps, "v_scale": 0.05 / steps}
    return {
        "query": rows(num_heads, head_dim),
        "key": rows(num_kv_heads, head_dim),
        "value": rows(num_kv_heads, value_head_dim),
        "cos": cos,
        "sin": sin,
        "positions": torch.randint(0, 50, (num_tokens,), generator=generator).to(backend.device),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": slots.to(backend.device),
        **scales,
    }


def copied(arguments: Call) -> Call:
    """The same arguments in other memory, strides kept for nothing."""
    return {
        name: reference.as_bytes(x).clone().view(x.dtype)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in arguments.items()
    } | {
        name: arguments[name].clone()
        for name in ("key_cache", "value_cache")
        if arguments[name].dtype == torch.int8
    }


def check_rope(backend: Backend, arguments: Call, **options: Any) -> None:
    """Compare with the reference: exact where nothing is rotated, within one rounding where it is."""
    expected = copied(arguments)
    expected_query, key_before = expected["query"], bits(arguments["key"])
    reference.rope_and_cache(**expected, **options)
    assert backend.ops.rope_and_cache(**arguments, **options) is None
    assert torch.equal(bits(arguments["key"]), key_before)
    rotary_dim = 2 * arguments["cos"].shape[1]
    assert_rounded_once(arguments["query"], expected_query, rotary_dim)
    assert_rounded_once(arguments["key_cache"], expected["key_cache"], rotary_dim)
    assert_same_bits(arguments["value_cache"], expected["value_cache"], "value_cache")


def assert_rounded_once(actual: Tensor, expected: Tensor, rotary_dim: int) -> None:
    """Equal but for the order of float32 operations: nearly all elements to the bit, the others neighbours.

    What lies past the rotary dimension is equal to the bit.
    """
    assert_same_bits(actual[..., rotary_dim:], expected[..., rotary_dim:], "pass-through")
    actual, expected = actual[..., :rotary_dim], expected[..., :rotary_dim]
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=3e-7, atol=3e-7, equal_nan=True)
        return
    different = reference.as_bytes(actual) != reference.as_bytes(expected)
    assert different.float().mean() < 0.02 if different.numel() > 200 else different.sum() <= 2
    steps = (reference.as_bytes(actual).int() - reference.as_bytes(expected).int()).abs()
    assert (steps[different] == 1).all()
