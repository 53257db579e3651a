"""The transformers drop-in: tokens and logits equal transformers' eager attention with a DynamicCache."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pagedkv
from pagedkv.integrations.transformers import PagedCache, paged_attention_forward, paged_attention_mask

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
    return model.generate(cache=cache, **{"max_new_tokens": 24, "do_sample": False, **options})


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, implementation: str, **inputs: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    return model(**inputs).logits


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_eager(family: str, block_size: int) -> None:
    model = make_model(family)
    expected = generate(model, "eager", **prompts())
    assert len(set(expected[0, 21:].tolist())) > 6, "the model repeats itself: nothing is tested"
    cache = make_cache(model, block_size=block_size)
    assert torch.equal(generate(model, "pagedkv", cache, **prompts()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_q_len_not_kv_len_adapter(family: str) -> None:
    model = make_model(family)
    ids = prompts((81, 81))["input_ids"]
    expected = logits(model, "eager", input_ids=ids)
    cache = make_cache(model)
    chunks = [logits(model, "pagedkv", input_ids=chunk, cache=cache) for chunk in ids.split([64, 16, 1], 1)]
    torch.testing.assert_close(torch.cat(chunks, 1), expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 81


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_half_precision_logits_are_close(family: str, dtype: torch.dtype) -> None:
    model, inputs = make_model(family, dtype), prompts((9, 9))
    expected = logits(make_model(family), "eager", **inputs)
    eager = logits(model, "eager", **inputs)
    cache = make_cache(model)
    assert cache.pool.key_caches[0].dtype == dtype
    paged = logits(model, "pagedkv", **inputs, cache=cache)
    assert (paged - expected).abs().max() <= 2 * (eager - expected).abs().max()


def test_sampled_tokens_equal_eager() -> None:
    model = make_model("llama")
    torch.manual_seed(3)
    expected = generate(model, "eager", **prompts(), do_sample=True, num_return_sequences=2)
    torch.manual_seed(3)
    paged = generate(model, "pagedkv", make_cache(model), **prompts(), do_sample=True, num_return_sequences=2)
    assert torch.equal(paged, expected)


def test_past_key_values_is_the_older_name_of_cache() -> None:
    model = make_model("llama")
    cache = make_cache(model)
    model.set_attn_implementation("pagedkv")
    with pytest.warns(FutureWarning, match="past_key_values"):
        model.generate(**prompts(), past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 22


# Padding


def test_padding_takes_no_slot() -> None:
    model = make_model("llama")
    cache = make_cache(model, block_size=4)
    logits(model, "pagedkv", **prompts(), cache=cache)
    assert (cache.get_seq_length(), cache.batch_size) == (21, 3)
    assert cache.stats().num_used == 6 + 2 + 4
    assert cache.stats().utilization == sum(PROMPT_LENS) / (4 * 12)


def test_padded_queries_give_zero() -> None:
    cache = make_cache(make_model("llama"))
    make_model("llama").set_attn_implementation("pagedkv")
    keywords: dict[str, Any] = {}
    states = torch.randn(2, 4, 3, 16)
    key, value = cache.update(states[:, :2], states[:, 2:], 0, kwargs=keywords)
    mask = torch.tensor([[False, True, True], [True, True, True]])
    out, weights = paged_attention_forward(torch.nn.Identity(), states, key, value, mask, **keywords)
    assert weights is None
    assert out.shape == (2, 3, 4, 16)
    assert torch.equal(out[0, 0], torch.zeros(4, 16))
    assert not out[0, 1:].eq(0).all(-1).any()


@pytest.mark.parametrize("cached", [True, False])
def test_right_padding(cached: bool) -> None:
    model, inputs = make_model("mistral"), prompts((9, 9))
    inputs["attention_mask"] = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    expected = logits(model, "eager", **inputs)
    keywords = {"cache": make_cache(model)} if cached else {"use_cache": False}
    paged = logits(model, "pagedkv", **inputs, **keywords)
    for row_idx, length in enumerate((9, 4)):
        torch.testing.assert_close(paged[row_idx, :length], expected[row_idx, :length], rtol=1e-4, atol=1e-4)


def test_padding_between_tokens_is_left_out() -> None:
    model, inputs = make_model("llama"), prompts((6, 6))
    mask = inputs["attention_mask"]
    mask[1, 3:] = 0
    cache, dynamic = make_cache(model), transformers.DynamicCache(config=model.config)
    logits(model, "eager", **inputs, cache=dynamic)
    logits(model, "pagedkv", **inputs, cache=cache)
    more = {"input_ids": torch.tensor([[8], [9]]), "attention_mask": torch.cat([mask, torch.ones(2, 1)], 1)}
    expected = logits(model, "eager", **more, cache=dynamic)
    torch.testing.assert_close(logits(model, "pagedkv", **more, cache=cache), expected, rtol=1e-4, atol=1e-4)


def test_padding_inside_of_a_window_is_an_error() -> None:
    model = make_model("mistral")
    inputs = prompts((12,))
    inputs["attention_mask"][0, 5] = 0
    with pytest.raises(NotImplementedError, match="sliding window over padding"):
        logits(model, "pagedkv", **inputs, cache=make_cache(model))


def test_a_mask_that_forgets_the_padding_is_an_error() -> None:
    model = make_model("llama")
    cache = make_cache(model)
    logits(model, "pagedkv", **prompts(), cache=cache)
    used = cache.stats().num_used
    with pytest.raises(ValueError, match="shows tokens that it hid"):
        logits(model, "pagedkv", input_ids=torch.tensor([[5], [6], [7]]), cache=cache)
    assert cache.stats().num_used == used


# What `generate` does with a cache


@pytest.mark.parametrize("family", FAMILIES)
def test_multi_turn_continuation(family: str) -> None:
    model, cache = make_model(family), make_cache(make_model(family))
    dynamic = transformers.DynamicCache(config=model.config)
    inputs = prompts((12,))
    for turn in range(3):
        expected = generate(model, "eager", dynamic, **inputs, max_new_tokens=9)
        assert torch.equal(generate(model, "pagedkv", cache, **inputs, max_new_tokens=9), expected)
        ids = torch.cat([expected, prompts((5,), seed=turn)["input_ids"]], 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert cache.stats().num_used == -(-cache.get_seq_length() // 4)


def test_multi_turn_continuation_after_rows_that_ended() -> None:
    model, cache = make_model("llama"), make_cache(make_model("llama"))
    dynamic = transformers.DynamicCache(config=model.config)
    inputs = prompts()
    first = generate(model, "eager", **inputs)
    eos = int(first[1, 24])  # the second row ends at its fourth token
    expected = generate(model, "eager", dynamic, **inputs, eos_token_id=eos)
    assert torch.equal(generate(model, "pagedkv", cache, **inputs, eos_token_id=eos), expected)
    mask = torch.cat([inputs["attention_mask"], (expected[:, 21:] != 0).long()], 1)
    assert not mask[:, 21:].all(), "no row has ended before the others"
    new = prompts((5, 5, 5))["input_ids"]
    inputs = {"input_ids": torch.cat([expected, new], 1), "attention_mask": torch.cat([mask, new > 0], 1)}
    expected = generate(model, "eager", dynamic, **inputs)
    used = cache.stats().num_used
    assert torch.equal(generate(model, "pagedkv", cache, **inputs, max_new_tokens=1), expected[:, :-23])
    assert cache.stats().num_used <= used + 2 * 3, "tokens after the end of a row kept their slots"


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_chunked_prefill(family: str) -> None:
    model = make_model(family)
    expected = generate(model, "eager", **prompts())
    assert torch.equal(
        generate(model, "pagedkv", make_cache(model), **prompts(), prefill_chunk_size=6), expected
    )


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_beam_search_shares_blocks(family: str) -> None:
    model, cache = make_model(family), make_cache(make_model(family))
    options = {"num_beams": 4, "num_return_sequences": 4}
    expected = generate(model, "eager", **prompts(), **options)
    assert torch.equal(generate(model, "pagedkv", cache, **prompts(), **options), expected)
    assert cache.batch_size == 12
    apart = sum(4 * -(-(length + 23) // 4) for length in PROMPT_LENS)
    assert cache.stats().num_used < apart


def test_prompt_lookup_decoding_crops() -> None:
    model = make_model("gemma2")
    inputs = prompts((4,))
    inputs = {name: tensor.repeat(1, 5) for name, tensor in inputs.items()}
    expected = generate(model, "eager", **inputs)
    cache = make_cache(model)
    assert torch.equal(generate(model, "pagedkv", cache, **inputs, prompt_lookup_num_tokens=3), expected)


def test_crop() -> None:
    model, cache, inputs = make_model("llama"), make_cache(make_model("llama")), prompts()
    expected = logits(model, "pagedkv", **inputs, cache=cache)
    cache.crop(-10)
    assert cache.get_seq_length() == 11
    assert cache.stats().num_used == 3 + 0 + 1
    inputs["input_ids"] = inputs["input_ids"][:, 11:]
    again = logits(model, "pagedkv", **inputs, cache=cache)
    torch.testing.assert_close(again, expected[:, 11:], rtol=1e-4, atol=1e-4)
    for tokens_to_remove in (1, -22):
        with pytest.raises(ValueError, match="-21 to 0"):
            cache.crop(tokens_to_remove)


def test_rows_are_repeated_and_selected() -> None:
    model, inputs = make_model("llama"), prompts()
    cache = make_cache(model)
    logits(model, "pagedkv", **inputs, cache=cache)
    used = cache.stats().num_used
    cache.batch_repeat_interleave(2)
    assert (cache.batch_size, cache.stats().num_used) == (6, used)
    cache.batch_select_indices(torch.tensor([True, False, False, True, True, True]))
    cache.reorder_cache(torch.tensor([3, 0, 0]))
    rows = torch.tensor([2, 0, 0])
    mask = torch.cat([inputs["attention_mask"][rows], torch.ones(3, 1)], 1)
    ids = torch.tensor([[7], [8], [9]])
    paged = logits(model, "pagedkv", input_ids=ids, attention_mask=mask, cache=cache)
    full = torch.cat([inputs["input_ids"][rows], ids], 1)
    expected = logits(model, "eager", input_ids=full, attention_mask=mask)[:, -1:]
    torch.testing.assert_close(paged, expected, rtol=1e-4, atol=1e-4)


def test_blocks_are_given_back() -> None:
    model = make_model("llama")
    cache = make_cache(model)
    for name in ("reset", "free"):
        logits(model, "pagedkv", **prompts(), cache=cache)
        getattr(cache, name)()
        assert (cache.stats().num_used, cache.get_seq_length(), cache.batch_size) == (0, 0, -1)
    generate(model, "pagedkv", cache, **prompts())
    pool = weakref.ref(cache.pool)
    del cache
    assert pool() is None, "the pool outlives the cache"


# Other attention implementations, other caches


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_other_implementations_get_dense_keys(family: str, implementation: str) -> None:
    model = make_model(family)
    expected = generate(model, "eager", **prompts())
    assert torch.equal(generate(model, implementation, make_cache(model), **prompts()), expected)


def test_update_without_the_keyword_dict_returns_dense_keys() -> None:
    model = make_model("llama")
    model.set_attn_implementation("pagedkv")
    cache = make_cache(model)
    states = torch.randn(2, 2, 2, 7, 16)
    for columns in (slice(0, 4), slice(4, 7)):
        for layer_idx in range(2):
            keys, values = cache.update(*states[..., columns, :], layer_idx)
            assert torch.equal(torch.stack([keys, values]), states[..., : columns.stop, :])


def test_the_implementation_may_change_midway() -> None:
    model, inputs = make_model("llama"), prompts()
    ids, mask = inputs["input_ids"], torch.cat([inputs["attention_mask"], torch.ones(3, 2)], 1)
    cache = make_cache(model)
    more = torch.tensor([[7, 8], [9, 10], [11, 12]])
    expected = logits(model, "eager", input_ids=torch.cat([ids, more], 1), attention_mask=mask)
    for implementation, step in (("pagedkv", 19), ("eager", 2), ("sdpa", 1), ("pagedkv", 1)):
        start = cache.get_seq_length()
        stop = start + step
        paged = logits(
            model,
            implementation,
            input_ids=torch.cat([ids, more], 1)[:, start:stop],
            attention_mask=mask[:, :stop],
            cache=cache,
        )
        seen = mask[:, start:stop].bool()
        torch.testing.assert_close(paged[seen], expected[:, start:stop][seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_caches_work_with_the_attention_function(family: str) -> None:
    model = make_model(family)
    expected = generate(model, "eager", **prompts())
    assert torch.equal(generate(model, "pagedkv", **prompts()), expected)
    assert torch.equal(generate(model, "pagedkv", **prompts(), use_cache=False), expected)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("implementation", ["pagedkv", "eager"])
def test_quantised_cache(kv_dtype: torch.dtype, implementation: str) -> None:
    model, inputs = make_model("llama"), prompts()
    scales = {"k_scales": 0.08, "v_scales": 0.08}
    cache = make_cache(model, kv_dtype=kv_dtype, **scales)
    assert cache.stats().bytes < make_cache(model).stats().bytes / 3
    paged = logits(model, implementation, **inputs, cache=cache)
    expected = logits(model, "eager", **inputs)
    seen = inputs["attention_mask"].bool()
    error = (paged - expected)[seen].abs().mean() / expected[seen].abs().mean()
    assert 0 < error < 0.2


# Masks


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
        model(**prompts(), cache=cache)
    logits(model, "pagedkv", **prompts(), cache=cache)  # what broke off is forgotten
    assert cache.get_seq_length() == 21


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
    model, inputs = make_model("llama"), prompts()
    cache = make_cache(model)
    expected = logits(model, "pagedkv", **inputs, cache=cache)
    cache.reset()
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, "pagedkv", **inputs, cache=cache)
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
