"""transformers' own continuous batching on pagedkv's attention: the tokens are those of its sdpa."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from generation_helpers import expected_tokens, random_prompts
from small_models import make_model

from pagedkv.integrations import continuous_batching

PROMPTS = random_prompts((28, 2, 9, 40))


def generate_batch(model: Any, implementation: str, prompts: list[list[int]], num_tokens: int) -> Any:
    """New tokens of each prompt."""
    model.set_attn_implementation(implementation)
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=64
        ),
        progress_bar=False,
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_equal_sdpa(family: str) -> None:
    model = make_model(family)
    expected = generate_batch(model, "sdpa", PROMPTS, 12)
    assert [len(tokens) for tokens in expected] == [12] * 4
    assert generate_batch(model, continuous_batching.IMPLEMENTATION, PROMPTS, 12) == expected


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_which_sdpa_does_not_have(family: str) -> None:
    expected = [expected_tokens(family, tuple(prompt), 12) for prompt in PROMPTS]
    assert generate_batch(make_model(family), continuous_batching.IMPLEMENTATION, PROMPTS, 12) == expected


def test_models_of_other_flavours_alone_do_not_take_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    monkeypatch.setattr(type(model), "_compatible_flash_implementations", ["flash_attention_4"])
    with pytest.raises(Exception, match=r"(?i)flash.*4|kernels"):
        model.set_attn_implementation(continuous_batching.IMPLEMENTATION)


def test_padded_batches_work_too() -> None:
    model = make_model("llama")
    ids = torch.tensor([PROMPTS[0], [0] * 19 + PROMPTS[2]])
    mask = (ids > 0).long()
    rows = []
    for implementation in ("eager", continuous_batching.IMPLEMENTATION):
        model.set_attn_implementation(implementation)
        rows.append(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))
    assert torch.equal(*rows)


def test_other_flavours_are_still_looked_for_elsewhere() -> None:
    with pytest.raises(Exception, match=r"flash|kernels"):
        continuous_batching._import_functions("some_flash_nobody_has")
