"""reshape_and_cache: the right bytes in the right slots, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
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
    poisoned,
    poisoned_caches,
    sparse_zeros,
)
from torch import Tensor

import pagedkv
from pagedkv import reference

OPERATORS = ("reshape_and_cache",)


def scales_for(cache_dtype: torch.dtype, backend: Backend, num_kv_heads: int) -> dict[str, Tensor]:
    """Different, non-unit scales a head where the cache is quantised, and none where it is not."""
    if cache_dtype in FLOAT_DTYPES:
        return {}
    steps = 1 + torch.arange(num_kv_heads, dtype=torch.float32, device=backend.device)
    return {"k_scale": 0.013 * steps, "v_scale": 0.37 / steps}


def check_write(
    backend: Backend, key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor, **scales: Any
) -> None:
    """Write, and compare every byte of the caches' whole storage with what the reference leaves there."""
    storages = []
    expected = []
    for cache in caches:
        storage = torch.tensor([], dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        copy = storage.clone()
        view = torch.tensor([], dtype=cache.dtype, device=cache.device).set_(
            copy.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
        )
        storages.append(storage)
        expected.append((copy, view))
    if storages[0].data_ptr() == storages[1].data_ptr():  # interleaved: both views into one copy
        cache = caches[1]
        view = torch.tensor([], dtype=cache.dtype, device=cache.device).set_(
            expected[0][0].untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
        )
        expected[1] = (expected[0][0], view)
    reference.reshape_and_cache(key, value, expected[0][1], expected[1][1], slots, **scales)
    inputs = [bits(key), bits(value), slots.clone()]
    result = backend.ops.reshape_and_cache(key, value, *caches, slots, **scales)
    assert result is None
    for storage, (copy, view), name in zip(storages, expected, ("key_cache", "value_cache"), strict=True):
        cache = caches[name == "value_cache"]
        assert_same_bits(cache, view, name)
        assert torch.equal(storage, copy), f"memory around {name} changed"
    assert torch.equal(bits(key), inputs[0])
    assert torch.equal(bits(value), inputs[1])
    assert torch.equal(slots, inputs[2])


def rows(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, backend: Backend, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype).to(backend.device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_every_dtype_and_layout(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, layout: str
) -> None:
    caches = poisoned_caches(5, 6, 3, (24, 16), cache_dtype, layout, backend.device)
    key, value = rows(11, 3, 24, dtype, backend), rows(11, 3, 16, dtype, backend, 1)
    slots = backend.slots([29, 0, -1, 7, 12, 13, 14, -5, 5, 6, 28])
    check_write(backend, key, value, caches, slots, **scales_for(cache_dtype, backend, 3))


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 8, 20, 36, 40, 46, 50, 66, 80, 128, 257, 576])
def test_misaligned_vector_store(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int
) -> None:
    # Any head_dim, slots 0 .. 17, a cache and inputs that start one element off.
    caches = []
    for _ in range(2):
        buffer = poisoned(1 + 3 * 6 * 2 * head_dim, dtype=cache_dtype, device=backend.device)
        caches.append(buffer[1:].view(3, 6, 2, head_dim))
    inputs = []
    for seed in range(2):
        buffer = poisoned(1 + 18 * 2 * head_dim, dtype=dtype, device=backend.device)
        view = buffer[1:].view(18, 2, head_dim)
        view.copy_(rows(18, 2, head_dim, dtype, backend, seed))
        inputs.append(view)
    slots = backend.slots(list(range(18)))
    check_write(backend, *inputs, (caches[0], caches[1]), slots, **scales_for(cache_dtype, backend, 2))


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(192, 128), (64, 512), (576, 1), (16, 24)])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_k_and_v_head_dim_differ(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_head_dim: int
) -> None:
    caches = poisoned_caches(3, 4, 2, (head_dim, value_head_dim), cache_dtype, "contiguous", backend.device)
    key, value = rows(5, 2, head_dim, dtype, backend), rows(5, 2, value_head_dim, dtype, backend, 1)
    check_write(
        backend, key, value, caches, backend.slots([3, 4, 11, 0, 8]), **scales_for(cache_dtype, backend, 2)
    )


@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 100])
def test_block_sizes(backend: Backend, block_size: int) -> None:
    caches = poisoned_caches(4, block_size, 2, (8, 8), torch.float32, "contiguous", backend.device)
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(0)).to(backend.device)
    key = rows(len(slots), 2, 8, torch.float32, backend)
    check_write(backend, key, -key, caches, slots)


def test_strided_inputs(backend: Backend) -> None:
    for dtype in FLOAT_DTYPES:
        key = embed(rows(6, 2, 24, dtype, backend), tail_dim=5)
        fused = rows(6, 1, (4 + 2 + 2) * 16, dtype, backend)[:, 0]  # a projection's query, key and value
        key_slice, value_slice = fused[:, 64:96].view(6, 2, 16), fused[:, 96:].view(6, 2, 16)
        transposed = rows(2, 6, 16, dtype, backend).transpose(0, 1)
        expanded = rows(1, 1, 16, dtype, backend).expand(6, 2, 16)
        slots = backend.slots([5, 4, 3, 9, 1, 0])
        for k, v in ((key, key), (key_slice, value_slice), (transposed, expanded)):
            caches = poisoned_caches(3, 4, 2, (k.shape[2], v.shape[2]), dtype, "contiguous", backend.device)
            check_write(backend, k, v, caches, slots)
        strided_slots = torch.stack([slots, slots + 1], dim=1)[:, 0]
        with pytest.raises(ValueError, match=r"(?s)slot_mapping.*contiguous"):
            backend.ops.reshape_and_cache(key_slice, value_slice, *caches, strided_slots)


def test_many_tokens(backend: Backend) -> None:
    num_blocks, block_size = 300, 16
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))[:4000]
    key, value = rows(4000, 2, 8, torch.bfloat16, backend), rows(4000, 2, 8, torch.bfloat16, backend, 1)
    caches = poisoned_caches(num_blocks, block_size, 2, (8, 8), torch.bfloat16, "contiguous", backend.device)
    before = [cache.clone() for cache in caches]
    backend.ops.reshape_and_cache(key, value, *caches, slots.to(backend.device))
    for cache, old, new in zip(caches, before, (key, value), strict=True):
        old.view(-1, 2, 8)[slots.to(backend.device)] = new
        assert_same_bits(cache, old)


# --------------------------------------------------------------------------------------------- slots


@pytest.mark.parametrize("cache_dtype", [torch.float32, *QUANTIZED_DTYPES], ids=dtype_name)
def test_slot_minus_one(backend: Backend, cache_dtype: torch.dtype) -> None:
    caches = poisoned_caches(2, 4, 1, (8, 8), cache_dtype, "contiguous", backend.device)
    before = [bits(cache) for cache in caches]
    key = torch.full((3, 1, 8), torch.nan, device=backend.device)
    key[1] = 1.5
    backend.ops.reshape_and_cache(
        key, key, *caches, backend.slots([-1, 3, -1]), **scales_for(cache_dtype, backend, 1)
    )
    for cache, old in zip(caches, before, strict=True):
        changed = (bits(cache) != old).flatten(2).any(dim=2)
        assert changed.flatten().tolist() == [slot == 3 for slot in range(8)]


def test_negative_slots_of_any_size_are_skipped(backend: Backend) -> None:
    caches = poisoned_caches(2, 4, 1, (8, 8), torch.float32, "contiguous", backend.device)
    key = torch.ones(5, 1, 8, device=backend.device)
    with backend.index_checks():
        check_write(backend, key, key, caches, backend.slots([-1, -2, -(2**31), -(2**40) - 17, -(2**63)]))


@pytest.mark.parametrize("slot", [8, 9, 2**31, 2**32, 2**32 + 3, 2**40 + 17, 2**63 - 1])
def test_slot_beyond_capacity(backend: Backend, slot: int) -> None:
    caches = poisoned_caches(2, 4, 1, (8, 8), torch.float32, "padded", backend.device)
    before = [bits(cache) for cache in caches]
    key = torch.ones(3, 1, 8, device=backend.device)
    slots = backend.slots([0, slot, 1])
    with backend.index_checks(), pytest.raises(IndexError, match=rf"(?s)slot_mapping\[1\].*{slot}.*8 slots"):
        backend.ops.reshape_and_cache(key, key, *caches, slots)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(bits(cache), old)
    if not backend.checks_indices:  # skipped
        check_write(backend, key[[0, 2]], key[[0, 2]], caches, backend.slots([2, 3]))
        before = [cache.clone() for cache in caches]
        backend.ops.reshape_and_cache(key, key, *caches, slots)
        for cache, old in zip(caches, before, strict=True):
            old[0, :2] = 1
            assert_same_bits(cache, old)


def test_slot_mapping_shorter_than_key(backend: Backend) -> None:
    caches = poisoned_caches(2, 8, 2, (8, 8), torch.float32, "contiguous", backend.device)
    key, value = rows(8, 2, 8, torch.float32, backend), rows(8, 2, 8, torch.float32, backend, 1)
    check_write(backend, key, value, caches, backend.slots([3, 9, 1, 0, 15]))
    check_write(backend, key, value, caches, backend.slots([]))
    with pytest.raises(ValueError, match=r"(?s)slot_mapping.*9.*8"):
        backend.ops.reshape_and_cache(key, value, *caches, backend.slots([0] * 9))


def test_empty_write(backend: Backend) -> None:
    caches = poisoned_caches(2, 8, 2, (8, 8), torch.float32, "contiguous", backend.device)
    check_write(backend, *[rows(0, 2, 8, torch.float32, backend)] * 2, caches, backend.slots([]))


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_rows_with_the_same_slot_leave_one_whole_row(backend: Backend, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        num_tokens, head_dim = 2048, 64
        numbers = torch.arange(num_tokens, dtype=torch.float32, device=backend.device)
        key = numbers[:, None, None].expand(num_tokens, 2, head_dim).contiguous()
        slots = torch.arange(num_tokens, device=backend.device) % 3 * 5
        caches = poisoned_caches(4, 4, 2, (head_dim, head_dim), torch.float32, "contiguous", backend.device)
        backend.ops.reshape_and_cache(key, key, *caches, slots)
        for slot in (0, 5, 10):
            stored = [cache.view(16, 2, head_dim)[slot] for cache in caches]
            row = stored[0][0, 0].item()
            assert slots[int(row)] == slot
            assert (stored[0] == row).all()
            assert (stored[1] == row).all()
    finally:
        torch.set_num_threads(before)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_random_shapes(backend: Backend, data: st.DataObject) -> None:
    dtype, cache_dtype = data.draw(st.sampled_from(DTYPE_PAIRS))
    num_blocks, block_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    num_kv_heads = data.draw(st.integers(1, 5))
    head_dims = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    layout = data.draw(st.sampled_from(LAYOUTS))
    capacity = num_blocks * block_size
    slots = data.draw(st.lists(st.integers(-2, capacity - 1), max_size=30, unique=True))
    extra_rows = data.draw(st.integers(0, 3))
    caches = poisoned_caches(
        num_blocks, block_size, num_kv_heads, head_dims, cache_dtype, layout, backend.device
    )
    key, value = (
        embed(rows(len(slots) + extra_rows, num_kv_heads, head_dim, dtype, backend), tail_dim=3)
        for head_dim in head_dims
    )
    scales = scales_for(cache_dtype, backend, num_kv_heads)
    check_write(backend, key, value, caches, backend.slots(slots), **scales)


# ------------------------------------------------------------------------- offsets, errors, autograd


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(torch.float32, torch.int8), (torch.bfloat16, torch.bfloat16)], ids=dtype_name
)
def test_int32_offset_overflow(backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    caches = huge_cache(cache_dtype, backend.device), huge_cache(cache_dtype, backend.device)
    scales: dict[str, Any] = {} if dtype == cache_dtype else {"k_scale": 0.25, "v_scale": 0.25}
    key = (
        torch.arange(len(HUGE_BLOCKS), device=backend.device)[:, None, None]
        .expand(-1, 1, 8)
        .to(dtype)
        .contiguous()
    )
    slots = backend.slots([block * 16 + 5 for block in HUGE_BLOCKS])
    backend.ops.reshape_and_cache(key, key, *caches, slots, **scales)
    for cache in caches:
        for number, block in enumerate(HUGE_BLOCKS):
            stored = cache[block].float()
            assert (stored[5] == number * (4 if scales else 1)).all()
            assert stored.count_nonzero() == (8 if number else 0)


def test_uint32_page_offset_wrap(backend: Backend) -> None:
    page_stride, block = 16_384, 1_000_003
    cache = sparse_zeros((block + 1) * page_stride, torch.int8, backend.device).as_strided(
        (block + 1, 16, 1, 8), (page_stride, 8, 8, 1)
    )
    key = torch.full((1, 1, 8), 7.0, device=backend.device)
    backend.ops.reshape_and_cache(
        key, key, cache, cache, backend.slots([block * 16 + 3]), k_scale=1.0, v_scale=1.0
    )
    assert (cache[block, 3] == 7).all()
    assert cache[block].count_nonzero() == 8


Call = dict[str, Any]
MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "key rank": (ValueError, "key.*num_tokens", lambda a: {"key": a["key"][0]}),
    "key head_dim": (ValueError, "key.*head_dim", lambda a: {"key": a["key"][..., :8]}),
    "value head_dim": (ValueError, "value.*head_dim", lambda a: {"value": a["value"][..., :8]}),
    "key heads": (ValueError, "key.*num_kv_heads", lambda a: {"key": a["key"][:, :1]}),
    "value heads": (ValueError, "value.*num_kv_heads", lambda a: {"value": a["value"].repeat(1, 2, 1)}),
    "value tokens": (ValueError, "value.*num_tokens", lambda a: {"value": a["value"][:2]}),
    "key strided": (ValueError, "key.*contiguous", lambda a: {"key": a["key"].repeat(1, 1, 2)[..., ::2]}),
    "cache rank": (ValueError, "key_cache.*num_blocks", lambda a: {"key_cache": a["key_cache"][0]}),
    "cache strided": (
        ValueError,
        "value_cache.*contiguous",
        lambda a: {"value_cache": a["value_cache"].transpose(1, 3).contiguous().transpose(1, 3)},
    ),
    "pools differ": (ValueError, "value_cache.*num_blocks", lambda a: {"value_cache": a["value_cache"][:1]}),
    "block sizes differ": (
        ValueError,
        "value_cache.*block_size",
        lambda a: {"value_cache": a["value_cache"][:, :2]},
    ),
    "slots rank": (
        ValueError,
        "slot_mapping.*num_tokens",
        lambda a: {"slot_mapping": a["slot_mapping"][None]},
    ),
    "slots int32": (
        TypeError,
        "(?i)slot_mapping.*(long|int64)",
        lambda a: {"slot_mapping": a["slot_mapping"].int()},
    ),
    "key float64": (TypeError, "key.*float16, bfloat16, float32", lambda a: {"key": a["key"].double()}),
    "value dtype": (TypeError, "value.*key", lambda a: {"value": a["value"].half()}),
    "cache dtype": (
        TypeError,
        "key_cache.*key",
        lambda a: {"key_cache": a["key_cache"].half(), "value_cache": a["value_cache"].half()},
    ),
    "cache uint8": (
        TypeError,
        "key_cache.*float8_e4m3fn",
        lambda a: {
            "key_cache": a["key_cache"].to(torch.uint8),
            "value_cache": a["value_cache"].to(torch.uint8),
        },
    ),
    "caches differ": (
        TypeError,
        "value_cache.*key_cache",
        lambda a: {"value_cache": a["value_cache"].half()},
    ),
    "scale on float": (ValueError, "k_scale", lambda a: {"k_scale": 0.5}),
    "v_scale on float": (ValueError, "v_scale", lambda a: {"v_scale": torch.ones(2, device=a["key"].device)}),
    "int8 needs k_scale": (
        ValueError,
        "k_scale",
        lambda a: {
            "key_cache": a["key_cache"].to(torch.int8),
            "value_cache": a["value_cache"].to(torch.int8),
            "v_scale": 1.0,
        },
    ),
    "int8 needs v_scale": (
        ValueError,
        "v_scale",
        lambda a: {
            "key_cache": a["key_cache"].to(torch.int8),
            "value_cache": a["value_cache"].to(torch.int8),
            "k_scale": 1.0,
        },
    ),
    "scale length": (
        ValueError,
        "k_scale.*num_kv_heads",
        lambda a: {
            "key_cache": a["key_cache"].to(torch.float8_e5m2),
            "value_cache": a["value_cache"].to(torch.float8_e5m2),
            "k_scale": torch.ones(3, device=a["key"].device),
        },
    ),
    "scale dtype": (
        TypeError,
        "(?i)v_scale.*float",
        lambda a: {
            "key_cache": a["key_cache"].to(torch.float8_e5m2),
            "value_cache": a["value_cache"].to(torch.float8_e5m2),
            "v_scale": torch.ones(2, dtype=torch.float16, device=a["key"].device),
        },
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_write_nothing(backend: Backend, mistake: str) -> None:
    exception, message, change = MISTAKES[mistake]
    caches = [torch.zeros(3, 4, 2, 16, device=backend.device) for _ in range(2)]
    arguments: Call = {
        "key": rows(3, 2, 16, torch.float32, backend),
        "value": rows(3, 2, 16, torch.float32, backend, 1),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": backend.slots([0, 5, 7]),
    }
    arguments |= change(arguments)
    with pytest.raises(exception, match=f"(?s){message}"):
        backend.ops.reshape_and_cache(**arguments)
    for name in ("key_cache", "value_cache"):
        assert reference.as_bytes(arguments[name]).count_nonzero() == 0


def test_wrong_head_dim_overwrites_memory(backend: Backend) -> None:
    caches = poisoned_caches(2, 4, 2, (128, 128), torch.float32, "contiguous", backend.device)
    before = [bits(cache) for cache in caches]
    key = torch.ones(3, 2, 256, device=backend.device)
    with pytest.raises(ValueError, match=r"(?s)key.*256.*128"):
        backend.ops.reshape_and_cache(key, key, *caches, backend.slots([0, 1, 2]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(bits(cache), old)


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache"])
def test_inference_only(backend: Backend, name: str) -> None:
    arguments: Call = {
        "key": rows(3, 2, 16, torch.float32, backend),
        "value": rows(3, 2, 16, torch.float32, backend),
        "key_cache": torch.zeros(3, 4, 2, 16, device=backend.device),
        "value_cache": torch.zeros(3, 4, 2, 16, device=backend.device),
        "slot_mapping": backend.slots([0, 5, 7]),
    }
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*torch\.no_grad\(\)"):
        backend.ops.reshape_and_cache(**arguments)
    with torch.no_grad():
        backend.ops.reshape_and_cache(**arguments)
    assert arguments["key_cache"].count_nonzero() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (120, torch.float32)])
def test_more_than_the_cpus_caches_hold(layout: str, head_dim: int, dtype: torch.dtype) -> None:
    """From 8 MiB on other instructions write, a cache line at a time; rows of 120 are not whole lines."""
    backend = Backend("cpu", torch.device("cpu"), pagedkv.ops)
    num_tokens = 4096
    caches = poisoned_caches(300, 16, 4, (head_dim, 128), dtype, layout, backend.device)
    key = rows(num_tokens, 4, head_dim, dtype, backend)
    value = rows(num_tokens, 4, 128, dtype, backend, 1)
    slots = torch.randperm(300 * 16, generator=torch.Generator().manual_seed(0))[:num_tokens]
    slots[::100] = -1
    slots[1000] = slots[3999]  # the later one ends there
    before = [bits(cache) for cache in caches]
    backend.ops.reshape_and_cache(key, value, *caches, slots)
    written = {int(slot): row for row, slot in enumerate(slots) if slot >= 0}
    for cache, new, old in zip(caches, (key, value), before, strict=True):
        expected = old.flatten(0, 1)
        expected[list(written)] = bits(new)[list(written.values())]
        assert torch.equal(bits(cache).flatten(0, 1), expected)
