"""Llama models written for one ragged batch on a paged cache: what to do where every millisecond counts.

The same mathematics as `pagedkv.integrations.ragged`, which runs transformers' own modules, in fewer steps:
queries, keys and values come from one product, so do gate and up, and rotary embedding happens on the way to
the cache. It is also what a model of one's own looks like.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from pagedkv import ops
from pagedkv.cache import Batch, PagedKVCache
from pagedkv.generation.layers import rms_norm, silu_and_mul
from pagedkv.generation.linear import PackedLinear, use_huge_pages

__all__ = ["RaggedLlama"]


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: PackedLinear
    out: PackedLinear
    mlp_norm: Tensor
    gate_and_up: PackedLinear
    down: PackedLinear


class RaggedLlama:
    """A Llama model that computes ragged batches, `model(token_ids, positions, batch)`, for `Generator`.

    Args:
        model: whose weights are packed; it stays as it is.
        cache: what it attends to, see `pagedkv.integrations.ragged.make_cache`. Not quantised.
        split_size: as for `paged_attention`: with it the logits of a sequence have the same bits alone and in
            any batch, if widths are multiples of 64 (at the end of a row torch may round differently).
        max_positions: how many positions are prepared; None: as many as the model was made for.

    Raises:
        NotImplementedError: another architecture, another activation than SiLU, a rotary embedding that
            changes with the length, a quantised cache.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    >>> import transformers; model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    >>> cache = pagedkv.PagedKVCache(2, 4, 16, num_blocks=8)
    >>> batch = cache.batch([cache.add_sequence([5, 6])])
    >>> with torch.no_grad(): RaggedLlama(model, cache)(torch.tensor([5, 6]), torch.arange(2), batch).shape
    torch.Size([1, 64])
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: PagedKVCache,
        *,
        split_size: int | None = None,
        max_positions: int | None = None,
    ) -> None:
        """Pack the weights."""
        config = model.config
        rope_type = (config.rope_parameters or {}).get("rope_type")
        if (
            type(model) is not LlamaForCausalLM
            or config.hidden_act != "silu"
            or cache.kv_dtype != cache.dtype
        ):
            raise NotImplementedError(
                "RaggedLlama takes a LlamaForCausalLM with SiLU and a cache of the model's dtype, not "
                f"{type(model).__name__} with {config.hidden_act} and {cache.kv_dtype}; see RaggedModel"
            )
        if rope_type in ("dynamic", "longrope"):
            raise NotImplementedError(f"RaggedLlama does not support the rotary embedding {rope_type!r}")
        self.cache, self.split_size = cache, split_size
        self._eps = config.rms_norm_eps
        self._head_dim = cache.head_dim
        self._num_heads = [config.num_attention_heads, cache.num_kv_heads, cache.num_kv_heads]

        packed: list[PackedLinear] = []

        def pack(*linears: torch.nn.Linear) -> PackedLinear:
            weights: list[Tensor] = [linear.weight for linear in linears]
            biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
            packed.append(
                PackedLinear(
                    torch.cat(weights),
                    torch.cat(biases) if biases else None,
                    reproducible=split_size is not None,
                )
            )
            return packed[-1]

        with torch.no_grad():
            self._embedding = model.model.embed_tokens.weight
            self._layers = [
                _Layer(
                    layer.input_layernorm.weight,
                    pack(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                    pack(layer.self_attn.o_proj),
                    layer.post_attention_layernorm.weight,
                    pack(layer.mlp.gate_proj, layer.mlp.up_proj),
                    pack(layer.mlp.down_proj),
                )
                for layer in model.model.layers
            ]
            self._norm = model.model.norm.weight
            self._head = pack(model.lm_head)
            use_huge_pages(packed)
            positions = torch.arange(max_positions or config.max_position_embeddings, device=cache.device)
            # As transformers has them: rounded to the model's dtype, each half of a head the same.
            tables = model.model.rotary_emb(self._norm, positions.unsqueeze(0))
            self._cos, self._sin = (table[0, :, : self._head_dim // 2].contiguous() for table in tables)

    def __call__(self, token_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """`[num_tokens]` ids and positions -> logits of each sequence's last token."""
        cache, eps = self.cache, self._eps
        tables, slots, context_lens = batch.block_tables, batch.slot_mapping, batch.context_lens
        query_start_loc, max_query_len = batch.query_start_loc, batch.max_query_len
        x = functional.embedding(token_ids, self._embedding)
        pools = zip(cache.key_caches, cache.value_caches, strict=True)
        for layer, (key_cache, value_cache) in zip(self._layers, pools, strict=True):
            qkv = layer.qkv(rms_norm(x, layer.attention_norm, eps)).view(len(x), -1, self._head_dim)
            q, k, v = qkv.split_with_sizes(self._num_heads, dim=1)
            ops.rope_and_cache(q, k, v, self._cos, self._sin, positions, key_cache, value_cache, slots)
            out = ops.paged_attention(
                q,
                tables,
                key_cache,
                value_cache,
                context_lens,
                query_start_loc=query_start_loc,
                max_query_len=max_query_len,
                split_size=self.split_size,
            )
            assert isinstance(out, Tensor)
            x = layer.out(out.flatten(1), residual=x)
            x = layer.down(silu_and_mul(layer.gate_and_up(rms_norm(x, layer.mlp_norm, eps))), residual=x)
        last_rows = x[query_start_loc[1:].long() - 1]
        logits: Tensor = self._head(rms_norm(last_rows, self._norm, eps))
        return logits
