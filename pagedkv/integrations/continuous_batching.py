"""transformers' own continuous batching, `generate_batch`, with pagedkv's attention, on a CPU too.

Importing this module registers the attention implementation `pagedkv_flash`:

    model.set_attn_implementation("pagedkv_flash")
    outputs = model.generate_batch(prompts, generation_config=...)

transformers takes a name with "flash" in it for a flavour of FlashAttention: it prepares ragged batches, and
looks for FlashAttention's functions. Those of `pagedkv.integrations.flash_attn` are what it finds. Its cache
stays its own; for continuous batching on pagedkv's cache see `pagedkv.generation`.
"""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from pagedkv.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

IMPLEMENTATION = "pagedkv_flash"

_import_others = modeling_flash_attention_utils._lazy_imports


def _import_functions(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Transformers' search for an implementation's functions, which also finds ours."""
    if implementation != IMPLEMENTATION:
        found: tuple[Any, ...] = _import_others(implementation, *args, **kwargs)
        return found
    padding = (modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input)
    return (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, *padding)


# There is no public way to name functions for an implementation of one's own.
modeling_flash_attention_utils._lazy_imports = _import_functions
AttentionInterface.register(IMPLEMENTATION, flash_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)
