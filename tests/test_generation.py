"""The generator: its tokens are transformers', whoever shares the batch and however often it is preempted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from generation_helpers import (
    assert_nothing_is_held,
    expected_tokens,
    make_generator,
    random_prompts,
    tokens_of,
)
from small_models import FAMILIES, SIZES

from pagedkv.generation import Completion, Generator, Sampling
from pagedkv.integrations.llama import RaggedLlama
from pagedkv.integrations.ragged import RaggedModel, make_cache

PROMPTS = random_prompts((21, 1, 14, 40, 3, 9, 33))
PROMPTS.append(PROMPTS[3][:30] + PROMPTS[5])  # shares a prefix
NUM_TOKENS = 20


def expected(family: str = "llama") -> list[list[int]]:
    return [expected_tokens(family, tuple(prompt), NUM_TOKENS) for prompt in PROMPTS]


# Tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [7, 512])
def test_tokens_equal_eager(family: str, budget: int) -> None:
    generator = make_generator(family, max_batch_tokens=budget)
    requests = generator.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert tokens_of(requests) == expected(family)
    assert all(request.completions[0].finish_reason == "length" for request in requests)
    assert_nothing_is_held(generator)


@pytest.mark.parametrize("num_host_blocks", [0, 12, 200])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_forced_preemption_changes_nothing(family: str, prefix_caching: bool, num_host_blocks: int) -> None:
    """A pool of a tenth of what all requests take together, or less."""
    prompts = PROMPTS + random_prompts((18, 7, 25, 12, 30, 5, 22, 16), seed=6)
    num_needed = sum(-(-(len(prompt) + NUM_TOKENS) // 4) for prompt in prompts)
    # Windows give blocks back; two kinds of layers have blocks of their own.
    num_blocks = {"llama": num_needed // 10, "mistral": num_needed // 20}.get(family, num_needed // 8)
    generator = make_generator(
        family,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        num_host_blocks=num_host_blocks,
        reserve=0.0,
        max_batch_tokens=16,
    )
    requests = generator.generate(prompts, max_new_tokens=NUM_TOKENS)
    assert tokens_of(requests) == [expected_tokens(family, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert generator.stats.num_preemptions > 0
    assert (generator.stats.num_swaps > 0) == (num_host_blocks > 0)
    assert_nothing_is_held(generator)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_join_and_leave_at_every_step(temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": NUM_TOKENS}
    alone = [make_generator().generate([prompt], **options)[0] for prompt in PROMPTS]
    generator = make_generator()
    requests = []
    for prompt in PROMPTS:
        requests.append(generator.submit(prompt, **options))
        generator.step()
        generator.step()
    list(generator.stream(requests))
    assert tokens_of(requests) == tokens_of(alone)
    if temperature == 0:
        assert tokens_of(requests) == expected()


def test_a_long_prompt_does_not_stop_the_others() -> None:
    generator = make_generator(max_batch_tokens=8)
    short = generator.submit(PROMPTS[4], max_new_tokens=12)
    generator.step()
    long = generator.submit(PROMPTS[3], max_new_tokens=2)
    while not long.completions[0].token_ids:
        before = len(short.completions[0].token_ids)
        generator.step()
        assert len(short.completions[0].token_ids) == before + 1


# Bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_split_size_bits_do_not_depend_on_batch_or_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # torch rounds the ends of rows differently where widths are not multiples of 64.
    config = transformers.LlamaConfig(**{**SIZES, "intermediate_size": 128})
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    ragged = RaggedModel(model, make_cache(model, num_blocks=8), split_size=64)
    llama = RaggedLlama(model, ragged.cache, split_size=64)
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "logprobs": True}

    def run(prompts: list[list[int]], runner: RaggedModel | RaggedLlama, budget: int) -> list[Completion]:
        runner.cache = make_cache(model, num_blocks=100, block_size=4, prefix_caching=True)
        generator = Generator(runner, runner.cache, max_batch_tokens=budget, reserve=0.0)
        return [request.completions[0] for request in generator.generate(prompts, **options)]

    num_threads = torch.get_num_threads()
    try:
        for runner in (ragged, llama):
            torch.set_num_threads(1)
            together = run(PROMPTS, runner, 29)
            alone = [run([prompt], runner, 512)[0] for prompt in PROMPTS]
            assert together == alone
            assert len(alone[0].logprobs) == NUM_TOKENS
            torch.set_num_threads(2)
            assert run(PROMPTS, runner, 64) == alone
    finally:
        torch.set_num_threads(num_threads)


# Prefixes and forks


def test_requests_admitted_together_share_prefixes() -> None:
    system = random_prompts((40,))[0]
    prompts = [system + tail for tail in random_prompts((5, 3, 6), seed=9)]
    generator = make_generator()
    requests = generator.generate(prompts, max_new_tokens=4)
    assert [request.num_cached_tokens for request in requests] == [0, 40, 40]
    assert generator.stats.num_computed_tokens == 40 + 5 + 3 + 6 + 3 * 3
    assert tokens_of(requests) == [expected_tokens("llama", tuple(prompt), 4) for prompt in prompts]
    again = generator.generate(prompts[:1], max_new_tokens=4)
    assert (again[0].num_cached_tokens, tokens_of(again)) == (44, tokens_of(requests[:1]))


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """The second request is preempted within its prompt, and finds its own blocks when it comes again."""
    generator = make_generator(num_blocks=11, reserve=0.0, max_batch_tokens=4)
    first = generator.submit(PROMPTS[4], max_new_tokens=30)
    second = generator.submit(PROMPTS[3], max_new_tokens=2)
    list(generator.stream([first, second]))
    assert generator.stats.num_preemptions > 0
    assert generator.stats.num_cached_tokens > 0
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)


def test_without_prefix_caching_nothing_waits() -> None:
    generator = make_generator(prefix_caching=False)
    requests = [generator.submit(PROMPTS[0], max_new_tokens=2) for _ in range(3)]
    generator.step()
    assert [len(request.completions[0].token_ids) for request in requests] == [1, 1, 1]


@pytest.mark.parametrize("num_blocks", [256, 16])
def test_completions_fork_from_one_prompt(num_blocks: int) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 7}
    generator = make_generator(num_blocks=num_blocks)
    request = generator.generate([PROMPTS[3]], n=5, **options)[0]
    tokens = [completion.token_ids for completion in request.completions]
    assert len({tuple(row) for row in tokens}) > 1
    assert tokens[0] == make_generator().generate([PROMPTS[3]], **options)[0].completions[0].token_ids
    if num_blocks == 256:
        assert generator.stats.num_computed_tokens == len(PROMPTS[3]) + 5 * 11
    else:
        assert generator.stats.num_preemptions > 0
        roomy = make_generator().generate([PROMPTS[3]], n=5, **options)[0]
        assert tokens == [completion.token_ids for completion in roomy.completions]
    assert_nothing_is_held(generator)


# Draws


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log()
    from pagedkv.generation.sampling import draw_token

    def share(token: int, **options: Any) -> float:
        sampling = Sampling(temperature=1.0, **options)
        draws = [draw_token(logits, sampling, (i + 0.5) / 1000) for i in range(1000)]
        return draws.count(token) / len(draws)

    assert [share(token) for token in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=2e-3)
    assert [share(token, top_k=2) for token in range(4)] == pytest.approx([0.625, 0.375, 0, 0], abs=2e-3)
    assert [share(token, top_p=0.7) for token in range(3)] == pytest.approx([0.625, 0.375, 0], abs=2e-3)
    assert share(0, top_p=0.01) == 1.0
    assert share(0, top_k=3, top_p=0.5) == pytest.approx(1.0)


def test_an_impossible_token_is_never_drawn() -> None:
    from pagedkv.generation.sampling import draw_token

    logits = torch.tensor([-torch.inf, 1.0, 1.0, -torch.inf])
    for uniform in (0.0, 0.5, 1 - 2**-26, 1 - 2**-53):
        for options in ({}, {"top_k": 3}, {"top_p": 0.999}):
            sampling = Sampling(temperature=1.0, **options)  # type: ignore[arg-type]
            assert draw_token(logits, sampling, uniform) in (1, 2)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature: float) -> None:
    from pagedkv.generation.sampling import draw_token

    for logits in ([0.0, 30.0, 0.0, 29.0], [-torch.inf, -3e38, -torch.inf, -torch.inf]):
        sampling = Sampling(temperature=temperature)
        assert draw_token(torch.tensor(logits), sampling, 0.99) == 1


def test_seeds_are_independent_of_the_batch_and_differ() -> None:
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.5}
    generator = make_generator()
    requests = [generator.submit(PROMPTS[0], seed=seed, **options) for seed in (1, 2, 1, None, None)]
    list(generator.stream(requests))
    one, two, again, free, other = tokens_of(requests)
    assert one == again
    assert len({tuple(row) for row in (one, two, free, other)}) == 4


def test_log_probabilities() -> None:
    request = make_generator().generate([PROMPTS[0]], max_new_tokens=5, logprobs=True)[0]
    completion = request.completions[0]
    model = make_generator()._model.model  # type: ignore[attr-defined]
    model.set_attn_implementation("eager")
    ids = torch.tensor([PROMPTS[0] + completion.token_ids])
    with torch.no_grad():
        rows = model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    model.set_attn_implementation("pagedkv_ragged")
    chosen = rows.gather(1, ids[0, len(PROMPTS[0]) :, None])[:, 0]
    assert completion.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


# Cancellation, errors, statistics


def test_cancellation_gives_blocks_back_and_leaves_the_others_alone() -> None:
    generator = make_generator(num_blocks=30, reserve=0.0, num_host_blocks=60)
    requests = [generator.submit(prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    doomed = [requests[0], requests[3], requests[7]]
    events = []
    for event in generator.stream(requests):
        events.append(event)
        for request in doomed:
            if len(events) == 25 + 10 * doomed.index(request):
                generator.cancel(request)
    for request, tokens in zip(requests, expected(), strict=True):
        completion = request.completions[0]
        if request in doomed and completion.finish_reason == "cancelled":
            assert completion.token_ids == tokens[: len(completion.token_ids)]
        else:
            assert completion.token_ids == tokens
    assert requests[3].completions[0].finish_reason == "cancelled"
    generator.cancel(requests[1])  # done: nothing happens
    assert requests[1].completions[0].finish_reason == "length"
    assert_nothing_is_held(generator)


def test_errors() -> None:
    generator = make_generator(num_blocks=4)
    with pytest.raises(ValueError, match="prompt is empty"):
        generator.submit([])
    with pytest.raises(ValueError, match="take 5 blocks, but the pool has 4"):
        generator.generate([[5, 6], [5] * 10], max_new_tokens=8)
    with pytest.raises(TypeError):
        generator.generate([[5, 6], [None]], max_new_tokens=2)  # type: ignore[list-item]
    assert generator.num_waiting == 0
    with pytest.raises(ValueError, match="tokenizer"):
        generator.submit([5], stop=["x"])
    with pytest.raises(TypeError, match="max_tokens"):
        generator.submit([5], max_tokens=3)
    for name, value in (
        ("max_new_tokens", 0),
        ("n", 0),
        ("top_k", 0),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("stop", "x"),
        ("stop", None),
        ("stop", [3]),
    ):
        with pytest.raises(ValueError, match=name):
            Sampling(**{name: value})
    for name, value in (
        ("max_new_tokens", 2.5),
        ("max_new_tokens", None),
        ("n", 1.0),
        ("top_k", float("nan")),
        ("stop_token_ids", 2),
        ("stop_token_ids", None),
        ("stop_token_ids", ["a"]),
    ):
        with pytest.raises(TypeError, match=name):
            Sampling(**{name: value})
    assert Sampling(stop_token_ids=iter([3, np.int64(4)])).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    for name in ("max_batch_tokens", "max_num_seqs", "reserve"):
        with pytest.raises(ValueError, match=name):
            make_generator(**{name: -1})
    wrong = Generator(lambda *args: torch.zeros(7, 3), generator.cache)
    wrong.submit([5], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"logits of shape \[7, 3\]"):
        wrong.step()


def test_statistics_and_the_limit_of_sequences() -> None:
    generator = make_generator(max_num_seqs=3, prefix_caching=False)
    generator.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    stats = generator.stats
    assert (stats.peak_running, stats.num_finished) == (3, len(PROMPTS))
    assert stats.num_new_tokens == NUM_TOKENS * len(PROMPTS)
    assert stats.num_computed_tokens == sum(map(len, PROMPTS)) + (NUM_TOKENS - 1) * len(PROMPTS)
    assert 1 < stats.mean_running <= 3
    assert generator.step() == []


def test_the_limit_of_sequences_counts_what_will_fork() -> None:
    generator = make_generator(max_num_seqs=4, max_batch_tokens=8)
    requests = [
        generator.submit(prompt, n=n, max_new_tokens=5)
        for n, prompt in zip((3, 1, 2, 6, 1), PROMPTS[3:], strict=True)
    ]
    while generator.num_running or generator.num_waiting:
        generator.step()
        is_large_one = 0 < len(requests[3].completions[0].token_ids) < 5  # it runs alone
        assert generator.num_running <= (6 if is_large_one else 4)
    assert generator.stats.peak_running == 6
    assert generator.stats.num_preemptions == 0
