"""After an exception everything is as before, and the step can be tried again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from generation_helpers import (
    assert_nothing_is_held,
    expected_tokens,
    make_generator,
    random_prompts,
    tokens_of,
)

from pagedkv import OutOfMemoryError, PagedKVCache
from pagedkv.generation import Generator, Request

PROMPTS = random_prompts((21, 1, 14, 40, 3, 9, 33))
NUM_TOKENS = 20


def test_a_failed_step_can_be_tried_again() -> None:
    generator = make_generator(num_blocks=24, reserve=0.0)
    model, calls = generator._model, itertools.count()

    def failing(*args: Any) -> torch.Tensor:
        call = next(calls)
        if call % 5 == 1:
            raise RuntimeError("before")
        logits = model(*args)
        if call % 5 == 3:
            raise RuntimeError("after")
        return logits

    generator._model = failing
    requests = [generator.submit(prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    num_failures = 0
    while not all(request.done for request in requests):
        try:
            generator.step()
        except RuntimeError:
            num_failures += 1
    assert num_failures > 10
    assert tokens_of(requests) == [expected_tokens("llama", tuple(prompt), NUM_TOKENS) for prompt in PROMPTS]
    assert_nothing_is_held(generator)


def test_a_branch_that_cannot_grow_is_an_error_that_can_be_survived() -> None:
    generator = make_generator(num_blocks=8)
    blocker = generator.cache.add_sequence(num_tokens=16)  # somebody else's
    generator.cache.commit(generator.cache.batch([blocker]))
    request = generator.submit(PROMPTS[4], max_new_tokens=20)
    with pytest.raises(OutOfMemoryError):
        list(generator.stream([request]))
    blocker.free()
    list(generator.stream([request]))
    assert request.completions[0].token_ids == expected_tokens("llama", tuple(PROMPTS[4]), 20)


class FailingTokenizer:
    """Reads a token as a letter; fails in every `period`-th call, and always on the `bad` token."""

    def __init__(self, period: int = 0, bad: int | None = None) -> None:
        self.period, self.bad, self.num_calls = period, bad, 0

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.num_calls += 1
        if self.bad in token_ids or (self.period > 0 and self.num_calls % self.period == 0):
            raise RuntimeError("the tokenizer failed")
        return "".join(chr(97 + token % 26) for token in token_ids)


def submit_various(generator: Generator) -> list[Request]:
    return [
        generator.submit(prompt, n=n, temperature=0.7 * (n - 1), seed=4, max_new_tokens=12, stop=["ab", "z"])
        for prompt, n in zip(PROMPTS, (2, 1, 3, 1, 2, 1, 1), strict=True)
    ]


@pytest.mark.parametrize("period", [11, 40])
@pytest.mark.parametrize(("family", "num_host_blocks"), [("llama", 0), ("gemma2", 40)])
def test_after_a_tokenizer_failed_all_goes_on_as_if_it_had_not(
    family: str, num_host_blocks: int, period: int
) -> None:
    options: dict[str, Any] = {"num_blocks": 40, "reserve": 0.0, "max_batch_tokens": 30}
    options["num_host_blocks"] = num_host_blocks
    smooth = make_generator(family, tokenizer=FailingTokenizer(), **options)
    expected = submit_various(smooth)
    list(smooth.stream(expected))
    tokenizer = FailingTokenizer(period)
    generator = make_generator(family, tokenizer=tokenizer, **options)
    requests, num_failures = submit_various(generator), 0
    while not all(request.done for request in requests):
        try:
            generator.step()
        except RuntimeError:
            num_failures += 1
            tokenizer.num_calls = 1  # a step reads more than `period` texts
            tokenizer.period += 7
    assert num_failures > 2
    assert [request.completions for request in requests] == [request.completions for request in expected]
    assert generator.stats.num_new_tokens == smooth.stats.num_new_tokens
    assert_nothing_is_held(generator)


def test_the_request_that_fails_can_be_cancelled() -> None:
    tokens = [expected_tokens("llama", tuple(prompt), NUM_TOKENS) for prompt in PROMPTS]
    bad = next(token for token in tokens[2][3:] if all(token not in row for row in tokens[:2] + tokens[3:]))
    generator = make_generator(tokenizer=FailingTokenizer(bad=bad))
    requests = [generator.submit(prompt, max_new_tokens=NUM_TOKENS) for prompt in PROMPTS]
    with pytest.raises(RuntimeError, match="tokenizer"):
        list(generator.stream(requests))
    num_steps = generator.stats.num_steps
    for _ in range(2):
        with pytest.raises(RuntimeError, match="tokenizer"):
            generator.step()
    assert generator.stats.num_steps == num_steps
    generator.cancel(requests[2])
    list(generator.stream(requests))
    assert requests[2].completions[0].token_ids == tokens[2][: tokens[2].index(bad)]
    assert tokens_of(requests[:2] + requests[3:]) == tokens[:2] + tokens[3:]
    assert_nothing_is_held(generator)


def test_what_a_sequence_cannot_hold_is_refused_before_it_runs() -> None:
    cache = PagedKVCache(1, 1, 8, num_blocks=8, max_tokens_per_seq=10)
    generator = Generator(lambda ids, positions, batch: torch.eye(50)[ids], cache)
    with pytest.raises(ValueError, match="at most 10 tokens"):
        generator.submit([3] * 7, max_new_tokens=5)
    request = generator.generate([[3] * 7], max_new_tokens=4)[0]
    assert request.completions[0].token_ids == [3] * 4
