"""Swapping sequences to the host and back: content, sharing, and what happens while a copy is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_helpers import compute, make_cache, state

from pagedkv import OutOfMemoryError, PagedKVCache, _core
from pagedkv.cache import Sequence


def swap_cache(num_blocks: int = 16, num_host_blocks: int = 16, **options: Any) -> PagedKVCache:
    return make_cache(num_blocks, num_host_blocks=num_host_blocks, **options)


def write(cache: PagedKVCache, seq: Sequence, value: float) -> None:
    """Fill all slots of a sequence, in every layer, with numbers from `value` on."""
    for tensor in [*cache._key_tensors, *cache._value_tensors]:
        for i, block in enumerate(seq.block_table):
            tensor[block] = value + i
    assert seq.block_table


def read(cache: PagedKVCache, seq: Sequence) -> torch.Tensor:
    """The blocks of a sequence, all tensors."""
    return torch.stack([tensor[seq.block_table] for tensor in [*cache._key_tensors, *cache._value_tensors]])


def computed(cache: PagedKVCache, num_tokens: int, value: float = 0.0) -> Sequence:
    seq = cache.add_sequence(num_tokens=num_tokens)
    compute(cache, seq)
    write(cache, seq, value)
    return seq


def test_content_survives() -> None:
    cache = swap_cache()
    seq = computed(cache, 10, 5.0)
    before = read(cache, seq)
    seq.swap_out()
    assert (seq.swapped_out, seq.block_table, seq.num_computed_tokens) == (True, [], 10)
    stats = cache.stats()
    assert (stats.num_used, stats.num_host_used, stats.num_host_blocks) == (0, 3, 16)
    computed(cache, 16 * 4, -1.0).free()  # every block of the device is written
    seq.append(2)
    seq.swap_in()
    assert torch.equal(read(cache, seq), before)
    assert (seq.swapped_out, seq.num_tokens, cache.stats().num_host_used) == (False, 12, 0)
    compute(cache, seq)
    assert seq.num_computed_tokens == 12
    cache._core.check_integrity()


def test_fault_block_id_vs_pool_index() -> None:
    """A table never holds an id of the other pool."""
    cache = swap_cache(num_blocks=4, num_host_blocks=64)
    held = [computed(cache, 8, 10.0 * i) for i in range(2)]
    before = [read(cache, seq) for seq in held]
    for seq in held:
        seq.swap_out()
    other = computed(cache, 8, -5.0)
    held[1].swap_in()
    assert max(held[1].block_table) < 4
    assert set(held[1].block_table).isdisjoint(other.block_table)
    assert torch.equal(read(cache, held[1]), before[1])
    other.free()
    held[0].swap_in()
    assert torch.equal(read(cache, held[0]), before[0])


def test_fault_swap_in_capacity_check() -> None:
    """There has to be a block for the token that comes next, too."""
    cache = swap_cache(num_blocks=3, block_size=16)
    seq = computed(cache, 32)
    seq.swap_out()
    other = computed(cache, 1)
    assert cache.stats().num_free == 2
    before = state(cache)
    assert not cache.can_swap_in(seq)
    assert state(cache) == before
    other.free()
    assert cache.can_swap_in(seq)
    seq.append(17)
    assert not cache.can_swap_in(seq)
    seq.swap_in()
    assert not cache.can_append([seq], [0])
    with pytest.raises(ValueError, match="not swapped out"):
        cache.can_swap_in(seq)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_forks_share_on_both_sides(prefix_caching: bool) -> None:
    """Two sequences share a prompt of 1,000 tokens and have 4 forks each; before and after they diverge."""
    cache = swap_cache(400, 400, block_size=16, num_layers=1, prefix_caching=prefix_caching)
    first = cache.add_sequence(range(1000))
    compute(cache, first)
    second = first.fork()
    family = [first, second, *first.fork(4), *second.fork(4)]

    def used() -> int:
        cache._core.check_integrity()
        return cache.stats().num_used

    def there_and_back() -> None:
        num_used = used()
        for i, seq in enumerate(family):
            seq.swap_out()
            assert cache.stats().num_host_used <= num_used
            assert (used() == 0) == (i == len(family) - 1)
        assert cache.stats().num_host_used == num_used
        for seq in reversed(family):
            assert cache.can_swap_in(seq)
            seq.swap_in()
        assert used() == num_used
        assert cache.stats().num_host_used == 0

    assert used() == 63  # 62 full blocks and one of 8 tokens
    there_and_back()
    for i, seq in enumerate(family):
        seq.append([5000 + i])
    compute(cache, *family)
    assert used() == 62 + 10
    there_and_back()
    for seq in family:
        seq.append(list(range(10)))
    compute(cache, *family)
    assert used() == 62 + 20
    there_and_back()
    for seq in family[1:]:
        seq.swap_out()
    assert used() == 64
    assert cache.stats().num_host_used == 62 + 2 * 9  # the shared blocks are on both sides
    first.free()
    for seq in family[1:]:
        seq.swap_in()
    assert used() == 62 + 18


def test_a_tail_that_was_written_is_no_twin() -> None:
    """After a swap the other owner appends: neither side may take its block for the old one."""
    cache = swap_cache()
    a = computed(cache, 6, 1.0)
    b = a.fork()
    before = read(cache, a)
    a.swap_out()
    b.append(1)
    compute(cache, b)  # in place: the only owner
    write(cache, b, 7.0)
    after = read(cache, b)
    b.swap_out()
    assert cache.stats().num_host_used == 3
    a.swap_in()
    b.swap_in()
    assert torch.equal(read(cache, a), before)
    assert torch.equal(read(cache, b)[:, 1], after[:, 1])
    assert a.block_table[1] != b.block_table[1]
    cache._core.check_integrity()


def test_fault_read_write_race_shared_prefix() -> None:
    """Swapping in does not write blocks that are there."""
    cache = swap_cache()
    a = computed(cache, 10, 1.0)
    b = a.fork()
    b.swap_out()
    write(cache, a, 50.0)
    b.swap_in()
    assert b.block_table == a.block_table
    assert torch.equal(read(cache, b), read(cache, a))


def test_a_prefix_that_is_still_cached_is_not_copied() -> None:
    cache = swap_cache(prefix_caching=True)
    seq = cache.add_sequence(range(10))
    compute(cache, seq)
    table = seq.block_table
    seq.swap_out()
    assert cache.probe(range(10)) == 8
    seq.swap_in()
    assert seq.block_table[:2] == table[:2]
    assert cache.stats().num_cached == 0
    seq.swap_out()
    assert cache.evict(9) == 2
    assert cache.probe(range(10)) == 8  # on the host
    seq.swap_in()
    assert cache.probe(range(10)) == 8  # known on the device again
    cache._core.check_integrity()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_all_or_nothing(prefix_caching: bool) -> None:
    cache = swap_cache(num_blocks=4, num_host_blocks=2, prefix_caching=prefix_caching)
    long, short = cache.add_sequence(range(12)), cache.add_sequence(range(40, 44))
    compute(cache, long, short)
    before = state(cache)
    with pytest.raises(OutOfMemoryError, match="needs 3, 2 of 2 are free"):
        long.swap_out()
    assert state(cache) == before
    assert cache.stats().num_host_used == 0
    short.swap_out()
    long.append(4)
    compute(cache, long)
    before = state(cache)
    assert not cache.can_swap_in(short)
    with pytest.raises(OutOfMemoryError, match="needs 1, 0 of 4 are free"):
        short.swap_in()
    assert state(cache) == before
    assert short.swapped_out
    short.free()
    assert (short.freed, cache.stats().num_host_used) == (True, 0)


def test_what_a_swapped_out_sequence_refuses() -> None:
    cache = swap_cache()
    seq, other = computed(cache, 5), computed(cache, 5)
    seq.append(1)
    for call in (seq.swap_in, lambda: cache.can_swap_in(seq)):
        with pytest.raises(ValueError, match="not swapped out"):
            call()
    seq.swap_out()
    refused: list[Any] = [
        seq.fork,
        seq.swap_out,
        lambda: seq.truncate(1),
        lambda: cache.batch([other, seq]),
        lambda: cache.can_append([seq], [1]),
        lambda: cache.reorder([other, seq], [1, 0]),
    ]
    for call in refused:
        with pytest.raises(
            ValueError, match=r"(sequence that|sequences\[[01]\]) is swapped out: swap it in first"
        ):
            call()
    seq.swap_in()
    batch = cache.batch([seq])
    with pytest.raises(ValueError, match="open batch"):
        seq.swap_out()
    cache.abandon(batch)
    plain = make_cache()
    with pytest.raises(ValueError, match="no host blocks"):
        computed(plain, 3).swap_out()
    seq.free()
    with pytest.raises(ValueError, match="freed"):
        seq.swap_out()


def test_fault_pinned_node_evicted() -> None:
    """Blocks are not handed out while a copy reads them; the core is told when it has ended."""
    core = _core.Sequences(num_blocks=3, block_size=4, num_host_blocks=3)
    root = bytes(32)
    seq = core.add(range(9), 0, root)
    core.commit(core.open_batch([seq]).batch_id)
    transfer, pairs = core.swap_out(seq)
    assert pairs.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert (core.num_free_blocks, core.evict(3)) == (0, 0)
    assert core.probe(range(9), root) == 8  # they can be used, though
    reader = core.add(range(9), 0, root)
    assert core.blocks(reader) == [0, 1]
    core.free(reader)
    other = core.add(None, 1)
    with pytest.raises(OutOfMemoryError):
        core.open_batch([other])
    core.finish_transfer(transfer)
    assert (core.num_free_blocks, core.num_cached_blocks) == (3, 2)
    core.commit(core.open_batch([other]).batch_id)
    with pytest.raises(ValueError, match="not open"):
        core.finish_transfer(transfer)
    core.free(other)
    arrival, pairs = core.swap_in(seq)
    assert pairs.tolist() == [[2, 2]]
    assert core.num_free_host_blocks == 2  # read by the copy
    core.finish_transfer(arrival)
    assert core.num_free_host_blocks == 3
    core.check_integrity()


def test_bytes_of_the_host() -> None:
    cache = swap_cache(num_host_blocks=5, prefix_caching=True)
    assert cache.stats().host_bytes == 5 * cache.bytes_per_block
    assert make_cache().stats().host_bytes == 0


class Event:
    """Stands in for a CUDA event behind a copy that takes its time."""

    def __init__(self) -> None:
        self.done = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.num_waits += 1
        self.done = True


def start_swap_out(cache: PagedKVCache, seq: Sequence) -> Event:
    """A swap whose copy is under way, as on CUDA."""
    assert cache._host is not None
    transfer_id, _ = cache._core.swap_out(seq._id)
    event = Event()
    cache._host._in_flight.append((event, transfer_id))  # type: ignore[arg-type]
    return event


def test_fault_freed_while_in_flight() -> None:
    """Blocks that a copy reads stay used until it is done; whoever needs them waits, nobody else does."""
    cache = swap_cache(num_blocks=4)
    seq = computed(cache, 12)
    event = start_swap_out(cache, seq)
    small, large = cache.add_sequence(num_tokens=4), cache.add_sequence(num_tokens=9)
    compute(cache, small)
    assert (cache.stats().num_used, event.num_waits) == (4, 0)
    event.done = True
    assert cache.stats().num_used == 1  # found out without waiting
    seq.swap_in()
    event = start_swap_out(cache, seq)
    compute(cache, large)
    assert event.num_waits == 1


@pytest.mark.parametrize("question", ["can_append", "can_allocate", "can_swap_in"])
def test_answers_do_not_depend_on_copies_in_flight(question: str) -> None:
    cache = swap_cache(num_blocks=4)
    away, seq, new = computed(cache, 4), computed(cache, 8), cache.add_sequence()
    away.swap_out()
    full = computed(cache, 8)
    event = start_swap_out(cache, seq)
    if question == "can_append":
        assert cache.can_append([new], [1])
    elif question == "can_allocate":
        assert cache.can_allocate(4)
    else:
        assert cache.can_swap_in(away)
    assert event.num_waits == 1
    assert not cache.can_append([full], [9])
