"""The default table of bench_paged_attention.py: its rows, and what each has to reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attention_cases import Shape


@dataclass(frozen=True)
class Bar:
    """One thing to reach.

    Attributes:
        kind: what is measured.
            "speed": the peer's time over pagedkv's. `of` names peers separated by commas, of which the
            fastest counts, or is "any". "roof": the time at the machine's limit over pagedkv's; `of` is
            "read" or "GEMM". "cost": a variant's time over the plain one's, or over another one's, `of`
            being "a" or "a / b". "gain": the inverse. "error": against float64.
        of: see above.
        limit: the value may not be below it, or, with "cost" and "error", above it.
        layout: of the pool: "best", or "NHD".
    """

    kind: str
    of: str
    limit: float
    layout: str = "best"

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return self.kind not in ("cost", "error")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        variants: by name, fields of the shape that differ: measured beside it in the same rounds.
    """

    name: str
    shape: Shape
    threads: int
    bars: list[Bar]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)


# By (query heads to a KV head, threads): speed against vLLM, with the best layout and with NHD.
_DECODE_SPEED = {
    (1, 1): (2.2, None),
    (3, 1): (2.5, 2.3),
    (4, 1): (2.5, 2.3),
    (8, 1): (3.2, 2.6),
    (1, 2): (1.7, None),
    (3, 2): (2.0, 1.95),
    (4, 2): (2.0, 1.95),
    (8, 2): (2.8, 2.25),
}
MEAN_READ_ROOF = 0.75  # the geometric mean over the rows of `decode`
BF16_ERROR = Bar("error", "float64", 3e-3)


def is_decode(row: Row) -> bool:
    """Whether the row counts for MEAN_READ_ROOF."""
    group = row.shape.heads // row.shape.kv_heads
    return row.name.startswith("decode-") and row.shape.dtype == "bf16" and group <= 8


def _shape(heads: str, batch: int, context: int, block_size: int = 32, **changes: Any) -> Shape:
    num_heads, num_kv_heads = map(int, heads.split("/"))
    changes.setdefault("head_dim", 64 if num_heads == 9 else 128)
    return Shape(
        batch=batch, context=context, heads=num_heads, kv_heads=num_kv_heads, block_size=block_size, **changes
    )


def decode(heads: str, batch: int, context: int, block_size: int, threads: int) -> Row:
    """bfloat16, groups up to 8: bound by memory."""
    shape = _shape(heads, batch, context, block_size)
    best, nhd = _DECODE_SPEED[shape.heads // shape.kv_heads, threads]
    bars = [Bar("speed", "vLLM", best), Bar("speed", "any", 1.0), BF16_ERROR]
    if nhd is not None:
        bars.append(Bar("speed", "vLLM", nhd, "NHD"))
    return Row(f"decode-{heads}-b{batch}-c{context}-p{block_size}-t{threads}", shape, threads, bars)


def large_group(batch: int, context: int, block_size: int, threads: int) -> Row:
    """64 query heads to the KV head: bound by arithmetic."""
    bars = [Bar("roof", "GEMM", 0.78 if threads == 1 else 0.76), Bar("speed", "any", 2.0), BF16_ERROR]
    shape = _shape("64/1", batch, context, block_size)
    return Row(f"decode-64/1-b{batch}-c{context}-p{block_size}-t{threads}", shape, threads, bars)


def prefill(batch: int, query_len: int, past: int, threads: int, limit: float) -> Row:
    """bfloat16, 32/8 heads."""
    bars = [Bar("roof", "GEMM", limit), Bar("speed", "SGLang,OpenVINO,vLLM", 1.25), BF16_ERROR]
    shape = _shape("32/8", batch, past + query_len, query_len=query_len)
    name = f"prefill-b{batch}-q{query_len}" + (f"-past{past}" if past else "")
    return Row(f"{name}-t{threads}", shape, threads, bars)


def prefill_float32(query_len: int, threads: int) -> Row:
    """float32, 32/8 heads."""
    bars = [Bar("roof", "GEMM", 0.85), Bar("speed", "any", 0.97)]
    shape = _shape("32/8", 1, query_len, query_len=query_len, dtype="fp32")
    return Row(f"prefill-fp32-b1-q{query_len}-t{threads}", shape, threads, bars)


def decode_float32(heads: str, batch: int, context: int, threads: int) -> Row:
    """float32: vLLM, and contiguous SDPA, which is faster on some shapes."""
    bars = [
        Bar("speed", "vLLM", 1.5 if threads == 1 else 1.0),
        Bar("speed", "SDPA contiguous,SDPA folded", 1.0),
    ]
    shape = _shape(heads, batch, context, dtype="fp32")
    return Row(f"decode-fp32-{heads}-b{batch}-c{context}-t{threads}", shape, threads, bars)


def variants(name: str, bars: list[Bar], changes: dict[str, dict[str, Any]], **plain: Any) -> Row:
    """Variants of one shape beside it, one thread."""
    return Row(name, _shape("32/8", 8, 4096, **plain), 1, bars, changes)


ROWS = [
    decode("32/32", 1, 4096, 32, threads=1),
    decode("32/32", 8, 2048, 16, threads=2),
    decode("9/3", 8, 4096, 16, threads=1),
    decode("9/3", 64, 2048, 32, threads=2),
    decode("32/8", 1, 512, 32, threads=1),
    decode("32/8", 1, 16384, 32, threads=1),
    decode("32/8", 8, 4096, 16, threads=1),
    decode("32/8", 64, 512, 32, threads=1),
    decode("32/8", 1, 4096, 16, threads=2),
    decode("32/8", 8, 16384, 32, threads=2),
    decode("64/8", 8, 4096, 32, threads=1),
    decode("64/8", 64, 512, 16, threads=2),
    large_group(8, 4096, 32, threads=1),
    large_group(64, 512, 16, threads=1),
    large_group(8, 4096, 16, threads=2),
    prefill(8, 128, 0, threads=1, limit=0.68),
    prefill(1, 512, 0, threads=1, limit=0.82),
    prefill(1, 2048, 0, threads=1, limit=0.88),
    prefill(1, 512, 4096, threads=1, limit=0.90),
    prefill(8, 128, 0, threads=2, limit=0.68),
    prefill(1, 2048, 0, threads=2, limit=0.88),
    prefill_float32(512, threads=1),
    prefill_float32(2048, threads=2),
    decode_float32("32/8", 8, 4096, threads=1),
    decode_float32("32/32", 1, 4096, threads=1),
    decode_float32("32/8", 8, 4096, threads=2),
    Row(
        "decode-fp16-32/8-b8-c4096-t1", _shape("32/8", 8, 4096, dtype="fp16"), 1, [Bar("speed", "vLLM", 2.0)]
    ),
    variants(
        "options-t1",
        [
            Bar("cost", name, 1.25 if name == "softcap" else 1.1)
            for name in ("window", "softcap", "alibi", "sinks", "lse")
        ],
        {
            "window": {"window": 4000},
            "softcap": {"softcap": 30.0},
            "alibi": {"alibi": True},
            "sinks": {"sinks": True},
            "lse": {"lse": True},
        },
    ),
    variants(
        "blocks-t1",
        [
            *(Bar("cost", f"block {size}", 1.3 if size == 1 else 1.1) for size in (1, 7, 16, 100, 128)),
            Bar("cost", "block 16 / block 16 sequential", 1.05),
            Bar("cost", "plain / block 32 sequential", 1.05),
        ],
        {
            **{f"block {size}": {"block_size": size} for size in (1, 7, 16, 100, 128)},
            "block 16 sequential": {"block_size": 16, "block_order": "sequential"},
            "block 32 sequential": {"block_order": "sequential"},
        },
    ),
    variants(
        "quantised-t1",
        [Bar("gain", name, 1.4) for name in ("int8", "e4m3", "e5m2")],
        {name: {"cache_dtype": name} for name in ("int8", "e4m3", "e5m2")},
    ),
]
