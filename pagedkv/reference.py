"""Every operator in slow, obvious PyTorch: the specification.

Read this module first. Each function has the signature of its namesake in :mod:`pagedkv.ops` and returns what
that must return; loops run over sequences and tokens so that each rule stands in one readable place. Nothing
here is fast, and shapes and dtypes are not validated (the operators do that, once, in their bindings); only
indices are checked, because which of them are *needed* is part of the meaning.

Arithmetic is done in float64 and rounded once to the result's dtype, except where the contract names float32
(quantisation, rotation, dequantisation). The vocabulary is that of the documentation: a *block* is a cache
block, a *slot* is ``physical_block * block_size + offset``, the caches are
``[num_blocks, block_size, num_kv_heads, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "paged_attention",
    "quantize",
    "reshape_and_cache",
    "rope_and_cache",
    "swap_blocks",
    "visible_keys",
]

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# ----------------------------------------------------------------------------------------- attention


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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    kv_starts: Tensor | None = None,
    tree_mask: Tensor | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from each query row to the keys of its own sequence, read through the block table.

    Everything is as in :func:`pagedkv.ops.paged_attention`, with one option more, ``compute_dtype``. ``None``
    computes in float64 and rounds the result to the query's dtype. A dtype rounds the result of every step
    to it and returns the output in it: float64 gives the exact result unrounded, the query's dtype the error
    that a plain PyTorch computation in it makes (half types are computed in float32 and rounded, as matrix
    units do).

    Returns:
        ``out [num_tokens, num_heads, value_head_dim]``, and with ``return_lse`` also ``lse [num_tokens,
        num_heads] float32`` (float64 with ``compute_dtype=torch.float64``), the natural logarithm of the sum
        of exponentials, the sink included. A row that sees no key has output 0 and lse -inf (lse = sink with
        a sink); a row past the end of ``query_start_loc`` is padding and has output 0 and lse -inf always.

    Example:
        >>> cache = torch.zeros(4, 2, 1, 8)                      # keys of zero: every weight is equal
        >>> cache[3, 0], cache[3, 1], cache[1, 0] = 1.0, 2.0, 6.0  # the sequence lies in blocks 3 and 1
        >>> paged_attention(torch.ones(1, 8), torch.tensor([3, 1]), torch.zeros_like(cache), cache, 3)[0, 0]
        tensor(3.)
    """
    del max_query_len, split_size  # both choose how the work is cut, not what comes out
    if isinstance(context_lens, int):  # the unbatched form: one sequence, one token
        query, block_tables = query[None], block_tables[None]
        lens, unbatched = [context_lens], True
    else:
        lens, unbatched = [int(length) for length in context_lens], False
    num_tokens, num_heads, head_dim = query.shape
    query_begins = list(range(len(lens) + 1))
    if query_start_loc is not None:
        query_begins = [int(begin) for begin in query_start_loc]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale

    work_dtype = torch.float64 if compute_dtype in (None, torch.float64) else torch.float32
    result_dtype = query.dtype if compute_dtype is None else compute_dtype
    result = query.new_zeros(num_tokens, num_heads, value_cache.shape[3], dtype=result_dtype)
    lse = query.new_full((num_tokens, num_heads), -torch.inf, dtype=work_dtype)

    def rounded(x: Tensor) -> Tensor:
        return x if compute_dtype is None else x.to(compute_dtype).to(work_dtype)

    for seq_idx, context_len in enumerate(lens):
        query_begin, query_end = query_begins[seq_idx], query_begins[seq_idx + 1]
        query_len = query_end - query_begin
        kv_start = 0 if kv_starts is None else int(kv_starts[seq_idx])
        needed_begin, needed_end = needed_keys(query_len, context_len, kv_start, window)
        slots = token_slots(block_tables, seq_idx, needed_begin, needed_end, key_cache)
        keys = dequantize(read_slots(key_cache, slots), k_scale, work_dtype)
        values = dequantize(read_slots(value_cache, slots), v_scale, work_dtype)
        for token_idx in range(query_begin, query_end):
            position = context_len - query_len + (token_idx - query_begin)
            tree_row = None if tree_mask is None else tree_mask[token_idx]
            visible = visible_keys(
                position, context_len, causal=causal, window=window, kv_start=kv_start, tree_row=tree_row
            ).to(query.device)
            result[token_idx], lse[token_idx] = attend_one_token(
                query[token_idx].to(work_dtype),
                keys[visible[needed_begin:needed_end]],
                values[visible[needed_begin:needed_end]],
                torch.nonzero(visible)[:, 0] - position,
                scale,
                softcap,
                alibi_slopes,
                sinks,
                rounded,
            )

    if compute_dtype != torch.float64:
        lse = lse.float()
    if unbatched:
        result, lse = result[0], lse[0]
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def attend_one_token(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    distances: Tensor,
    scale: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rounded: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """One query token ``[num_heads, head_dim]`` over the keys it sees ``[num_keys, num_kv_heads, head_dim]``.

    ``distances [num_keys]`` is key position minus query position. The order of the steps is the contract's:
    q.k times the scale, softcap, ALiBi, softmax with the sink in the denominator.
    """
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    kv_head_of_head = torch.arange(num_heads, device=query.device) // (num_heads // num_kv_heads)
    scores = rounded(torch.einsum("hd,khd->hk", query, keys[:, kv_head_of_head]))
    scores = rounded(scores * scale)
    if softcap > 0:
        scores = rounded(softcap * torch.tanh(scores / softcap))
    if alibi_slopes is not None:
        scores = rounded(scores + alibi_slopes.to(scores.dtype)[:, None] * distances)
    if sinks is not None:  # one logit more a head, which has no value
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None]], dim=1)
    if scores.shape[1] == 0:
        return query.new_zeros(num_heads, values.shape[2]), query.new_full((num_heads,), -torch.inf)
    weights = rounded(torch.softmax(scores, dim=1))[:, : keys.shape[0]]
    output = torch.einsum("hk,khd->hd", weights, values[:, kv_head_of_head])
    return rounded(output), torch.logsumexp(scores, dim=1)


def visible_keys(
    position: int,
    context_len: int,
    *,
    causal: bool = True,
    window: int | None = None,
    kv_start: int = 0,
    tree_row: Tensor | None = None,
) -> Tensor:
    """Which keys of its sequence the query at ``position`` sees: ``[context_len]`` bool.

    Query ``i`` of ``query_len`` stands at ``context_len - query_len + i``, so the last query is at the last
    key, and a query before the first key (more queries than keys) sees nothing when causal. ``tree_row
    [max_tree]`` is the query's row of the tree mask, over the last ``max_tree`` keys; it replaces causality
    there, columns before key 0 being ignored. The window cuts off what lies ``window`` or more before the
    query, and, without causality, as far behind it.

    Example:
        >>> visible_keys(3, 5, window=2).int()
        tensor([0, 0, 1, 1, 0], dtype=torch.int32)
        >>> visible_keys(3, 5, window=2, causal=False).int()
        tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    """
    key_positions = torch.arange(context_len)
    visible = key_positions <= position if causal else torch.ones(context_len, dtype=torch.bool)
    if tree_row is not None:
        tree_len = min(tree_row.shape[0], context_len)
        if tree_len > 0:
            visible[context_len - tree_len :] = tree_row[tree_row.shape[0] - tree_len :].cpu()
    if window is not None:
        visible &= key_positions > position - window
        if not causal:
            visible &= key_positions < position + window
    return visible & (key_positions >= kv_start)


def needed_keys(query_len: int, context_len: int, kv_start: int, window: int | None) -> tuple[int, int]:
    """The half-open range of keys that some query of the sequence may see; no block outside it is read."""
    if query_len == 0:
        return 0, 0
    first_position = context_len - query_len
    begin = max(0, kv_start, 0 if window is None else first_position - window + 1)
    return min(begin, context_len), context_len


# ---------------------------------------------------------------------------------------- addressing


def token_slots(block_tables: Tensor, seq_idx: int, begin: int, end: int, cache: Tensor) -> Tensor:
    """Slots of the tokens ``begin`` to ``end`` (half open) of one sequence, ``[end - begin]`` int64.

    Raises:
        IndexError: the table is too short for ``end`` tokens, or an entry that is needed is outside the pool.
    """
    num_blocks, block_size = cache.shape[:2]
    table = block_tables[seq_idx].tolist()
    if begin < end and end > len(table) * block_size:
        raise IndexError(
            f"context_lens[{seq_idx}] is {end}, but block_tables has {len(table)} entries a sequence, "
            f"room for {len(table) * block_size} tokens"
        )
    slots = []
    for token_idx in range(begin, end):
        block_idx, offset = divmod(token_idx, block_size)
        block = table[block_idx]
        if not 0 <= block < num_blocks:
            raise IndexError(
                f"block_tables[{seq_idx}, {block_idx}] is {block}, outside the pool of {num_blocks} blocks"
            )
        slots.append(block * block_size + offset)
    return torch.tensor(slots, dtype=torch.int64, device=cache.device)


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """The stored rows at ``slots``, ``[num_slots, num_kv_heads, head_dim]``, whatever the cache's strides."""
    block_size = cache.shape[1]
    return as_bytes(cache)[slots // block_size, slots % block_size].view(cache.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that copies keep every bit and float8 can be indexed."""
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


# -------------------------------------------------------------------------------------- quantisation


def quantize(x: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a cache stores for ``x [..., num_kv_heads, head_dim]``: ``x / scale`` in float32, to nearest even.

    float8 saturates to its largest finite value, infinity too, and keeps NaN; int8 is clamped to +-127, and
    NaN becomes 0. A cache of the same dtype as ``x`` stores its very bits.

    Example:
        >>> quantize(torch.tensor([[1000.0, -torch.inf, 272.0]]), None, torch.float8_e4m3fn).float()
        tensor([[ 448., -448.,  256.]])
        >>> quantize(torch.tensor([[2.5, 3.5, torch.nan, 1e9]]), 1.0, torch.int8)
        tensor([[  2,   4,   0, 127]], dtype=torch.int8)
    """
    if dtype == x.dtype:
        return x
    scaled = x.float() / scale_per_head(scale, x.device)
    if dtype == torch.int8:
        return torch.round(scaled).clamp(-127, 127).nan_to_num(nan=0.0).to(torch.int8)
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype)


def dequantize(stored: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """``stored [..., num_kv_heads, head_dim] * scale`` in ``dtype``."""
    return stored.to(dtype) * scale_per_head(scale, stored.device).to(dtype)


def scale_per_head(scale: float | Tensor | None, device: torch.device) -> Tensor:
    """A scale as a float32 tensor that multiplies ``[..., num_kv_heads, head_dim]``; ``None`` is 1."""
    scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device)
    return scale.reshape(-1, 1)


# --------------------------------------------------------------------------------- writing the cache


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write row ``i`` of key and value ``[num_tokens, num_kv_heads, head_dim]`` to slot ``slot_mapping[i]``.

    Only the ``len(slot_mapping)`` first rows are written; a negative slot skips its row.

    Raises:
        IndexError: a slot lies past the end of the cache; nothing was written then.

    Example:
        >>> key_cache, value_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
        >>> rows = torch.ones(3, 1, 8)
        >>> reshape_and_cache(rows, rows, key_cache, value_cache, torch.tensor([6, -1]))
        >>> key_cache[..., 0, 0]
        tensor([[0., 0., 0., 0.],
                [0., 0., 1., 0.]])
    """
    num_blocks, block_size = key_cache.shape[:2]
    for token_idx, slot in enumerate(slot_mapping.tolist()):
        if slot >= num_blocks * block_size:
            raise IndexError(
                f"slot_mapping[{token_idx}] is {slot}, but the cache has {num_blocks * block_size} slots"
            )
    for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored = as_bytes(quantize(x, scale, cache.dtype))
        for token_idx, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                as_bytes(cache)[slot // block_size, slot % block_size] = stored[token_idx]


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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Rotate every query row in place, and write rotated keys and plain values to their slots.

    Rotary position embedding (Su et al., RoFormer, 2021, section 3.2). The key itself is not changed.

    Example:
        >>> query = torch.tensor([[[1.0, 2.0]]])
        >>> cache = torch.zeros(1, 1, 1, 2)
        >>> key, value, value_cache = query.clone(), query.clone(), cache.clone()
        >>> cos, sin, zero = torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([0])
        >>> rope_and_cache(query, key, value, cos, sin, zero, cache, value_cache, zero)
        >>> query, cache.flatten()
        (tensor([[[-2.,  1.]]]), tensor([-2.,  1.]))
    """
    for token_idx, position in enumerate(positions.tolist()):
        if not 0 <= position < cos.shape[0]:
            raise IndexError(
                f"positions[{token_idx}] is {position}, but cos and sin have {cos.shape[0]} rows"
            )
    rotated_key = rotate(key, cos[positions], sin[positions], interleaved)
    if key_cache.dtype in FLOAT_DTYPES:
        rotated_key = rotated_key.to(key_cache.dtype)
    reshape_and_cache(
        rotated_key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale
    )
    query.copy_(rotate(query, cos[positions], sin[positions], interleaved))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x [num_tokens, num_heads, head_dim]`` turned by ``cos``, ``sin [num_tokens, rotary_dim / 2]``.

    Computed in float32. Element ``i`` is paired with ``i + rotary_dim / 2`` (NeoX), or, if interleaved,
    ``2 i`` with ``2 i + 1`` (GPT-J); what lies past ``rotary_dim`` passes through.
    """
    half_dim = cos.shape[1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    rotated = x.float().clone()
    first = slice(0, 2 * half_dim, 2) if interleaved else slice(0, half_dim)
    second = slice(1, 2 * half_dim, 2) if interleaved else slice(half_dim, 2 * half_dim)
    a, b = x[..., first].float(), x[..., second].float()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    return rotated


# ---------------------------------------------------------------------------------- moving the cache


def copy_blocks(
    key_caches: Tensor | Sequence[Tensor], value_caches: Tensor | Sequence[Tensor], block_mapping: Tensor
) -> None:
    """Copy blocks within each cache: every source as it was before the call (snapshot meaning).

    Example:
        >>> cache = torch.arange(3.0).reshape(3, 1, 1, 1)
        >>> copy_blocks(cache, cache.clone(), torch.tensor([[0, 1], [1, 2]]))
        >>> cache.flatten()
        tensor([0., 0., 1.])
    """
    caches = [*as_layers(key_caches), *as_layers(value_caches)]
    swap_blocks(caches, caches, block_mapping)


def swap_blocks(
    source: Tensor | Sequence[Tensor], destination: Tensor | Sequence[Tensor], block_mapping: Tensor
) -> None:
    """Copy blocks, bit for bit, from one cache to another, on the same device or not; snapshot meaning.

    Raises:
        IndexError: an id lies outside the pool of its cache.
        ValueError: two pairs have the same destination.

    Example:
        >>> device, host = torch.zeros(4, 1, 1, 2), torch.ones(2, 1, 1, 2)
        >>> swap_blocks(host, device, torch.tensor([[1, 3]]))
        >>> device[:, 0, 0, 0]
        tensor([0., 0., 0., 1.])
    """
    pairs: list[list[int]] = block_mapping.tolist()
    layers = list(zip(as_layers(source), as_layers(destination), strict=True))
    for layer_source, layer_destination in layers:
        for pair_idx, pair in enumerate(pairs):
            for name, block, cache in zip(
                ("source", "destination"), pair, (layer_source, layer_destination), strict=True
            ):
                if not 0 <= block < cache.shape[0]:
                    raise IndexError(
                        f"block_mapping[{pair_idx}] has the {name} {block}, "
                        f"outside the pool of {cache.shape[0]} blocks"
                    )
    if len({block for _, block in pairs}) < len(pairs):
        raise ValueError("block_mapping names a destination twice")
    snapshots = [
        [as_bytes(layer_source)[source_block].clone() for source_block, _ in pairs]
        for layer_source, _ in layers
    ]
    for snapshot, (_, layer_destination) in zip(snapshots, layers, strict=True):
        for block_bytes, (_, destination_block) in zip(snapshot, pairs, strict=True):
            as_bytes(layer_destination)[destination_block] = block_bytes


def as_layers(caches: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A single cache tensor as a list of one layer."""
    return [caches] if isinstance(caches, Tensor) else list(caches)


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    kv_starts: Tensor | None = None,
    total_tokens: int | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The keys and values of every sequence, one after the other, dense and dequantised.

    Returns:
        ``key, value [sum(context_lens - kv_starts), num_kv_heads, head_dim]``, in the cache's dtype, or
        float32 if it is quantised, or ``dtype``.

    Raises:
        ValueError: ``total_tokens`` is not the number of tokens.
        IndexError: a needed table entry is outside the pool, or a context longer than its table.

    Example:
        >>> cache = torch.arange(4.0).reshape(4, 1, 1, 1)
        >>> key, _ = gather_kv(cache, cache, torch.tensor([[3, 0], [2, -1]]), torch.tensor([2, 1]))
        >>> key.flatten()
        tensor([3., 0., 2.])
    """
    slots = []
    for seq_idx, context_len in enumerate(context_lens.tolist()):
        kv_start = 0 if kv_starts is None else max(0, int(kv_starts[seq_idx]))
        slots.append(token_slots(block_tables, seq_idx, kv_start, context_len, key_cache))
    all_slots = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64, device=key_cache.device)
    if total_tokens is not None and total_tokens != all_slots.shape[0]:
        raise ValueError(
            f"total_tokens is {total_tokens}, but the sequences hold {all_slots.shape[0]} tokens"
        )
    results = []
    for cache, scale in ((key_cache, k_scale), (value_cache, v_scale)):
        rows = read_slots(cache, all_slots)
        if cache.dtype not in FLOAT_DTYPES:
            rows = dequantize(rows, scale, torch.float32)
        results.append(rows if dtype is None else rows.to(dtype))
    return results[0], results[1]


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the attention over each.

    A state with lse -inf saw no key: the other is returned bit for bit, whatever the empty state's output
    holds; two empty states give output 0 and lse -inf. Give a sink to one of the states only. (Online
    softmax: Milakov and Gimelshein, 2018, section 3.1.)

    Returns:
        ``out [num_tokens, num_heads, head_dim]`` in the dtype of ``out_a``, ``lse [num_tokens, num_heads]``.

    Example:
        >>> one_key, three_keys = torch.tensor([[0.0]]), torch.tensor([[3.0]]).log()
        >>> merge_attn_states(torch.zeros(1, 1, 1), one_key, torch.full((1, 1, 1), 4.0), three_keys)[0]
        tensor([[[3.]]])
    """
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    merged = torch.zeros(out_a.shape, dtype=torch.float64, device=out_a.device)
    for out, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part_lse.double() - lse)[..., None]
        empty = (part_lse == -torch.inf)[..., None]
        merged += torch.where(empty, 0.0, weight * out.double())
    return merged.to(out_a.dtype), lse.float()
