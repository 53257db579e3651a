"""Paged attention on a GPU, beside its peers and the card's limits: a stage of bench_gpu.py.

A row is a shape. Its share of the limit is the time that the card needs at least, to move as many bytes as
keys and values have or to multiply as many numbers, whichever is longer, over the median time of a call.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import time
from pathlib import Path

import gpu_peers
import gpu_timing
import timing
import torch
from attention_cases import DTYPES, Shape
from gpu_peers import Call

import pagedkv

LARGEST_ERROR = 1e-2  # beyond it a contender computes something else


def _decode(heads: str, batch: int, context: int, block_size: int = 16, **changes: object) -> Shape:
    num_heads, num_kv_heads = map(int, heads.split("/"))
    shape = {"head_dim": 128, "heads": num_heads, "kv_heads": num_kv_heads, **changes}
    return Shape(batch=batch, context=context, block_size=block_size, **shape)  # type: ignore[arg-type]


def _prefill(batch: int, query_len: int, context: int) -> Shape:
    return Shape(batch=batch, query_len=query_len, context=context, heads=32, kv_heads=8, block_size=16)


# The most telling first: time may run out.
ROWS = {
    "decode-32/8-b64-c8k": _decode("32/8", 64, 8192),
    "decode-64/8-b1-c8k": _decode("64/8", 1, 8192),
    "decode-32/8-b8-c8k": _decode("32/8", 8, 8192),
    "prefill-b1-q4k": _prefill(1, 4096, 4096),
    "decode-32/8-b1-c32k": _decode("32/8", 1, 32768),
    "decode-64/1-b64-c8k": _decode("64/1", 64, 8192),
    "decode-32/32-b8-c8k": _decode("32/32", 8, 8192),
    "decode-32/8-b64-c8k-e4m3": _decode("32/8", 64, 8192, cache_dtype="e4m3"),
    "decode-32/8-b8-c8k-block1": _decode("32/8", 8, 8192, 1),
    "decode-32/8-b8-c8k-block64": _decode("32/8", 8, 8192, 64),
    "decode-32/8-b8-c8k-dim64": _decode("32/8", 8, 8192, head_dim=64),
    "decode-32/8-b8-c8k-dim256": _decode("32/8", 8, 8192, head_dim=256),
    "prefill-b8-q1k": _prefill(8, 1024, 1024),
    "prefill-b1-q512-past8k": _prefill(1, 512, 8704),
    "decode-32/8-b1-c1k": _decode("32/8", 1, 1024),
    "decode-32/8-b1-c8k": _decode("32/8", 1, 8192),
    "decode-32/8-b8-c1k": _decode("32/8", 8, 1024),
    "decode-32/8-b64-c1k": _decode("32/8", 64, 1024),
    "decode-32/8-b8-c32k": _decode("32/8", 8, 32768),
    "decode-32/8-b64-c32k": _decode("32/8", 64, 32768),
    "decode-64/8-b64-c8k": _decode("64/8", 64, 8192),
    "decode-64/1-b8-c8k": _decode("64/1", 8, 8192),
    "decode-32/32-b1-c8k": _decode("32/32", 1, 8192),
}
FLEX_ROWS = ("decode-32/8-b8-c8k",)  # it compiles for every shape anew


class Problem:
    """The data of a row, in as many layers as calls rotate over.

    Attributes:
        pools: (key_cache, value_cache) a layer, `[num_blocks, block_size, kv_heads, head_dim]`.
        block_tables: one a layer, `[batch, blocks_per_seq]`: blocks lie all over the pool.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        """Random data."""
        self.shape = shape
        self.num_layers = gpu_timing.num_copies(shape.kv_bytes, device)
        num_blocks = shape.batch * shape.blocks_per_seq
        size = (num_blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        self.pools = [
            (self._random(size, shape.stored, device), self._random(size, shape.stored, device))
            for _ in range(self.num_layers)
        ]
        self.block_tables = [
            torch.randperm(num_blocks, device=device).view(shape.batch, -1).int()
            for _ in range(self.num_layers)
        ]
        num_tokens = shape.batch * shape.query_len
        self.query = self._random((num_tokens, shape.heads, shape.head_dim), DTYPES[shape.dtype], device)
        self.context_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        self.query_start_loc = torch.arange(
            0, num_tokens + 1, shape.query_len, dtype=torch.int32, device=device
        )
        self.contiguous = functools.cache(self._contiguous)

    @staticmethod
    def _random(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device).to(dtype)

    def _contiguous(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, each `[batch, kv_heads, context, head_dim]`."""
        shape = self.shape
        gathered = pagedkv.gather_kv(*self.pools[layer], self.block_tables[layer], self.context_lens)
        dense = (shape.batch, shape.context, shape.kv_heads, shape.head_dim)
        key, value = (rows.view(dense).transpose(1, 2).contiguous() for rows in gathered)
        return key, value

    def calls(self) -> list[Call]:
        """Of pagedkv, one a layer."""
        out = torch.empty_like(self.query)

        def call(layer: int) -> torch.Tensor:
            pagedkv.paged_attention(
                self.query,
                self.block_tables[layer],
                *self.pools[layer],
                self.context_lens,
                query_start_loc=None if self.shape.query_len == 1 else self.query_start_loc,
                max_query_len=self.shape.query_len,
                out=out,
            )
            return out

        return [functools.partial(call, layer) for layer in range(self.num_layers)]

    def error(self, out: torch.Tensor) -> float:
        """Relative L2 error against float32 arithmetic, of one sequence and KV head, at most 128 tokens."""
        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        tokens = self.block_tables[0][-1].long()
        key, value = (pool[tokens, :, -1].float().flatten(0, 1)[: shape.context] for pool in self.pools[0])
        num_rows = min(shape.query_len, 128)
        query, found = (rows[-num_rows:, -group:].float() for rows in (self.query, out))
        scores = torch.einsum("qgd,kd->gqk", query, key) * shape.head_dim**-0.5
        position = torch.arange(shape.context, device=query.device)
        scores.masked_fill_(position > position[-num_rows:, None], -math.inf)
        expected = torch.einsum("gqk,kd->qgd", scores.softmax(-1), value)
        return float((found - expected).norm() / expected.norm())


def _rehearsal(shape: Shape) -> Shape:
    """The same, small enough for a CPU."""
    batch, query_len = min(shape.batch, 2), min(shape.query_len, 64)
    context = query_len if shape.query_len == shape.context else query_len + 255
    return dataclasses.replace(shape, batch=batch, query_len=query_len, context=context)


def run_row(
    name: str, shape: Shape, device: torch.device, bandwidth: float, rate: float
) -> dict[str, object]:
    """Check and time a row's contenders, and print them."""
    problem = Problem(shape, device)
    calls = {"pagedkv": problem.calls(), **gpu_peers.peer_calls(problem, name in FLEX_ROWS)}
    errors = {}
    for contender in list(calls):
        try:
            errors[contender] = problem.error(calls[contender][0]())
        except Exception as reason:  # a peer's own kind
            if contender == "pagedkv":
                raise
            print(f"  {contender} is left out, it says: {str(reason).strip().splitlines()[0]}")
            del calls[contender]
            continue
        if not errors[contender] <= (4e-2 if shape.cache_dtype else LARGEST_ERROR):
            print(f"  {contender} is left out, its error is {errors[contender]:.2g}")
            del calls[contender]
    samples = gpu_timing.measure(calls, device)
    floor = max(shape.kv_bytes / bandwidth, shape.flops / rate)
    print(f"{name}  ({shape.kv_bytes / 1e6:.1f} MB, {shape.flops / 1e9:.1f} GFLOP)")
    for contender, seconds in samples.items():
        median = statistics.median(seconds)
        relative = timing.ratio(samples, contender, "pagedkv") if "pagedkv" in samples else math.nan
        print(
            f"  {contender:<20}{median * 1e6:>10.1f} us{shape.kv_bytes / median / 1e12:>7.2f} TB/s"
            f"{shape.flops / median / 1e12:>7.0f} TFLOP/s{floor / median:>7.1%} of the limit"
            f"{relative:>7.2f}x  error {errors[contender]:.1e}",
            flush=True,
        )
    return {"floor": floor, "samples": samples, "errors": errors}


def main() -> None:
    """Run the rows that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=120, help="no row begins after so many")
    parser.add_argument("--rows", nargs="*", default=[""], help="the rows whose names begin so")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(timing.machine_line())
    device, end = torch.device(arguments.device), time.monotonic() + arguments.seconds
    bandwidth, rate = gpu_timing.copy_bandwidth(device), gpu_timing.matrix_rate(device)
    print(
        f"limits: copy {bandwidth / 1e12:.2f} TB/s read and written, bf16 product {rate / 1e12:.0f} TFLOP/s"
    )
    results: dict[str, object] = {"bandwidth": bandwidth, "rate": rate}
    for name, shape in ROWS.items():
        if not name.startswith(tuple(arguments.rows)):
            continue
        if time.monotonic() > end:
            print(f"left out for want of time: {name}")
            continue
        shape = shape if device.type == "cuda" else _rehearsal(shape)
        try:
            results[name] = run_row(name, shape, device, bandwidth, rate)
        except (RuntimeError, NotImplementedError) as reason:
            print(f"FAILED {name}: {reason}")
            results[name] = {"failed": str(reason)}
        if arguments.json:
            arguments.json.write_text(json.dumps(results))
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
