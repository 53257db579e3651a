"""The text of completions, where it ends, and when a stream gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generation_helpers import VOCAB_SIZE, assert_nothing_is_held

from pagedkv import PagedKVCache
from pagedkv.generation import Generator


class Letters:
    """A token is a letter; token 90 is the first half of a two-byte character, 91 the second."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        raw = b"".join({90: b"\xc3", 91: b"\xa9"}.get(token, bytes([65 + token % 26])) for token in token_ids)
        return raw.decode(errors="replace")


def scripted(tokens: list[int], **options: Any) -> Generator:
    """A generator whose model says these tokens after a prompt of one token."""
    cache = PagedKVCache(1, 1, 8, num_blocks=64, block_size=4)

    def model(token_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        next_ids = torch.tensor([tokens[int(position)] for position in positions])
        return torch.nn.functional.one_hot(next_ids, VOCAB_SIZE).float()

    return Generator(model, cache, **options)


def test_stop_tokens() -> None:
    generator = scripted([3, 4, 5, 6])
    completion = generator.generate([[1]], max_new_tokens=4, stop_token_ids=[5, 9])[0].completions[0]
    assert (completion.token_ids, completion.finish_reason) == ([3, 4, 5], "stop")
    assert_nothing_is_held(generator)


def test_stop_strings_are_cut_off_and_never_streamed() -> None:
    letters = [2, 0, 1, 0, 1, 2, 3]  # CABABCD
    generator = scripted(letters, tokenizer=Letters())
    request = generator.submit([1], max_new_tokens=7, stop=["ABC", "XY"])
    events = list(generator.stream([request]))
    assert [event.text for event in events] == ["C", "", "", "AB", "", ""]
    completion = request.completions[0]
    assert (completion.text, completion.finish_reason) == ("CAB", "stop")
    assert completion.token_ids == letters[:6]


def test_of_several_stop_strings_the_earliest_in_the_text_ends_it() -> None:
    class Pairs:
        def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
            return "xaby" * len(token_ids)

    request = scripted([0, 1], tokenizer=Pairs()).generate([[1]], max_new_tokens=2, stop=["by", "ab", "b"])[0]
    assert (request.completions[0].text, request.completions[0].token_ids) == ("x", [0])


def test_the_text_ends_before_a_stop_token() -> None:
    generator = scripted([0, 1, 2], tokenizer=Letters())
    request = generator.submit([1], max_new_tokens=3, stop_token_ids=[2], stop=["BX"])
    assert [event.text for event in generator.stream([request])] == ["A", "", "B"]
    completion = request.completions[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("AB", [0, 1, 2], "stop")


def test_text_held_back_is_kept_when_the_request_is_cancelled() -> None:
    generator = scripted([0, 1, 2], tokenizer=Letters())
    request = generator.submit([1], max_new_tokens=3, stop=["BX"])
    assert [event.text for _ in range(2) for event in generator.step()] == ["A", ""]
    generator.cancel(request)
    assert (request.completions[0].text, request.completions[0].finish_reason) == ("AB", "cancelled")


def test_text_has_no_half_characters() -> None:
    generator = scripted([0, 90, 91, 90, 91], tokenizer=Letters())
    request = generator.submit([1], max_new_tokens=5)
    assert [event.text for event in generator.stream([request])] == ["A", "", "é", "", "é"]
    assert request.completions[0].text == "Aéé"


def test_text_held_back_comes_with_the_last_token() -> None:
    generator = scripted([0, 1], tokenizer=Letters())
    request = generator.submit([1], max_new_tokens=2, stop=["ABC"])
    assert [event.text for event in generator.stream([request])] == ["", "AB"]


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    scripted([3, 4, 5, 6]).generate([[1], [2]], max_new_tokens=4, stop_token_ids=[5], progress=True)
    assert "6/6" in capsys.readouterr().err
