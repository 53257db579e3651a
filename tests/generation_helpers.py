"""What the generation tests share: a generator over a small model, and what transformers gives."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from small_models import generate, make_model

from pagedkv import PagedKVCache
from pagedkv.generation import Generator, Request
from pagedkv.integrations.ragged import RaggedModel, make_cache

VOCAB_SIZE = 97


def make_generator(family: str = "llama", **options: Any) -> Generator:
    """A generator over a small random model; the options are the cache's and the generator's."""
    model = make_model(family)
    names = ("num_blocks", "block_size", "prefix_caching", "num_host_blocks")
    given = {name: options.pop(name) for name in names if name in options}
    cache = make_cache(model, **{"num_blocks": 256, "block_size": 4, "prefix_caching": True, **given})
    for tensor in (*cache.key_caches, *cache.value_caches):
        tensor.fill_(torch.nan)  # what was never written must not be seen
    return Generator(ragged_model(family, cache, options.pop("split_size", None)), cache, **options)


def ragged_model(family: str, cache: PagedKVCache, split_size: int | None) -> RaggedModel:
    """Packing is done once a family; the cache is the test's own."""
    model = packed_model(family, split_size)
    model.cache = cache
    return model


@functools.cache
def packed_model(family: str, split_size: int | None) -> RaggedModel:
    model = make_model(family)
    return RaggedModel(model, make_cache(model, num_blocks=8), split_size=split_size)


@functools.cache
def expected_tokens(family: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers' eager attention with a DynamicCache."""
    ids = torch.tensor([prompt])
    tokens = generate(make_model(family), "eager", input_ids=ids, max_new_tokens=num_tokens)
    return tokens[0, len(prompt) :].tolist()


def random_prompts(lens: tuple[int, ...], seed: int = 5) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, VOCAB_SIZE, length).tolist() for length in lens]


def tokens_of(requests: list[Request]) -> list[list[int]]:
    """The first completion of each."""
    return [request.completions[0].token_ids for request in requests]


def assert_nothing_is_held(generator: Generator) -> None:
    """All blocks are free or cached, on both sides, and the books are right."""
    stats = generator.cache.stats()
    generator.cache._core.check_integrity()
    assert (generator.num_running, generator.num_waiting) == (0, 0)
    assert (stats.num_used, stats.num_host_used) == (0, 0)
    assert stats.num_free + stats.num_cached == stats.num_blocks
