"""What differs between transformers 5.0 and the newest: one adapter for all, with the differences here.

Before 5.24 a model gives `Cache.update` no keyword dict, mask functions get a tensor of positions in place of
lengths, and `Cache.crop` takes the number of tokens to keep.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils

_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
IS_OLDER = _VERSION < (5, 24)

_NOTE = "_pagedkv_note"


def layer_types_and_windows(config: PreTrainedConfig) -> tuple[list[str], list[int | None]]:
    """The type of each layer, and its sliding window where it has one."""
    if hasattr(cache_utils, "get_layer_types_and_kwargs"):
        types, options = cache_utils.get_layer_types_and_kwargs(config)
        return types, [layer_options.get("sliding_window") for layer_options in options]
    window = getattr(config, "sliding_window", None)
    chunk_size = getattr(config, "attention_chunk_size", None)
    plain = "sliding_attention" if window else "chunked_attention" if chunk_size else "full_attention"
    types = list(getattr(config, "layer_types", None) or [plain] * config.num_hidden_layers)
    num_shared = getattr(config, "num_kv_shared_layers", None) or 0
    types = [*types[: len(types) - num_shared], *["dummy"] * num_shared]
    return types, [window if layer_type == "sliding_attention" else None for layer_type in types]


def leave_note(key: Tensor, note: object) -> None:
    """Have the key tensor carry a note to the attention function, where no keyword dict goes there."""
    setattr(key, _NOTE, note)


def take_note(key: Tensor) -> Any:
    """The note that came with the key tensor, which forgets it; or None."""
    note = getattr(key, _NOTE, None)
    if note is not None:
        delattr(key, _NOTE)  # the note knows the key: they would keep each other alive
    return note


def num_tokens(
    q_length: int | None, q_offset: int | Tensor, cache_position: Tensor | None, keys_end: int
) -> int:
    """How many tokens there are up to the last of the new ones that a mask is for."""
    if q_length is None:
        assert cache_position is not None
        # After a chunked prefill, 5.0 counts positions from one too many.
        return min(int(cache_position[-1]) + 1, keys_end)
    return int(q_offset) + q_length


def query_length(lengths: int | Tensor) -> int:
    """New tokens, from their number or their positions."""
    return len(lengths) if isinstance(lengths, Tensor) and lengths.dim() > 0 else int(lengths)
