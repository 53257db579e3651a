"""Real weights: SmolLM2-135M-Instruct in float32 gives the tokens of transformers' eager attention."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from test_continuous_batching import generate_batch

from pagedkv.generation import Generator
from pagedkv.integrations.llama import RaggedLlama
from pagedkv.integrations.ragged import RaggedModel, make_cache

NUM_TOKENS = 12
PROMPTS = ["What is the capital of France?", "Name three primary colours.", "Hi!"]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any, list[list[int]]]:
    """The model, its tokenizer, and the prompts' tokens."""
    path = Path(__file__).parent.parent / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo_for_generation", path)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # the demo sets it, for good
        patch.setitem(__import__("sys").modules, "demo_for_generation", demo)
        spec.loader.exec_module(demo)
    model, tokenizer = demo.load_model()
    return model, tokenizer, demo.encode(tokenizer, PROMPTS)


@pytest.fixture(scope="module")
def expected(smollm2: tuple[Any, Any, list[list[int]]]) -> list[list[int]]:
    """Greedy tokens with a DynamicCache, one prompt at a time."""
    model, _, prompts = smollm2
    model.set_attn_implementation("eager")
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        row = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)[0]
        tokens.append(row[len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("runner", [RaggedModel, RaggedLlama])
def test_generator(smollm2: Any, expected: list[list[int]], runner: Any, prefix_caching: bool) -> None:
    model, tokenizer, prompts = smollm2
    cache = make_cache(model, num_blocks=5, block_size=16, prefix_caching=prefix_caching)
    generator = Generator(runner(model, cache), cache, tokenizer=tokenizer, reserve=0.0)
    options = {"max_new_tokens": NUM_TOKENS, "stop_token_ids": [tokenizer.eos_token_id]}
    requests = generator.generate(prompts, **options)
    assert [request.completions[0].token_ids for request in requests] == expected
    assert "Paris" in requests[0].completions[0].text
    if prefix_caching:
        assert requests[1].num_cached_tokens > 0  # the chat template's system prompt
    else:
        assert generator.stats.num_preemptions > 0


def test_continuous_batching_of_transformers(smollm2: Any, expected: list[list[int]]) -> None:
    model, _, prompts = smollm2
    sdpa = generate_batch(model, "sdpa", prompts, NUM_TOKENS)
    assert generate_batch(model, "pagedkv_flash", prompts, NUM_TOKENS) == sdpa
    assert [row[: len(tokens)] for row, tokens in zip(sdpa, expected, strict=True)] == expected
