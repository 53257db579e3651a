"""`PagedKVCache`: how big its pool is, of which dtype, and with which scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import PagedKVCache, _pool

MODEL = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 64}
FP32_BLOCK = 2 * 2 * 16 * 4 * 64 * 4  # K and V, 2 layers, 16 tokens, 4 heads, head_dim 64


def test_one_tensor_a_layer_and_kind() -> None:
    cache = PagedKVCache(**MODEL, value_head_dim=32, num_blocks=5, block_size=3, dtype=torch.bfloat16)
    assert [tuple(t.shape) for t in cache.key_caches] == [(5, 3, 4, 64)] * 2
    assert [tuple(t.shape) for t in cache.value_caches] == [(5, 3, 4, 32)] * 2
    tensors = [*cache.key_caches, *cache.value_caches]
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 4


def test_a_block_lies_head_by_head_on_the_cpu() -> None:
    cache = PagedKVCache(**MODEL, num_blocks=5, block_size=3, num_host_blocks=2)
    assert cache._host is not None
    for tensor in [*cache.key_caches, *cache.value_caches, *cache._host._tensors]:
        assert tensor.transpose(1, 2).is_contiguous()
        assert tensor.data_ptr() % 64 == 0


def test_huge_pages_hold_what_is_written() -> None:
    """Of a tensor that starts and ends within a huge page, and of one that is smaller than any page."""
    for num_elements in (2_345_678, 1, 0):
        tensor = torch.empty(num_elements, dtype=torch.uint8)
        _pool.advise_huge_pages(tensor)
        tensor.fill_(7)
        assert int(tensor.sum()) == 7 * num_elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_changes_no_result(dtype: torch.dtype) -> None:
    """The same sequence, written, forked, swapped and attended over, in pools laid out token by token."""
    results = []
    for token_major in (False, True):
        cache = PagedKVCache(**MODEL, num_blocks=9, block_size=4, dtype=dtype, num_host_blocks=9)
        if token_major:
            assert cache._host is not None
            for tensors in (cache.key_caches, cache.value_caches):
                tensors[:] = [tensor.contiguous() for tensor in tensors]
            cache._host._device_tensors[:] = [*cache.key_caches, *cache.value_caches]
        generator = torch.Generator().manual_seed(0)
        sequence = cache.add_sequence(num_tokens=14)
        for num_tokens in (14, 1, 1):
            batch = cache.batch([sequence])
            for layer in range(2):
                q, k, v = (torch.randn(num_tokens, n, 64, generator=generator).to(dtype) for n in (8, 4, 4))
                results.append(cache.attend(layer, q, k, v, batch, split_size=64))
            fork = sequence.fork()
            sequence.free()
            sequence = fork
            sequence.append(1)
            sequence.swap_out()
            sequence.swap_in()
    half = len(results) // 2
    for head_major, token_major in zip(results[:half], results[half:], strict=True):
        assert torch.equal(head_major, token_major)


def test_dtype_is_torchs_default() -> None:
    assert PagedKVCache(1, 1, 8, num_blocks=1).kv_dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert PagedKVCache(1, 1, 8, num_blocks=1).kv_dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("options", "bytes_per_block"),
    [
        ({"dtype": torch.float32}, 65536),
        ({"dtype": torch.bfloat16}, 32768),
        ({"dtype": torch.float16}, 32768),
        ({"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}, 16384),
        ({"dtype": torch.float16, "kv_dtype": torch.float8_e5m2}, 16384),
        ({"dtype": torch.float32, "kv_dtype": torch.int8, "k_scales": 0.5, "v_scales": 0.25}, 16384),
        ({"dtype": torch.float32, "value_head_dim": 32}, 49152),
    ],
    ids=str,
)
def test_cache_dtype_ignored(options: dict[str, Any], bytes_per_block: int) -> None:
    scales_bytes = 2 * 2 * 4 * 4 if "k_scales" in options else 0
    budget = 10 * 65536 + scales_bytes
    cache = PagedKVCache(**MODEL, memory=budget, **options)
    assert cache.bytes_per_block == bytes_per_block
    assert cache.num_blocks == 10 * 65536 // bytes_per_block
    allocated = sum(t.nbytes for t in [*cache.key_caches, *cache.value_caches])
    assert cache.stats().bytes == allocated + scales_bytes
    assert allocated == cache.num_blocks * bytes_per_block


@pytest.mark.parametrize("memory", [-1, 0, FP32_BLOCK - 1, "1KiB", "0 B"])
def test_negative_block_count(memory: int | str) -> None:
    with pytest.raises(ValueError, match=f"one block takes {FP32_BLOCK} bytes"):
        PagedKVCache(**MODEL, memory=memory)


def test_exact_floor() -> None:
    for memory, num_blocks in [
        (FP32_BLOCK, 1),
        (2 * FP32_BLOCK - 1, 1),
        (2 * FP32_BLOCK, 2),
        (np.int64(FP32_BLOCK), 1),
    ]:
        assert PagedKVCache(**MODEL, memory=memory).num_blocks == num_blocks  # type: ignore[arg-type]
    scales = {"kv_dtype": torch.int8, "k_scales": 1.0, "v_scales": 1.0}
    one_block = FP32_BLOCK // 4 + 64
    assert PagedKVCache(**MODEL, memory=one_block, **scales).num_blocks == 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the scales take 64"):
        PagedKVCache(**MODEL, memory=one_block - 1, **scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_fraction_outside_0_to_1(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"fraction in \(0, 1\]"):
        PagedKVCache(**MODEL, memory=fraction)


def test_a_fraction_is_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "host_free_memory", lambda *_: 8 * FP32_BLOCK + 5)
    assert PagedKVCache(**MODEL, memory=1.0).num_blocks == 8
    assert PagedKVCache(**MODEL, memory=0.5).num_blocks == 4
    assert PagedKVCache(**MODEL, memory=np.float32(0.25).item()).num_blocks == 2


def test_free_memory_of_this_machine() -> None:
    assert 0 < _pool.free_memory(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("512MiB", 2**29),
        ("1.5GB", 1_500_000_000),
        (" 3 kb ", 3000),
        ("7B", 7),
        ("0.1KiB", 102),
        ("4.35GB", 4_350_000_000),
        ("1TiB", 2**40),
    ],
)
def test_memory_as_text(text: str, num_bytes: int) -> None:
    assert _pool.memory_budget(text, torch.device("cpu")) == num_bytes


@pytest.mark.parametrize("text", ["", "2", "GiB", "-1GiB", "2G", "1e3MB", "90%", "1 000 MB"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="GiB"):
        PagedKVCache(**MODEL, memory=text)


def test_memory_of_another_type() -> None:
    for memory in (True, [1], b"2GiB"):
        with pytest.raises(TypeError, match="memory must be"):
            PagedKVCache(**MODEL, memory=memory)  # type: ignore[arg-type]


def test_cpu_path_none_memory() -> None:
    for options in ({}, {"num_blocks": 4, "memory": "2GiB"}):
        with pytest.raises(ValueError, match="exactly one of num_blocks"):
            PagedKVCache(**MODEL, device="cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["num_layers", "num_kv_heads", "head_dim", "value_head_dim", "num_blocks", "block_size"]
)
def test_sizes_below_one(name: str) -> None:
    for size in (0, -2):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {size}"):
            PagedKVCache(**{**MODEL, "num_blocks": 4, name: size})  # type: ignore[arg-type]


def test_dtypes_and_scales_that_do_not_go_together() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"dtype": torch.float64}, TypeError, "dtype must be"),
        ({"dtype": torch.int8}, TypeError, "dtype must be"),
        ({"dtype": torch.bfloat16, "kv_dtype": torch.float32}, TypeError, "kv_dtype must be"),
        ({"kv_dtype": torch.uint8}, TypeError, "kv_dtype must be"),
        ({"kv_dtype": torch.int8}, ValueError, "int8 cache needs k_scales"),
        ({"kv_dtype": torch.int8, "k_scales": 1.0}, ValueError, "int8 cache needs v_scales"),
        ({"v_scales": 1.0}, ValueError, "v_scales is for float8 and int8"),
        ({"kv_dtype": torch.float8_e5m2, "k_scales": torch.ones(4)}, ValueError, r"\[2, 4\]"),
        ({"kv_dtype": torch.float8_e5m2, "k_scales": torch.ones(2, 4).int()}, TypeError, "float32"),
        ({"kv_dtype": torch.float8_e5m2, "k_scales": -1.0}, ValueError, "above 0"),
        ({"kv_dtype": torch.float8_e5m2, "v_scales": float("inf")}, ValueError, "finite"),
        ({"device": "meta"}, ValueError, "cpu or cuda"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            PagedKVCache(**MODEL, num_blocks=4, **options)


def test_scales_are_per_layer_and_head() -> None:
    k_scales = torch.arange(1.0, 9.0).reshape(2, 4)
    cache = PagedKVCache(**MODEL, num_blocks=4, kv_dtype=torch.int8, k_scales=k_scales, v_scales=0.5)
    k_scales.fill_(7.0)  # the cache has its own
    for layer in range(2):
        batch = cache.batch([cache.add_sequence(num_tokens=1)])
        key = torch.full((1, 4, 64), 24.0)
        out = cache.attend(layer, torch.zeros(1, 8, 64), key, torch.full((1, 4, 64), 3.0), batch)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out, torch.full((1, 8, 64), 3.0))
        slot = int(batch.slot_mapping[0])
        expected = (24.0 / torch.arange(1.0 + 4 * layer, 5.0 + 4 * layer)).round().to(torch.int8)
        assert torch.equal(cache.key_caches[layer].flatten(0, 1)[slot, :, 0], expected)


def test_float8_scales_may_be_left_out() -> None:
    cache = PagedKVCache(**MODEL, num_blocks=1, kv_dtype=torch.float8_e4m3fn, v_scales=2.0)
    assert cache.k_scales is None
    assert cache.v_scales is not None
    assert cache.v_scales.shape == (2, 4)


def write_cgroup(folder: Path, names: tuple[str, str, str], limit: str, usage: int, reclaimable: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {reclaimable}\nother 2\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("own_group", "groups", "expected"),
    [
        ("", [], 1_000_000 * 1024),
        ("0::/a/b", [], 1_000_000 * 1024),
        ("0::/a/b", [("a/b", V2, "5000", 2000, 300), ("a", V2, "9000", 100, 0)], 3300),
        ("0::/a/b", [("a/b", V2, "max", 2000, 0), ("a", V2, "4000", 3000, 0)], 1000),
        ("0::/", [("", V2, "4000", 1000, 0)], 3000),
        ("0::/outside/of/view", [("", V2, "4000", 1000, 0)], 3000),
        ("0::/", [("", V2, "4000", 5000, 0)], 0),
        ("3:cpu,memory:/box\n1:pids:/x", [("memory/box", V1, "6000", 1000, 500)], 5500),
        ("3:memory:/box", [("memory", V1, "7000", 1000, 0)], 6000),
        ("3:memory:/box", [("memory/box", V1, str(2**63 - 4096), 1000, 0)], 1_000_000 * 1024),
        ("3:cpu:/box", [("memory/box", V1, "6000", 1000, 500)], 1_000_000 * 1024),
    ],
)
def test_container_limits(tmp_path: Path, own_group: str, groups: list[Any], expected: int) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  2000000 kB\nMemFree:  5 kB\nMemAvailable:  1000000 kB\n")
    if own_group:
        (proc / "self" / "cgroup").write_text(own_group + "\n")
    for folder, names, limit, usage, reclaimable in groups:
        write_cgroup(root / folder, names, limit, usage, reclaimable)
    assert _pool.host_free_memory(proc, root) == expected
