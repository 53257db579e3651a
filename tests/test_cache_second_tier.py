"""Prefixes on the host: how they get there, how they are found, and what happens while they are copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_helpers import added, compute, prefix_cache, state

from pagedkv import OutOfMemoryError, PagedKVCache, _core


def two_tiers(num_blocks: int = 8, num_host_blocks: int = 8, **options: Any) -> PagedKVCache:
    return prefix_cache(num_blocks, num_host_blocks=num_host_blocks, **options)


def mark(cache: PagedKVCache, block: int, value: float) -> None:
    for tensor in [*cache._key_tensors, *cache._value_tensors]:
        tensor[block] = value


def marks(cache: PagedKVCache, blocks: list[int]) -> list[float]:
    """What blocks were marked with; every slot of every tensor agrees."""
    values = torch.stack([t[blocks].flatten(1) for t in [*cache._key_tensors, *cache._value_tensors]])
    assert (values == values[:1, :, :1]).all()
    return [float(value) for value in values[0, :, 0]]


def stored(cache: PagedKVCache, first: int, num_blocks: int) -> None:
    """A prefix of tokens from `first` on that nobody uses; block i is marked with first + i."""
    seq = added(cache, range(first, first + 4 * num_blocks))
    for i, block in enumerate(seq.block_table):
        mark(cache, block, first + i)
    seq.free()


def test_a_prefix_comes_back_from_the_host() -> None:
    cache = two_tiers()
    stored(cache, 100, 3)
    assert cache.swap_out_prefixes(2) == 2  # the end of it
    stats = cache.stats()
    assert (stats.num_cached, stats.num_free, stats.num_host_cached, stats.evictions) == (1, 7, 2, 0)
    other = added(cache, range(28))
    for block in other.block_table:
        mark(cache, block, -1)  # what was moved is overwritten
    assert cache.add_sequence(range(100, 112)).num_cached_tokens == 4  # there is no room for the rest
    other.free()
    seq = cache.add_sequence(range(100, 113))
    assert seq.num_cached_tokens == 12
    assert marks(cache, seq.block_table) == [100, 101, 102]
    stats = cache.stats()
    assert (stats.host_hits, stats.hit_rate) == (2, (4 + 12) / (12 + 28 + 12 + 13))
    assert (stats.num_host_used, stats.num_host_cached) == (0, 2)
    assert cache.add_sequence(range(100, 113)).block_table == seq.block_table  # known on the device again
    assert cache.stats().host_hits == 2
    cache._core.check_integrity()


def test_moving_again_copies_nothing() -> None:
    cache = two_tiers()
    stored(cache, 0, 2)
    for _ in range(3):
        assert cache.swap_out_prefixes(9) == 2
        assert (cache.stats().num_cached, cache.stats().num_host_cached) == (0, 2)
        seq = cache.add_sequence(range(9))
        assert seq.num_cached_tokens == 8
        transfer_id, pairs = cache._core.swap_out(seq._id)
        assert pairs.tolist() == []
        cache._core.finish_transfer(transfer_id)
        seq.free()
        cache._core.check_integrity()


def test_swapped_out_sequences_serve_new_ones() -> None:
    """The blocks of a sequence on the host are found by their tokens, also when it has left the host."""
    cache = two_tiers()
    seq = added(cache, range(10))
    for i, block in enumerate(seq.block_table):
        mark(cache, block, i)
    seq.swap_out()
    cache.evict(8)
    other = cache.add_sequence([*range(8), 90])
    assert (other.num_cached_tokens, marks(cache, other.block_table)) == (8, [0, 1])
    seq.swap_in()
    assert seq.block_table[:2] == other.block_table
    assert cache.stats().num_host_cached == 2
    seq.free()
    other.free()
    cache.evict(8)
    third = cache.add_sequence([*range(8), 91])
    assert marks(cache, third.block_table) == [0, 1]
    cache._core.check_integrity()


def test_the_host_evicts_its_oldest_prefix_from_its_end() -> None:
    cache = two_tiers(num_host_blocks=3)
    stored(cache, 0, 2)
    assert cache.swap_out_prefixes(8) == 2
    stored(cache, 100, 2)
    assert cache.swap_out_prefixes(8) == 2
    assert (cache.probe(range(9)), cache.probe(range(100, 109))) == (4, 8)
    seq = cache.add_sequence(num_tokens=12)
    compute(cache, seq)
    seq.swap_out()  # a sequence's blocks are worth more than any prefix
    assert (cache.probe(range(9)), cache.probe(range(100, 109))) == (0, 0)
    stored(cache, 0, 2)
    assert cache.swap_out_prefixes(8) == 0
    with pytest.raises(ValueError, match="negative"):
        cache.swap_out_prefixes(-1)
    with pytest.raises(ValueError, match="no host blocks"):
        prefix_cache().swap_out_prefixes(1)


def test_hits_on_both_sides_are_not_evicted_for_each_other() -> None:
    cache = two_tiers(num_blocks=4)
    stored(cache, 0, 4)
    assert cache.swap_out_prefixes(2) == 2
    stored(cache, 50, 2)  # fills the pool
    assert cache.stats().num_free == 0
    seq = cache.add_sequence(range(17))
    assert (seq.num_cached_tokens, marks(cache, seq.block_table)) == (16, [0, 1, 2, 3])
    assert cache.probe(range(50, 59)) == 0


def test_can_allocate_counts_what_comes_back() -> None:
    cache = two_tiers(num_blocks=4)
    stored(cache, 0, 3)
    cache.swap_out_prefixes(3)
    held = added(cache, [900])
    assert cache.can_allocate(range(12))
    assert not cache.can_allocate(range(13))
    seq = cache.add_sequence(range(13))
    assert seq.num_cached_tokens == 12
    before = state(cache)
    with pytest.raises(OutOfMemoryError):
        cache.batch([seq])
    assert state(cache) == before
    held.free()
    compute(cache, seq)


def test_a_full_prompt_on_the_host() -> None:
    """All but the last token, which is recomputed in a block that is the sequence's own."""
    cache = two_tiers()
    stored(cache, 0, 2)
    cache.swap_out_prefixes(2)
    seq = cache.add_sequence(range(8))
    assert (seq.num_cached_tokens, cache.stats().num_used) == (7, 2)
    table = seq.block_table
    compute(cache, seq)
    assert (seq.block_table, cache.probe(range(9))) == (table, 8)
    cache._core.check_integrity()


def test_reset_forgets_the_host_too() -> None:
    cache = two_tiers()
    stored(cache, 0, 2)
    seq = added(cache, range(30, 35))
    cache.swap_out_prefixes(8)
    seq.swap_out()
    with pytest.raises(ValueError, match="use 2 blocks"):
        cache.reset_prefix_cache()
    seq.free()
    cache.reset_prefix_cache()
    stats = cache.stats()
    assert (cache.probe(range(9)), stats.num_free, stats.num_host_cached) == (0, 8, 0)


@pytest.mark.parametrize("window", [3, 5])
def test_windows_bring_back_the_window_only(window: int) -> None:
    cache = two_tiers(num_blocks=16, num_host_blocks=16, num_layers=2, sliding_window=[window, None])
    added(cache, range(16)).free()
    assert cache.swap_out_prefixes(16) == 8
    seq = cache.add_sequence(range(17))
    full, windowed = 4, -(-(window - 1) // 4)
    assert (seq.num_cached_tokens, cache.stats().host_hits) == (16, full + windowed)
    cache._core.check_integrity()


def test_blocks_are_not_handed_out_while_a_copy_reads_them() -> None:
    """The core's side of it: transfers that take their time."""
    core = _core.Sequences(num_blocks=3, block_size=4, num_host_blocks=2)
    root = bytes(32)
    seq = core.add(range(9), 0, root)
    core.commit(core.open_batch([seq]).batch_id)
    core.free(seq)
    num_moved, departure, pairs = core.swap_out_prefixes(3)
    assert (num_moved, pairs.tolist()) == (2, [[1, 0], [0, 1]])
    assert (core.num_free_blocks, core.num_cached_blocks, core.evict(3)) == (1, 0, 0)
    other = core.add(None, 12)
    with pytest.raises(OutOfMemoryError, match="needs 3, 1 of 3 are free"):
        core.open_batch([other])
    core.check_integrity()
    core.finish_transfer(departure)
    assert core.num_free_blocks == 3
    hit = core.add(range(9), 0, root)
    ((arrival, pairs),) = core.take_arrivals()
    assert core.take_arrivals() == []
    assert sorted(pairs[:, 0].tolist()) == [0, 1]
    assert core.num_free_host_blocks == 0  # the copy reads both
    away = core.add(None, 1)
    core.commit(core.open_batch([away]).batch_id)
    with pytest.raises(OutOfMemoryError, match="on the host, the sequence needs 1, 0 of 2 are free"):
        core.swap_out(away)
    core.check_integrity()
    core.finish_transfer(arrival)
    assert core.num_free_host_blocks == 2
    core.free(hit)
    core.check_integrity()


def test_nobody_writes_into_a_block_that_a_copy_reads() -> None:
    """The other owner of a tail goes on, behind what the copy reads: it gets a copy of its own."""
    core = _core.Sequences(num_blocks=4, block_size=4, num_host_blocks=4)
    seq = core.add(None, 6)
    core.commit(core.open_batch([seq]).batch_id)
    fork = core.fork(seq)
    transfer, pairs = core.swap_out(seq)
    assert pairs.tolist() == [[0, 0], [1, 1]]
    core.truncate(fork, 5)
    core.append_count(fork, 1)
    batch = core.open_batch([fork])
    assert batch.copies.tolist() == [[1, 2]]
    core.commit(batch.batch_id)
    core.check_integrity()
    core.finish_transfer(transfer)
    assert core.num_free_blocks == 2
    core.check_integrity()
