"""rope_and_cache: rotated queries in place, rotated keys and plain values in the cache."""

from __future__ import annotations

import math

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
    dtype_name,
    huge_cache,
)
from rope_inputs import check_rope, rope_call

from pagedkv import reference

OPERATORS = ("rope_and_cache",)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_every_dtype_and_layout(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, layout: str, interleaved: bool
) -> None:
    for table_dtype in {torch.float32, dtype}:
        arguments = rope_call(
            backend,
            dtype=dtype,
            cache_dtype=cache_dtype,
            table_dtype=table_dtype,
            layout=layout,
            strided=True,
        )
        check_rope(backend, arguments, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [
        (2, 2),
        (6, 6),
        (6, 2),
        (8, 8),
        (20, 10),
        (36, 36),
        (50, 26),
        (64, 16),
        (128, 128),
        (192, 64),
        (256, 256),
        (9, 4),
        (16, 0),
        (7, 0),
    ],
)
def test_head_and_rotary_dims(backend: Backend, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    for dtype, cache_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.int8)):
        arguments = rope_call(
            backend,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
            num_tokens=40,
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
        query,
        key,
        -key,
        cos,
        sin,
        backend.slots([0, 1, 2]),
        *caches,
        backend.slots([3, 2, 1]),
        interleaved=interleaved,
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
        arguments["key"].double(),
        arguments["cos"][arguments["positions"]],
        arguments["sin"][arguments["positions"]],
        False,
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
    backend.ops.rope_and_cache(
        ones.clone(), ones, 2 * ones, cos, sin, torch.zeros_like(slots), *caches, slots
    )
    for block in HUGE_BLOCKS:
        assert caches[0][block, 5, 0].tolist() == [-1] * 4 + [1] * 4
        assert (caches[1][block, 5] == 2).all()
        assert caches[0][block].count_nonzero() == 8


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
