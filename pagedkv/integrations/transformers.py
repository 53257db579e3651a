"""pagedkv in Hugging Face transformers: an attention implementation, `pagedkv`, and a cache for `generate`.

Importing this module registers the attention function and its mask function. A forward pass calls

1. the mask function, with the padding mask of the whole batch;
2. in each layer `PagedCache.update`, with the keys and values of the new tokens: it leaves a note in the
   keyword dict that the model passes on to
3. the attention function, which knows the mask, and writes and reads through the cache's block tables.

So padding is never stored. Where the note cannot travel (another attention implementation, or a model that
does not pass its keyword dict), `update` stores every token and returns dense keys and values, as other
caches do.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagedkv.cache import CacheStats, PagedKVCache, Sequence
from pagedkv.integrations._rectangle import Rectangle, attend_dense

try:
    from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.masking_utils import (
        AttentionMaskInterface,
        and_masks,
        causal_mask_function,
        sliding_window_overlay,
    )

    from pagedkv.integrations import _versions
except ImportError as error:
    raise ImportError(
        "pagedkv.integrations.transformers needs transformers 5.0 or later: pip install 'transformers>=5'"
    ) from error

__all__ = ["PagedCache", "paged_attention_forward", "paged_attention_mask"]

IMPLEMENTATION = "pagedkv"
_HANDOVER = "pagedkv_handover"

# With these keywords some models change what a query sees or how it scores a key, as the operator cannot.
_UNSUPPORTED_KEYWORDS = {
    "block_indices",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "head_mask",
    "indices",
    "output_attentions",
    "position_bias",
    "seq_idx",
    "sinks",
}

_AND_MASKS_CODE = and_masks(causal_mask_function).__code__
_SLIDING_WINDOW_CODE = sliding_window_overlay(1).__code__


@dataclass(frozen=True)
class _Handover:
    """The note from `PagedCache.update` to the attention function of the same layer."""

    cache: PagedCache
    layer_idx: int
    key: Tensor
    value: Tensor


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers asks of one layer: all hold the same tokens, so the cache answers."""

    is_croppable = True

    def __init__(self, cache: PagedCache, layer_idx: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.proxy(cache)  # no cycle: the pool is freed with the last reference to the cache
        self._layer_idx = layer_idx
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The pool is allocated with the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.update(key_states, value_states, self._layer_idx, *args, **kwargs)
        return keys, values

    def get_seq_length(self) -> int:
        return int(self._cache.get_seq_length())

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.get_seq_length() + _versions.query_length(query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions


class PagedCache(Cache):
    """A paged key-value cache that transformers' models and `generate` accept in place of a `DynamicCache`.

    One cache serves one batch; `reset` makes it ready for the next. Give the model
    `attn_implementation="pagedkv"`, so that attention reads the blocks where they lie; with any other one the
    cache gathers dense keys and values at each step: right, but slow. Padding takes no slot, and padded
    queries get output 0. Sliding-window layers keep all their tokens. The pool has a fixed size. Inference
    only.

    Args:
        model: the model, or its `config`: the very object, as its attention implementation is looked up.
        num_blocks: blocks in the pool. Exactly one of num_blocks and memory is given.
        memory: bytes for all tensors of the cache together: an int, text ("2GiB"), or a fraction (float) of
            the device's free memory.
        block_size: tokens in a block.
        dtype: of the model's keys and values. Default: the model's or config's.
        kv_dtype: what the cache stores; dtype (the default), float8_e4m3fn, float8_e5m2 or int8.
        device: default: the model's; "cpu" where a config is given.
        k_scales: key = stored * scale, `[num_layers, num_kv_heads]` float32 or a float; int8 needs them.
        v_scales: the same for values.

    Attributes:
        pool: the `pagedkv.PagedKVCache` that holds the blocks.

    Raises:
        ValueError: both or neither of num_blocks and memory; otherwise as `PagedKVCache`.
        NotImplementedError: an encoder-decoder model, layers that are neither full nor sliding-window
            attention, layers that share keys, a model on several devices.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    >>> config = transformers.LlamaConfig(**sizes, attn_implementation="pagedkv", eos_token_id=None)
    >>> model = transformers.LlamaForCausalLM(config); cache = PagedCache(model, num_blocks=8)
    >>> ids = model.generate(torch.tensor([[5, 6, 7]]), cache=cache, max_new_tokens=5)
    >>> ids.shape, cache.get_seq_length(), cache.stats().num_used
    (torch.Size([1, 8]), 7, 1)
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        *,
        num_blocks: int | None = None,
        memory: int | float | str | None = None,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        k_scales: Tensor | float | None = None,
        v_scales: Tensor | float | None = None,
    ) -> None:
        """Allocate the pool; see the class."""
        if isinstance(model, PreTrainedModel):
            devices = {str(parameter.device) for parameter in model.parameters()}
            if len(devices) > 1:
                raise NotImplementedError(f"PagedCache serves a model on one device, not {sorted(devices)}")
            config, dtype, device = model.config, dtype or model.dtype, device or model.device
        else:
            config = model
        self._config = config.get_text_config(decoder=True)
        if dtype is None and isinstance(self._config.dtype, torch.dtype):
            dtype = self._config.dtype
        self._windows = layer_windows(self._config)
        num_heads = self._config.num_attention_heads
        self.pool = PagedKVCache(
            num_layers=len(self._windows),
            num_kv_heads=getattr(self._config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(self._config, "head_dim", None) or self._config.hidden_size // num_heads,
            num_blocks=num_blocks,
            memory=memory,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device or "cpu",
            k_scales=k_scales,
            v_scales=v_scales,
        )
        self._rectangle = Rectangle(self.pool)
        self._handover: _Handover | None = None
        super().__init__(layers=[_Layer(self, layer_idx) for layer_idx in range(len(self._windows))])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values: hand them to the attention function, or store and gather.

        Args:
            key_states: `[batch_size, num_kv_heads, num_tokens, head_dim]`, after RoPE.
            value_states: the same.
            layer_idx: 0 to num_layers - 1.
            args: not used.
            kwargs: `kwargs=` is the keyword dict that the model will pass to its attention function.

        Returns:
            What the model is to pass to its attention function.

        Raises:
            ValueError: shape or batch size do not fit the cache.
            RuntimeError: what the call before handed over never reached the attention function.
        """
        if self._handover is not None:
            lost, self._handover = self._handover, None
            raise RuntimeError(
                f"the keys of layer {lost.layer_idx} never reached pagedkv's attention function: the model "
                "does not use attn_implementation='pagedkv', but the config that the cache was made from "
                "says so"
            )
        self._rectangle.check_states(layer_idx, key_states, value_states)
        keywords = kwargs.get("kwargs")
        if isinstance(keywords, dict) and self._config._attn_implementation == IMPLEMENTATION:
            self._handover = keywords[_HANDOVER] = _Handover(self, layer_idx, key_states, value_states)
            return key_states, value_states
        if _versions.IS_OLDER and self._config._attn_implementation == IMPLEMENTATION:
            self._handover = _Handover(self, layer_idx, key_states, value_states)
            _versions.leave_note(key_states, self._handover)
            return key_states, value_states
        return self._rectangle.store(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row, padding included, after the last forward pass that ran to its end."""
        return self._rectangle.num_columns

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The pool's sequence of each row, without its padding."""
        return tuple(self._rectangle.rows)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward pass."""
        return len(self._rectangle.rows) or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row, padding included.

        Before transformers 5.24 a positive number is one of tokens to keep.

        Raises:
            ValueError: the number is positive, or there are fewer tokens.
        """
        num_tokens = self.get_seq_length()
        if _versions.IS_OLDER and tokens_to_remove > 0:
            tokens_to_remove = min(tokens_to_remove - num_tokens, 0)
        if not -num_tokens <= tokens_to_remove <= 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, {-num_tokens} to 0, got {tokens_to_remove}"
            )
        self._rectangle.truncate(num_tokens + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was. Rows of one parent share its blocks."""
        self._rectangle.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row in its place; they share its blocks."""
        self._rectangle.select([i for i in range(len(self._rectangle.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows alone, in this order; a bool mask of rows will do."""
        self._rectangle.select(torch.arange(len(self._rectangle.rows))[indices.cpu()].tolist())

    def reset(self) -> None:
        """Give back every block and forget the batch; the pool stays."""
        self._handover = None
        self._rectangle.clear()

    def free(self) -> None:
        """Give back every block and forget the batch, as `reset` does."""
        self.reset()

    def stats(self) -> CacheStats:
        """Count the pool's blocks, filled slots and bytes: `PagedKVCache.stats`."""
        return self.pool.stats()

    def __repr__(self) -> str:
        """Show the batch and the pool."""
        return (
            f"PagedCache(batch_size={self.batch_size}, seq_length={self.get_seq_length()}, pool: {self.pool})"
        )

    def _attend(
        self, handover: _Handover, query: Tensor, visible: Tensor | None, window: int | None, **options: Any
    ) -> Tensor:
        layer_idx, key, value = handover.layer_idx, handover.key, handover.value
        if window != self._windows[layer_idx]:
            raise NotImplementedError(
                f"layer {layer_idx} has sliding_window {self._windows[layer_idx]} in the config, but the "
                f"model calls its attention with {window}; this model is not supported"
            )
        if query.shape[2] != key.shape[2]:
            raise NotImplementedError(
                f"{query.shape[2]} queries beside {key.shape[2]} new keys are not supported"
            )
        return self._rectangle.attend(layer_idx, query, key, value, visible, window=window, **options)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention, registered as `pagedkv`: causal, over a `PagedCache` or dense keys.

    Args:
        module: the attention layer.
        query: `[batch_size, num_heads, num_tokens, head_dim]`, the last tokens of each row.
        key: `[batch_size, num_kv_heads, num_keys, head_dim]`; with a `PagedCache` what its `update` returned.
        value: the same.
        attention_mask: `[batch_size, all tokens]` bool, False where a token is padding, or None: none is.
        dropout: 0.
        scaling: multiplies q.k; None: `head_dim ** -0.5`.
        sliding_window: each query sees that many keys, itself included.
        softcap: caps scores (Gemma 2).
        s_aux: `[num_heads]` sinks (gpt-oss).
        is_causal: None: what the module says.
        kwargs: the model's other keywords.

    Returns:
        `[batch_size, num_tokens, num_heads, head_dim]` (0 for padding), and None in place of the weights.

    Raises:
        ValueError: dropout; a mask that does not fit.
        NotImplementedError: attention that is not causal, 4-D masks, `output_attentions`, position biases,
            packed sequences, padding between tokens where it cannot be left out.
        RuntimeError: gradients are required.
    """
    handover = kwargs.get(_HANDOVER) or _versions.take_note(key)
    if handover is not None:
        handover.cache._handover = None  # it arrived
    if dropout > 0:
        raise ValueError(f"pagedkv is for inference: dropout must be 0, got {dropout} (call model.eval())")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    check_keywords(kwargs, causal, IMPLEMENTATION)
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.dtype != torch.bool):
        raise NotImplementedError(
            "attn_implementation='pagedkv' takes a 2-D padding mask, not one of shape "
            f"{list(attention_mask.shape)} and {attention_mask.dtype}"
        )
    options = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    if handover is None:
        return attend_dense(query, key, value, attention_mask, window=sliding_window, **options), None
    if key is not handover.key or value is not handover.value:
        raise NotImplementedError(
            "the model changes keys or values between cache.update and attention (as latent attention does), "
            "which attn_implementation='pagedkv' does not support; use 'sdpa' or 'eager' with this cache"
        )
    return handover.cache._attend(handover, query, attention_mask, sliding_window, **options), None


def paged_attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function registered as `pagedkv`: passes the padding mask on, and refuses what it cannot mean.

    Causality and windows are the attention function's business.

    Args:
        batch_size: rows.
        q_length: new tokens of a row; None: as many as cache_position has.
        kv_length: keys that attention will see.
        q_offset: tokens before the new ones.
        kv_offset: tokens before the first of the keys.
        mask_function: transformers' pattern: causal, with or without a sliding window.
        attention_mask: `[batch_size, kv_offset + kv_length]`, False or 0 where a token is padding.
        cache_position: `[q_length]` positions of the new tokens, in place of q_length and q_offset.
        kwargs: not used.

    Returns:
        `[batch_size, kv_length]` bool, or None where no token is padding.

    Raises:
        ValueError: the mask has other sizes.
        NotImplementedError: another pattern, or keys behind the last query (a static cache).

    >>> paged_attention_mask(1, 3, 3, attention_mask=torch.tensor([[0, 1, 1]]))
    tensor([[False,  True,  True]])
    """
    if not _is_causal_pattern(mask_function):
        raise NotImplementedError(
            "attn_implementation='pagedkv' supports causal masks, with or without a sliding window and "
            "padding, not bidirectional, chunked, packed or custom ones"
        )
    keys_end = kv_offset + kv_length
    num_tokens = _versions.num_tokens(q_length, q_offset, cache_position, keys_end)
    if keys_end != num_tokens:
        raise NotImplementedError(
            f"the last of {num_tokens} tokens is a query, but keys end at {keys_end}; "
            "attn_implementation='pagedkv' does not support static caches"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch_size, num_tokens):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, but it must cover all "
            f"[{batch_size}, {num_tokens}] tokens, those in the cache and padding included"
        )
    visible = attention_mask[:, kv_offset:].bool()
    return None if bool(visible.all()) else visible


def check_keywords(keywords: dict[str, Any], causal: bool, implementation: str) -> None:
    """Raise where a model asks its attention function for what the operator cannot do."""
    asked = {name for name, value in keywords.items() if value is not None and value is not False}
    unsupported = sorted(asked & _UNSUPPORTED_KEYWORDS)
    if not causal or unsupported:
        what = f"the keywords {unsupported}" if unsupported else "attention that is not causal"
        raise NotImplementedError(f"attn_implementation='{implementation}' does not support {what}")


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer, None where it sees all tokens."""
    if config.is_encoder_decoder:
        raise NotImplementedError("PagedCache does not support encoder-decoder models")
    layer_types, windows = _versions.layer_types_and_windows(config)
    unsupported = set(layer_types) - {"full_attention", "sliding_attention"}
    if unsupported:
        # transformers calls a layer "dummy" where it reuses another's keys, or has none.
        names = sorted("shared keys" if name == "dummy" else name for name in unsupported)
        raise NotImplementedError(f"PagedCache supports layers of full and of sliding attention, not {names}")
    return windows


def _is_causal_pattern(mask_function: Callable[..., Any]) -> bool:
    """Whether this is transformers' causal mask, alone or under a sliding window; told by what built it."""
    if mask_function is causal_mask_function:
        return True
    if getattr(mask_function, "__code__", None) is not _AND_MASKS_CODE:
        return False
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    return (
        len(parts) == 2
        and getattr(parts[0], "__code__", None) is _SLIDING_WINDOW_CODE
        and parts[1] is causal_mask_function
    )


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, paged_attention_mask)
