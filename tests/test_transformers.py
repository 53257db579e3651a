"""The transformers drop-in: tokens and logits equal transformers' eager attention with a DynamicCache."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import transformers
from small_models import (
    FAMILIES,
    HAS_KEYWORD_DICT,
    PROMPT_LENS,
    generate,
    logits,
    make_cache,
    make_model,
    newest_only,
    prompts,
)

from pagedkv.integrations.transformers import PagedCache, paged_attention_forward

NO_TOKEN = 500  # outside of the vocabulary; some versions of transformers need a number


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


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_equal_eager(family: str) -> None:
    model = make_model(family)
    torch.manual_seed(3)
    expected = generate(model, "eager", **prompts(), do_sample=True, num_return_sequences=2)
    torch.manual_seed(3)
    paged = generate(model, "pagedkv", make_cache(model), **prompts(), do_sample=True, num_return_sequences=2)
    assert torch.equal(paged, expected)


@newest_only
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
    assert torch.equal(generate(model, "pagedkv", cache, **inputs), expected)
    num_tokens = (inputs["attention_mask"].sum(1) + 23).tolist()
    assert [sequence.num_computed_tokens for sequence in cache.sequences] == num_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill(family: str) -> None:
    model = make_model(family)
    expected = generate(model, "eager", **prompts())
    assert torch.equal(
        generate(model, "pagedkv", make_cache(model), **prompts(), prefill_chunk_size=6), expected
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_beam_search_shares_blocks(family: str) -> None:
    model, cache = make_model(family), make_cache(make_model(family))
    options = {"num_beams": 4, "num_return_sequences": 4}
    expected = generate(model, "eager", **prompts(), **options)
    assert torch.equal(generate(model, "pagedkv", cache, **prompts(), **options), expected)
    assert cache.batch_size == 12
    apart = sum(4 * -(-(length + 23) // 4) for length in PROMPT_LENS)
    assert cache.stats().num_used < apart


def record_crops(cache: PagedCache) -> list[int]:
    """What `crop` will have been called with."""
    crops: list[int] = []
    crop = cache.crop

    def recorded(num_tokens: int) -> None:
        crops.append(num_tokens)
        crop(num_tokens)

    cache.crop = recorded
    return crops


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup_decoding_crops(family: str) -> None:
    model = make_model(family)
    inputs = prompts((4,))
    inputs = {name: tensor.repeat(1, 5) for name, tensor in inputs.items()}
    expected = generate(model, "eager", **inputs)
    cache = make_cache(model)
    crops = record_crops(cache)
    options = {"prompt_lookup_num_tokens": 3, "eos_token_id": NO_TOKEN}
    assert torch.equal(generate(model, "pagedkv", cache, **inputs, **options), expected)
    assert len(set(crops)) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding_crops_every_step(family: str) -> None:
    model = make_model(family)
    assistant = copy.deepcopy(model)
    assistant.set_attn_implementation("eager")
    has_window = getattr(assistant.config, "sliding_window", None) is not None
    if has_window and not HAS_KEYWORD_DICT:
        assistant.config.sliding_window = 4096  # dense caches of some versions cannot be cropped behind it
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():  # it is right at times
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    inputs = prompts((9,))
    expected = generate(model, "eager", **inputs)
    cache = make_cache(model)
    crops = record_crops(cache)
    options = {"assistant_model": assistant, "eos_token_id": NO_TOKEN}
    assert torch.equal(generate(model, "pagedkv", cache, **inputs, **options), expected)
    assert len(crops) > 1, "the assistant was always right"
    assert len(crops) < 24 or (has_window and not HAS_KEYWORD_DICT), "the assistant was never right"


def test_crop() -> None:
    model, cache, inputs = make_model("llama"), make_cache(make_model("llama")), prompts()
    expected = logits(model, "pagedkv", **inputs, cache=cache)
    cache.crop(-10)
    assert cache.get_seq_length() == 11
    assert cache.stats().num_used == 3 + 0 + 1
    inputs["input_ids"] = inputs["input_ids"][:, 11:]
    again = logits(model, "pagedkv", **inputs, cache=cache)
    torch.testing.assert_close(again, expected[:, 11:], rtol=1e-4, atol=1e-4)
    for tokens_to_remove in (1, -22) if HAS_KEYWORD_DICT else (-22,):
        with pytest.raises(ValueError, match="-21 to 0"):
            cache.crop(tokens_to_remove)


def test_rows_are_repeated_and_selected() -> None:
    model, inputs = make_model("llama"), prompts()
    cache = make_cache(model)
    logits(model, "pagedkv", **inputs, cache=cache)
    used = cache.stats().num_used
    cache.batch_repeat_interleave(2)
    assert (cache.batch_size, cache.stats().num_used) == (6, used)
    first_row, second_row, *_ = cache.sequences
    cache.batch_select_indices(torch.tensor([True, False, False, True, True, True]))
    assert (first_row.freed, second_row.freed) == (False, True)
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


@newest_only
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
