"""What `PagedKVCache` makes of its arguments: the number of blocks, dtypes that fit, scales and pools."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def check_dtypes(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    k_scales: torch.Tensor | float | None,
    v_scales: torch.Tensor | float | None,
) -> None:
    """Raise where the cache cannot store kv_dtype for a model of dtype, or the scales do not fit it."""
    if dtype not in _FLOAT_DTYPES:
        raise TypeError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    if kv_dtype != dtype and kv_dtype not in _QUANTISED_DTYPES:
        raise TypeError(
            f"kv_dtype must be {dtype} as dtype, float8_e4m3fn, float8_e5m2 or int8, got {kv_dtype}"
        )
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is None and kv_dtype == torch.int8:
            raise ValueError(f"an int8 cache needs {name}: a float, or a [num_layers, num_kv_heads] tensor")
        if scales is not None and kv_dtype not in _QUANTISED_DTYPES:
            raise ValueError(f"{name} is for float8 and int8 caches, this one stores {kv_dtype}")


def make_pool(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, pin_memory: bool = False
) -> torch.Tensor:
    """One layer's keys or values, uninitialised, in the layout that the device's kernels read fastest.

    On the CPU a block lies head by head, since attention reads one head's rows of a block after the other.

    Args:
        shape: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        dtype: what is stored.
        device: where.
        pin_memory: the pool is the host's side of one on CUDA, whose layout it shares.
    """
    num_blocks, block_size, num_kv_heads, head_dim = shape
    if device.type != "cpu" or pin_memory:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
    pool = torch.empty(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype)
    advise_huge_pages(pool)
    return pool.transpose(1, 2)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the system to back a contiguous CPU tensor by huge pages; where it will not, nothing changes.

    Blocks lie all over the pool, so with small pages most of them begin with a miss of the address cache.
    """
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def make_scales(
    name: str, scales: torch.Tensor | float | None, shape: tuple[int, int], device: torch.device
) -> torch.Tensor | None:
    """Scales as a `[num_layers, num_kv_heads]` float32 tensor of the cache's own."""
    if scales is None:
        return None
    if not isinstance(scales, torch.Tensor):
        scales = torch.full(shape, scales, dtype=torch.float32)
    if scales.shape != shape:
        raise ValueError(
            f"{name} must be a float or [num_layers, num_kv_heads] = {list(shape)}, "
            f"got the shape {list(scales.shape)}"
        )
    if not scales.is_floating_point():
        raise TypeError(f"{name} must be float32, got {scales.dtype}")
    owned = scales.detach().to(device, torch.float32, copy=True).contiguous()
    if not bool(torch.all(torch.isfinite(owned) & (owned > 0))):
        raise ValueError(f"{name} must be finite and above 0")
    return owned


def choose_num_blocks(
    num_blocks: int | None,
    memory: int | float | str | None,
    bytes_per_block: int,
    scales_bytes: int,
    device: torch.device,
) -> int:
    """num_blocks as given, or as many whole blocks as fit into memory beside the scales."""
    if (num_blocks is None) == (memory is None):
        raise ValueError(
            "a cache needs exactly one of num_blocks (blocks in the pool) and memory "
            '(bytes, text like "2GiB", or a fraction of free memory), got '
            + ("neither" if num_blocks is None else "both")
        )
    if num_blocks is not None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        return num_blocks
    assert memory is not None
    budget = memory_budget(memory, device)
    if budget < bytes_per_block + scales_bytes:
        scales = f" and the scales take {scales_bytes}" if scales_bytes > 0 else ""
        raise ValueError(
            f"memory={memory!r} is {budget} bytes, but one block takes {bytes_per_block} bytes{scales}"
        )
    return (budget - scales_bytes) // bytes_per_block


def memory_budget(memory: int | float | str, device: torch.device) -> int:
    """The bytes that a `memory` argument stands for.

    Args:
        memory: bytes (int), text like "2GiB" or "1.5GB", or a fraction (float) of the device's free memory
        device: whose free memory a fraction is of

    Raises:
        ValueError: text that is not a size, a fraction outside (0, 1]
        TypeError: another type

    >>> memory_budget("1.5KiB", torch.device("cpu")), memory_budget("2MB", torch.device("cpu"))
    (1536, 2000000)
    """
    if isinstance(memory, str):
        match = _SIZE.fullmatch(memory)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"memory is {memory!r}; as text it is a number and one of B, KB, MB, GB, TB (powers of 1000) "
                'or KiB, MiB, GiB, TiB (powers of 1024), like "2GiB"'
            )
        whole, _, decimals = match[1].partition(".")
        denominator: int = 10 ** len(decimals)
        return int(whole + decimals) * _UNITS[match[2].lower()] // denominator
    if isinstance(memory, int | np.integer) and not isinstance(memory, bool):
        return int(memory)
    if not isinstance(memory, float):
        raise TypeError(
            "memory must be bytes (int), text or a fraction of free memory (float), "
            f"got {type(memory).__name__}"
        )
    if not 0 < memory <= 1:
        raise ValueError(
            f"memory is {memory}; a float is a fraction in (0, 1] of the free memory of {device} "
            "(for bytes pass an int)"
        )
    return int(memory * free_memory(device))


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take on the device, container limits included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_free_memory(Path("/proc"), Path("/sys/fs/cgroup"))


def host_free_memory(proc: Path, cgroup_root: Path) -> int:
    """The kernel's MemAvailable, or what is left below the tightest cgroup limit where that is less.

    Args:
        proc: the proc file system
        cgroup_root: where the cgroup file systems are mounted
    """
    meminfo = (proc / "meminfo").read_text()
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if available is None:
        raise ValueError(f"{proc}/meminfo has no MemAvailable: pass memory as bytes, or num_blocks")
    return max(0, min([int(available[1]) * 1024, *_cgroup_free(proc, cgroup_root)]))


def _cgroup_free(proc: Path, cgroup_root: Path) -> Iterator[int]:
    """What is left below each limit on this process's memory (cgroup v1 and v2)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            root, names = cgroup_root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup_root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container may see its own group as the root: then the path leads nowhere and the root counts.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _group_free(folder, *names)


def _group_free(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return
    if limit != "max":
        # Cached file pages count as usage, but make way for a process that asks for memory.
        reclaimable = re.search(rf"^{reclaimable_name} (\d+)$", stat, re.MULTILINE)
        yield int(limit) - usage + (int(reclaimable[1]) if reclaimable else 0)
