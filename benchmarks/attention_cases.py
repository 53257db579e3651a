"""One attention problem for all contenders: a shape, its data, pagedkv's calls, and the answer in float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import pagedkv
from pagedkv._pool import advise_huge_pages

# In a model every layer has a cache of its own, and by the next step the others have passed through the CPU's
# caches. Calls rotate over as many copies as hold this many bytes, so that each finds its own in memory.
COLD_BYTES = 256 * 2**20
# Enough for every shape of a megabyte and more. Each copy has tensors on huge pages, and each of those is a
# mapping of its own, of which a process may have no more than vm.max_map_count.
MAX_LAYERS = 256
INT8_SCALE = 1 / 32  # a power of two, so that the bfloat16 values that the peers get are the same

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What is computed: every sequence has `query_len` queries over `context` keys, their own included."""

    batch: int = 8
    query_len: int = 1
    context: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 32
    dtype: str = "bf16"
    cache_dtype: str = ""  # that of the queries where empty
    block_order: str = "random"  # or "sequential"
    window: int = 0  # 0: off
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lse: bool = False

    @property
    def stored(self) -> torch.dtype:
        """What the caches hold."""
        return DTYPES[self.cache_dtype or self.dtype]

    @property
    def is_plain(self) -> bool:
        """Whether contenders without options can take part."""
        return not (self.window or self.softcap or self.alibi or self.sinks or self.lse or self.cache_dtype)

    @property
    def blocks_per_seq(self) -> int:
        """Rounded up."""
        return -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one layer, as they are cached."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * self.stored.itemsize

    @property
    def flops(self) -> int:
        """Of both products, without what causality hides."""
        past = self.context - self.query_len
        visible = self.query_len * past + self.query_len * (self.query_len + 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * visible


@dataclass
class Case:
    """The data of a shape, for one or more layers. Blocks lie all over the pool, in another order each layer.

    Attributes:
        keys, values: one a layer, contiguous `[batch, kv_heads, context, head_dim]`.
        block_tables: one a layer, `[batch, blocks_per_seq]`.
        query: `[batch * query_len, heads, head_dim]`.
    """

    shape: Shape
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    block_tables: list[torch.Tensor]
    query: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def num_layers(self) -> int:
        """Copies that calls rotate over."""
        return len(self.keys)

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return self.shape.head_dim**-0.5

    def slots(self, layer: int, seq_idx: int) -> torch.Tensor:
        """Where the sequence's tokens lie, `[context]` int64."""
        tokens = torch.arange(self.shape.context)
        size = self.shape.block_size
        return self.block_tables[layer][seq_idx, tokens // size].long() * size + tokens % size

    def rows(self, tensors: list[torch.Tensor], layer: int, seq_idx: int) -> torch.Tensor:
        """One sequence's keys or values, token after token: `[context, kv_heads, head_dim]`."""
        return tensors[layer][seq_idx].transpose(0, 1).contiguous()


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on huge pages, where there are such: as `PagedKVCache` has its pool, here for everybody."""
    tensor = torch.empty(*shape, dtype=dtype)
    advise_huge_pages(tensor)
    return tensor


def make_case(shape: Shape) -> Case:
    """Random data, the same for the same shape."""
    generator = torch.Generator().manual_seed(shape.batch * 1_000_003 + shape.context)
    dtype = DTYPES[shape.dtype]
    num_layers = min(math.ceil(COLD_BYTES / shape.kv_bytes), MAX_LAYERS)
    # Enough numbers to tell all rows apart, repeated: a gigabyte of fresh ones would take longer than a row.
    noise = torch.randn(1_000_003, generator=generator)
    if shape.cache_dtype == "int8":
        noise = (noise / INT8_SCALE).round().clamp(-127, 127) * INT8_SCALE
    elif shape.cache_dtype:
        noise = noise.to(shape.stored).float()
    noise = noise.to(dtype)

    def dense(offset: int) -> torch.Tensor:
        tensor = empty(shape.batch, shape.kv_heads, shape.context, shape.head_dim, dtype=dtype)
        flat, begin = tensor.view(-1), -(offset * 7919 % len(noise))
        for i in range(begin, len(flat), len(noise)):
            part = flat[max(i, 0) : i + len(noise)]
            part.copy_(noise[max(-i, 0) :][: len(part)])
        return tensor

    def table() -> torch.Tensor:
        num_blocks = shape.batch * shape.blocks_per_seq
        order = torch.arange(num_blocks)
        if shape.block_order == "random":
            order = torch.randperm(num_blocks, generator=generator)
        return order.view(shape.batch, -1).to(torch.int32)

    num_tokens = shape.batch * shape.query_len
    return Case(
        shape=shape,
        keys=[dense(2 * i) for i in range(num_layers)],
        values=[dense(2 * i + 1) for i in range(num_layers)],
        block_tables=[table() for _ in range(num_layers)],
        query=torch.randn(num_tokens, shape.heads, shape.head_dim, generator=generator).to(dtype),
        context_lens=torch.full((shape.batch,), shape.context, dtype=torch.int32),
        query_start_loc=torch.arange(0, num_tokens + 1, shape.query_len, dtype=torch.int32),
        alibi_slopes=torch.logspace(-1, -8, shape.heads, base=2.0) if shape.alibi else None,
        sinks=torch.linspace(-1, 1, shape.heads) if shape.sinks else None,
    )


def pagedkv_pools(case: Case, layout: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer in blocks, laid out `layout`, which is NHD or HND."""
    shape = case.shape
    scale = INT8_SCALE if shape.cache_dtype == "int8" else None
    num_blocks = shape.batch * shape.blocks_per_seq
    pools = []
    for layer in range(case.num_layers):
        if layout == "HND":
            pair = [
                empty(num_blocks, shape.kv_heads, shape.block_size, shape.head_dim, dtype=shape.stored)
                for _ in range(2)
            ]
            key_cache, value_cache = (tensor.transpose(1, 2) for tensor in pair)
        else:
            key_cache, value_cache = (
                empty(num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, dtype=shape.stored)
                for _ in range(2)
            )
        for i in range(shape.batch):
            key, value = case.rows(case.keys, layer, i), case.rows(case.values, layer, i)
            slots = case.slots(layer, i)
            pagedkv.reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale=scale, v_scale=scale)
        pools.append((key_cache, value_cache))
    return pools


def pagedkv_calls(case: Case, pools: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Call]:
    """One call a layer."""
    shape = case.shape
    scale = INT8_SCALE if shape.cache_dtype == "int8" else None
    out = torch.empty_like(case.query)

    def call(layer: int) -> torch.Tensor:
        pagedkv.paged_attention(
            case.query,
            case.block_tables[layer],
            *pools[layer],
            case.context_lens,
            query_start_loc=None if shape.query_len == 1 else case.query_start_loc,
            max_query_len=shape.query_len,
            window=shape.window or None,
            softcap=shape.softcap,
            alibi_slopes=case.alibi_slopes,
            sinks=case.sinks,
            k_scale=scale,
            v_scale=scale,
            return_lse=shape.lse,
            out=out,
        )
        return out

    return [functools.partial(call, layer) for layer in range(case.num_layers)]


def in_turn(calls: list[Call]) -> Callable[[], object]:
    """A call that is another layer's each time."""
    turns: Iterator[Call] = itertools.cycle(calls)
    return lambda: next(turns)()


def error(case: Case, out: torch.Tensor) -> float:
    """Relative L2 error of layer 0's output against float64, on two sequences and two KV heads."""
    shape = case.shape
    group = shape.heads // shape.kv_heads
    differences, norms = 0.0, 0.0
    for seq_idx in {0, shape.batch - 1}:
        rows = slice(seq_idx * shape.query_len, (seq_idx + 1) * shape.query_len)
        for kv_head_idx in {0, shape.kv_heads - 1}:
            heads = slice(kv_head_idx * group, (kv_head_idx + 1) * group)
            expected = _attend_in_float64(case, seq_idx, kv_head_idx, case.query[rows, heads])
            differences += float((out[rows, heads].double() - expected).square().sum())
            norms += float(expected.square().sum())
    return math.sqrt(differences / norms)


def _attend_in_float64(case: Case, seq_idx: int, kv_head_idx: int, query: torch.Tensor) -> torch.Tensor:
    """`[query_len, group, head_dim]`, by materialised scores."""
    shape, group = case.shape, query.shape[1]
    key, value = (tensors[0][seq_idx, kv_head_idx].double() for tensors in (case.keys, case.values))
    scores = torch.einsum("qgd,kd->gqk", query.double(), key) * case.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    heads = slice(kv_head_idx * group, (kv_head_idx + 1) * group)
    position = torch.arange(shape.context - shape.query_len, shape.context)[:, None]
    distance = torch.arange(shape.context) - position
    if case.alibi_slopes is not None:
        scores += case.alibi_slopes[heads].double()[:, None, None] * distance
    hidden = distance > 0
    if shape.window:
        hidden |= distance <= -shape.window
    scores.masked_fill_(hidden, -math.inf)
    if case.sinks is not None:
        sink = case.sinks[heads].double()[:, None, None].expand(-1, shape.query_len, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : shape.context]
    return torch.einsum("gqk,kd->qgd", weights, value)
