"""FlashAttention's functions over pagedkv's operators: code written for them runs unchanged, on a CPU too.

The arguments, layouts and defaults are those of flash-attn 2.8 and, for `page_table` and `s_aux`, of
FlashAttention-3. What the operators cannot do is a NotImplementedError; nothing is ignored that would change
a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv import ops

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
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
        window_size: keys before and after the query's position that it sees; -1: all.
        softcap: caps scores; 0 is off.
        alibi_slopes: `[num_heads]` float32, with causal.
        deterministic: results are in any case.
        return_attn_probs: also return the log-sum-exp, `[batch_size, num_heads, seqlen_q]` float32, and None
            for the probabilities.
        s_aux: `[num_heads]` sinks.

    Raises:
        NotImplementedError: dropout, windows that are neither causal nor symmetric, ALiBi without causal or
            with slopes for each sequence.

    >>> q = k = torch.ones(2, 3, 4, 8)
    >>> flash_attn_func(q, k, k, causal=True).shape
    torch.Size([2, 3, 4, 8])
    """
    _refuse_dropout(dropout_p)
    batch_size, seqlen_q = q.shape[:2]
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
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
    )
    out, lse = _as_batch(out, lse, batch_size)
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
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
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

    >>> q = k = torch.ones(5, 4, 8); starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, k, starts, starts, 3, 3, causal=True).shape
    torch.Size([5, 4, 8])
    """
    _refuse_dropout(dropout_p)
    starts = cu_seqlens_k.int()
    if block_table is None:
        k, v = _overlapping_blocks(k, int(max_seqlen_k)), _overlapping_blocks(v, int(max_seqlen_k))
        block_table = starts[:-1].unsqueeze(1)
    out, lse = _attend(
        q,
        block_table,
        k,
        v,
        starts.diff(),
        cu_seqlens_q.int(),
        int(max_seqlen_q),
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
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
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
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
        ValueError: k without v, rotary_cos without k, block_table with cache_batch_idx or page_table.
        NotImplementedError: as `flash_attn_func`; rotary embedding with cache_leftpad, of another number of
            queries than keys, or of several queries without causal or window.
        IndexError: on the CPU, keys that do not fit into the cache.

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
    (batch_size, seqlen_q), device = q.shape[:2], q.device
    if tables is None:
        rows = torch.arange(batch_size, device=device) if cache_batch_idx is None else cache_batch_idx
        tables = rows.int().unsqueeze(1)
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1] * tables.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch_size,), cache_seqlens, dtype=torch.int32, device=device)
    lens, queries = cache_seqlens.int(), q.flatten(0, 1)
    if k is not None and v is not None:
        positions = lens.long().unsqueeze(1) + torch.arange(k.shape[1], device=device)
        slots = _slots(positions, tables, k_cache.shape[1])
        lens = lens + k.shape[1]
        if rotary_cos is None:
            ops.reshape_and_cache(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
        else:
            if cache_leftpad is not None:
                raise NotImplementedError("rotary embedding with cache_leftpad is not supported")
            if seqlen_q != k.shape[1]:
                raise NotImplementedError(
                    f"rotary embedding of {seqlen_q} queries beside {k.shape[1]} new keys is not supported"
                )
            if seqlen_q > 1 and not causal and tuple(window_size) == (-1, -1):
                raise NotImplementedError("rotary embedding of several queries needs causal=True or a window")
            if rotary_sin is None:
                raise ValueError("rotary_cos and rotary_sin must be given together")
            queries = queries.clone()  # the operator rotates in place
            ops.rope_and_cache(
                queries,
                k.flatten(0, 1),
                v.flatten(0, 1),
                rotary_cos,
                rotary_sin,
                positions.flatten(),
                k_cache,
                v_cache,
                slots,
                interleaved=rotary_interleaved,
            )
    out, lse = _attend(
        queries,
        tables,
        k_cache,
        v_cache,
        lens,
        _equal_starts(batch_size, seqlen_q, device),
        seqlen_q,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        kv_starts=None if cache_leftpad is None else cache_leftpad.int(),
    )
    out, lse = _as_batch(out, lse, batch_size)
    return (out, lse) if return_softmax_lse else out


def _attend(
    q: Tensor,
    block_tables: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    *,
    causal: bool,
    window_size: Window,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    kv_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[total_q, num_heads, head_dim]` and log-sum-exp `[total_q, num_heads]`."""
    before, after = window_size
    if after == 0 and not causal:
        causal = True
    if not causal and before != after:
        raise NotImplementedError(
            f"window_size={(before, after)} without causal is not supported: only (-1, -1), (n, n) and (n, 0)"
        )
    if alibi_slopes is not None and (not causal or alibi_slopes.dim() != 1):
        raise NotImplementedError("alibi_slopes are supported with causal=True, and as [num_heads]")
    result = ops.paged_attention(
        q,
        block_tables,
        key_cache,
        value_cache,
        context_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        softmax_scale=softmax_scale,
        causal=causal,
        window=None if before < 0 else before + 1,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=None if sinks is None else sinks.float(),
        kv_starts=kv_starts,
        return_lse=True,
    )
    assert isinstance(result, tuple)
    return result


def _overlapping_blocks(states: Tensor, block_size: int) -> Tensor:
    """`[total, num_heads, head_dim]` -> `[total, block_size, ...]`: block i is what follows from token i on.

    So a sequence is one block, wherever it begins. Behind the last token there must be memory to point to.
    """
    total = states.shape[0]
    padded = states.new_empty(total + block_size, *states.shape[1:])
    padded[:total] = states
    strides = padded.stride()
    return padded.as_strided((total, block_size, *states.shape[1:]), (strides[0], *strides))


def _slots(positions: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Where the tokens at `[batch_size, n]` positions lie, `[batch_size * n]`."""
    logical = positions // block_size
    # Past its table a sequence has no slot: one past the cache is an error where the host can see it.
    inside = logical < block_tables.shape[1]
    physical = block_tables.long().gather(1, logical.where(inside, 0))
    slots = physical * block_size + positions % block_size
    return slots.where(inside, torch.iinfo(torch.int64).max).flatten()


def _equal_starts(batch_size: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * length


def _as_batch(out: Tensor, lse: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """FlashAttention's layouts of output and log-sum-exp."""
    seqlen_q = len(out) // max(batch_size, 1)
    out = out.view(batch_size, seqlen_q, *out.shape[1:])
    return out, lse.view(batch_size, seqlen_q, -1).transpose(1, 2)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise NotImplementedError(f"pagedkv is for inference: dropout_p must be 0, got {dropout_p}")
