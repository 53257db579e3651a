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

from transformers import AttentionInterface, PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from pagedkv.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

IMPLEMENTATION = "pagedkv_flash"
_WITH_SINKS = "kernels-community/vllm-flash-attn3"  # has the arguments of ours

_import_others = modeling_flash_attention_utils._lazy_imports


def _import_functions(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Transformers' search for an implementation's functions, which also finds ours."""
    if implementation != IMPLEMENTATION:
        found: tuple[Any, ...] = _import_others(implementation, *args, **kwargs)
        return found
    padding = (modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input)
    return (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, *padding)


_models: Any = PreTrainedModel
_choose_others = _models._check_and_adjust_attn_implementation


def _choose_implementation(model: Any, implementation: str | None, *args: Any, **kwargs: Any) -> str:
    """Transformers' choice; models that want a FlashAttention with sinks may have ours as well."""
    listed = getattr(model, "_compatible_flash_implementations", None) or ()
    if implementation == IMPLEMENTATION and _WITH_SINKS in listed:
        return IMPLEMENTATION
    chosen: str = _choose_others(model, implementation, *args, **kwargs)
    return chosen


# There is no public way to name functions for an implementation of one's own, nor for a model to accept it.
_models._check_and_adjust_attn_implementation = _choose_implementation
modeling_flash_attention_utils._lazy_imports = _import_functions
AttentionInterface.register(IMPLEMENTATION, flash_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, flash_attention_mask)
