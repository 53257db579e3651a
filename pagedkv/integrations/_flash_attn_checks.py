"""What flash_attn.py checks of its arguments: shapes, and on the CPU, where the host sees them, values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedkv._fakes import check_dims

Window = tuple[int | None, int | None]

QUERY = "[batch_size, seqlen_q, num_heads, head_dim]"
LENGTHS = "[batch_size]"


def check_shape(tensor: Tensor, name: str, pattern: str, *sizes: int | None) -> None:
    """Raise a ValueError where the dimensions are not the pattern's, or the first sizes not these."""
    check_dims(tensor, name, pattern)
    for dim, (size, expected) in enumerate(zip(tensor.shape, sizes, strict=False)):
        if expected is not None and size != expected:
            raise ValueError(
                f"{name} must be {pattern}, got the shape {list(tensor.shape)}; "
                f"dimension {dim} must be {expected}"
            )


def check_keys(k: Tensor, v: Tensor, pattern: str, batch_size: int) -> None:
    """Raise a ValueError unless k and v have a row for each sequence, and as many tokens as each other."""
    check_shape(k, "k", pattern, batch_size)
    check_shape(v, "v", pattern, *k.shape[:3])


def attention_options(
    causal: bool,
    window_size: Window | None,
    softmax_scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    """The keywords of `ops.paged_attention` for FlashAttention's; NotImplementedError for what it has not."""
    if window_size is None:
        window_size = (None, None)
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (before, after), got {window_size!r}")
    before, after = (-1 if side is None or side < 0 else side for side in window_size)
    if after == 0:
        causal = True
    if not causal and before != after:
        raise NotImplementedError(
            f"window_size={(before, after)} without causal is not supported: only (-1, -1), (n, n) and (n, 0)"
        )
    if alibi_slopes is not None and (not causal or alibi_slopes.dim() != 1):
        raise NotImplementedError("alibi_slopes are supported with causal=True, and as [num_heads]")
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": None if before < 0 else before + 1,
        "softcap": 0.0 if softcap is None else softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": None if s_aux is None else s_aux.float(),
    }


def host_sees(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device, and are not being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_starts(starts: Tensor, name: str, num_tokens: int | None) -> None:
    """Raise an IndexError where starts fall, are negative, or end past the tokens there are."""
    check_shape(starts, name, "[num_seqs + 1]")
    if not host_sees(starts):
        return
    values = starts.tolist()
    for i, (start, before) in enumerate(zip(values, [0, *values], strict=False)):
        if start < before:
            raise IndexError(f"{name}[{i}] is {start}; it must neither be negative nor fall")
        if num_tokens is not None and start > num_tokens:
            raise IndexError(f"{name}[{i}] is {start}, past the {num_tokens} tokens there are")


def check_room(lens: Tensor, seqlen_new: int, capacity: int) -> None:
    """Raise an IndexError where new keys do not fit behind those that a sequence has."""
    if not host_sees(lens):
        return
    for seq_idx, length in enumerate(lens.tolist()):
        if length < 0:
            raise IndexError(f"cache_seqlens[{seq_idx}] is {length}; it must not be negative")
        if length + seqlen_new > capacity:
            raise IndexError(
                f"{seqlen_new} new keys do not fit behind the {length} of sequence {seq_idx}: "
                f"its part of the cache has room for {capacity}"
            )


def check_rotary(
    seqlen_q: int, seqlen_new: int, options: dict[str, Any], cache_leftpad: Tensor | None
) -> None:
    """Raise a NotImplementedError where one rotation does not fit queries and keys."""
    if cache_leftpad is not None:
        raise NotImplementedError("rotary embedding with cache_leftpad is not supported")
    if seqlen_q != seqlen_new:
        raise NotImplementedError(
            f"rotary embedding of {seqlen_q} queries beside {seqlen_new} new keys is not supported"
        )
    if seqlen_q > 1 and not options["causal"] and options["window"] is None:
        raise NotImplementedError("rotary embedding of several queries needs causal=True or a window")


def check_needed_blocks(
    tables: Tensor,
    k_cache: Tensor,
    lens: Tensor,
    seqlen_q: int,
    window: int | None,
    kv_starts: Tensor | None,
) -> None:
    """Raise an IndexError where a key that is seen lies in a block that the cache does not have."""
    if not host_sees(tables) or tables.numel() == 0:
        return
    num_blocks, block_size = k_cache.shape[:2]
    smallest, largest = tables.aminmax()
    if smallest >= 0 and largest < num_blocks:  # as a rule, and quickly found
        return
    first_keys = torch.zeros_like(lens) if kv_starts is None else kv_starts
    if window is not None:
        first_keys = first_keys.maximum(lens - seqlen_q - window + 1)
    begins = torch.arange(tables.shape[1]) * block_size
    needed = (begins + block_size > first_keys.unsqueeze(1)) & (begins < lens.unsqueeze(1))
    outside = needed & ((tables < 0) | (tables >= num_blocks))
    if outside.any():
        seq_idx, entry = outside.nonzero()[0].tolist()
        raise IndexError(
            f"sequence {seq_idx} needs block {int(tables[seq_idx, entry])}, outside the {num_blocks} blocks "
            "(or rows) of the cache"
        )
