"""The transformers drop-in: its mask function, and what it does not support, which says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from small_models import CONFIGS, SIZES, WINDOW, generate, logits, make_cache, make_model, named, prompts
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pagedkv
from pagedkv.integrations.transformers import PagedCache, paged_attention_forward, paged_attention_mask


def test_both_functions_are_registered() -> None:
    assert ALL_ATTENTION_FUNCTIONS["pagedkv"] is paged_attention_forward
    assert ALL_MASK_ATTENTION_FUNCTIONS["pagedkv"] is paged_attention_mask


def test_mask_function_passes_padding_on() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(paged_attention_mask(2, 4, 4, attention_mask=mask), mask.bool())
    assert torch.equal(paged_attention_mask(2, 1, 3, 3, 1, attention_mask=mask), mask[:, 1:].bool())
    window = sliding_window_causal_mask_function(5)
    assert torch.equal(paged_attention_mask(2, 4, 4, mask_function=window, attention_mask=mask), mask.bool())
    assert paged_attention_mask(2, 4, 4, attention_mask=torch.ones(2, 4)) is None
    assert paged_attention_mask(2, 4, 4) is None


@pytest.mark.parametrize(
    "pattern",
    [
        bidirectional_mask_function,
        chunked_causal_mask_function(4, torch.zeros(1)),
        or_masks(bidirectional_mask_function),
        and_masks(sliding_window_overlay(4), bidirectional_mask_function),
        lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx <= q_idx,
    ],
)
def test_mask_function_refuses_other_patterns(pattern: Any) -> None:
    with pytest.raises(NotImplementedError, match="supports causal masks"):
        paged_attention_mask(1, 4, 4, mask_function=pattern)


def test_masks_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match=r"shape \[1, 3\].*cover all \[1, 4\]"):
        paged_attention_mask(1, 2, 4, 2, attention_mask=torch.ones(1, 3))
    with pytest.raises(NotImplementedError, match="static caches"):
        paged_attention_mask(1, 2, 8)
    model = make_model("llama")
    with pytest.raises(NotImplementedError, match="2-D padding mask"):
        logits(model, "pagedkv", input_ids=torch.ones(1, 3).long(), attention_mask=torch.zeros(1, 1, 3, 3))
    with pytest.raises(NotImplementedError, match="static caches"):
        generate(model, "pagedkv", **prompts(), cache_implementation="static")
    packed = {"input_ids": torch.ones(1, 4).long(), "position_ids": torch.tensor([[0, 1, 0, 1]])}
    with pytest.raises(NotImplementedError, match="packed"):
        logits(model, "pagedkv", **packed, use_cache=False)
    with pytest.raises(NotImplementedError, match="padding between tokens"):
        logits(
            model,
            "pagedkv",
            input_ids=torch.ones(1, 3).long(),
            attention_mask=torch.tensor([[1, 0, 1]]),
            use_cache=False,
        )


# What is not supported says so


def attention(**options: Any) -> None:
    """Call the attention function on dense keys."""
    states = torch.zeros(1, 2, 3, 8)
    paged_attention_forward(torch.nn.Identity(), states, states, states, None, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": 0.1}, ValueError, "dropout must be 0"),
        ({"is_causal": False}, NotImplementedError, "not causal"),
        ({"position_bias": torch.zeros(1)}, NotImplementedError, "position_bias"),
        ({"cu_seq_lens_q": torch.zeros(2)}, NotImplementedError, "cu_seq_lens_q"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions"),
    ],
)
def test_attention_options_that_are_not_supported(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    attention(position_bias=None, output_attentions=False)
    with pytest.raises(error, match=message):
        attention(**options)


def test_training_is_an_error() -> None:
    model = transformers.LlamaForCausalLM(CONFIGS["llama"]())
    model.set_attn_implementation("pagedkv")
    cache = make_cache(model)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(**named(**prompts(), cache=cache))
    # What broke off is forgotten.
    inputs = prompts((21, 20, 3))
    expected = logits(model, "pagedkv", **inputs, cache=make_cache(model))
    assert torch.equal(logits(model, "pagedkv", **inputs, cache=cache), expected)


def test_output_attentions_is_an_error() -> None:
    model = make_model("llama")
    with pytest.raises((ValueError, NotImplementedError), match="output_attentions"):
        logits(model, "pagedkv", **prompts(), cache=make_cache(model), output_attentions=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BartConfig(), "encoder-decoder"),
        (transformers.Llama4TextConfig(num_hidden_layers=4), "chunked_attention"),
        (transformers.Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
        (transformers.Gemma3nTextConfig(), "shared keys"),
    ],
)
def test_models_that_are_not_supported(config: transformers.PreTrainedConfig, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        PagedCache(config, num_blocks=1)


def test_latent_attention_is_an_error() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(**sizes, kv_lora_rank=16, q_lora_rank=16, n_routed_experts=8)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with pytest.raises(ValueError, match="this model is not supported"):
        logits(model, "pagedkv", input_ids=torch.ones(1, 3).long(), cache=make_cache(model))


def test_a_model_that_hides_its_window_is_an_error() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    config = transformers.PhimoeConfig(**sizes, sliding_window=WINDOW, num_local_experts=4)
    model = transformers.PhimoeForCausalLM(config).eval()
    with pytest.raises(NotImplementedError, match="sliding_window 8 in the config"):
        logits(model, "pagedkv", input_ids=torch.ones(1, 3).long(), cache=make_cache(model))


def test_pool_size_is_required() -> None:
    config = CONFIGS["llama"]()
    with pytest.raises(ValueError, match="num_blocks"):
        PagedCache(config)
    cache = PagedCache(config, memory="1MiB", dtype=torch.bfloat16)
    assert cache.stats().bytes == 2**20
    assert cache.pool.num_blocks == 2**20 // (2 * 2 * 2 * 16 * 16 * 2)


def test_another_batch_size_is_an_error() -> None:
    model = make_model("llama")
    cache = make_cache(model)
    logits(model, "pagedkv", **prompts(), cache=cache)
    with pytest.raises(ValueError, match=r"holds a batch of 3, this one has 1 .*reset"):
        logits(model, "pagedkv", input_ids=torch.tensor([[5]]), cache=cache)


def test_out_of_memory_changes_nothing() -> None:
    model, mask = make_model("llama"), prompts()["attention_mask"]
    cache = make_cache(model, num_blocks=13)
    logits(model, "pagedkv", **prompts(), cache=cache)
    before = (repr(cache), cache.stats())
    inputs = {"input_ids": torch.ones(3, 4).long(), "attention_mask": torch.cat([mask, torch.ones(3, 4)], 1)}
    with pytest.raises(pagedkv.OutOfMemoryError, match=r"1 of 13 blocks of 4 .* too few for 12 more tokens"):
        logits(model, "pagedkv", **inputs, cache=cache)
    assert (repr(cache), cache.stats()) == before
    cache.crop(-1)
    logits(model, "pagedkv", input_ids=inputs["input_ids"][:, :1], attention_mask=mask, cache=cache)
    assert cache.get_seq_length() == 21


def test_a_forward_pass_that_broke_off_leaves_no_trace() -> None:
    model, inputs = make_model("llama"), prompts((21, 20, 3))
    expected = logits(model, "pagedkv", **inputs, cache=make_cache(model))
    cache = make_cache(model)
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, "pagedkv", **prompts(), cache=cache)
    broken.remove()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, "pagedkv", **inputs, cache=cache), expected)


def test_keys_that_never_arrive_are_an_error() -> None:
    model = make_model("llama")
    config = CONFIGS["llama"]()
    config._attn_implementation = "pagedkv"
    cache = PagedCache(config, num_blocks=32)
    with pytest.raises(RuntimeError, match="never reached"):
        logits(model, "eager", **prompts(), cache=cache)
