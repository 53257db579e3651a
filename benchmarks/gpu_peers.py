"""What pagedkv is measured beside on a GPU: torch's attention, and FlashInfer where it can be imported."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

if TYPE_CHECKING:
    from gpu_attention import Problem

Call = Callable[[], torch.Tensor]

FLEX_PAGE = 128  # FlexAttention's pages are as large as its mask's blocks


def peer_calls(problem: Problem, with_flex: bool) -> dict[str, Sequence[Call]]:
    """One call a layer, by the peer's name. Each returns what `Problem.error` compares."""
    if problem.shape.cache_dtype:
        return {}
    calls: dict[str, Sequence[Call]] = dict(_sdpa(problem))
    if with_flex:
        calls["FlexAttention paged"] = _flex(problem)
    with contextlib.suppress(ImportError):
        calls["FlashInfer"] = _flashinfer(problem)
    return calls


def _sdpa(problem: Problem) -> dict[str, list[Call]]:
    """On keys and values that lie contiguously, head after head: what a cache without pages would hold."""
    shape = problem.shape
    contiguous = [problem.contiguous(layer) for layer in range(problem.num_layers)]
    query = problem.query.view(shape.batch, shape.query_len, shape.heads, shape.head_dim).transpose(1, 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    mask = causal_lower_right(shape.query_len, shape.context) if 1 < shape.query_len < shape.context else None
    is_causal = 1 < shape.query_len == shape.context

    def call(backend: SDPBackend, layer: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = attend(query, *contiguous[layer], attn_mask=mask, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(problem.query.shape)

    def folded(layer: int) -> torch.Tensor:
        """The group as query tokens, so that keys and values are read once."""
        rows = query.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend(rows, *contiguous[layer]).reshape(problem.query.shape)

    layers = range(problem.num_layers)
    backends = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
    calls: dict[str, list[Call]] = {
        name: [functools.partial(call, backend, layer) for layer in layers]
        for name, backend in backends.items()
    }
    if shape.query_len == 1:
        calls["SDPA folded"] = [functools.partial(folded, layer) for layer in layers]
    return calls


def _flex(problem: Problem) -> list[Call]:
    """torch.nn.attention.experimental's PagedAttention over a compiled flex_attention."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

    shape, device = problem.shape, problem.query.device
    pages_per_seq = shape.context // FLEX_PAGE
    num_pages = shape.batch * pages_per_seq
    paged = PagedAttention(num_pages, FLEX_PAGE, shape.batch, device=str(device))
    order = torch.randperm(num_pages, device=device).view(shape.batch, pages_per_seq)
    paged.page_table[:, :pages_per_seq] = order
    logical = torch.arange(pages_per_seq, device=device).expand(shape.batch, -1)
    paged.physical_to_logical.scatter_(1, order, logical)
    caches = []
    positions = torch.arange(shape.context, device=device).expand(shape.batch, -1)
    for layer in range(problem.num_layers):
        key, value = problem.contiguous(layer)
        flat = (1, shape.kv_heads, num_pages * FLEX_PAGE, shape.head_dim)
        key_cache, value_cache = (torch.empty(flat, dtype=key.dtype, device=device) for _ in range(2))
        paged.assign(torch.arange(shape.batch, device=device), positions, key, value, key_cache, value_cache)
        caches.append((key_cache, value_cache))
    mask = create_block_mask(noop_mask, shape.batch, 1, 1, shape.context, device=device, BLOCK_SIZE=FLEX_PAGE)
    block_mask = paged.convert_logical_block_mask(mask)
    score_mod = paged.get_score_mod(None)
    compiled = torch.compile(flex_attention, fullgraph=True)
    query = problem.query.view(shape.batch, 1, shape.heads, shape.head_dim).transpose(1, 2)

    def call(layer: int) -> torch.Tensor:
        out = compiled(query, *caches[layer], score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(problem.query.shape)

    return [functools.partial(call, layer) for layer in range(problem.num_layers)]


def _flashinfer(problem: Problem) -> list[Call]:
    """Its paged decode or prefill, planned beforehand; planning is not in its time."""
    import flashinfer

    shape, device = problem.shape, problem.query.device
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    indptr = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.blocks_per_seq
    last = torch.full(
        (shape.batch,), (shape.context - 1) % shape.block_size + 1, dtype=torch.int32, device=device
    )
    heads = (shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)
    calls: list[Call] = []
    for layer in range(problem.num_layers):
        indices = problem.block_tables[layer].flatten()
        if shape.query_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(indptr, indices, last, *heads, q_data_type=problem.query.dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(
                problem.query_start_loc,
                indptr,
                indices,
                last,
                *heads,
                causal=True,
                q_data_type=problem.query.dtype,
            )
        calls.append(functools.partial(wrapper.run, problem.query, problem.pools[layer]))
    return calls
