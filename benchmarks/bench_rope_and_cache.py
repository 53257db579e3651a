"""Rotating queries and keys on the way into the cache, against the same in torch, and a plain cache write."""

from __future__ import annotations

import timing
import torch

import pagedkv
from pagedkv._pool import make_pool

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 32, 8, 128, 16, 1024


def bench(num_tokens: int, dtype: torch.dtype, interleaved: bool, device: torch.device, rounds: int) -> None:
    """One table: the rows of a prompt, or of as many sequences' decode step."""
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device=device).to(dtype)
    key, value = (torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(2))
    angles = torch.rand(4096, HEAD_DIM // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(num_tokens, device=device)
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pools = [make_pool(shape, dtype, device).zero_() for _ in range(2)]
    blocks = torch.randperm(NUM_BLOCKS)[: -(-num_tokens // BLOCK_SIZE)]
    tokens = torch.arange(num_tokens)
    slots = (blocks[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE).to(device)
    flat = [torch.zeros(NUM_BLOCKS * BLOCK_SIZE, *shape[2:], dtype=dtype, device=device) for _ in range(2)]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        c, s = cos[positions, None], sin[positions, None]
        pair = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        a, b = (part.float() for part in pair)
        rotated = a * c - b * s, b * c + a * s
        joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
        return joined.to(dtype)

    def in_torch() -> None:
        query.copy_(rotate(query))
        flat[0].index_copy_(0, slots, rotate(key))
        flat[1].index_copy_(0, slots, value)

    contenders = {
        "pagedkv": lambda: pagedkv.rope_and_cache(
            query, key, value, cos, sin, positions, *pools, slots, interleaved=interleaved
        ),
        "torch, with index_copy_": in_torch,
        "reshape_and_cache alone": lambda: pagedkv.reshape_and_cache(key, value, *pools, slots),
    }
    samples = timing.measure(contenders, rounds, device)
    style = "interleaved" if interleaved else "halves"
    title = f"rope_and_cache, {num_tokens} tokens, {NUM_HEADS}/{NUM_KV_HEADS} x {HEAD_DIM}, {dtype}, {style}"
    timing.print_table(title, samples, num_bytes=2 * (query.nbytes + key.nbytes + value.nbytes))


def main() -> None:
    """Decode steps and a prompt."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    for dtype, interleaved in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
        for num_tokens in (1, 64, 2048):
            bench(num_tokens, dtype, interleaved, torch.device(arguments.device), arguments.rounds)


if __name__ == "__main__":
    main()
