"""compare_tokens: hashes that collide, and blocks that are reused up to where a prompt leaves them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cache_helpers import added, compute, make_cache, prefix_cache, state

from pagedkv import PagedKVCache, _core
from pagedkv.cache import Sequence

ROOT = bytes(32)


def computed(core: _core.Sequences, tokens: range | list[int]) -> int:
    sequence = core.add(tokens, 0, ROOT)
    core.commit(core.open_batch([sequence]).batch_id)
    return sequence


def colliding(tokens: list[int], num_tokens: int) -> list[int]:
    """Other tokens whose first block has the same hash of one bit."""

    def bit(block: list[int]) -> int:
        return int.from_bytes(_core.extend_key(ROOT, block)[:4]) & 1

    return next(
        other
        for first in range(1000, 2000)
        if bit((other := [*range(first, first + num_tokens)])[:4]) == bit(tokens[:4])
    )


@pytest.mark.parametrize("compare_tokens", [False, True])
def test_fault_hash_collision(compare_tokens: bool) -> None:
    """Two blocks with one hash: where tokens are compared, the second prompt does not get the first's."""
    core = _core.Sequences(8, 4, compare_tokens=compare_tokens, key_bits=1)
    first = [1, 2, 3, 4]
    second = colliding(first, 5)
    computed(core, first)
    assert core.probe([*first, 5], ROOT) == 4
    assert core.probe(second, ROOT) == (0 if compare_tokens else 4)
    if compare_tokens:  # each is found, and leads to its own block
        assert core.blocks(computed(core, second)) == [1, 2]
        assert core.blocks(core.add(second, 0, ROOT)) == [1]
        assert core.blocks(core.add([*first, 5], 0, ROOT)) == [0]
    core.check_integrity()


@pytest.mark.parametrize("compare_tokens", [False, True])
def test_fault_hash_collision_of_prefixes(compare_tokens: bool) -> None:
    """Two prefixes with one hash, and the same block behind both, of which the first prefix's is left."""
    core = _core.Sequences(8, 4, num_host_blocks=1, compare_tokens=compare_tokens, key_bits=1)
    first, behind = [1, 2, 3, 4], [7, 7, 7, 7]
    second = colliding(first, 4)
    core.free(computed(core, [*first, *behind]))
    core.finish_transfer(core.swap_out_prefixes(1)[1])  # the block behind
    core.evict(8)
    computed(core, second)
    assert core.probe([*second, *behind, 0], ROOT) == (4 if compare_tokens else 8)
    core.check_integrity()


def test_random_prompts_with_hashes_of_two_bits() -> None:
    """Whatever is found is what was computed for these tokens, through eviction, forks and the host."""
    generator = random.Random(0)
    core = _core.Sequences(24, 2, num_host_blocks=12, compare_tokens=True, key_bits=2)
    content: dict[int, tuple[int, ...]] = {}  # block: the tokens up to its end
    num_hits = 0
    for _ in range(1500):
        tokens = [generator.randrange(3) for _ in range(generator.randrange(1, 12))]
        sequence = core.add(tokens, 0, ROOT)
        for transfer_id, pairs in core.take_arrivals():
            for host_block, block in pairs.tolist():
                content[block] = content[~host_block]
            core.finish_transfer(transfer_id)
        num_cached = core.num_cached_tokens(sequence)
        num_hits += num_cached > 0
        for i, block in enumerate(core.blocks(sequence)):
            end = min(2 * i + 2, num_cached)
            assert content[block][:end] == tuple(tokens[:end])
        batch = core.open_batch([sequence])
        for i, block in enumerate(core.blocks(sequence)):
            content[block] = tuple(tokens[: 2 * i + 2])
        core.commit(batch.batch_id)
        core.free(sequence)
        _, transfer_id, pairs = core.swap_out_prefixes(generator.randrange(2))
        for block, host_block in pairs.tolist():
            content[~host_block] = content[block]
        core.finish_transfer(transfer_id)
        core.check_integrity()
    assert num_hits > 300


def comparing(num_blocks: int = 16, **options: Any) -> PagedKVCache:
    return prefix_cache(num_blocks, compare_tokens=True, **options)


def fill(cache: PagedKVCache, seq: Sequence) -> None:
    """Write each token's number into its slot, in all tensors."""
    for tensor in [*cache._key_tensors, *cache._value_tensors]:
        for i, token in enumerate(seq.token_ids):
            tensor[seq.block_table[i // 4], i % 4] = float(token)


def content(cache: PagedKVCache, seq: Sequence) -> list[int]:
    """The tokens whose numbers the computed slots hold."""
    slots = torch.cat([cache._key_tensors[-1][block] for block in seq.block_table])
    return [int(slot) for slot in slots[: seq.num_computed_tokens, 0, 0]]


def test_a_prompt_that_leaves_a_block_in_the_middle() -> None:
    cache = comparing()
    first = added(cache, range(12))
    fill(cache, first)
    first.free()
    tokens = [*range(10), 77, 78, 79]
    assert cache.probe(tokens) == 10
    seq = cache.add_sequence(tokens)
    assert (seq.num_cached_tokens, seq.block_table) == (10, [0, 1, 2])
    assert content(cache, seq) == tokens[:10]
    compute(cache, seq)
    assert seq.block_table[:2] == [0, 1]
    assert seq.block_table[2] != 2
    fill(cache, seq)
    assert content(cache, seq) == tokens
    assert cache.probe(range(13)) == 12  # still known, and as it was
    assert content(cache, cache.add_sequence(range(13))) == [*range(12)]
    assert cache.stats().hit_rate == (10 + 12) / (12 + 13 + 13)
    cache._core.check_integrity()


def test_without_compare_tokens_only_whole_blocks_are_found() -> None:
    cache = prefix_cache()
    added(cache, range(12)).free()
    assert cache.probe([*range(10), 77, 78]) == 8
    with pytest.raises(ValueError, match="prefix_caching=True"):
        make_cache(compare_tokens=True)


def test_the_block_with_the_most_equal_tokens() -> None:
    cache = comparing()
    for tail in ([1, 9, 9, 9], [1, 2, 9, 9], [1, 2, 3, 9], [2, 2, 3, 4]):
        added(cache, [0, 0, 0, 0, *tail]).free()
    assert cache.probe([0, 0, 0, 0, 1, 2, 3, 4, 5]) == 7
    assert cache.probe([0, 0, 0, 0, 1, 2, 7, 4, 5]) == 6
    assert cache.probe([0, 0, 0, 0, 1, 2, 3]) == 6  # never the last token
    assert cache.probe([0, 0, 0, 0, 2, 7]) == 5
    assert cache.probe([0, 0, 0, 0, 3, 7]) == 4
    assert cache.probe([0, 0, 7, 0, 3, 7]) == 2
    assert cache.probe([0, 0, 0, 0, 1, 2, 3, 4, 5], salt="other") == 0


def test_only_a_few_siblings_are_kept_by_their_first_token() -> None:
    cache = comparing(num_blocks=64)
    for i in range(20):
        added(cache, [5, i, i, i]).free()
    assert [cache.probe([5, i, 99]) for i in range(20)] == [2] * 8 + [1] * 12
    assert [cache.probe([5, i, i, i, 1]) for i in range(20)] == [4] * 20
    cache.evict(20)
    assert cache.probe([5, 3, 99]) == 0
    cache._core.check_integrity()


def test_room_is_not_taken_by_the_block_that_is_copied() -> None:
    """In a pool that the prompt just fits into, the block gives way instead of standing in the way."""
    for num_blocks, num_cached in ((3, 4), (4, 6)):
        cache = comparing(num_blocks)
        added(cache, range(8)).free()
        tokens = [*range(6), 70, 71, 72]
        assert cache.can_allocate(tokens)
        seq = cache.add_sequence(tokens)
        assert seq.num_cached_tokens == num_cached
        compute(cache, seq)
        cache._core.check_integrity()


def test_a_kept_tail_through_forks_swaps_and_truncation() -> None:
    cache = comparing(num_host_blocks=16)
    first = added(cache, range(8))
    fill(cache, first)
    first.free()
    seq = cache.add_sequence([*range(7), 70])
    fork = seq.fork()
    seq.swap_out()
    seq.swap_in()
    assert content(cache, seq) == [*range(7)]
    fork.truncate(6)
    fork.append([60, 61])
    before = state(cache)
    assert cache.can_append([seq, fork], [0, 0])
    assert state(cache) == before
    compute(cache, seq, fork)
    fill(cache, seq)
    fill(cache, fork)
    assert content(cache, seq) == [*range(7), 70]
    assert content(cache, fork) == [*range(6), 60, 61]
    assert content(cache, cache.add_sequence(range(9))) == [*range(8)]
    cache._core.check_integrity()


@pytest.mark.parametrize("window", [2, 6])
def test_layers_with_windows(window: int) -> None:
    cache = comparing(32, num_layers=2, sliding_window=[window, None])
    added(cache, range(12)).free()
    seq = cache.add_sequence([*range(10), 77, 78])
    assert seq.num_cached_tokens == 10
    compute(cache, seq)
    assert cache.probe(range(13)) == 12
    cache._core.check_integrity()
