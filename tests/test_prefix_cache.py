"""The prefix cache: which blocks are found again, when, by whom, and what it never does."""

from __future__ import annotations

import random

import pytest
import torch
from cache_helpers import added, compute, make_cache, prefix_cache, state

from pagedkv import OutOfMemoryError, PagedKVCache
from pagedkv.cache import Sequence


def test_without_prefix_caching_nothing_is_found() -> None:
    cache = make_cache()
    added(cache, range(9)).free()
    assert cache.add_sequence(range(9)).num_cached_tokens == cache.probe(range(9)) == 0
    assert cache.stats().num_cached == 0


@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_fault_full_prompt_hit(num_tokens: int) -> None:
    """The last token is always computed; a partial block of a prompt is found only where it was full."""
    cache = prefix_cache()
    added(cache, range(16)).free()
    seq = cache.add_sequence(range(num_tokens))
    whole_blocks = num_tokens // 4 * 4
    assert seq.num_cached_tokens == min(whole_blocks, num_tokens - 1) == seq.num_computed_tokens
    batch = cache.batch([seq])
    assert batch.num_tokens == num_tokens - seq.num_cached_tokens >= 1
    assert batch.context_lens.tolist() == [num_tokens]
    cache.commit(batch)
    cache._core.check_integrity()


def test_tokens_in_blocks_that_others_own() -> None:
    cache = prefix_cache()
    first = added(cache, range(11))
    assert first.num_shared_tokens == 0
    second = added(cache, [*range(8), 99, 98])
    assert (first.num_shared_tokens, second.num_shared_tokens) == (8, 8)
    fork = second.fork()
    assert (second.num_shared_tokens, fork.num_shared_tokens) == (10, 10)
    fork.free()
    second.free()
    assert first.num_shared_tokens == 0


def test_blocks_of_one_token() -> None:
    cache = prefix_cache(block_size=1)
    added(cache, [7, 8, 9])
    seqs = [cache.add_sequence(tokens) for tokens in ([7], [7, 8], [7, 8, 9], [7, 8, 9, 1])]
    assert [seq.num_cached_tokens for seq in seqs] == [0, 1, 2, 3]
    compute(cache, *seqs)
    assert cache.stats().num_used == 4  # each token of [7, 8, 9, 1] once
    cache._core.check_integrity()


def fill(cache: PagedKVCache, value: float, seq: Sequence, start: int, stop: int) -> None:
    """Write `value` to the slots of some tokens of every layer."""
    size = cache.block_size
    for tensors in (cache.key_caches, cache.value_caches):
        for tensor in tensors:
            for token in range(start, stop):
                tensor[seq.block_table[token // size], token % size] = value


def test_fault_recompute_into_shared_block() -> None:
    cache = prefix_cache()
    for tensor in [*cache.key_caches, *cache.value_caches]:
        tensor.zero_()
    a = added(cache, range(8))
    fill(cache, 1.0, a, 0, 8)
    before = [tensor.clone() for tensor in cache.key_caches]
    b = cache.add_sequence(range(8))
    assert (b.num_cached_tokens, b.block_table) == (7, a.block_table)
    batch = cache.batch([b])
    assert b.block_table[0] == a.block_table[0]
    assert b.block_table[1] != a.block_table[1]
    fill(cache, 2.0, b, 7, 8)
    for layer, tensor in enumerate(cache.key_caches):
        assert torch.equal(tensor[a.block_table], before[layer][a.block_table])
        assert torch.equal(tensor[b.block_table[1], :3], before[layer][a.block_table[1], :3])
    cache.commit(batch)
    assert b.block_table == a.block_table  # the first block of equal ones stays
    a.free()
    b.free()
    assert cache.probe(range(9)) == 8


def test_a_lone_reader_recomputes_in_place() -> None:
    """Nothing is copied where nobody else has the block, and until it is written again it is not found."""
    cache = prefix_cache(num_blocks=2)
    added(cache, range(8)).free()
    seq = cache.add_sequence(range(8))
    batch = cache.batch([seq])
    assert cache.stats().num_used == 2
    assert cache.probe(range(9)) == 4
    cache.commit(batch)
    assert cache.probe(range(9)) == 8


def test_fault_stale_hash_after_reallocation() -> None:
    cache = prefix_cache(num_blocks=2)
    added(cache, range(8)).free()
    assert (cache.probe(range(9)), cache.stats().num_cached) == (8, 2)
    other = cache.add_sequence(range(50, 58))
    batch = cache.batch([other])
    assert (cache.probe(range(9)), cache.probe(range(50, 59))) == (0, 0)
    cache.commit(batch)
    assert (cache.probe(range(9)), cache.probe(range(50, 59))) == (0, 8)
    assert (cache.stats().evictions, cache.stats().num_cached) == (2, 0)
    cache._core.check_integrity()


def test_fault_hit_before_kv_written() -> None:
    cache = prefix_cache()
    a, b = cache.add_sequence(range(12)), cache.add_sequence(range(12))
    first = cache.batch([a], [6])
    assert cache.add_sequence(range(12)).num_cached_tokens == 0
    cache.commit(first)
    assert cache.add_sequence(range(12)).num_cached_tokens == 4  # of 6, one full block
    second = cache.batch([a])
    assert cache.probe(range(12)) == 4
    cache.abandon(second)
    assert cache.probe(range(12)) == 4
    compute(cache, a)
    assert cache.probe(range(12)) == 11
    assert b.num_cached_tokens == 0
    compute(cache, b)
    assert b.block_table == a.block_table


def test_last_layer_makes_a_prompt_hittable() -> None:
    cache = prefix_cache(num_layers=2)
    seq = cache.add_sequence(range(5))
    batch = cache.batch([seq])
    q, kv = torch.ones(5, 2, 8), torch.ones(5, 2, 8)
    cache.attend(0, q, kv, kv, batch)
    assert cache.probe(range(5)) == 0
    cache.attend(1, q, kv, kv, batch)
    assert cache.probe(range(5)) == 4


def test_equal_prompts_of_one_batch_end_in_the_same_blocks() -> None:
    cache = prefix_cache()
    seqs = [cache.add_sequence(range(10)) for _ in range(3)]
    compute(cache, *seqs)
    assert [seq.block_table[:2] for seq in seqs] == [[0, 1]] * 3
    assert cache.stats().num_used == 2 + 3  # and a tail each
    for seq in seqs:
        seq.free()
    assert cache.stats().num_cached == 2
    cache._core.check_integrity()


def test_generated_tokens_are_found_too() -> None:
    cache = prefix_cache()
    seq = added(cache, range(3))
    for token in range(3, 9):
        seq.append([token])
        compute(cache, seq)
    assert cache.probe(range(20)) == 8
    seq.append(1)  # a token without an id
    seq.append([10, 11, 12])
    compute(cache, seq)
    assert cache.probe(range(20)) == 8
    cache._core.check_integrity()


def test_a_hit_is_pinned_from_the_look_up() -> None:
    cache = prefix_cache(num_blocks=4)
    added(cache, range(8)).free()
    seq = cache.add_sequence(range(9))
    with pytest.raises(OutOfMemoryError):
        compute(cache, cache.add_sequence(num_tokens=12))
    compute(cache, cache.add_sequence(num_tokens=4))
    assert cache.evict(9) == 0
    compute(cache, seq)
    assert seq.block_table[:2] == [0, 1]


def test_never_cached_blocks_are_reused_first_then_the_oldest_from_its_tail() -> None:
    cache = prefix_cache(num_blocks=8)
    a, b = added(cache, range(12)), added(cache, range(50, 58))  # blocks 0 1 2, 3 4
    loose = cache.add_sequence(num_tokens=4)
    compute(cache, loose)
    for seq in (loose, a, b):
        seq.free()
    assert cache.probe(range(5)) == 4  # a probe does not make a prefix younger
    taken = cache.add_sequence(num_tokens=8 * 4)
    compute(cache, taken)
    assert taken.block_table == [5, 6, 7, 2, 1, 0, 4, 3]


def test_a_hit_makes_a_prefix_younger() -> None:
    cache = prefix_cache(num_blocks=4)
    added(cache, range(8)).free()
    added(cache, range(50, 58)).free()
    cache.add_sequence(range(9)).free()
    compute(cache, cache.add_sequence(num_tokens=8))
    assert (cache.probe(range(9)), cache.probe(range(50, 59))) == (8, 0)


def test_the_shared_head_outlives_its_branches() -> None:
    cache = prefix_cache(num_blocks=8)
    branches = [added(cache, [*range(8), *range(start, start + 4)]) for start in (20, 30)]
    branches[0].free()
    branches[1].free()
    assert cache.stats().num_cached == 4
    assert cache.evict(1) == 1
    assert [cache.probe([*range(8), *range(start, start + 5)]) for start in (20, 30)] == [8, 12]
    assert cache.evict(1) == 1
    assert cache.probe([*range(8), *range(30, 35)]) == 8
    assert cache.evict(1) == 1
    assert cache.probe(range(9)) == 4


def test_evict_and_reset() -> None:
    cache = prefix_cache()
    seq = added(cache, range(8))
    added(cache, range(50, 62)).free()
    assert (cache.stats().num_cached, cache.evict(2)) == (3, 2)
    assert cache.probe(range(50, 62)) == 4
    with pytest.raises(ValueError, match="negative"):
        cache.evict(-1)
    with pytest.raises(ValueError, match="while sequences use 2 blocks"):
        cache.reset_prefix_cache()
    seq.free()
    cache.reset_prefix_cache()
    stats = cache.stats()
    assert (stats.num_used, stats.num_cached, stats.num_free) == (0, 0, 16)
    assert cache.probe(range(8)) == 0
    cache._core.check_integrity()


def test_truncate_and_write_other_tokens() -> None:
    """A block leaves the cache before its owner writes something else into it."""
    cache = prefix_cache()
    seq = added(cache, range(10))
    seq.truncate(6)
    assert cache.probe(range(9)) == 8
    seq.append([77, 78])
    batch = cache.batch([seq])
    assert cache.probe(range(9)) == 4
    cache.commit(batch)
    assert cache.probe([*range(6), 77, 78, 0]) == 8
    seq.truncate(8)
    seq.truncate(0)
    seq.append(range(5))
    compute(cache, seq)
    assert cache.probe(range(9)) == 4
    cache._core.check_integrity()


def test_a_fork_keeps_the_old_content() -> None:
    cache = prefix_cache()
    seq = added(cache, range(8))
    fork = seq.fork()
    fork.truncate(6)
    fork.append([77, 78])
    compute(cache, fork)
    assert fork.block_table[1] != seq.block_table[1]
    assert cache.probe(range(9)) == cache.probe([*range(6), 77, 78, 0]) == 8


def test_fault_evictable_accounting_drift() -> None:
    """Used + cached + free is always the pool, and each is what the tables say."""
    generator = random.Random(0)
    cache = prefix_cache(num_blocks=24)
    seqs: list[Sequence] = []
    for _ in range(600):
        action = generator.randrange(5)
        if action <= 1:
            start = generator.choice([0, 0, 0, 100])
            seq = cache.add_sequence(range(start, start + generator.randrange(1, 20)))
            fits = cache.can_append([seq], [0])
            try:
                compute(cache, seq)
                seqs.append(seq)
                assert fits
            except OutOfMemoryError:
                assert not fits
                seq.free()
        elif seqs and action == 2:
            seqs.pop(generator.randrange(len(seqs))).free()
        elif seqs and action == 3:
            seq = generator.choice(seqs)
            seq.truncate(generator.randrange(seq.num_tokens + 1))
        else:
            cache.evict(generator.randrange(3))
        stats = cache.stats()
        mapped = {block for seq in seqs for block in seq.block_table}
        assert stats.num_used == len(mapped)
        assert stats.num_used + stats.num_cached + stats.num_free == stats.num_blocks
        cache._core.check_integrity()


def test_can_allocate_counts_hits_once() -> None:
    """It says exactly what adding the sequence and a batch of it would do."""
    generator = random.Random(1)
    answers = []
    for _ in range(300):
        cache = prefix_cache(num_blocks=generator.randrange(4, 9))
        held = [
            seq
            for length in (8, 6, 12)
            if cache.can_allocate(length) and (seq := added(cache, range(length)))
        ]
        for seq in generator.sample(held, generator.randrange(len(held) + 1)):
            seq.free()
        tokens = [*range(generator.randrange(1, 14)), *range(90, 90 + generator.randrange(20))]
        spare = generator.randrange(3)
        before = state(cache)
        expected = cache.can_allocate(tokens, num_spare_blocks=spare)
        assert state(cache) == before
        seq = cache.add_sequence(tokens)
        try:
            batch = cache.batch([seq])  # its commit may find equal blocks and free some
            fits = cache._core.num_free_blocks >= spare
            cache.commit(batch)
        except OutOfMemoryError:
            fits = False
        assert fits == expected
        answers.append(fits)
    assert 50 < sum(answers) < 250


def test_hit_rate() -> None:
    cache = prefix_cache()
    assert cache.stats().hit_rate == 0.0
    added(cache, range(8))
    cache.add_sequence(range(12))
    cache.add_sequence(num_tokens=99)
    cache.probe(range(12))
    assert cache.stats().hit_rate == 8 / 20


def test_cached_blocks_in_the_picture() -> None:
    cache = prefix_cache()
    added(cache, range(10)).free()
    assert cache.draw() == " 0  --" + "." * 14
    assert str(cache).startswith("16 blocks of 4 tokens: 0 used (100.0% filled), 2 cached, 14 free, ")


def test_content_is_reused() -> None:
    """What a hit attends to is what the first sequence wrote."""
    cache = prefix_cache(num_layers=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(10, 2, 8, generator=generator) for _ in range(3))
    expected = cache.attend(0, q, k, v, cache.batch([cache.add_sequence(range(10))]))
    seq = cache.add_sequence(range(10))
    batch = cache.batch([seq])
    assert batch.num_tokens == 2
    out = cache.attend(0, q[8:], k[8:], v[8:], batch)
    assert isinstance(expected, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, expected[8:])


def test_reorder_and_fork_n() -> None:
    cache = prefix_cache()
    root = added(cache, range(6))
    beams = [root, *root.fork(2)]
    for i, beam in enumerate(beams):
        beam.append([70 + i])
    compute(cache, *beams)
    before = [(beam.token_ids, beam.block_table) for beam in beams]
    cache.reorder(beams, [2, 2, 1])
    assert [(beam.token_ids, beam.block_table) for beam in beams] == [before[2], before[2], before[1]]
    cache._core.check_integrity()
    for beam in beams:
        beam.append([1])
    compute(cache, *beams)  # the last slot of a block that two of them share
    assert len({beam.block_table[1] for beam in beams}) == 2  # equal tokens, equal blocks
    kept = state(cache)
    for parents in ([0, 1], [0, 1, 3], [0, 1, -1]):
        with pytest.raises(ValueError, match="parents"):
            cache.reorder(beams, parents)
    with pytest.raises(ValueError, match="listed twice"):
        cache.reorder([beams[0], beams[0]], [0, 0])
    beams[1].append(1)
    batch = cache.batch([beams[1]])
    with pytest.raises(ValueError, match="open batch"):
        cache.reorder(beams, [1, 1, 1])
    cache.abandon(batch)
    assert state(cache) == kept
    with pytest.raises(ValueError, match="negative"):
        root.fork(-1)
    assert root.fork(0) == []
