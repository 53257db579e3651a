"""transformers' models as the callables that `pagedkv.generation` takes: one ragged batch, without padding.

A forward pass sees one row of all new tokens, one sequence after the other. The batch travels in the keyword
dict that models pass on to their attention function, which hands keys and values to `PagedKVCache.attend`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagedkv.cache import Batch, PagedKVCache
from pagedkv.generation.linear import pack_linears
from pagedkv.integrations.transformers import check_keywords, layer_windows

try:
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.activations import ACT2CLS
except ImportError as error:  # pragma: no cover - the import above has said so already
    raise ImportError("pagedkv.integrations.ragged needs transformers") from error

__all__ = ["RaggedModel", "make_cache", "ragged_attention_forward"]

IMPLEMENTATION = "pagedkv_ragged"
_KEYWORD = "pagedkv_ragged_batch"
_ACTIVATIONS: Any = tuple(entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())
# Larger tensors torch shares out to threads (those of GELU; of other functions larger ones still).
_MAX_SERIAL_ELEMENTS = 16384


@dataclass(frozen=True)
class _RaggedBatch:
    """What travels to the attention function."""

    cache: PagedKVCache
    batch: Batch
    split_size: int | None


def make_cache(model: PreTrainedModel, **options: Any) -> PagedKVCache:
    """A `PagedKVCache` of the model's shape, dtype and device, which gives back blocks behind its windows.

    Args:
        model: a causal model.
        options: of `PagedKVCache`: num_blocks or memory, block_size, prefix_caching, num_host_blocks, ...

    Raises:
        NotImplementedError: an encoder-decoder model, layers that are neither full nor sliding-window
            attention, a model on several devices.
    """
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise NotImplementedError(f"a paged cache serves a model on one device, not {sorted(devices)}")
    config = model.config.get_text_config(decoder=True)
    windows = layer_windows(config)
    num_heads = config.num_attention_heads
    return PagedKVCache(
        num_layers=len(windows),
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=model.dtype,
        device=model.device,
        sliding_window=windows if any(window is not None for window in windows) else None,
        **options,
    )


class RaggedModel:
    """A causal model of transformers that computes ragged batches: `model(token_ids, positions, batch)`.

    The model itself stays as it is: this is a copy of its modules that shares its parameters, but has its
    linear layers' weights packed (`PackedLinear`) beside them.

    Args:
        model: a causal model that passes its keyword dict on to its attention function.
        cache: what it attends to, see `make_cache`.
        split_size: as for `paged_attention`: with it the logits of a sequence have the same bits alone and in
            any batch, if the model's other layers treat rows alone (mixtures of experts do not) and their
            widths are multiples of 64 (at the end of a row torch may round differently).
        pack: False leaves linear layers as they are, which `torch.compile` needs.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    >>> import transformers; model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    >>> cache = make_cache(model, num_blocks=8); batch = cache.batch([cache.add_sequence([5, 6, 7])])
    >>> with torch.no_grad(): RaggedModel(model, cache)(torch.tensor([5, 6, 7]), torch.arange(3), batch).shape
    torch.Size([1, 64])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedKVCache,
        *,
        split_size: int | None = None,
        pack: bool = True,
    ) -> None:
        """Copy the modules and pack the weights."""
        tensors = [*model.parameters(), *model.buffers()]
        self.model: PreTrainedModel = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        self.model.eval()  # type: ignore[no-untyped-call]
        if pack:
            pack_linears(self.model, reproducible=split_size is not None)
        if split_size is not None and cache.device.type == "cpu":
            _steady_activations(self.model)
        self.model.set_attn_implementation(IMPLEMENTATION)
        self.cache = cache
        self.split_size = split_size
        # Masks of four dimensions are passed on as they are; ours says nothing, as the batch says it all.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=cache.device)

    def __call__(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """`[num_tokens]` ids and positions -> logits of each sequence's last token, `[num_seqs, vocab_size]`.

        Raises:
            NotImplementedError: the attention layers ask for what the operator cannot do.
        """
        output = self.model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=batch.query_start_loc[1:].long() - 1,
            **{_KEYWORD: _RaggedBatch(self.cache, batch, self.split_size)},
        )
        logits: Tensor = output.logits[0]
        return logits


class _SteadyActivation(nn.Module):
    """An activation function whose results have the same bits in every batch, with any number of threads.

    torch rounds the last few elements of each thread's share in another way than those before them.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() <= _MAX_SERIAL_ELEMENTS:
            return self._activation(x)  # type: ignore[no-any-return]
        pieces = torch.split(x.flatten(), _MAX_SERIAL_ELEMENTS)
        return torch.cat([self._activation(piece) for piece in pieces]).view(x.shape)


def _steady_activations(module: nn.Module) -> None:
    """Wrap every activation function in the module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _ACTIVATIONS):
                setattr(parent, name, _SteadyActivation(child))


def ragged_attention_forward(
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `RaggedModel`, registered as `pagedkv_ragged`.

    Args:
        module: the attention layer, which knows its `layer_idx`.
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: the same.
        attention_mask: not used.
        dropout: not used: the model is in evaluation mode.
        scaling: multiplies q.k; None: `head_dim ** -0.5`.
        sliding_window: each query sees that many keys, itself included.
        softcap: caps scores.
        s_aux: `[num_heads]` sinks.
        kwargs: the model's other keywords, the batch among them.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and None in place of the weights.

    Raises:
        NotImplementedError: the model's keywords ask for what the operator cannot do, or the batch got lost.
    """
    check_keywords(kwargs, getattr(module, "is_causal", True), IMPLEMENTATION)
    ragged = kwargs.get(_KEYWORD)
    if not isinstance(ragged, _RaggedBatch):
        raise NotImplementedError(
            f"{type(module).__name__} got no batch: attn_implementation='{IMPLEMENTATION}' is for "
            "RaggedModel, and for models that pass their keywords on to the attention function"
        )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out = ragged.cache.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        q,
        k,
        v,
        ragged.batch,
        softmax_scale=scaling,
        window=sliding_window,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        split_size=ragged.split_size,
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, ragged_attention_forward)
