"""The cache operators on a GPU, beside a copy of as many bytes: a stage of bench_gpu.py."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import gpu_timing
import timing
import torch

import pagedkv

BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
Call = Callable[[], object]
Row = tuple[str, int, list[Call]]  # name, bytes read and written by a call, calls


def caches(num_blocks: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Keys and values."""
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype) for _ in range(2)]


def writes(num_tokens: int, device: torch.device) -> list[Row]:
    """New rows into slots all over a pool, as they are, rotated, and as float8."""
    num_blocks = 2 * num_tokens // BLOCK_SIZE
    rows = [torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2)]
    query = torch.randn(num_tokens, 4 * NUM_KV_HEADS, HEAD_DIM, device=device).bfloat16()
    cos, sin = (torch.randn(num_tokens, HEAD_DIM // 2, device=device) for _ in range(2))
    positions = torch.arange(num_tokens, device=device)
    slots = torch.randperm(2 * num_tokens, device=device)[:num_tokens]
    row_bytes = 2 * rows[0].nbytes
    found: list[Row] = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        pools = [
            caches(num_blocks, device, dtype)
            for _ in range(gpu_timing.num_copies(2 * row_bytes, device) // 8 + 1)
        ]
        name = f"reshape_and_cache, {num_tokens} tokens, {str(dtype)[6:]}"
        calls = [functools.partial(pagedkv.reshape_and_cache, *rows, *pool, slots) for pool in pools]
        found.append((name, row_bytes + row_bytes * dtype.itemsize // 2, list(calls)))
        if dtype == torch.bfloat16:
            arguments = (query, *rows, cos, sin, positions)
            rotate = [functools.partial(pagedkv.rope_and_cache, *arguments, *pool, slots) for pool in pools]
            num_bytes = 2 * query.nbytes + 2 * row_bytes + 2 * rows[0].nbytes
            found.append((f"rope_and_cache, {num_tokens} tokens", num_bytes, list(rotate)))
    return found


def gathers(num_tokens: int, device: torch.device) -> list[Row]:
    """Sequences out of their blocks."""
    num_seqs = 8
    num_blocks = num_tokens // BLOCK_SIZE
    pool = caches(num_blocks, device)
    tables = torch.randperm(num_blocks, device=device).view(num_seqs, -1).int()
    lens = torch.full((num_seqs,), num_tokens // num_seqs, dtype=torch.int32, device=device)
    call = functools.partial(pagedkv.gather_kv, *pool, tables, lens, total_tokens=num_tokens)
    return [(f"gather_kv, {num_tokens} tokens", 4 * pool[0].nbytes, [call])]


def copies(num_layers: int, num_pairs: int, device: torch.device) -> list[Row]:
    """Copy-on-write in all layers, and blocks to pinned memory on the host and back."""
    num_blocks = 2 * num_pairs
    layers = [caches(num_blocks, device) for _ in range(num_layers)]
    keys, values = (list(part) for part in zip(*layers, strict=True))
    mapping = torch.randperm(num_blocks).view(num_pairs, 2)
    num_bytes = 2 * num_layers * num_pairs * keys[0][0].nbytes
    pinned = device.type == "cuda"
    host = [torch.empty(cache.shape, dtype=cache.dtype, pin_memory=pinned) for cache in (*keys, *values)]
    out = torch.stack([torch.arange(num_pairs), torch.arange(num_pairs)], dim=1)
    shape = f"{num_pairs} blocks in {num_layers} layers"
    return [
        (
            f"copy_blocks, {shape}",
            2 * num_bytes,
            [functools.partial(pagedkv.copy_blocks, keys, values, mapping)],
        ),
        (
            f"swap_blocks out, {shape}",
            num_bytes,
            [functools.partial(pagedkv.swap_blocks, [*keys, *values], host, out)],
        ),
        (
            f"swap_blocks in, {shape}",
            num_bytes,
            [functools.partial(pagedkv.swap_blocks, host, [*keys, *values], out)],
        ),
    ]


def link_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes a second of one copy to pinned memory on the host."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    calls = [lambda: host.copy_(source, non_blocking=True)]
    return num_bytes / statistics.median(gpu_timing.measure({"copy": calls}, device, in_graph=False)["copy"])


def main() -> None:
    """Print each operator's bytes a second and its share of a copy's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(timing.machine_line())
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    memory = gpu_timing.copy_bandwidth(device)
    link = link_bandwidth(2**28 if is_cuda else 2**20, device)
    print(f"limits: copy {memory / 1e9:.0f} GB/s read and written, to the host {link / 1e9:.1f} GB/s")
    rows = [
        *writes(8192 if is_cuda else 64, device),
        *gathers(131072 if is_cuda else 256, device),
        *copies(16, 256 if is_cuda else 4, device),
    ]
    results = {}
    for name, num_bytes, calls in rows:
        in_graph = not name.startswith(("copy", "swap"))  # their list of blocks is the host's
        samples = gpu_timing.measure({"pagedkv": calls}, device, in_graph=in_graph)["pagedkv"]
        median = statistics.median(samples)
        limit = link if name.startswith("swap") else memory
        print(
            f"{name:<52}{median * 1e6:>10.1f} us{num_bytes / median / 1e9:>9.1f} GB/s"
            f"{num_bytes / median / limit:>8.1%} of the limit",
            flush=True,
        )
        results[name] = {"seconds": samples, "bytes": num_bytes, "limit": limit}
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
