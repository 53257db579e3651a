"""What the cache tests share."""

from __future__ import annotations

from typing import Any

import torch

from pagedkv import PagedKVCache
from pagedkv.cache import Sequence


def make_cache(
    num_blocks: int = 16, block_size: int = 4, num_layers: int = 2, **options: Any
) -> PagedKVCache:
    return PagedKVCache(num_layers, 2, 8, num_blocks=num_blocks, block_size=block_size, **options)


def compute(cache: PagedKVCache, *sequences: Sequence) -> None:
    cache.commit(cache.batch(sequences))


def state(cache: PagedKVCache) -> tuple[Any, ...]:
    """All that a failed call must leave as it was."""
    cache._core.check_integrity()
    usage = [counts.tolist() for counts in cache._core.usage()]
    return cache._core.num_free_blocks, cache._core.num_cached_blocks, *usage


def tokens_of(rows: int, *salt: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query, key and value that depend on `salt` alone."""
    generator = torch.Generator().manual_seed(hash(salt) % 2**31)
    query, key, value = (torch.randn(rows, heads, 8, generator=generator) for heads in (4, 2, 2))
    return query, key, value


def prefix_cache(num_blocks: int = 16, block_size: int = 4, **options: Any) -> PagedKVCache:
    return make_cache(num_blocks, block_size, prefix_caching=True, **options)


def added(cache: PagedKVCache, tokens: Any, **options: Any) -> Sequence:
    """A sequence whose tokens are all computed."""
    seq = cache.add_sequence(tokens, **options)
    compute(cache, seq)
    return seq
