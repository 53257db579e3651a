"""What one asks a generator for, and what comes back."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

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
        stop_token_ids: a completion ends with any of these tokens. It keeps the token, but its text ends
            before it.
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
    """Their text, where the generator has a tokenizer, without special tokens, stop tokens and strings."""
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


class TextBuilder(NamedTuple):
    """Text of tokens that come one by one: no half characters, and no beginnings of stop strings.

    Attributes:
        token_ids: the last ones: some tokens read differently after others, so that these are decoded again.
        num_read: of these, the leading ones whose text is known.
        held: the end of the known text, with which a stop string may be beginning.
    """

    tokenizer: Tokenizer
    stop: Sequence[str]
    token_ids: tuple[int, ...] = ()
    num_read: int = 0
    held: str = ""

    def add(self, token_id: int) -> tuple[TextBuilder, str, bool]:
        """With one more token; the text that has become certain by it; whether a stop string is complete."""
        token_ids = [*self.token_ids, token_id]
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # in the middle of a character
            return self._replace(token_ids=tuple(token_ids)), "", False
        known = self.tokenizer.decode(token_ids[: self.num_read], skip_special_tokens=True)
        text = self.held + text[len(known) :]
        places = [place for place in map(text.find, self.stop) if place >= 0]
        end = min(places) if places else len(text) - self._num_uncertain(text)
        held = "" if places else text[end:]
        context = tuple(token_ids[self.num_read :])
        return TextBuilder(self.tokenizer, self.stop, context, len(context), held), text[:end], bool(places)

    def _num_uncertain(self, text: str) -> int:
        """Characters at the end with which a stop string may be beginning."""
        lens = [
            length for stop in self.stop for length in range(1, len(stop)) if text.endswith(stop[:length])
        ]
        return max(lens, default=0)


def draws_of(sampling: Sampling, index: int) -> random.Random:
    """The random numbers of a request's index-th completion: its own, whatever else runs."""
    return random.Random(None if sampling.seed is None else f"{sampling.seed}, completion {index}")
