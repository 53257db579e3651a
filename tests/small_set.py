"""Every kernel on small shapes, compared with the CPU: `python tests/small_set.py [device [step]]`.

With a step every step-th call alone. For tools that slow a program down a hundredfold, such as
compute-sanitizer, and as a first look at a card.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import torch
from torch import Tensor

import pagedkv

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
BLOCK_SIZE, NUM_BLOCKS, NUM_KV_HEADS, GROUP = 16, 40, 2, 4
CONTEXT_LENS = (300, 17, 129)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}


class SmallSet:
    """Calls on the device and on the CPU, and how many differed."""

    def __init__(self, device: torch.device, step: int) -> None:
        """Nothing has run yet."""
        self.device = device
        self.step = step
        self.num_calls = 0
        self.failures: list[str] = []

    def run(self, name: str, tolerance: float, operator: Any, *arguments: Any, **options: Any) -> None:
        """Compare what the operator returns, or, where it returns nothing, what it left in its arguments."""
        self.num_calls += 1
        if self.num_calls % self.step != 0:
            return
        here = [clone(argument) for argument in arguments]
        there = [to_device(argument, self.device) for argument in arguments]
        expected = operator(*here, **options)
        moved = {key: to_device(value, self.device) for key, value in options.items()}
        found = operator(*there, **moved)
        pairs = zip(
            tensors(here if expected is None else expected),
            tensors(there if found is None else found),
            strict=True,
        )
        for x, y in pairs:
            x, y = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (x, y.cpu()))
            if not torch.allclose(x.float(), y.float(), rtol=tolerance, atol=tolerance, equal_nan=True):
                worst = (x.float() - y.float()).abs().nan_to_num(nan=1e9).max()
                self.failures.append(f"{name}: differs by {worst}")
                return


def clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [clone(item) for item in value] if isinstance(value, list) else value


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.clone().to(device)
    return [to_device(item, device) for item in value] if isinstance(value, list) else value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


def attention(small: SmallSet) -> None:
    """Each dtype pair, head_dim bucket and kind of tile; then the options, and the ways to cut the keys."""
    pairs = [(q, c) for q in FLOAT_DTYPES for c in (q, *QUANTIZED_DTYPES)]
    for (query_dtype, cache_dtype), head_dim, query_len in itertools.product(
        pairs, (64, 128, 256), (1, 5, 40)
    ):
        attend(small, query_dtype, cache_dtype, head_dim, query_len)
    options: list[dict[str, Any]] = [
        {"window": 40, "softcap": 20.0},
        {"alibi_slopes": torch.linspace(0.1, 0.5, GROUP * NUM_KV_HEADS)},
        {"sinks": torch.linspace(-1, 1, GROUP * NUM_KV_HEADS)},
        {"split_size": 64},
        {"kv_starts": torch.tensor([30, 0, 128], dtype=torch.int32)},
        {"causal": False},
    ]
    for option, query_len, head_dim in itertools.product(options, (1, 5, 40), (80, 128)):
        attend(small, torch.bfloat16, torch.bfloat16, head_dim, query_len, **option)
    attend(small, torch.bfloat16, torch.bfloat16, 128, 1, context_lens=(4096, 900, 1), block_size=1)
    attend(small, torch.float16, torch.float16, 104, 70, context_lens=(2000, 700, 71), block_size=7)


def attend(
    small: SmallSet,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    query_len: int,
    context_lens: tuple[int, ...] = CONTEXT_LENS,
    block_size: int = BLOCK_SIZE,
    **options: Any,
) -> None:
    """Three sequences of query_len tokens each, fewer where the context is shorter."""
    max_blocks = -(-max(context_lens) // block_size)
    num_blocks = max_blocks * len(context_lens)
    shape = (num_blocks, block_size, NUM_KV_HEADS, head_dim)
    caches = [random(*shape, dtype=cache_dtype) for _ in range(2)]
    tables = torch.randperm(num_blocks).view(len(context_lens), max_blocks).int()
    query_lens = [min(query_len, n) for n in context_lens]
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    query = random(sum(query_lens), GROUP * NUM_KV_HEADS, head_dim, dtype=query_dtype)
    scale = 0.02 if cache_dtype == torch.int8 else None
    dtypes = f"{str(query_dtype)[6:]} on {str(cache_dtype)[6:]}"
    small.run(
        f"paged_attention {dtypes}, head_dim {head_dim}, {query_len} tokens, {', '.join(options)}",
        TOLERANCE[query_dtype],
        pagedkv.paged_attention,
        query,
        tables,
        *caches,
        torch.tensor(context_lens, dtype=torch.int32),
        query_start_loc=None if query_len == 1 else starts,
        max_query_len=query_len,
        k_scale=scale,
        v_scale=scale,
        return_lse=True,
        **options,
    )


def cache_operators(small: SmallSet) -> None:
    """Writing, gathering and copying in every dtype, merging of states, swapping."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:50]
    slots[::7] = -1
    tables = torch.randperm(NUM_BLOCKS)[:30].view(3, 10).int()
    lens = torch.tensor([100, 0, 33], dtype=torch.int32)
    mapping = [(3, 9), (9, 3), (1, 0), (7, 20)]
    positions = torch.arange(50)
    cos, sin = (torch.randn(50, 16) for _ in range(2))
    for dtype, cache_dtype in [(q, c) for q in FLOAT_DTYPES for c in (q, *QUANTIZED_DTYPES)]:
        for head_dim in (64, 100):
            rows = [random(50, NUM_KV_HEADS, head_dim, dtype=dtype) for _ in range(2)]
            shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
            caches = [random(*shape, dtype=cache_dtype) for _ in range(2)]
            scale = 0.02 if cache_dtype == torch.int8 else None
            name = f"{str(dtype)[6:]} on {str(cache_dtype)[6:]}, head_dim {head_dim}"
            scales = {"k_scale": scale, "v_scale": scale}
            small.run(
                f"reshape_and_cache {name}", 0, pagedkv.reshape_and_cache, *rows, *caches, slots, **scales
            )
            query = random(50, NUM_KV_HEADS * GROUP, head_dim, dtype=dtype)
            rotated = (query, *rows, cos, sin, positions, *caches, slots)
            small.run(f"rope_and_cache {name}", 0, pagedkv.rope_and_cache, *rotated, **scales)
            if cache_dtype == dtype:
                small.run(f"gather_kv {name}", 0, pagedkv.gather_kv, *caches, tables, lens)
            else:
                small.run(
                    f"gather_kv {name}", 0, pagedkv.gather_kv, *caches, tables, lens, dtype=dtype, **scales
                )
            small.run(f"copy_blocks {name}", 0, pagedkv.copy_blocks, [caches[0]], [caches[1]], mapping)
            small.run(f"swap_blocks {name}", 0, pagedkv.swap_blocks, [caches[0]], [caches[1]], mapping)
        outs = [random(20, 6, 64, dtype=dtype) for _ in range(2)]
        lses = [torch.randn(20, 6) for _ in range(2)]
        states = (outs[0], lses[0], outs[1], lses[1])
        small.run(f"merge_attn_states {dtype}", TOLERANCE[dtype], pagedkv.merge_attn_states, *states)


def main() -> int:
    """Run all; 1 where something differed."""
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", default="cuda", type=torch.device)
    parser.add_argument("step", nargs="?", default=1, type=int)
    arguments = parser.parse_args()
    small = SmallSet(arguments.device, arguments.step)
    attention(small)
    cache_operators(small)
    for failure in small.failures[:40]:
        print(failure)
    print(f"{small.num_calls // small.step} calls, {len(small.failures)} differ")
    return 1 if small.failures else 0


if __name__ == "__main__":
    sys.exit(main())
