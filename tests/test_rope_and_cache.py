"""rope_and_cache: rotated queries in place, rotated keys and plain values in the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    DTYPE_PAIRS,
    FLOAT_DTYPES,
    HUGE_BLOCKS,
    LAYOUTS,
    QUANTIZED_DTYPES,
    Backend,
    assert_same_bits,
    bits,
    dtype_name,
    embed,
    huge_cache,
    poisoned_caches,
)
from pagedkv import reference
from torch import Tensor

OPERATORS = ("rope_and_cache",)
ARGUMENTS = (
    "query",
    "key",
    "value",
    "cos",
    "sin",
    "positions",
    "key_cache",
    "value_cache",
    "slot_mapping",
)
Call = dict[str, Any]


def tables(max_position: int, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the usual frequencies, `[max_position, rotary_dim / 2]`."""
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
        name: reference.as_bytes(x).clone().view(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    } | {name: arguments[name].clone() for name in ("key_cache", "value_cache") if arguments[name].dtype == torch.int8}


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


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_every_dtype_and_layout(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, layout: str, interleaved: bool
) -> None:
    for table_dtype in {torch.float32, dtype}:
        arguments = rope_call(
            backend, dtype=dtype, cache_dtype=cache_dtype, table_dtype=table_dtype, layout=layout, strided=True
        )
        check_rope(backend, arguments, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(2, 2), (6, 6), (6, 2), (8, 8), (20, 10), (36, 36), (50, 26), (64, 16), (128, 128), (192, 64), (256, 256), (9, 4)]
    + [(16, 0), (7, 0)],
)
def test_head_and_rotary_dims(backend: Backend, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    for dtype, cache_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.int8)):
        arguments = rope_call(
            backend, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, cache_dtype=cache_dtype, num_tokens=40
        )
        check_rope(backend, arguments, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_quarter_turns_by_hand(backend: Backend, interleaved: bool) -> None:
    # head_dim 6, rotary_dim 4: position 0 turns by nothing, 1 by 90 degrees, 2 by 180.
    cos = torch.tensor([[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]], device=backend.device)
    sin = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]], device=backend.device)
    row = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=backend.device)
    query, key = row.expand(3, 1, 6).clone(), row.expand(3, 1, 6).clone()
    caches = [torch.zeros(1, 4, 1, 6, device=backend.device) for _ in range(2)]
    backend.ops.rope_and_cache(
        query, key, -key, cos, sin, backend.slots([0, 1, 2]), *caches, backend.slots([3, 2, 1]), interleaved=interleaved
    )
    turned = [-2.0, 1.0, -4.0, 3.0] if interleaved else [-3.0, -4.0, 1.0, 2.0]
    expected = [[1, 2, 3, 4, 5, 6], [*turned, 5, 6], [-1, -2, -3, -4, 5, 6]]
    assert query[:, 0].tolist() == expected
    assert caches[0][0, :, 0].tolist() == [[0] * 6, *expected[::-1]]
    assert caches[1][0, :, 0].tolist() == [[0] * 6, *[(-row).tolist()] * 3]
    assert key[:, 0].tolist() == [row.tolist()] * 3


@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
def test_quantised_keys_are_rounded_once(backend: Backend, cache_dtype: torch.dtype) -> None:
    # bfloat16 has 8 bits: rounding the rotated key to it first would move one code in many.
    arguments = rope_call(
        backend, num_tokens=300, dtype=torch.bfloat16, cache_dtype=cache_dtype, head_dim=64, value_head_dim=64
    )
    arguments["slot_mapping"] = torch.arange(300, device=backend.device)
    exact = reference.rotate(
        arguments["key"].double(), arguments["cos"][arguments["positions"]], arguments["sin"][arguments["positions"]], False
    )
    once = reference.quantize(exact.float(), arguments["k_scale"], cache_dtype)
    twice = reference.quantize(exact.bfloat16(), arguments["k_scale"], cache_dtype)
    backend.ops.rope_and_cache(**arguments)
    stored = reference.as_bytes(arguments["key_cache"]).view(-1, 2, 64)[:300]
    wrong = (stored != reference.as_bytes(once)).sum().item()
    assert (reference.as_bytes(twice) != reference.as_bytes(once)).sum() > 20 * (wrong + 1)


def test_every_query_row_is_rotated(backend: Backend) -> None:
    # Whether or not its token has a slot; slot_mapping may be shorter, positions may not.
    arguments = rope_call(backend)
    arguments["slot_mapping"] = arguments["slot_mapping"][:3]
    check_rope(backend, arguments)
    arguments = rope_call(backend)
    arguments["slot_mapping"] = arguments["slot_mapping"][:0]
    check_rope(backend, arguments)


def test_sizes(backend: Backend) -> None:
    for num_tokens in (0, 1, 200):
        for heads in ((1, 1), (8, 1), (3, 3)):
            check_rope(
                backend, rope_call(backend, num_tokens=num_tokens, num_heads=heads[0], num_kv_heads=heads[1])
            )


def test_head_counts_need_not_divide(backend: Backend) -> None:
    check_rope(backend, rope_call(backend, num_heads=3, num_kv_heads=2))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_fused_projection(backend: Backend, dtype: torch.dtype) -> None:
    # query, key and value are slices of one tensor: the query's part is rotated, the rest stays.
    arguments = rope_call(backend, dtype=dtype, head_dim=16, value_head_dim=16)
    fused = torch.randn(7, (4 + 2 + 2) * 16).to(dtype).to(backend.device)
    before = fused.clone()
    arguments["query"] = fused[:, :64].view(7, 4, 16)
    arguments["key"] = fused[:, 64:96].view(7, 2, 16)
    arguments["value"] = fused[:, 96:].view(7, 2, 16)
    check_rope(backend, arguments)
    assert_same_bits(fused[:, 64:], before[:, 64:])
    assert not torch.equal(fused[:, :64], before[:, :64])


def test_strided_tables(backend: Backend) -> None:
    arguments = rope_call(backend)
    both = torch.cat([arguments["cos"], arguments["sin"]], dim=1)  # as vLLM keeps them, side by side
    half = arguments["cos"].shape[1]
    arguments["cos"], arguments["sin"] = both[:, :half], both[:, half:]
    check_rope(backend, arguments)


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_threads(backend: Backend, num_threads: int) -> None:
    before = torch.get_num_threads()
    first = rope_call(backend, num_tokens=500)
    second = rope_call(backend, num_tokens=500)
    backend.ops.rope_and_cache(**first)
    torch.set_num_threads(num_threads)
    try:
        backend.ops.rope_and_cache(**second)
    finally:
        torch.set_num_threads(before)
    for name in ("query", "key_cache", "value_cache"):
        assert_same_bits(second[name], first[name], name)


def test_zero_positions_copy(backend: Backend) -> None:
    # Position 0 turns by nothing: a float cache receives the very key.
    for dtype in FLOAT_DTYPES:
        arguments = rope_call(backend, dtype=dtype)
        arguments["positions"].zero_()
        arguments["slot_mapping"] = backend.slots([6, 5, 4, 3, 2, 1, 0])
        query = arguments["query"].clone()
        backend.ops.rope_and_cache(**arguments)
        assert_same_bits(arguments["query"], query)
        assert_same_bits(arguments["key_cache"].flatten(0, 1)[:7].flip(0), arguments["key"])


@pytest.mark.operators("rope_and_cache", "reshape_and_cache")
@pytest.mark.parametrize("cache_dtype", [torch.float32, *QUANTIZED_DTYPES], ids=dtype_name)
def test_equals_rotation_then_reshape_and_cache(backend: Backend, cache_dtype: torch.dtype) -> None:
    # Without anything to rotate the two operators write the same bytes.
    fused = rope_call(backend, cache_dtype=cache_dtype, rotary_dim=0)
    plain = rope_call(backend, cache_dtype=cache_dtype)
    backend.ops.rope_and_cache(**fused)
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")
    backend.ops.reshape_and_cache(**{name: plain[name] for name in names if name in plain})
    for name in ("key_cache", "value_cache"):
        assert_same_bits(fused[name], plain[name], name)


def test_int32_offset_overflow(backend: Backend) -> None:
    caches = huge_cache(torch.bfloat16, backend.device), huge_cache(torch.bfloat16, backend.device)
    num_tokens = len(HUGE_BLOCKS)
    cos, sin = (torch.full((1, 4), x, device=backend.device) for x in (0.0, 1.0))
    ones = torch.ones(num_tokens, 1, 8, dtype=torch.bfloat16, device=backend.device)
    slots = backend.slots([block * 16 + 5 for block in HUGE_BLOCKS])
    backend.ops.rope_and_cache(ones.clone(), ones, 2 * ones, cos, sin, torch.zeros_like(slots), *caches, slots)
    for block in HUGE_BLOCKS:
        assert caches[0][block, 5, 0].tolist() == [-1] * 4 + [1] * 4
        assert (caches[1][block, 5] == 2).all() and caches[0][block].count_nonzero() == 8


def test_slot_minus_one_and_beyond(backend: Backend) -> None:
    arguments = rope_call(backend)
    arguments["slot_mapping"] = backend.slots([-1] * 7)
    check_rope(backend, arguments)
    before = {name: bits(arguments[name]) for name in ("query", "key_cache", "value_cache")}
    for slot in (12, 2**31, 2**40 + 17):
        arguments["slot_mapping"] = backend.slots([0, 1, 2, slot, 3, 4, 5])
        with backend.index_checks(), pytest.raises(IndexError, match=rf"(?s)slot_mapping\[3\].*{slot}.*12 slots"):
            backend.ops.rope_and_cache(**arguments)
        for name, old in before.items():
            assert torch.equal(bits(arguments[name]), old), name


@pytest.mark.parametrize("position", [50, -1, 2**31, 2**40])
def test_positions_outside_the_tables(backend: Backend, position: int) -> None:
    arguments = rope_call(backend)
    arguments["positions"][4] = position
    before = {name: bits(arguments[name]) for name in ("query", "key_cache", "value_cache")}
    with backend.index_checks(), pytest.raises(IndexError, match=rf"(?s)positions\[4\].*{position}.*50"):
        backend.ops.rope_and_cache(**arguments)
    for name, old in before.items():
        assert torch.equal(bits(arguments[name]), old), name


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "query rank": (ValueError, "query.*num_tokens", lambda a: {"query": a["query"][0]}),
    "query tokens": (ValueError, "query.*num_tokens|positions.*num_tokens", lambda a: {"query": a["query"][1:]}),
    "query head_dim": (ValueError, "query.*head_dim", lambda a: {"query": a["query"][..., :8]}),
    "query dtype": (TypeError, "query.*key", lambda a: {"query": a["query"].half()}),
    "query strided": (ValueError, "query.*contiguous", lambda a: {"query": a["query"].repeat(1, 1, 2)[..., ::2]}),
    "key heads": (ValueError, "key.*num_kv_heads", lambda a: {"key": a["key"][:, :1]}),
    "value head_dim": (ValueError, "value.*head_dim", lambda a: {"value": a["value"][..., :8]}),
    "value dtype": (TypeError, "value.*key", lambda a: {"value": a["value"].half()}),
    "cos rank": (ValueError, "cos.*max_position", lambda a: {"cos": a["cos"][None]}),
    "sin shape": (ValueError, "sin.*", lambda a: {"sin": a["sin"][:, 1:]}),
    "sin rows": (ValueError, "sin.*max_position", lambda a: {"sin": a["sin"][1:]}),
    "cos dtype": (TypeError, "cos.*float32", lambda a: {"cos": a["cos"].double(), "sin": a["sin"].double()}),
    "cos other half type": (TypeError, "cos.*float32", lambda a: {"cos": a["cos"].half(), "sin": a["sin"].half()}),
    "sin dtype": (TypeError, "sin.*cos", lambda a: {"sin": a["sin"].half()}),
    "rotary_dim too large": (
        ValueError,
        "rotary_dim.*head_dim",
        lambda a: {"cos": a["cos"].repeat(1, 2), "sin": a["sin"].repeat(1, 2)},
    ),
    "positions dtype": (TypeError, "(?i)positions.*(int64|long)", lambda a: {"positions": a["positions"].int()}),
    "positions length": (ValueError, "positions.*num_tokens", lambda a: {"positions": a["positions"][1:]}),
    "slots too long": (
        ValueError,
        "slot_mapping.*8.*7",
        lambda a: {"slot_mapping": torch.cat([a["slot_mapping"], a["slot_mapping"][:1]])},
    ),
    "slots dtype": (TypeError, "(?i)slot_mapping.*(int64|long)", lambda a: {"slot_mapping": a["slot_mapping"].int()}),
    "cache dtype": (
        TypeError,
        "key_cache.*key",
        lambda a: {"key_cache": a["key_cache"].half(), "value_cache": a["value_cache"].half()},
    ),
    "scale on float": (ValueError, "k_scale", lambda a: {"k_scale": 1.0}),
    "int8 needs scales": (
        ValueError,
        "k_scale",
        lambda a: {
            name: torch.zeros(a[name].shape, dtype=torch.int8, device=a[name].device)
            for name in ("key_cache", "value_cache")
        },
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_write_nothing(backend: Backend, mistake: str) -> None:
    exception, message, change = MISTAKES[mistake]
    arguments = rope_call(backend)
    arguments |= change(arguments)
    names = ("query", "key_cache", "value_cache")
    before = {name: bits(arguments[name]) for name in names}
    with pytest.raises(exception, match=f"(?s){message}"):
        backend.ops.rope_and_cache(**arguments)
    for name in names:
        assert torch.equal(bits(arguments[name]), before[name]), name


@pytest.mark.parametrize("name", ["query", "key", "value", "cos", "key_cache"])
def test_inference_only(backend: Backend, name: str) -> None:
    arguments = rope_call(backend)
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*torch\.no_grad\(\)"):
        backend.ops.rope_and_cache(**arguments)
    with torch.no_grad():
        backend.ops.rope_and_cache(**arguments)


@pytest.mark.operators("rope_and_cache", "paged_attention")
def test_scores_depend_on_the_distance_only(backend: Backend) -> None:
    # The point of rotary embedding: shifting all positions changes nothing.
    results = []
    for shift in (0, 17):
        arguments = rope_call(backend, head_dim=32, value_head_dim=32)
        arguments["positions"] = torch.arange(7, device=backend.device) + shift
        arguments["slot_mapping"] = torch.arange(7, device=backend.device)
        backend.ops.rope_and_cache(**arguments)
        _, lse = backend.ops.paged_attention(
            arguments["query"],
            backend.tensor([[0, 1]]),
            arguments["key_cache"],
            arguments["value_cache"],
            backend.tensor([7]),
            query_start_loc=backend.tensor([0, 7]),
            return_lse=True,
        )
        results.append(lse)
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    assert math.isfinite(results[0].sum().item())
