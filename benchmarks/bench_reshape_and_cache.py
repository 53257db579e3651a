"""Writing keys and values into a paged cache, against two `index_copy_` of torch and a contiguous copy."""

from __future__ import annotations

import timing
import torch

import pagedkv
from pagedkv._pool import advise_huge_pages, make_pool

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 8, 128, 16, 4096
SPEED = 1.5  # of two index_copy_, in bfloat16


def bench(tokens_per_seq: int, num_seqs: int, dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """One table: the newest tokens of sequences whose blocks lie all over the pool; the speed-up."""
    num_tokens, row = num_seqs * tokens_per_seq, (NUM_KV_HEADS, HEAD_DIM)
    key, value = (torch.randn(num_tokens, *row, device=device).to(dtype) for _ in range(2))
    shape = (NUM_BLOCKS, BLOCK_SIZE, *row)
    pools = [make_pool(shape, dtype, device) for _ in range(2)]
    token_major = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
    for tensor in token_major if device.type == "cpu" else []:
        advise_huge_pages(tensor)
    for tensor in [*pools, *token_major]:
        tensor.zero_()
    blocks = torch.randperm(NUM_BLOCKS)[: num_seqs * -(-tokens_per_seq // BLOCK_SIZE)].view(num_seqs, -1)
    tokens = torch.arange(tokens_per_seq)
    slots = (blocks[:, tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE).flatten().to(device)
    flat = [tensor.view(-1, *row) for tensor in token_major]
    copies = [torch.empty_like(key), torch.empty_like(value)]

    def index_copy() -> None:
        flat[0].index_copy_(0, slots, key)
        flat[1].index_copy_(0, slots, value)

    def contiguous_copy() -> None:
        copies[0].copy_(key)
        copies[1].copy_(value)

    contenders = {
        "pagedkv": lambda: pagedkv.reshape_and_cache(key, value, *pools, slots),
        "pagedkv, token-major pool": lambda: pagedkv.reshape_and_cache(key, value, *token_major, slots),
        "index_copy_, twice": index_copy,
        "copy_ to contiguous tensors": contiguous_copy,
    }
    samples = timing.measure(contenders, rounds, device)
    title = f"reshape_and_cache, {num_seqs} x {tokens_per_seq} tokens, {NUM_KV_HEADS} x {HEAD_DIM}, {dtype}"
    timing.print_table(title, samples, num_bytes=2 * (key.nbytes + value.nbytes))
    return timing.ratio(samples, "index_copy_, twice", "pagedkv")


def main() -> None:
    """Decode steps and prompts."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    bars = []
    for dtype in (torch.bfloat16, torch.float32):
        for num_seqs, tokens_per_seq in ((1, 1), (32, 1), (256, 1), (1, 512), (1, 4096)):
            speed = bench(tokens_per_seq, num_seqs, dtype, torch.device(arguments.device), arguments.rounds)
            if dtype == torch.bfloat16 and (num_seqs, tokens_per_seq) != (1, 1):  # which is all call
                bars.append((f"{num_seqs} x {tokens_per_seq} tokens: index_copy_ / pagedkv", speed, SPEED))
    timing.print_bars(bars)


if __name__ == "__main__":
    main()
