"""What one asks a generator for, and what comes back."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["length", "stop", "cancelled"]


class Tokenizer(Protocol):
    """What the generator needs to turn tokens into text; transformers' tokenizers have it."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """The text of these tokens."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen, and when they end.

    Args:
        max_new_tokens: tokens of a completion, at most.
        n: completions of the prompt, which is computed once.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest tokens are drawn; None: all.
        top_p: only the likeliest tokens that together reach this probability are drawn.
        seed: of the draws. The same seed gives the same draws whatever else runs; None: another one each
            time.
        stop_token_ids: a completion ends with any of these tokens, which it keeps.
        stop: a completion ends where its text contains any of these; its text ends before them. Needs the
            generator's tokenizer.
        logprobs: also keep each token's log-probability under the model, before temperature and cuts.

    Raises:
        TypeError: max_new_tokens, n or top_k that is no integer, stop_token_ids that are no list of integers.
        ValueError: max_new_tokens, n or top_k below 1, a temperature that is negative or not finite, top_p
            outside (0, 1], an empty stop string.

    >>> Sampling(max_new_tokens=8, temperature=0.7, seed=1).n
    1
    """

    max_new_tokens: int = 128
    n: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        """Check the values, and keep lists as they are now."""
        for name in ("max_new_tokens", "n", "top_k"):
            value = getattr(self, name)
            if value is None and name == "top_k":
                continue
            if not isinstance(value, numbers.Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        try:
            stop_token_ids = tuple(operator.index(token) for token in self.stop_token_ids)
        except TypeError:
            raise TypeError(
                f"stop_token_ids must be a list of integers, got {self.stop_token_ids!r}"
            ) from None
        stop = None if self.stop is None or isinstance(self.stop, str) else tuple(self.stop)
        if stop is None or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be a list of strings that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "stop", stop)

    def replaced(self, **options: object) -> Sampling:
        """The same with other values."""
        return dataclasses.replace(self, **options)  # type: ignore[arg-type]


@dataclass
class Completion:
    """One continuation of a prompt, growing until finish_reason is set."""

    token_ids: list[int] = field(default_factory=list)
    """The new tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Their log-probabilities, where the request asked for them."""
    text: str = ""
    """Their text, where the generator has a tokenizer, without special tokens and stop strings."""
    finish_reason: FinishReason | None = None
    """Why it ended: "length", "stop" or "cancelled"; None while it has not."""


@dataclass(eq=False)
class Request:
    """A prompt on its way through a generator; `Generator.submit` makes it."""

    number: int
    """Counts the generator's requests: the order in which they came."""
    prompt: list[int]
    """The prompt's tokens."""
    sampling: Sampling
    """How it is continued."""
    completions: list[Completion]
    """`sampling.n` continuations."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had when it was first admitted."""

    @property
    def done(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish_reason is not None for completion in self.completions)


@dataclass(frozen=True)
class Event:
    """One new token of one completion."""

    request: Request
    index: int
    """Which of the request's completions."""
    token_id: int
    text: str
    """Text that is certain by now: a character or stop string may still be incomplete."""
    finish_reason: FinishReason | None
    """Set with the last token."""


class TextBuilder:
    """Text of tokens that come one by one: no half characters, and no beginnings of stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Start empty."""
        self._decode = tokenizer.decode
        self._stop = stop
        self._token_ids: list[int] = []
        self._context_begin = 0  # some tokens read differently after others: these are decoded again
        self._num_read = 0
        self._text = ""
        self._num_given = 0

    def add(self, token_id: int) -> bool:
        """Take a token; whether a stop string is complete."""
        self._token_ids.append(token_id)
        window = self._token_ids[self._context_begin :]
        text = self._decode(window, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # in the middle of a character
            return False
        known = self._decode(window[: self._num_read - self._context_begin], skip_special_tokens=True)
        num_before = len(self._text)
        self._text += text[len(known) :]
        self._context_begin, self._num_read = self._num_read, len(self._token_ids)
        for stop in self._stop:
            found = self._text.find(stop, max(0, num_before - len(stop) + 1))
            if found >= 0:
                self._text = self._text[:found]
                return True
        return False

    def take(self, *, final: bool) -> str:
        """What has become certain since the last call; the rest too where nothing more comes."""
        end = len(self._text) - (0 if final else self._num_uncertain())
        new, self._num_given = self._text[self._num_given : end], max(end, self._num_given)
        return new

    def _num_uncertain(self) -> int:
        """Characters at the end with which a stop string may be beginning."""
        lens = [
            length
            for stop in self._stop
            for length in range(1, len(stop))
            if self._text.endswith(stop[:length])
        ]
        return max(lens, default=0)


def draws_of(sampling: Sampling, index: int) -> random.Random:
    """The random numbers of a request's index-th completion: its own, whatever else runs."""
    return random.Random(None if sampling.seed is None else f"{sampling.seed}, completion {index}")
