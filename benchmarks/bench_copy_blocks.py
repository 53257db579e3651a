"""Copy-on-write in all layers, against indexed assignment in torch and one memcpy of as many bytes."""

from __future__ import annotations

import timing
import torch

import pagedkv
from pagedkv._pool import advise_huge_pages, make_pool

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 16, 1024, 16
OF_MEMCPY = 0.85


def bench(
    num_pairs: int, num_kv_heads: int, head_dim: int, device: torch.device, rounds: int
) -> tuple[str, float, float]:
    """One table: `num_pairs` disjoint pairs in the caches of all layers; the bar."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    caches = [make_pool(shape, torch.bfloat16, device).zero_() for _ in range(2 * NUM_LAYERS)]
    mapping = torch.randperm(NUM_BLOCKS)[: 2 * num_pairs].view(num_pairs, 2)
    sources, destinations = (column.to(device) for column in mapping.unbind(1))
    block_bytes = caches[0][0].nbytes
    num_bytes = num_pairs * len(caches) * block_bytes
    contiguous = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    for tensor in contiguous:
        if device.type == "cpu":
            advise_huge_pages(tensor)
        tensor.zero_()

    def indexed_assignment() -> None:
        for cache in caches:
            cache[destinations] = cache[sources]

    contenders = {
        "pagedkv": lambda: pagedkv.copy_blocks(caches[:NUM_LAYERS], caches[NUM_LAYERS:], mapping),
        "cache[dst] = cache[src]": indexed_assignment,
        "memcpy": timing.memcpy(*contiguous),
    }
    samples = timing.measure(contenders, rounds, device)
    name = f"copy_blocks, {num_pairs} pairs in {NUM_LAYERS} layers, blocks of {block_bytes} bytes"
    timing.print_table(name, samples, num_bytes=2 * num_bytes)
    return f"{name}: memcpy / pagedkv", timing.ratio(samples, "memcpy", "pagedkv"), OF_MEMCPY


def main() -> None:
    """A single forked sequence, and a large beam search."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    device = torch.device(arguments.device)
    shapes = ((8, 128), (3, 64))
    bars = [bench(n, *shape, device, arguments.rounds) for shape in shapes for n in (1, 8, 64, 256)]
    timing.print_bars(bars)


if __name__ == "__main__":
    main()
