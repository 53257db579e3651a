"""The operators: typed wrappers around `torch.ops.pagedkv.*`.

A wrapper only normalises its arguments (allocates `out`, unbatches, sorts a scale into a float or a tensor);
every check of a real call is made in C++, once, in csrc/bindings. Their fake (meta) implementations are in
`_fakes.py`.

Words: a *block* is a page of the KV cache; `block_tables` maps a sequence's logical blocks to physical ones;
a *slot* is `physical_block * block_size + offset`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pagedkv import _loader
from pagedkv._fakes import check_dims

__all__ = [
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "paged_attention",
    "reshape_and_cache",
    "rope_and_cache",
    "set_debug",
    "swap_blocks",
]

Scale: TypeAlias = "float | Tensor | None"
Caches: TypeAlias = "Tensor | Sequence[Tensor]"
BlockMapping: TypeAlias = "Tensor | Sequence[tuple[int, int]]"

_library = torch.ops.pagedkv


def set_debug(on: bool) -> None:
    """Turn the checks of indices on CUDA tensors on or off.

    On the CPU a block id outside the pool, a context longer than its table and a slot outside the cache are
    always an IndexError. On CUDA such indices stay on the device, where they are masked or skipped; with
    debug on, every call copies them to the host and raises the same errors.

    Args:
        on: whether to check.

    >>> pagedkv.set_debug(False)
    """
    _library._set_debug(on)


def paged_attention(
    query: Tensor,
    block_tables: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor | int,
    *,
    query_start_loc: Tensor | None = None,
    max_query_len: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    kv_starts: Tensor | None = None,
    tree_mask: Tensor | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from ragged queries to keys and values that lie in the blocks of a paged cache.

    Query `i` of a sequence with `q_len` queries stands at position `context_len - q_len + i` and sees the
    keys up to its own (bottom-right causal). With q_len 2, context_len 5 and window 3 (x: visible)::

              key 0 1 2 3 4
        query 0   . x x x .
        query 1   . . x x x

    The score is `q.k * softmax_scale`, then softcap, then ALiBi, then the mask, then a softmax with the sink
    in its denominator; accumulated in float32. Decode, prefill, chunked prefill and batches that mix them are
    one call.

    Args:
        query: `[num_tokens, num_heads, head_dim]` float16, bfloat16 or float32, or `[num_heads, head_dim]`
            for one token of one sequence. head_dim is a multiple of 8 from 8 to 256. Strided views are taken
            as they are.
        block_tables: `[num_seqs, max_blocks_per_seq]` int32 (unbatched: `[n]`). Entries that no visible key
            needs may hold anything.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, the query's dtype, float8_e4m3fn,
            float8_e5m2 or int8. Any strides with a contiguous last dimension.
        value_cache: the same with a head_dim of its own.
        context_lens: `[num_seqs]` int32 tokens in the cache, those of this call included (unbatched: an int).
        query_start_loc: `[num_seqs + 1]` int32, first query token of each sequence, starting at 0
            (FlashAttention's cu_seqlens_q). None: one query token per sequence. Rows past its last entry are
            padding: 0, lse -inf.
        max_query_len: an upper bound of the query lengths, known to the host. None: num_tokens.
        softmax_scale: multiplies q.k. None: `head_dim ** -0.5`.
        causal: False lets every query see all keys.
        window: each query sees the `window` most recent keys, itself included; with `causal=False` those with
            `|key - query| < window`. None: all.
        softcap: `softcap * tanh(score / softcap)`; 0 is off (Gemma 2).
        alibi_slopes: `[num_heads]` float32; adds `slope * (key_position - query_position)` (Press et al.
            2021).
        sinks: `[num_heads]` float32; one more logit per head in the denominator (gpt-oss; Xiao et al. 2023).
        k_scale: key = stored * k_scale, a float or `[num_kv_heads]` float32; for quantised caches (int8 needs
            it).
        v_scale: the same for values.
        kv_starts: `[num_seqs]` int32; keys before it are not seen (left padding).
        tree_mask: `[num_tokens, max_tree]` bool, True = visible, over the last `max_tree` keys of the
            sequence (the last column is the last key); replaces causality among them. For speculative trees.
        split_size: cut the keys at 0, N, 2N, ..., so that a row's result is bit-identical alone and in any
            batch, in decode and in prefill. None: cut for speed.
        return_lse: also return the log-sum-exp.
        out: `[num_tokens, num_heads, value_head_dim]` to write into.

    Returns:
        `[num_tokens, num_heads, value_head_dim]` in the query's dtype; with `return_lse` also the natural
        log-sum-exp `[num_tokens, num_heads]` float32, the sink included. A row that sees no key is 0 with lse
        -inf (or the sink).

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, stride, device or option is not supported; `window` or `split_size` below 1,
            `softcap` below 0, a scale on a float cache, `tree_mask` with `causal=False`, a `query_start_loc`
            that falls or ends late.
        IndexError: on the CPU (or with `set_debug`), a needed block outside the pool or a context longer than
            its table.
        RuntimeError: an input requires grad in grad mode.

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 4.1.

    >>> query, cache = torch.zeros(1, 2, 8), torch.ones(4, 16, 1, 8)
    >>> tables, lens = torch.tensor([[3]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    >>> pagedkv.paged_attention(query, tables, cache, cache, lens)[0, 0, :2]
    tensor([1., 1.])
    """
    unbatched = query.dim() == 2
    if unbatched:
        query, block_tables = query.unsqueeze(0), block_tables.unsqueeze(0)
        out = None if out is None else out.unsqueeze(0)
    if not isinstance(context_lens, Tensor):
        is_int = isinstance(context_lens, (int, torch.SymInt)) and not isinstance(context_lens, bool)
        if not unbatched or not is_int:
            raise TypeError(
                "context_lens must be an int32 tensor [num_seqs], or an int where query is "
                f"[num_heads, head_dim]; got {context_lens!r}"
            )
        context_lens = torch.full((1,), context_lens, dtype=torch.int32, device=query.device)
    elif unbatched and context_lens.dim() == 0:
        context_lens = context_lens.unsqueeze(0)
    check_dims(query, "query", "[num_tokens, num_heads, head_dim]")
    check_dims(value_cache, "value_cache", "[num_blocks, block_size, num_kv_heads, head_dim]")
    num_tokens, num_heads, head_dim = query.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value_cache.shape[3])
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32) if return_lse else None
    k_scale, k_scale_value = _split_scale(k_scale)
    v_scale, v_scale_value = _split_scale(v_scale)
    _require_backend("paged_attention", query)
    _library.paged_attention.default(
        query,
        block_tables,
        key_cache,
        value_cache,
        context_lens,
        out,
        lse,
        query_start_loc,
        num_tokens if max_query_len is None else max_query_len,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        causal,
        window,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        k_scale_value,
        v_scale_value,
        kv_starts,
        tree_mask,
        split_size,
    )
    if unbatched:
        out = out.squeeze(0)
        lse = None if lse is None else lse.squeeze(0)
    return out if lse is None else (out, lse)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Write rows of new keys and values into their slots of the cache, in place.

    `stored = value / scale`, rounded to nearest even. float8 caches saturate at their largest finite value
    (infinity too) and keep NaN; int8 is clamped to +-127 and NaN becomes 0. Every back-end writes the same
    bytes.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]` float16, bfloat16 or float32; any head_dim.
        value: the same with a head_dim of its own.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, the key's dtype, float8_e4m3fn,
            float8_e5m2 or int8.
        value_cache: the same with the value's head_dim.
        slot_mapping: `[n]` int64 with n <= num_tokens: row i goes to slot `slot_mapping[i]`; a negative slot
            is skipped, rows past n are not written. Of rows that name the same slot one whole row ends there.
        k_scale: a float or `[num_kv_heads]` float32, for quantised caches (int8 needs it; float8 defaults to
            1).
        v_scale: the same for values.

    Raises:
        TypeError, ValueError: before anything is written, where a dtype, shape, stride, device or scale does
            not fit.
        IndexError: on the CPU (or with `set_debug`), a slot past the cache's last one. On CUDA it is skipped.

    >>> key, cache = torch.ones(2, 1, 8), torch.zeros(4, 16, 1, 8)
    >>> pagedkv.reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([17, -1]))
    >>> cache[1, 1, 0, 0]
    tensor(1.)
    """
    k_scale, k_scale_value = _split_scale(k_scale)
    v_scale, v_scale_value = _split_scale(v_scale)
    _require_backend("reshape_and_cache", key_cache)
    _library.reshape_and_cache.default(
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_scale_value, v_scale_value
    )


def rope_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Rotate queries in place and keys on their way into the cache, beside which values are written.

    One pass over memory, computed in float32 and rounded once; `key` itself does not change.
    Elements past rotary_dim pass through.

    Args:
        query: `[num_tokens, num_heads, head_dim]` float16, bfloat16 or float32; every row is rotated in
            place.
        key: `[num_tokens, num_kv_heads, head_dim]`, the query's dtype.
        value: `[num_tokens, num_kv_heads, value_head_dim]`, the query's dtype.
        cos: `[max_position, rotary_dim / 2]` float32 or the query's dtype, rotary_dim <= head_dim.
        sin: the same.
        positions: `[num_tokens]` int64 rows of cos and sin.
        key_cache: as in `reshape_and_cache`.
        value_cache: as in `reshape_and_cache`.
        slot_mapping: as in `reshape_and_cache`.
        interleaved: rotate pairs (2i, 2i + 1) as GPT-J does; otherwise halves (i, i + rotary_dim / 2) as NeoX
            does.
        k_scale: as in `reshape_and_cache`.
        v_scale: as in `reshape_and_cache`.

    Raises:
        TypeError, ValueError: before anything is written, where a dtype, shape, stride, device or scale does
            not fit.
        IndexError: on the CPU (or with `set_debug`), a position outside cos and sin or a slot past the
            cache's last one.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", 3.2.

    >>> query, cos, sin = torch.ones(1, 1, 8), torch.zeros(4, 4), torch.ones(4, 4)
    >>> cache = torch.zeros(2, 16, 1, 8)
    >>> pagedkv.rope_and_cache(
    ...     query, query.clone(), query.clone(), cos, sin, torch.tensor([2]),
    ...     cache, cache.clone(), torch.tensor([0]),
    ... )
    >>> query[0, 0, 0], cache[0, 0, 0, 4]
    (tensor(-1.), tensor(1.))
    """
    k_scale, k_scale_value = _split_scale(k_scale)
    v_scale, v_scale_value = _split_scale(v_scale)
    _require_backend("rope_and_cache", key_cache)
    _library.rope_and_cache.default(
        query,
        key,
        value,
        cos,
        sin,
        positions,
        key_cache,
        value_cache,
        slot_mapping,
        interleaved,
        k_scale,
        v_scale,
        k_scale_value,
        v_scale_value,
    )


def copy_blocks(key_caches: Caches, value_caches: Caches, block_mapping: BlockMapping) -> None:
    """Copy blocks to other blocks of the same caches, in every layer, byte for byte: copy-on-write.

    Every source is read as it was before the call, so `[(0, 1), (1, 0)]` exchanges two blocks. An empty
    mapping does nothing.

    Args:
        key_caches: `[num_blocks, block_size, num_kv_heads, head_dim]` of any supported dtype, or a list of
            them (layers).
        value_caches: the same, as many.
        block_mapping: `[num_pairs, 2]` int64 (source, destination) on the CPU, or a list of pairs.

    Raises:
        IndexError: a block outside the pool.
        TypeError, ValueError: shapes or dtypes that do not fit, a destination that stands twice, a mapping
            elsewhere than on the CPU; nothing is written.

    >>> cache = torch.arange(3.0).view(3, 1, 1, 1).repeat(1, 16, 1, 8)
    >>> pagedkv.copy_blocks(cache, cache.clone(), [(0, 1), (1, 2)])
    >>> cache[:, 0, 0, 0]
    tensor([0., 0., 1.])
    """
    keys, values = _tensor_list(key_caches), _tensor_list(value_caches)
    _require_backend("copy_blocks", *keys[:1])
    _library.copy_blocks.default(keys, values, _pairs(block_mapping))


def swap_blocks(source: Caches, destination: Caches, block_mapping: BlockMapping) -> None:
    """Copy blocks of one cache to blocks of another, byte for byte, on one device or between two.

    Args:
        source: `[num_blocks, block_size, num_kv_heads, head_dim]` of any supported dtype, or a list of them.
        destination: as many caches with blocks of the same shape and dtype; pools may differ in size, strides
            and device.
        block_mapping: `[num_pairs, 2]` int64 (block of source, block of destination) on the CPU, or a list of
            pairs.

    Raises:
        IndexError: a block outside its pool.
        TypeError, ValueError: as `copy_blocks`; nothing is written.

    >>> device, host = torch.ones(4, 16, 1, 8), torch.zeros(8, 16, 1, 8)
    >>> pagedkv.swap_blocks(device, host, [(3, 7)])
    >>> host[7, 0, 0, 0]
    tensor(1.)
    """
    sources, destinations = _tensor_list(source), _tensor_list(destination)
    _require_backend("swap_blocks", *sources[:1], *destinations[:1])
    _library.swap_blocks.default(sources, destinations, _pairs(block_mapping))


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    kv_starts: Tensor | None = None,
    total_tokens: int | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the keys and values of sequences out of their blocks, dequantised, one sequence after another.

    Args:
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` of any supported dtype.
        value_cache: the same with a head_dim of its own.
        block_tables: `[num_seqs, max_blocks_per_seq]` int32.
        context_lens: `[num_seqs]` int32.
        kv_starts: `[num_seqs]` int32; tokens before it are left out. None: 0.
        total_tokens: the sum of `context_lens - kv_starts`; without it a call on CUDA waits for the device to
            learn it.
        k_scale: a float or `[num_kv_heads]` float32, for quantised caches (int8 needs it).
        v_scale: the same for values.
        dtype: of the result: float16, bfloat16 or float32. None: the cache's; float32 for a quantised one.

    Returns:
        key `[total_tokens, num_kv_heads, head_dim]` and value `[total_tokens, num_kv_heads, value_head_dim]`.

    Raises:
        TypeError, ValueError: arguments that do not fit; a wrong `total_tokens` where the lengths are seen
            (on the CPU).
        IndexError: on the CPU (or with `set_debug`), a needed block outside the pool or a context longer than
            its table.

    >>> cache = torch.arange(4.0).view(4, 1, 1, 1).repeat(1, 2, 1, 8)
    >>> tables, lens = torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> pagedkv.gather_kv(cache, cache, tables, lens)[0][:, 0, 0]
    tensor([3., 3., 1.])
    """
    k_scale, k_scale_value = _split_scale(k_scale)
    v_scale, v_scale_value = _split_scale(v_scale)
    _require_backend("gather_kv", key_cache)
    key, value = _library.gather_kv.default(
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        kv_starts,
        total_tokens,
        k_scale,
        v_scale,
        k_scale_value,
        v_scale_value,
        dtype,
    )
    return key, value


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention results over disjoint sets of keys into the result over their union.

    Args:
        out_a: `[num_tokens, num_heads, head_dim]` float16, bfloat16 or float32.
        lse_a: `[num_tokens, num_heads]` float32, natural log; -inf marks an empty state, whose out is not
            read.
        out_b: the same shape and dtype as `out_a`.
        lse_b: the same shape as `lse_a`.

    Returns:
        out and lse of the union. Two empty states give 0 and -inf; an empty and a finite one give the finite
        one exactly. A sink counts once: give it to one of the two parts only.

    Raises:
        TypeError, ValueError: dtypes, shapes, strides or devices that do not fit.

    Source: Dao 2023, "FlashAttention-2", 3.1.1; Ye et al. 2025, "FlashInfer", 2.2.

    >>> out, lse = torch.ones(1, 1, 8), torch.zeros(1, 1)
    >>> pagedkv.merge_attn_states(out, lse, 3 * out, lse)[0][0, 0, 0]
    tensor(2.)
    """
    _require_backend("merge_attn_states", out_a)
    out, lse = _library.merge_attn_states.default(out_a, lse_a, out_b, lse_b)
    return out, lse


def _split_scale(scale: Scale) -> tuple[Tensor | None, float | None]:
    if scale is None or isinstance(scale, Tensor):
        return scale, None
    return None, float(scale)


def _tensor_list(caches: Caches) -> list[Tensor]:
    return [caches] if isinstance(caches, Tensor) else list(caches)


def _pairs(block_mapping: BlockMapping) -> Tensor:
    if isinstance(block_mapping, Tensor):
        return block_mapping
    try:
        pairs = [(operator.index(source), operator.index(to)) for source, to in block_mapping]
    except (TypeError, ValueError) as error:
        raise type(error)(
            "block_mapping must be an int64 tensor [num_pairs, 2] or a list of (source, destination) pairs: "
            f"{error}"
        ) from error
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def _require_backend(op: str, *tensors: Tensor) -> None:
    if any(tensor.is_cuda for tensor in tensors) and op not in _loader.CUDA_OPS:
        raise NotImplementedError(_loader.explain_missing_cuda(op))
