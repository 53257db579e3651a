"""FlashAttention's functions over pagedkv's operators: code written for them runs unchanged, on a CPU too.

The arguments, layouts and defaults are those of flash-attn 2.8 and, for `page_table` and `s_aux`, of
FlashAttention-3. What the operators cannot do is a NotImplementedError; nothing is ignored that would change
a result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedkv import ops
from pagedkv._fakes import check_dims
from pagedkv.integrations._flash_attn_checks import (
    LENGTHS,
    QUERY,
    Window,
    attention_options,
    check_keys,
    check_needed_blocks,
    check_room,
    check_rotary,
    check_shape,
    check_starts,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention over dense keys and values.

    Args:
        q: `[batch_size, seqlen_q, num_heads, head_dim]`, the last of the keys' tokens where causal.
        k: `[batch_size, seqlen_k, num_kv_heads, head_dim]`.
        v: the same.
        dropout_p: 0.
        softmax_scale: multiplies q.k; None: `head_dim ** -0.5`.
        causal: aligned to the last query and key.
        window_size: keys before and after the query's position that it sees; -1 or None: all.
        softcap: caps scores; 0 or None is off.
        alibi_slopes: `[num_heads]` float32, with causal.
        deterministic: results are in any case.
        return_attn_probs: also return the log-sum-exp, `[batch_size, num_heads, seqlen_q]` float32, and None
            for the probabilities.
        s_aux: `[num_heads]` sinks.

    Raises:
        NotImplementedError: dropout, windows that are neither causal nor symmetric, ALiBi without causal or
            with slopes for each sequence.
        ValueError: sizes that do not agree.

    >>> q = k = torch.ones(2, 3, 4, 8)
    >>> flash_attn_func(q, k, k, causal=True).shape
    torch.Size([2, 3, 4, 8])
    """
    _refuse_dropout(dropout_p)
    check_shape(q, "q", QUERY)
    batch_size, seqlen_q = q.shape[:2]
    check_keys(k, v, "[batch_size, seqlen_k, num_kv_heads, head_dim]", batch_size)
    lens = torch.full((batch_size,), k.shape[1], dtype=torch.int32, device=q.device)
    # Each row of keys is one block of the cache.
    tables = torch.arange(batch_size, dtype=torch.int32, device=q.device).unsqueeze(1)
    out, lse = _attend(
        q.flatten(0, 1),
        tables,
        k,
        v,
        lens,
        _equal_starts(batch_size, seqlen_q, q.device),
        seqlen_q,
        attention_options(causal, window_size, softmax_scale, softcap, alibi_slopes, s_aux),
    )
    out, lse = _as_batch(out, lse, q)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of ragged queries to ragged or paged keys.

    Args:
        q: `[total_q, num_heads, head_dim]`.
        k: `[total_k, num_kv_heads, head_dim]`, or with block_table `[num_blocks, block_size, num_kv_heads,
            head_dim]`. Ragged keys and values are copied once.
        v: the same.
        cu_seqlens_q: `[num_seqs + 1]` int32, where each sequence's queries begin.
        cu_seqlens_k: `[num_seqs + 1]` int32, likewise; with block_table its differences are the lengths.
        max_seqlen_q: an upper bound of the query lengths.
        max_seqlen_k: of the key lengths.
        dropout_p: 0.
        softmax_scale: as in `flash_attn_func`, and so on.
        causal: aligned to the last query and key of each sequence.
        window_size: see there.
        softcap: see there.
        alibi_slopes: see there.
        deterministic: see there.
        return_attn_probs: also return the log-sum-exp, `[num_heads, total_q]` float32, and None.
        block_table: `[num_seqs, max_blocks]` int32.
        s_aux: `[num_heads]` sinks.

    Raises:
        NotImplementedError: as `flash_attn_func`.
        IndexError: on the CPU, starts that fall, are negative or end past the tokens.

    >>> q = k = torch.ones(5, 4, 8); starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, k, starts, starts, 3, 3, causal=True).shape
    torch.Size([5, 4, 8])
    """
    _refuse_dropout(dropout_p)
    check_starts(cu_seqlens_q, "cu_seqlens_q", len(q))
    check_starts(cu_seqlens_k, "cu_seqlens_k", len(k) if block_table is None else None)
    starts = cu_seqlens_k.int()
    if block_table is None:
        block_size = max(int(max_seqlen_k), 1)
        k, v = _overlapping_blocks(k, block_size), _overlapping_blocks(v, block_size)
        block_table = starts[:-1].unsqueeze(1)
    out, lse = _attend(
        q,
        block_table,
        k,
        v,
        starts.diff(),
        cu_seqlens_q.int(),
        int(max_seqlen_q),
        attention_options(causal, window_size, softmax_scale, softcap, alibi_slopes, s_aux),
    )
    return (out, lse.transpose(0, 1), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache, in place, then attend to it.

    Args:
        q: `[batch_size, seqlen_q, num_heads, head_dim]`.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]` with block_table, else
            `[cache_batch_size, seqlen_cache, num_kv_heads, head_dim]`.
        v_cache: the same.
        k: `[batch_size, seqlen_new, num_kv_heads, head_dim]`, written behind cache_seqlens; None: nothing is.
        v: the same.
        rotary_cos: `[max_position, rotary_dim / 2]`: rotates k on its way into the cache, and q.
        rotary_sin: the same.
        cache_seqlens: `[batch_size]` int32 or an int: tokens in the cache before k. None: all that fit.
        cache_batch_idx: `[batch_size]` rows of the cache; not with block_table.
        cache_leftpad: `[batch_size]` int32: keys before it are not seen.
        block_table: `[batch_size, max_blocks]` int32.
        softmax_scale: as in `flash_attn_func`, and so on.
        causal: see there.
        window_size: see there.
        softcap: see there.
        rotary_interleaved: rotate pairs (2i, 2i + 1); otherwise halves.
        alibi_slopes: see there.
        num_splits: a hint, not needed.
        return_softmax_lse: also return the log-sum-exp, `[batch_size, num_heads, seqlen_q]` float32.
        page_table: FlashAttention-3's name of block_table.
        s_aux: `[num_heads]` sinks.

    Raises:
        ValueError: k without v, rotary_cos without k or rotary_sin, block_table with cache_batch_idx or
            page_table, sizes that do not agree.
        NotImplementedError: as `flash_attn_func`; rotary embedding with cache_leftpad, of another number of
            queries than keys, or of several queries without causal or window.
        IndexError: on the CPU, keys that do not fit into the cache.
        Whatever it raises, nothing has been written.

    >>> q, cache = torch.ones(1, 1, 4, 8), torch.zeros(3, 16, 2, 8); k = torch.ones(1, 1, 2, 8)
    >>> table, lens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    >>> out = flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=lens, block_table=table)
    >>> out.shape, cache[0, 0, 0, 0]
    (torch.Size([1, 1, 4, 8]), tensor(1.))
    """
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are two names of one argument: give one of them")
    tables = page_table if block_table is None else block_table
    if tables is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx is not supported with a block table")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos needs k and v: cached keys are rotated already")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    check_shape(q, "q", QUERY)
    check_dims(k_cache, "k_cache", "[num_blocks or cache_batch_size, block_size, num_kv_heads, head_dim]")
    (batch_size, seqlen_q), device = q.shape[:2], q.device
    if tables is None:
        rows = torch.arange(batch_size, device=device) if cache_batch_idx is None else cache_batch_idx
        check_shape(rows, "cache_batch_idx", LENGTHS, batch_size)
        if cache_batch_idx is None and len(k_cache) < batch_size:
            raise ValueError(f"k_cache has {len(k_cache)} rows, fewer than the {batch_size} of q")
        tables = rows.int().unsqueeze(1)
    check_shape(tables, "block_table", "[batch_size, max_blocks]", batch_size)
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1] * tables.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch_size,), cache_seqlens, dtype=torch.int32, device=device)
    check_shape(cache_seqlens, "cache_seqlens", LENGTHS, batch_size)
    lens, queries, starts = cache_seqlens.int(), q.flatten(0, 1), _equal_starts(batch_size, seqlen_q, device)
    kv_starts = None if cache_leftpad is None else cache_leftpad.int()
    options = attention_options(causal, window_size, softmax_scale, softcap, alibi_slopes, s_aux)
    if k is not None and v is not None:
        check_keys(k, v, "[batch_size, seqlen_new, num_kv_heads, head_dim]", batch_size)
        check_room(lens, k.shape[1], k_cache.shape[1] * tables.shape[1])
        if rotary_cos is not None:
            check_rotary(seqlen_q, k.shape[1], options, cache_leftpad)
        positions = lens.long().unsqueeze(1) + torch.arange(k.shape[1], device=device)
        lens = lens + k.shape[1]
        # Of no query: the checks of the attention below, before anything is written.
        _attend(queries[:0], tables, k_cache, v_cache, lens, starts * 0, 0, options, kv_starts)
        check_needed_blocks(tables, k_cache, lens, seqlen_q, options["window"], kv_starts)
        slots = _slots(positions, tables, k_cache.shape[1])
        new = (k.flatten(0, 1), v.flatten(0, 1))
        if rotary_cos is None or rotary_sin is None:
            ops.reshape_and_cache(*new, k_cache, v_cache, slots)
        else:
            queries = queries.clone()  # the operator rotates in place
            rotation = (rotary_cos, rotary_sin, positions.flatten())
            interleaved = rotary_interleaved
            ops.rope_and_cache(queries, *new, *rotation, k_cache, v_cache, slots, interleaved=interleaved)
    out, lse = _attend(queries, tables, k_cache, v_cache, lens, starts, seqlen_q, options, kv_starts)
    out, lse = _as_batch(out, lse, q)
    return (out, lse) if return_softmax_lse else out


def _attend(
    q: Tensor,
    block_tables: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    options: dict[str, Any],
    kv_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[total_q, num_heads, head_dim]` and log-sum-exp `[total_q, num_heads]`."""
    if key_cache.shape[1] == 0:  # no keys at all; a block of the operator's has room for one
        key_cache, value_cache = (
            cache.new_empty(0, 1, *cache.shape[2:]) for cache in (key_cache, value_cache)
        )
    result = ops.paged_attention(
        q,
        block_tables,
        key_cache,
        value_cache,
        context_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        kv_starts=kv_starts,
        return_lse=True,
        **options,
    )
    assert isinstance(result, tuple)
    return result


def _overlapping_blocks(states: Tensor, block_size: int) -> Tensor:
    """`[total, num_heads, head_dim]` -> `[total, block_size, ...]`: block i is what follows from token i on.

    So a sequence is one block, wherever it begins. Behind the last token there must be memory to point to,
    which is zeros for a device whose starts nobody has checked.
    """
    total = states.shape[0]
    padded = states.new_empty(total + block_size, *states.shape[1:])
    padded[:total] = states
    padded[total:] = 0
    strides = padded.stride()
    return padded.as_strided((total, block_size, *states.shape[1:]), (strides[0], *strides))


def _slots(positions: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Where the tokens at `[batch_size, n]` positions lie, `[batch_size * n]`."""
    logical = positions // block_size
    # Outside its table a sequence has no slot: one past the cache is an error where the host can see it.
    inside = (logical >= 0) & (logical < block_tables.shape[1])
    physical = block_tables.long().gather(1, logical.where(inside, 0))
    slots = physical * block_size + positions % block_size
    return slots.where(inside, torch.iinfo(torch.int64).max).flatten()


def _equal_starts(batch_size: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length


def _as_batch(out: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention's layouts of output and log-sum-exp."""
    out = out.view(*q.shape[:2], *out.shape[1:])
    return out, lse.view(*q.shape[:2], lse.shape[1]).transpose(1, 2)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise NotImplementedError(f"pagedkv is for inference: dropout_p must be 0, got {dropout_p}")
