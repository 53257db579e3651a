"""The fake (meta) implementations of the operators, for `torch.compile` and `torch.export`.

A fake repeats the checks of dtypes and shapes that csrc/bindings makes of a real call, so that tracing fails
where the call would, and says what the operator returns. What depends on values is left to the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., object])

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_CACHE_DTYPES = _FLOAT_DTYPES + _QUANTISED_DTYPES


def _fake(op: str) -> Callable[[_Function], _Function]:
    """Register a fake implementation; a typed name for torch's untyped decorator."""
    register: Callable[[_Function], _Function] = torch.library.register_fake(op)
    return register


def check_dims(tensor: Tensor, name: str, pattern: str) -> None:
    """Raise a ValueError unless the tensor has as many dimensions as the pattern."""
    if tensor.dim() != pattern.count(",") + 1:
        raise ValueError(f"{name} must be {pattern}, got the shape {list(tensor.shape)}")


def _check_shape(tensor: Tensor, name: str, pattern: str, *sizes: int | None) -> None:
    check_dims(tensor, name, pattern)
    for dim, (size, expected) in enumerate(zip(tensor.shape, sizes, strict=True)):
        if expected is not None and size != expected:
            raise ValueError(
                f"{name} must be {pattern}, got the shape {list(tensor.shape)}; "
                f"dimension {dim} must be {expected}"
            )


def _check_devices(cache: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != cache.device:
            raise ValueError(f"{name} is on {tensor.device}, but key_cache is on {cache.device}")


def _check_dtype(tensor: Tensor, name: str, *supported: torch.dtype) -> None:
    if tensor.dtype not in supported:
        raise TypeError(f"{name} has dtype {tensor.dtype}; supported: {', '.join(map(str, supported))}")


def _check_vector(tensor: Tensor | None, name: str, dtype: torch.dtype, pattern: str, size: int) -> None:
    if tensor is not None:
        _check_dtype(tensor, name, dtype)
        _check_shape(tensor, name, pattern, size)


def _check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    pattern = "[num_blocks, block_size, num_kv_heads, head_dim]"
    _check_dtype(key_cache, "key_cache", *_CACHE_DTYPES)
    _check_dtype(value_cache, "value_cache", key_cache.dtype)
    check_dims(key_cache, "key_cache", pattern)
    _check_shape(value_cache, "value_cache", pattern, *key_cache.shape[:3], None)
    for dim, what in ((1, "block_size"), (2, "num_kv_heads")):
        if key_cache.shape[dim] < 1:
            raise ValueError(f"key_cache has the shape {list(key_cache.shape)}; {what} must be at least 1")


def _check_scales(
    key_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
) -> None:
    num_kv_heads = key_cache.shape[2]
    for name, scale, value in (("k_scale", k_scale, k_scale_value), ("v_scale", v_scale, v_scale_value)):
        given = scale is not None or value is not None
        if given and key_cache.dtype in _FLOAT_DTYPES:
            raise ValueError(f"{name} was given, but a {key_cache.dtype} cache stores values as they are")
        if not given and key_cache.dtype == torch.int8:
            raise ValueError(f"{name} is missing: an int8 cache needs both k_scale and v_scale")
        _check_vector(scale, name, torch.float32, "[num_kv_heads]", num_kv_heads)


def _check_tables(block_tables: Tensor, context_lens: Tensor, kv_starts: Tensor | None) -> None:
    _check_dtype(block_tables, "block_tables", torch.int32)
    check_dims(block_tables, "block_tables", "[num_seqs, max_blocks_per_seq]")
    num_seqs = block_tables.shape[0]
    _check_vector(context_lens, "context_lens", torch.int32, "[num_seqs]", num_seqs)
    _check_vector(kv_starts, "kv_starts", torch.int32, "[num_seqs]", num_seqs)


def _check_block_copy(
    sources: list[Tensor], destinations: list[Tensor], names: tuple[str, str], block_mapping: Tensor
) -> None:
    if len(sources) != len(destinations):
        raise ValueError(f"{names[0]} has {len(sources)} tensors, but {names[1]} has {len(destinations)}")
    for source, destination in zip(sources, destinations, strict=True):
        for cache, name in ((source, names[0]), (destination, names[1])):
            _check_dtype(cache, name, *_CACHE_DTYPES)
            check_dims(cache, name, "[num_blocks, block_size, num_kv_heads, head_dim]")
    for caches, name in ((sources, names[0]), (destinations, names[1])):
        for cache in caches:
            if cache.shape[0] != caches[0].shape[0]:
                raise ValueError(f"{name} has tensors of {cache.shape[0]} and {caches[0].shape[0]} blocks")
    _check_dtype(block_mapping, "block_mapping", torch.int64)
    _check_shape(block_mapping, "block_mapping", "[num_pairs, 2]", None, 2)


def _check_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
) -> None:
    _check_caches(key_cache, value_cache)
    _check_dtype(key, "key", *_FLOAT_DTYPES)
    _check_dtype(value, "value", key.dtype)
    _check_dtype(key_cache, "key_cache", key.dtype, *_QUANTISED_DTYPES)
    _check_dtype(slot_mapping, "slot_mapping", torch.int64)
    _check_devices(key_cache, key=key, value=value, value_cache=value_cache, slot_mapping=slot_mapping)
    num_kv_heads, head_dim = key_cache.shape[2:]
    _check_shape(key, "key", "[num_tokens, num_kv_heads, head_dim]", None, num_kv_heads, head_dim)
    _check_shape(
        value,
        "value",
        "[num_tokens, num_kv_heads, head_dim]",
        key.shape[0],
        num_kv_heads,
        value_cache.shape[3],
    )
    check_dims(slot_mapping, "slot_mapping", "[num_tokens]")
    if slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping has {slot_mapping.shape[0]} entries, more than the {key.shape[0]} tokens of key"
        )
    _check_scales(key_cache, k_scale, v_scale, k_scale_value, v_scale_value)


@_fake("pagedkv::paged_attention")
def _(
    query: Tensor,
    block_tables: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    query_start_loc: Tensor | None,
    max_query_len: int,
    softmax_scale: float,
    causal: bool,
    window: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
    kv_starts: Tensor | None,
    tree_mask: Tensor | None,
    split_size: int | None,
) -> None:
    _check_dtype(query, "query", *_FLOAT_DTYPES)
    _check_caches(key_cache, value_cache)
    _check_devices(
        key_cache,
        query=query,
        block_tables=block_tables,
        value_cache=value_cache,
        context_lens=context_lens,
        out=out,
        lse=lse,
        query_start_loc=query_start_loc,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        kv_starts=kv_starts,
        tree_mask=tree_mask,
    )
    _check_dtype(key_cache, "key_cache", query.dtype, *_QUANTISED_DTYPES)
    _check_dtype(out, "out", query.dtype)
    _check_tables(block_tables, context_lens, kv_starts)
    _check_scales(key_cache, k_scale, v_scale, k_scale_value, v_scale_value)
    num_kv_heads, head_dim = key_cache.shape[2:]
    for cache, name in ((key_cache, "key_cache"), (value_cache, "value_cache")):
        if not 8 <= cache.shape[3] <= 256 or cache.shape[3] % 8 != 0:
            raise ValueError(
                f"{name} has head_dim {cache.shape[3]}; supported: every multiple of 8 from 8 to 256"
            )
    _check_shape(query, "query", "[num_tokens, num_heads, head_dim]", None, None, head_dim)
    num_tokens, num_heads, _head_dim = query.shape
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        raise ValueError(
            f"query has {num_heads} heads and key_cache {num_kv_heads}; "
            "num_heads must be a multiple of num_kv_heads"
        )
    _check_shape(
        out, "out", "[num_tokens, num_heads, value_head_dim]", num_tokens, num_heads, value_cache.shape[3]
    )
    num_seqs = block_tables.shape[0]
    if query_start_loc is None:
        _check_shape(query, "query", "[num_seqs, num_heads, head_dim]", num_seqs, None, None)
    _check_vector(query_start_loc, "query_start_loc", torch.int32, "[num_seqs + 1]", num_seqs + 1)
    _check_vector(alibi_slopes, "alibi_slopes", torch.float32, "[num_heads]", num_heads)
    _check_vector(sinks, "sinks", torch.float32, "[num_heads]", num_heads)
    if tree_mask is not None:
        _check_dtype(tree_mask, "tree_mask", torch.bool)
        _check_shape(tree_mask, "tree_mask", "[num_tokens, max_tree]", num_tokens, None)


@_fake("pagedkv::reshape_and_cache")
def _(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
) -> None:
    _check_write(
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_scale_value, v_scale_value
    )


@_fake("pagedkv::rope_and_cache")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
) -> None:
    _check_write(
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_scale_value, v_scale_value
    )
    _check_dtype(query, "query", key.dtype)
    _check_dtype(cos, "cos", torch.float32, query.dtype)
    _check_dtype(sin, "sin", cos.dtype)
    _check_shape(query, "query", "[num_tokens, num_heads, head_dim]", key.shape[0], None, key.shape[2])
    check_dims(cos, "cos", "[max_position, rotary_dim / 2]")
    _check_shape(sin, "sin", "[max_position, rotary_dim / 2]", *cos.shape)
    _check_vector(positions, "positions", torch.int64, "[num_tokens]", query.shape[0])
    if 2 * cos.shape[1] > query.shape[2]:
        raise ValueError(
            f"cos is [max_position, {cos.shape[1]}], that is rotary_dim {2 * cos.shape[1]}, "
            f"more than head_dim {query.shape[2]}"
        )


@_fake("pagedkv::copy_blocks")
def _(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    _check_block_copy(key_caches, value_caches, ("key_caches", "value_caches"), block_mapping)


@_fake("pagedkv::swap_blocks")
def _(sources: list[Tensor], destinations: list[Tensor], block_mapping: Tensor) -> None:
    _check_block_copy(sources, destinations, ("source", "destination"), block_mapping)
    for source, destination in zip(sources, destinations, strict=True):
        _check_dtype(destination, "destination", source.dtype)
        _check_shape(
            destination,
            "destination",
            "[num_blocks, block_size, num_kv_heads, head_dim]",
            None,
            *source.shape[1:],
        )


@_fake("pagedkv::gather_kv")
def _(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    kv_starts: Tensor | None,
    total_tokens: int | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    _check_caches(key_cache, value_cache)
    _check_tables(block_tables, context_lens, kv_starts)
    _check_scales(key_cache, k_scale, v_scale, k_scale_value, v_scale_value)
    if total_tokens is not None and total_tokens < 0:
        raise ValueError(f"total_tokens is {total_tokens}; it must not be negative")
    if dtype is not None and dtype not in _FLOAT_DTYPES:
        raise TypeError(f"dtype is {dtype}; supported: {', '.join(map(str, _FLOAT_DTYPES))}")
    if dtype is None:
        dtype = torch.float32 if key_cache.dtype in _QUANTISED_DTYPES else key_cache.dtype
    rows = torch.library.get_ctx().new_dynamic_size() if total_tokens is None else total_tokens
    num_kv_heads = key_cache.shape[2]
    return (
        key_cache.new_empty((rows, num_kv_heads, key_cache.shape[3]), dtype=dtype),
        value_cache.new_empty((rows, num_kv_heads, value_cache.shape[3]), dtype=dtype),
    )


@_fake("pagedkv::merge_attn_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check_dtype(out_a, "out_a", *_FLOAT_DTYPES)
    _check_dtype(out_b, "out_b", out_a.dtype)
    check_dims(out_a, "out_a", "[num_tokens, num_heads, head_dim]")
    _check_shape(out_b, "out_b", "[num_tokens, num_heads, head_dim]", *out_a.shape)
    for lse, name in ((lse_a, "lse_a"), (lse_b, "lse_b")):
        _check_dtype(lse, name, torch.float32)
        _check_shape(lse, name, "[num_tokens, num_heads]", *out_a.shape[:2])
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
