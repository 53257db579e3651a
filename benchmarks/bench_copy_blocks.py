"""Copy-on-write in all layers, against indexed assignment in torch and a contiguous copy of as many bytes."""

from __future__ import annotations

import timing
import torch

import pagedkv

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 256, 16, 8, 128


def bench(num_pairs: int, dtype: torch.dtype, device: torch.device, rounds: int) -> None:
    """One table: `num_pairs` disjoint pairs in the caches of all layers."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key_caches, value_caches = (
        [torch.zeros(shape, dtype=dtype, device=device) for _ in range(NUM_LAYERS)] for _ in range(2)
    )
    caches = key_caches + value_caches
    mapping = torch.randperm(NUM_BLOCKS)[: 2 * num_pairs].view(num_pairs, 2)
    sources, destinations = (column.to(device) for column in mapping.unbind(1))
    packed = [cache[:num_pairs].clone() for cache in caches]
    packed_copies = [torch.empty_like(tensor) for tensor in packed]

    def indexed_assignment() -> None:
        for cache in caches:
            cache[destinations] = cache[sources]

    def contiguous_copy() -> None:
        for copy, tensor in zip(packed_copies, packed, strict=True):
            copy.copy_(tensor)

    contenders = {
        "pagedkv": lambda: pagedkv.copy_blocks(key_caches, value_caches, mapping),
        "cache[dst] = cache[src]": indexed_assignment,
        "copy_ to a contiguous tensor": contiguous_copy,
    }
    samples = timing.measure(contenders, rounds, device)
    block_bytes = caches[0][0].nbytes
    title = f"copy_blocks, {num_pairs} pairs in {NUM_LAYERS} layers, blocks of {block_bytes} bytes, {dtype}"
    timing.print_table(title, samples, num_bytes=2 * num_pairs * len(caches) * block_bytes)


def main() -> None:
    """A single forked sequence, and a large beam search."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    for num_pairs in (1, 8, 64):
        bench(num_pairs, torch.bfloat16, torch.device(arguments.device), arguments.rounds)


if __name__ == "__main__":
    main()
