"""Reading sequences out of their blocks, against indexing in torch and memcpy.

gather_kv returns new tensors, whose pages the system has to provide; so does `clone`, but not `memcpy`.
"""

from __future__ import annotations

import timing
import torch

import pagedkv
from pagedkv._pool import make_pool

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 8, 128, 16, 4096
OF_CLONE = 0.85


def bench(
    num_seqs: int, context: int, cache_dtype: torch.dtype, device: torch.device, rounds: int
) -> tuple[str, float, float]:
    """One table: sequences whose blocks lie all over the pool; the bar."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pools = [make_pool(shape, cache_dtype, device).copy_(torch.ones(())) for _ in range(2)]
    num_blocks = -(-context // BLOCK_SIZE)
    blocks = torch.randperm(NUM_BLOCKS)[: num_seqs * num_blocks].view(num_seqs, -1)
    block_tables = blocks.to(device, torch.int32)
    context_lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
    flat_blocks = block_tables.view(-1)
    quantised = cache_dtype.itemsize == 1
    options = {"dtype": torch.bfloat16, "k_scale": 0.5, "v_scale": 0.5} if quantised else {}

    def pagedkv_call() -> None:
        pagedkv.gather_kv(*pools, block_tables, context_lens, total_tokens=num_seqs * context, **options)

    def indexing() -> None:
        for pool in pools:
            rows = pool[flat_blocks]
            if quantised:
                rows.to(torch.bfloat16).mul_(0.5)

    num_bytes = 2 * num_seqs * context * NUM_KV_HEADS * HEAD_DIM * (cache_dtype.itemsize + 2) // 2
    contiguous = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    contenders = {
        "pagedkv": pagedkv_call,
        "cache[blocks]": indexing,
        "clone": lambda: contiguous[0].clone(),
        "memcpy": timing.memcpy(*contiguous),
    }
    samples = timing.measure(contenders, rounds, device)
    name = f"gather_kv, {num_seqs} x {context} tokens, {NUM_KV_HEADS} x {HEAD_DIM}, {cache_dtype}"
    timing.print_table(name, samples, num_bytes=2 * num_bytes)
    return f"{name}: clone / pagedkv", timing.ratio(samples, "clone", "pagedkv"), OF_CLONE


def main() -> None:
    """One sequence and many."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    device, bars = torch.device(arguments.device), []
    for cache_dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        for num_seqs, context in ((1, 512), (1, 16384), (16, 2048)):
            bars.append(bench(num_seqs, context, cache_dtype, device, arguments.rounds))
    timing.print_bars([bar for bar in bars if "bfloat16" in bar[0]])


if __name__ == "__main__":
    main()
