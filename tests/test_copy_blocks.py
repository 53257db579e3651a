"""copy_blocks: whole blocks, in every layer, each source as it was before the call."""

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
    assert_same_bits,
    bits,
    build_case,
    dtype_name,
    huge_cache,
    poisoned_caches,
)
from torch import Tensor

import pagedkv
from pagedkv import reference

OPERATORS = ("copy_blocks",)


def pairs(*values: tuple[int, int]) -> Tensor:
    """A block mapping; it is always on the CPU."""
    return torch.tensor(values, dtype=torch.int64).reshape(-1, 2)


def random_caches(
    num_layers: int,
    backend: Backend,
    *,
    num_blocks: int = 6,
    block_size: int = 4,
    num_kv_heads: int = 2,
    head_dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> tuple[list[Tensor], list[Tensor]]:
    """Layers of random bytes (which for floats include NaN of all kinds)."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(num_layers):
        pair = poisoned_caches(num_blocks, block_size, num_kv_heads, head_dims, dtype, layout, backend.device)
        for cache in pair:
            integers = reference.as_bytes(cache)
            info = torch.iinfo(integers.dtype)
            random = torch.randint(
                info.min, info.max + 1, cache.shape, generator=generator, dtype=integers.dtype
            )
            integers.copy_(random)
        layers.append(pair)
    return [key for key, _ in layers], [value for _, value in layers]


def storage_of(cache: Tensor) -> Tensor:
    return torch.tensor([], dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def check_copy(backend: Backend, keys: list[Tensor], values: list[Tensor], mapping: Tensor) -> None:
    """Compare the blocks, and every byte around them, with the snapshot meaning."""
    caches = [*keys, *values]
    before = [bits(cache) for cache in caches]
    storages = [storage_of(cache).clone() for cache in caches]
    assert backend.ops.copy_blocks(keys, values, mapping) is None
    sources, destinations = mapping.t()
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        expected[destinations] = old[sources]
        assert torch.equal(bits(cache), expected)
    for cache, old in zip(caches, before, strict=True):
        reference.as_bytes(cache).copy_(old)  # undone, the memory around the blocks is as it was
    for cache, storage in zip(caches, storages, strict=True):
        assert torch.equal(storage_of(cache), storage)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=dtype_name)
def test_every_dtype_and_layout(backend: Backend, dtype: torch.dtype, layout: str) -> None:
    for head_dims in ((16, 16), (24, 40), (5, 3)):
        keys, values = random_caches(2, backend, dtype=dtype, layout=layout, head_dims=head_dims)
        check_copy(backend, keys, values, pairs((0, 3), (5, 1)))
        check_copy(backend, keys, values, pairs((0, 1), (1, 2), (2, 0)))


@pytest.mark.parametrize(
    "mapping",
    [
        [(0, 1), (1, 2)],
        [(0, 1), (1, 0)],
        [(3, 3)],
        [(3, 3), (3, 4), (2, 5)],
        [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)],
        [(5, 4), (4, 3), (3, 2), (2, 1), (1, 0)],
        [(0, 1), (0, 2), (0, 3), (1, 0)],
        [],
    ],
    ids=["chain", "exchange", "self", "self and more", "cycle", "reversed chain", "fan out", "empty"],
)
@pytest.mark.parametrize("num_layers", [1, 3, 70])
def test_overlapping_copy_pairs(backend: Backend, num_layers: int, mapping: list[tuple[int, int]]) -> None:
    keys, values = random_caches(num_layers, backend, head_dims=(8, 8))
    check_copy(backend, keys, values, pairs(*mapping))


def test_duplicate_destination(backend: Backend) -> None:
    keys, values = random_caches(2, backend)
    before = [bits(cache) for cache in (*keys, *values)]
    for mapping in ([(0, 2), (1, 2)], [(3, 3), (1, 3)], [(0, 1), (0, 1)]):
        with pytest.raises(ValueError, match=r"(?s)block_mapping.*destination"):
            backend.ops.copy_blocks(keys, values, pairs(*mapping))
    for cache, old in zip((*keys, *values), before, strict=True):
        assert torch.equal(bits(cache), old)


def test_tensors_stand_for_one_layer(backend: Backend) -> None:
    keys, values = random_caches(1, backend)
    expected = [cache.clone() for cache in (keys[0], values[0])]
    for cache in expected:
        reference.as_bytes(cache)[2] = reference.as_bytes(cache)[0]
    backend.ops.copy_blocks(keys[0], values[0], pairs((0, 2)))
    assert_same_bits(keys[0], expected[0])
    assert_same_bits(values[0], expected[1])


def test_containers(backend: Backend) -> None:
    keys, values = random_caches(2, backend)
    check_copy(backend, keys, values, pairs((0, 2), (4, 1)))
    before = [bits(cache) for cache in (*keys, *values)]
    backend.ops.copy_blocks(tuple(keys), tuple(values), pairs((0, 2)))
    for cache, old in zip((*keys, *values), before, strict=True):
        old[2] = old[0]
        assert torch.equal(bits(cache), old)
    backend.ops.copy_blocks([], [], pairs())


def test_strided_mapping(backend: Backend) -> None:
    keys, values = random_caches(1, backend)
    check_copy(backend, keys, values, torch.tensor([[0, 1], [3, 4]]).t())  # 0 -> 3 and 1 -> 4
    check_copy(backend, keys, values, torch.tensor([[0, 9, 3], [1, 9, 2]])[:, ::2])


def test_layers_of_different_shapes(backend: Backend) -> None:
    # Layers may differ in heads, in head_dim, in dtype and in layout; blocks keep their ids.
    layers = [
        random_caches(1, backend, num_kv_heads=2, head_dims=(16, 8), dtype=torch.bfloat16),
        random_caches(1, backend, num_kv_heads=5, head_dims=(7, 7), dtype=torch.int8, layout="hnd"),
        random_caches(1, backend, block_size=3, dtype=torch.float8_e5m2, layout="interleaved"),
    ]
    check_copy(
        backend,
        [key for keys, _ in layers for key in keys],
        [v for _, values in layers for v in values],
        pairs((0, 1), (1, 4), (2, 0)),
    )


@pytest.mark.parametrize("block_size", [1, 3, 16, 544])
def test_block_sizes(backend: Backend, block_size: int) -> None:
    for head_dims, dtype in (((1, 1), torch.int8), ((3, 5), torch.float16), ((128, 64), torch.bfloat16)):
        keys, values = random_caches(
            1, backend, block_size=block_size, num_kv_heads=1, head_dims=head_dims, dtype=dtype
        )
        check_copy(backend, keys, values, pairs((0, 5), (5, 3), (1, 2)))


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_random_mappings(backend: Backend, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 30))
    destinations = data.draw(st.lists(st.integers(0, num_blocks - 1), unique=True))
    sources = [data.draw(st.integers(0, num_blocks - 1)) for _ in destinations]
    keys, values = random_caches(
        data.draw(st.integers(1, 4)),
        backend,
        num_blocks=num_blocks,
        block_size=data.draw(st.integers(1, 9)),
        head_dims=(data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))),
        dtype=data.draw(st.sampled_from(CACHE_DTYPES)),
        layout=data.draw(st.sampled_from(LAYOUTS)),
    )
    check_copy(backend, keys, values, pairs(*zip(sources, destinations, strict=True)))


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_threads(backend: Backend, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        keys, values = random_caches(5, backend, num_blocks=200, head_dims=(8, 8))
        order = torch.randperm(200, generator=torch.Generator().manual_seed(num_threads))
        check_copy(backend, keys, values, torch.stack([torch.arange(200), order], dim=1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.operators("copy_blocks", "paged_attention")
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
    ],
    ids=dtype_name,
)
def test_garbage_after_defrag_cpu(backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    # Move every sequence's blocks to the front of the pool, one after the other, and decode as before.
    case = build_case([17, 40, 3, 64], device=backend.device, dtype=dtype, cache_dtype=cache_dtype)
    expected = case.run(backend)
    used = torch.cat([case.block_tables[i, : -(-n // 4)] for i, n in enumerate((17, 40, 3, 64))]).long().cpu()
    mapping = torch.stack([used, torch.arange(len(used))], dim=1)
    backend.ops.copy_blocks(case.key_cache, case.value_cache, mapping)
    new_id = torch.full((case.key_cache.shape[0],), -1, dtype=torch.int32)
    new_id[used] = torch.arange(len(used), dtype=torch.int32)
    inside = (case.block_tables >= 0) & (case.block_tables < len(new_id))
    moved = new_id.to(backend.device)[case.block_tables.clamp(0, len(new_id) - 1).long()]
    case.block_tables.copy_(torch.where(inside, moved, -1))
    before = torch.get_num_threads()
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        assert_same_bits(case.run(backend), expected)
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=dtype_name)
def test_int32_offset_overflow(backend: Backend, dtype: torch.dtype) -> None:
    key, value = huge_cache(dtype, backend.device), huge_cache(dtype, backend.device)
    for number, block in enumerate(HUGE_BLOCKS):
        key[block], value[block] = number + 1, -number - 1
    mapping = [
        (block, HUGE_BLOCKS[(number + 3) % len(HUGE_BLOCKS)]) for number, block in enumerate(HUGE_BLOCKS)
    ]
    backend.ops.copy_blocks(key, value, pairs(*mapping, (2048, 7)))
    for number, (_, destination) in enumerate(mapping):
        assert (key[destination] == number + 1).all()
        assert (value[destination] == -number - 1).all()
    assert (key[7] == HUGE_BLOCKS.index(2048) + 1).all()


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "pair", [(6, 0), (0, 6), (-1, 0), (0, -1), (2**31, 0), (0, 2**40), (2**63 - 1, 1), (0, -(2**63))]
)
def test_swap_index_out_of_range(backend: Backend, pair: tuple[int, int]) -> None:
    keys, values = random_caches(2, backend)
    before = [bits(cache) for cache in (*keys, *values)]
    bad = next(block for block in pair if not 0 <= block < 6)
    with pytest.raises(IndexError, match=rf"(?s)block_mapping\[1\].*{bad}.*6 blocks"):
        backend.ops.copy_blocks(keys, values, pairs((1, 2), pair))
    for cache, old in zip((*keys, *values), before, strict=True):
        assert torch.equal(bits(cache), old)


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
    "fewer values": (
        ValueError,
        "key_caches.*value_caches",
        lambda a: {"value_caches": a["value_caches"][:1]},
    ),
    "cache rank": (
        ValueError,
        "num_blocks, block_size",
        lambda a: {"key_caches": [cache.flatten(2) for cache in a["key_caches"]]},
    ),
    "cache strided": (
        ValueError,
        "contiguous",
        lambda a: {"key_caches": [c.transpose(1, 3).contiguous().transpose(1, 3) for c in a["key_caches"]]},
    ),
    "cache dtype": (
        TypeError,
        "float8_e4m3fn",
        lambda a: {"key_caches": [cache.double() for cache in a["key_caches"]]},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_write_nothing(backend: Backend, mistake: str) -> None:
    exception, message, change = MISTAKES[mistake]
    keys, values = random_caches(2, backend)
    arguments: Call = {"key_caches": keys, "value_caches": values, "block_mapping": pairs((0, 1))}
    before = [bits(cache) for cache in (*keys, *values)]
    arguments |= change(arguments)
    with pytest.raises(exception, match=f"(?s){message}"):
        backend.ops.copy_blocks(**arguments)
    for cache, old in zip((*keys, *values), before, strict=True):
        assert torch.equal(bits(cache), old)


def test_mapping_on_the_device(backend: Backend) -> None:
    keys, values = random_caches(1, backend)
    mapping = pairs((0, 1)).to(backend.device)
    if backend.device.type == "cpu":
        check_copy(backend, keys, values, mapping)
        return
    with pytest.raises(ValueError, match=r"(?s)block_mapping.*cuda.*CPU"):
        backend.ops.copy_blocks(keys, values, mapping)


def test_pools_of_different_sizes(backend: Backend) -> None:
    # An id has to exist in every layer; which error says so is left open, but nothing may be written.
    keys, values = random_caches(1, backend, num_blocks=6)
    more_keys, more_values = random_caches(1, backend, num_blocks=4)
    caches = [*keys, *more_keys, *values, *more_values]
    before = [bits(cache) for cache in caches]
    with pytest.raises((IndexError, ValueError)):
        backend.ops.copy_blocks(caches[:2], caches[2:], pairs((0, 1), (2, 5)))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(bits(cache), old)


def test_inference_only(backend: Backend) -> None:
    for name in ("key_caches", "value_caches"):
        caches = {n: torch.zeros(3, 4, 1, 8, device=backend.device) for n in ("key_caches", "value_caches")}
        caches[name].requires_grad_()
        with pytest.raises(RuntimeError, match=rf"(?s){name}.*torch\.no_grad\(\)"):
            backend.ops.copy_blocks(caches["key_caches"], caches["value_caches"], pairs((0, 1)))


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ({0: 1, 2: 3}, TypeError),
        ([0, 1], TypeError),
        ([(0.9, 1.9)], TypeError),
        ([(0, 1, 2), (3, 4, 0)], ValueError),
        ([(0,)], ValueError),
    ],
)
def test_a_list_that_is_no_list_of_pairs(mapping: object, error: type[Exception]) -> None:
    cache = torch.arange(5.0).view(5, 1, 1, 1).repeat(1, 2, 1, 8)
    before = cache.clone()
    with pytest.raises(error, match="block_mapping"):
        pagedkv.copy_blocks(cache, cache.clone(), mapping)  # type: ignore[arg-type]
    assert torch.equal(cache, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [128, 120])
def test_more_than_the_cpus_caches_hold(layout: str, head_dim: int) -> None:
    """From 8 MiB on other instructions copy, a cache line at a time; rows of 120 are not whole lines."""
    backend = Backend("cpu", torch.device("cpu"), pagedkv.ops)
    keys, values = random_caches(
        1, backend, num_blocks=160, block_size=16, num_kv_heads=8, head_dims=(head_dim, 128), layout=layout
    )
    moved = torch.randperm(160, generator=torch.Generator().manual_seed(0))[:150]
    for mapping in (torch.stack([moved[:75], moved[75:]], dim=1), torch.stack([moved, moved.roll(1)], dim=1)):
        check_copy(backend, keys, values, mapping)
