"""Fixed synthetic serving workloads: every request arrives at once, and wants an exact number of tokens.

S: chats that share one of four system prompts. D: questions about four long documents. B: batch inference on
prompts of very different lengths. Token ids and lengths come from a seeded generator, in the order of the
draws below; nothing else may draw from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_LEN = 2048
NUM_SLOTS = 8
KV_TOKENS = MAX_LEN * NUM_SLOTS
_TOKEN_IDS = (1000, 48_000)


@dataclass(frozen=True)
class Item:
    """One request."""

    prompt: list[int]
    num_tokens: int


def _lens(
    draws: np.random.Generator, count: int, mean: float, sigma: float, low: int, high: int
) -> npt.NDArray[np.int64]:
    """Log-normal lengths of this mean, before they are clipped."""
    lens = np.exp(draws.normal(np.log(mean) - sigma * sigma / 2, sigma, count))
    return np.clip(np.rint(lens), low, high).astype(int)


def _tokens(draws: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = draws.integers(*_TOKEN_IDS, int(count)).tolist()
    return tokens


def shared_chats() -> list[Item]:
    """S: 96 requests, a system prompt of 256 to 512 tokens and about 64 more; answers of about 96."""
    draws, count = np.random.default_rng(11), 96
    systems = [_tokens(draws, length) for length in draws.integers(256, 513, 4)]
    which = draws.integers(0, 4, count)
    user_lens = _lens(draws, count, 64, 0.8, 8, 512)
    answers = _lens(draws, count, 96, 0.8, 8, 256)
    return [Item(systems[which[i]] + _tokens(draws, user_lens[i]), int(answers[i])) for i in range(count)]


def long_documents() -> list[Item]:
    """D: 32 requests, eight short questions about each of four documents of 1,920 tokens, shuffled."""
    draws, num_questions = np.random.default_rng(12), 8
    documents = [_tokens(draws, 1920) for _ in range(4)]
    count = len(documents) * num_questions
    question_lens = draws.integers(24, 41, count)
    answers = draws.integers(16, 49, count)
    items = [
        Item(documents[i // num_questions] + _tokens(draws, question_lens[i]), int(answers[i]))
        for i in range(count)
    ]
    return [items[i] for i in draws.permutation(count)]


def batch_inference() -> list[Item]:
    """B: 96 requests of about 161 tokens, answers of about 128; nothing is shared."""
    draws, count = np.random.default_rng(13), 96
    prompt_lens = _lens(draws, count, 161, 0.9, 4, 1024)
    answers = _lens(draws, count, 128, 0.8, 4, 384)
    return [Item(_tokens(draws, prompt_lens[i]), int(answers[i])) for i in range(count)]


WORKLOADS: dict[str, Callable[[], list[Item]]] = {
    "S": shared_chats,
    "D": long_documents,
    "B": batch_inference,
}
