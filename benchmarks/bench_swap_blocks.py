"""Swapping sequences out to host memory, against indexed assignment and one memcpy of as many bytes."""

from __future__ import annotations

import timing
import torch

import pagedkv
from pagedkv._pool import make_pool

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 16, 1024, 16
OF_MEMCPY = 0.85


def bench(
    num_pairs: int, num_kv_heads: int, head_dim: int, device: torch.device, rounds: int
) -> tuple[str, float, float]:
    """One table: `num_pairs` blocks of all layers, all over either pool; the bar."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    host, on_cuda = torch.device("cpu"), device.type == "cuda"
    caches = [make_pool(shape, torch.bfloat16, device).zero_() for _ in range(2 * NUM_LAYERS)]
    host_caches = [
        make_pool(shape, torch.bfloat16, host, pin_memory=on_cuda).zero_() for _ in range(2 * NUM_LAYERS)
    ]
    mapping = torch.stack([torch.randperm(NUM_BLOCKS)[:num_pairs] for _ in range(2)], dim=1)
    sources, destinations = mapping.unbind(1)
    block_bytes = caches[0][0].nbytes
    num_bytes = num_pairs * len(caches) * block_bytes
    contiguous = torch.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
    host_contiguous = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_cuda).zero_()

    def indexed_assignment() -> None:
        for cache, host_cache in zip(caches, host_caches, strict=True):
            host_cache[destinations] = cache[sources.to(device)].to(host)

    contenders = {
        "pagedkv": lambda: pagedkv.swap_blocks(caches, host_caches, mapping),
        "cache[dst] = cache[src]": indexed_assignment,
        "memcpy": timing.memcpy(host_contiguous, contiguous),
    }
    samples = timing.measure(contenders, rounds, device)
    name = f"swap_blocks, {num_pairs} pairs in {NUM_LAYERS} layers, blocks of {block_bytes} bytes"
    timing.print_table(name, samples, num_bytes=2 * num_bytes)
    return f"{name}: memcpy / pagedkv", timing.ratio(samples, "memcpy", "pagedkv"), OF_MEMCPY


def main() -> None:
    """Sequences of 128 tokens to 4096."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    device = torch.device(arguments.device)
    shapes = ((8, 128), (3, 64))
    bars = [bench(n, *shape, device, arguments.rounds) for shape in shapes for n in (8, 64, 256)]
    timing.print_bars(bars)


if __name__ == "__main__":
    main()
