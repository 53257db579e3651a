"""Writing keys and values into a paged cache, against two `index_copy_` of torch and a contiguous copy."""

from __future__ import annotations

import timing
import torch

import pagedkv

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16


def bench(num_tokens: int, dtype: torch.dtype, device: torch.device, rounds: int) -> None:
    """One table: `num_tokens` rows to slots all over a cache four times their size."""
    row = (NUM_KV_HEADS, HEAD_DIM)
    key, value = (torch.randn(num_tokens, *row, device=device).to(dtype) for _ in range(2))
    num_blocks = 4 * -(-num_tokens // BLOCK_SIZE)
    key_cache, value_cache = (
        torch.zeros(num_blocks, BLOCK_SIZE, *row, dtype=dtype, device=device) for _ in range(2)
    )
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
    flat_key, flat_value = key_cache.view(-1, *row), value_cache.view(-1, *row)
    key_copy, value_copy = torch.empty_like(key), torch.empty_like(value)

    def index_copy() -> None:
        flat_key.index_copy_(0, slots, key)
        flat_value.index_copy_(0, slots, value)

    def contiguous_copy() -> None:
        key_copy.copy_(key)
        value_copy.copy_(value)

    contenders = {
        "pagedkv": lambda: pagedkv.reshape_and_cache(key, value, key_cache, value_cache, slots),
        "index_copy_, twice": index_copy,
        "copy_ to a contiguous tensor": contiguous_copy,
    }
    samples = timing.measure(contenders, rounds, device)
    title = f"reshape_and_cache, {num_tokens} tokens, {NUM_KV_HEADS} heads of {HEAD_DIM}, {dtype}"
    timing.print_table(title, samples, num_bytes=2 * (key.nbytes + value.nbytes))


def main() -> None:
    """Decode and prefill sizes."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    for dtype in (torch.bfloat16, torch.float32):
        for num_tokens in (32, 512, 4096):
            bench(num_tokens, dtype, torch.device(arguments.device), arguments.rounds)


if __name__ == "__main__":
    main()
