"""Limits: tokens of a sequence, blocks of all sequences."""

from __future__ import annotations

from typing import Any

import pytest
from cache_helpers import added, compute, make_cache, prefix_cache, state

from pagedkv import OutOfMemoryError


def test_the_length_of_a_sequence() -> None:
    cache = make_cache(max_tokens_per_seq=8)
    seq, other = cache.add_sequence(range(7)), cache.add_sequence(range(8))
    calls: list[Any] = [
        lambda: cache.add_sequence(range(9)),
        lambda: cache.add_sequence(num_tokens=9),
        lambda: seq.append([1, 2]),
        lambda: seq.append(2),
        lambda: cache.append([seq, other], [1, 1]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"at most 8 tokens; this one has [078], and [129] more are too"):
            call()
    assert (seq.num_tokens, other.num_tokens) == (7, 8)
    assert (cache.can_allocate(8), cache.can_allocate(9), cache.can_allocate(range(9))) == (
        True,
        False,
        False,
    )
    assert cache.can_append([seq, other], [1, 0])
    assert not cache.can_append([seq, other], [1, 1])
    seq.append([1])
    compute(cache, seq, other)
    seq.truncate(2)
    seq.append(6)
    with pytest.raises(ValueError, match="max_tokens_per_seq must be at least 1, got 0"):
        make_cache(max_tokens_per_seq=0)


def test_the_blocks_of_all_sequences() -> None:
    cache = prefix_cache(num_blocks=8, max_used_blocks=5)
    seq = added(cache, range(16))
    assert cache.can_allocate(4)
    assert not cache.can_allocate(5)
    before = state(cache)
    with pytest.raises(
        OutOfMemoryError, match=r"the batch needs 2, 1 of 5 are free \(the limit of a pool of 8\)$"
    ):
        cache.batch([cache.add_sequence(num_tokens=5)])
    assert state(cache) == before
    seq.free()
    other = added(cache, range(100, 120))
    stats = cache.stats()
    assert (stats.num_used, stats.num_cached, stats.num_free) == (5, 3, 0)  # one prefix block was evicted
    assert cache.probe(range(13)) == 0  # a hit would use blocks, too
    other.truncate(12)
    assert cache.probe(range(13)) == 8
    hit = cache.add_sequence(range(13))
    assert (hit.num_cached_tokens, cache.stats().num_used) == (8, 5)
    with pytest.raises(OutOfMemoryError, match="does not fit into this pool"):
        cache.batch([cache.add_sequence(num_tokens=24)])
    for wrong in (0, 9):
        with pytest.raises(ValueError, match=f"max_used_blocks must be 1 to num_blocks = 8, got {wrong}"):
            make_cache(num_blocks=8, max_used_blocks=wrong)


def test_a_watermark() -> None:
    """num_spare_blocks keeps room for the sequences that run."""
    cache = make_cache(num_blocks=8, max_used_blocks=6)
    seq = cache.add_sequence(num_tokens=8)
    compute(cache, seq)
    assert cache.can_allocate(16)
    assert cache.can_allocate(8, num_spare_blocks=2)
    assert not cache.can_allocate(9, num_spare_blocks=2)
