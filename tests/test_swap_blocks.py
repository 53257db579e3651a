"""swap_blocks: exact blocks from one cache to another, on one device or across devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from helpers import (
    CACHE_DTYPES,
    HUGE_BLOCKS,
    LAYOUTS,
    Backend,
    bits,
    dtype_name,
    huge_cache,
    poisoned_caches,
)
from torch import Tensor

from pagedkv import reference

OPERATORS = ("swap_blocks",)


def pairs(*values: tuple[int, int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).reshape(-1, 2)


def random_cache(
    device: torch.device,
    num_blocks: int,
    *,
    seed: int = 0,
    block_size: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> Tensor:
    """A cache of random bytes."""
    cache, _ = poisoned_caches(
        num_blocks, block_size, num_kv_heads, (head_dim, head_dim), dtype, layout, device
    )
    integers = reference.as_bytes(cache)
    info = torch.iinfo(integers.dtype)
    generator = torch.Generator().manual_seed(seed)
    integers.copy_(
        torch.randint(info.min, info.max + 1, cache.shape, generator=generator, dtype=integers.dtype)
    )
    return cache


def host(backend: Backend) -> torch.device:
    """The other side of a swap."""
    return torch.device("cpu")


def check_swap(backend: Backend, sources: list[Tensor], destinations: list[Tensor], mapping: Tensor) -> None:
    """Swap, and compare both sides with the snapshot meaning, byte for byte."""
    old_sources = [bits(cache) for cache in sources]
    old_destinations = [bits(cache) for cache in destinations]
    assert backend.ops.swap_blocks(sources, destinations, mapping) is None
    from_blocks, to_blocks = mapping.t()
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        expected = old_destinations[i].clone()
        expected[to_blocks] = old_sources[i][from_blocks].to(expected.device)
        assert torch.equal(bits(destination), expected)
        if source.untyped_storage().data_ptr() != destination.untyped_storage().data_ptr():
            assert torch.equal(bits(source), old_sources[i])


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("destination_layout", LAYOUTS)
@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_every_dtype_and_layout(
    backend: Backend, source_layout: str, destination_layout: str, dtype: torch.dtype
) -> None:
    for head_dim in (16, 5):
        settings: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim}
        device = [random_cache(backend.device, 6, layout=source_layout, seed=i, **settings) for i in range(2)]
        other = [
            random_cache(host(backend), 9, layout=destination_layout, seed=9 + i, **settings)
            for i in range(2)
        ]
        check_swap(backend, device, other, pairs((0, 8), (5, 0), (1, 2), (2, 3), (3, 4)))  # out
        check_swap(backend, other, device, pairs((8, 1), (7, 0), (6, 5)))  # and in


def test_out_and_back_is_exact(backend: Backend) -> None:
    for dtype in CACHE_DTYPES:
        device, other = (
            random_cache(backend.device, 6, dtype=dtype),
            random_cache(host(backend), 4, dtype=dtype, seed=1),
        )
        before = bits(device)
        backend.ops.swap_blocks(device, other, pairs((5, 0), (2, 1)))
        reference.as_bytes(device)[[5, 2]] = 0
        backend.ops.swap_blocks(other, device, pairs((0, 5), (1, 2)))
        assert torch.equal(bits(device), before)


@pytest.mark.parametrize(
    "mapping",
    [[(0, 1), (1, 2)], [(0, 1), (1, 0)], [(3, 3)], [(5, 4), (4, 3), (3, 2)], [(0, 1), (0, 2), (1, 0)], []],
    ids=["chain", "exchange", "self", "reversed chain", "fan out", "empty"],
)
def test_overlapping_copy_pairs(backend: Backend, mapping: list[tuple[int, int]]) -> None:
    # From a cache to itself: every source is read as it was before the call.
    caches = [random_cache(backend.device, 6, seed=i) for i in range(3)]
    check_swap(backend, caches, caches, pairs(*mapping))


def test_views_of_one_pool(backend: Backend) -> None:
    # Source and destination overlap in memory under different block ids.
    for shift in (1, 2):
        for forward in (True, False):
            pool = random_cache(backend.device, 8)
            lower, upper = pool[: 8 - shift], pool[shift:]
            source, destination = (lower, upper) if forward else (upper, lower)
            check_swap(backend, [source], [destination], pairs(*[(i, i) for i in range(8 - shift)]))


def test_exchange_between_two_layers(backend: Backend) -> None:
    # Layer 0 to layer 1 and layer 1 to layer 0 in one call.
    caches = [random_cache(backend.device, 4, seed=i) for i in range(2)]
    before = [bits(cache) for cache in caches]
    backend.ops.swap_blocks(caches, caches[::-1], pairs((0, 2), (3, 3)))
    for i in range(2):
        expected = before[i].clone()
        expected[[2, 3]] = before[1 - i][[0, 3]]
        assert torch.equal(bits(caches[i]), expected)


def test_interleaved_keys_and_values(backend: Backend) -> None:
    pool = torch.arange(4 * 2 * 3 * 8, dtype=torch.float32, device=backend.device).view(4, 2, 3, 1, 8)
    before = pool.clone()
    keys, values = pool[:, 0], pool[:, 1]
    backend.ops.swap_blocks([keys, values], [values, keys], pairs((0, 1), (2, 2)))
    before[1] = torch.stack([pool.new_tensor(range(24, 48)), pool.new_tensor(range(24))]).view(2, 3, 1, 8)
    before[2] = before[2].flip(0)
    assert torch.equal(pool, before)


def test_tensors_stand_for_one_layer(backend: Backend) -> None:
    device, other = random_cache(backend.device, 3), random_cache(host(backend), 3, seed=1)
    expected = bits(other)
    expected[0] = bits(device)[2].cpu()
    backend.ops.swap_blocks(device, other, pairs((2, 0)))
    assert torch.equal(bits(other), expected)
    backend.ops.swap_blocks([], [], pairs())


def test_duplicate_destination(backend: Backend) -> None:
    device, other = random_cache(backend.device, 3), random_cache(host(backend), 3, seed=1)
    before = bits(other)
    with pytest.raises(ValueError, match=r"(?s)block_mapping.*destination"):
        backend.ops.swap_blocks(device, other, pairs((0, 2), (1, 2)))
    assert torch.equal(bits(other), before)


@pytest.mark.parametrize(
    "pair", [(3, 0), (0, 5), (-1, 0), (0, -1), (2**31, 0), (0, 2**40), (2**63 - 1, 1), (0, -(2**63))]
)
def test_swap_index_out_of_range(backend: Backend, pair: tuple[int, int]) -> None:
    # Three blocks on one side and five on the other: each id is checked against its own pool.
    device, other = random_cache(backend.device, 3), random_cache(host(backend), 5, seed=1)
    before = bits(other)
    source_is_bad = not 0 <= pair[0] < 3
    bad, size = (pair[0], 3) if source_is_bad else (pair[1], 5)
    with pytest.raises(IndexError, match=rf"(?s)block_mapping\[1\].*{bad}.*{size} blocks"):
        backend.ops.swap_blocks(device, other, pairs((1, 2), pair))
    assert torch.equal(bits(other), before)
    backend.ops.swap_blocks(device, other, pairs((2, 4)))
    backend.ops.swap_blocks(other, device, pairs((4, 2)))


Call = dict[str, Any]
MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "mapping columns": (
        ValueError,
        "block_mapping.*num_pairs, 2",
        lambda a: {"block_mapping": torch.zeros(2, 3, dtype=torch.int64)},
    ),
    "mapping rank": (
        ValueError,
        "block_mapping.*num_pairs, 2",
        lambda a: {"block_mapping": torch.tensor([0, 1])},
    ),
    "mapping dtype": (
        TypeError,
        "(?i)block_mapping.*(int64|long)",
        lambda a: {"block_mapping": pairs((0, 1)).to(torch.int32)},
    ),
    "fewer destinations": (ValueError, "destination", lambda a: {"destination": a["destination"][:1]}),
    "block size": (
        ValueError,
        "destination",
        lambda a: {"destination": [c[:, :2] for c in a["destination"]]},
    ),
    "heads": (ValueError, "destination", lambda a: {"destination": [c[:, :, :1] for c in a["destination"]]}),
    "head_dim": (
        ValueError,
        "destination",
        lambda a: {"destination": [c[..., :8] for c in a["destination"]]},
    ),
    "dtypes": (
        TypeError,
        "destination.*source",
        lambda a: {"destination": [c.half() for c in a["destination"]]},
    ),
    "rank": (ValueError, "source", lambda a: {"source": [c[0] for c in a["source"]]}),
    "strided": (
        ValueError,
        "contiguous",
        lambda a: {"source": [c.transpose(1, 3).contiguous().transpose(1, 3) for c in a["source"]]},
    ),
    "unsupported dtype": (
        TypeError,
        "float8_e4m3fn",
        lambda a: {name: [c.double() for c in a[name]] for name in ("source", "destination")},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_write_nothing(backend: Backend, mistake: str) -> None:
    exception, message, change = MISTAKES[mistake]
    arguments: Call = {
        "source": [random_cache(backend.device, 3, seed=i) for i in range(2)],
        "destination": [random_cache(backend.device, 5, seed=7 + i) for i in range(2)],
        "block_mapping": pairs((0, 1)),
    }
    destinations = arguments["destination"]
    before = [bits(cache) for cache in destinations]
    arguments |= change(arguments)
    with pytest.raises(exception, match=f"(?s){message}"):
        backend.ops.swap_blocks(**arguments)
    for cache, old in zip(destinations, before, strict=True):
        assert torch.equal(bits(cache), old)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_random_mappings(backend: Backend, data: st.DataObject) -> None:
    num_sources, num_destinations = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    destinations = data.draw(st.lists(st.integers(0, num_destinations - 1), unique=True))
    if data.draw(st.booleans()):
        destinations.sort()  # runs of neighbouring blocks, which are copied as one
    first = data.draw(st.integers(0, num_sources - 1))
    sources = [
        (first + i) % num_sources if data.draw(st.booleans()) else data.draw(st.integers(0, num_sources - 1))
        for i in range(len(destinations))
    ]
    settings = {
        "block_size": data.draw(st.integers(1, 7)),
        "head_dim": data.draw(st.integers(1, 20)),
        "dtype": data.draw(st.sampled_from(CACHE_DTYPES)),
    }
    layouts = [data.draw(st.sampled_from(LAYOUTS)) for _ in range(2)]
    check_swap(
        backend,
        [random_cache(backend.device, num_sources, layout=layouts[0], **settings)],
        [random_cache(host(backend), num_destinations, layout=layouts[1], seed=5, **settings)],
        pairs(*zip(sources, destinations, strict=True)),
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=dtype_name)
def test_int32_offset_overflow(backend: Backend, dtype: torch.dtype) -> None:
    cache = huge_cache(dtype, backend.device)
    for number, block in enumerate(HUGE_BLOCKS):
        cache[block] = number + 1
    other = torch.zeros(len(HUGE_BLOCKS), 16, 1, 8, dtype=dtype)
    backend.ops.swap_blocks(
        cache, other, pairs(*[(block, number) for number, block in enumerate(HUGE_BLOCKS)])
    )
    assert other[:, 0, 0, 0].tolist() == list(range(1, len(HUGE_BLOCKS) + 1))
    other += 10
    backend.ops.swap_blocks(
        other,
        cache,
        pairs(*[(number, block + 1) for number, block in enumerate(HUGE_BLOCKS) if block != 511]),
    )
    for number, block in enumerate(HUGE_BLOCKS):
        if block != 511:
            assert (cache[block + 1] == number + 11).all()


def test_inference_only(backend: Backend) -> None:
    for which in range(2):
        caches = [torch.zeros(3, 4, 1, 8, device=backend.device) for _ in range(2)]
        caches[which].requires_grad_()
        with pytest.raises(RuntimeError, match=r"(?s)(source|destination).*torch\.no_grad\(\)"):
            backend.ops.swap_blocks(*caches, pairs((0, 1)))
