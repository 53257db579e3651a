"""What the tests of the transformers drop-in share: small random models, prompts, and ways to run them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from pagedkv.integrations.transformers import PagedCache

WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,  # wide enough that attention decides which token is best
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # tied ones repeat the last token
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES, attention_multiplier=0.6),  # its own softmax scale
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=4
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
}
FAMILIES = list(CONFIGS)
PROMPT_LENS = (21, 5, 14)


@functools.cache
def make_model(family: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 1.0, 2.0)
    return model


def prompts(lens: tuple[int, ...] = PROMPT_LENS, seed: int = 1) -> dict[str, Tensor]:
    """Left-padded random tokens and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lens)
    ids = torch.randint(2, 97, (len(lens), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lens)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def make_cache(model: transformers.PreTrainedModel, **options: Any) -> PagedCache:
    cache = PagedCache(model, **{"num_blocks": 256, "block_size": 4, **options})
    for pool in (*cache.pool.key_caches, *cache.pool.value_caches):
        if pool.is_floating_point():
            pool.view(torch.uint8).fill_(0xFF)  # NaN: what was never written must not be seen
    return cache


def generate(
    model: transformers.PreTrainedModel, implementation: str, cache: Any = None, **options: Any
) -> Tensor:
    model.set_attn_implementation(implementation)
    return model.generate(**named(cache=cache, **{"max_new_tokens": 24, "do_sample": False, **options}))


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, implementation: str, **inputs: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    return model(**named(**inputs)).logits


HAS_KEYWORD_DICT = "cache" in inspect.signature(transformers.LlamaModel.forward).parameters
newest_only = pytest.mark.skipif(not HAS_KEYWORD_DICT, reason="of newer versions of transformers")


def named(**keywords: Any) -> dict[str, Any]:
    """Keywords for a model: older versions of transformers have another name for the cache."""
    if "cache" in keywords and not HAS_KEYWORD_DICT:
        keywords["past_key_values"] = keywords.pop("cache")
    return keywords
