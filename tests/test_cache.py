"""`PagedKVCache`: sequences and batches, what is refused, statistics, the picture."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import compute, make_cache, state, tokens_of

from pagedkv import OutOfMemoryError, PagedKVCache
from pagedkv.cache import Batch


def test_a_batch_is_what_the_operators_take() -> None:
    cache = make_cache()
    a, b, c = cache.add_sequence(range(6)), cache.add_sequence([7, 8]), cache.add_sequence()
    batch = cache.batch([a, b, c], [5, 1, 0])
    assert batch.block_tables.tolist() == [[0, 1], [2, -1], [-1, -1]]
    assert batch.context_lens.tolist() == [5, 1, 0]
    assert batch.query_start_loc.tolist() == [0, 5, 6, 6]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3, 4, 8]
    assert (batch.num_tokens, batch.max_query_len, batch.sequences) == (6, 5, (a, b, c))
    for name in ("block_tables", "context_lens", "query_start_loc"):
        assert getattr(batch, name).dtype == torch.int32
    assert batch.slot_mapping.dtype == torch.int64
    cache.commit(batch)
    assert [seq.num_computed_tokens for seq in (a, b, c)] == [5, 1, 0]
    assert cache.batch([c, b, a]).query_start_loc.tolist() == [0, 0, 1, 2]


def test_an_empty_batch() -> None:
    cache = make_cache(num_layers=1)
    seq = cache.add_sequence()
    for sequences in ([], [seq]):
        batch = cache.batch(sequences)
        assert (batch.num_tokens, batch.max_query_len) == (0, 0)
        assert batch.block_tables.shape == (len(sequences), 0)
        out = cache.attend(0, *tokens_of(0), batch)
        assert isinstance(out, torch.Tensor)
        assert out.shape == (0, 4, 8)
    assert cache.stats().num_used == 0


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32, np.int64, np.uint64])
def test_token_ids_of_any_integer_kind(dtype: Any) -> None:
    ids = [3, 1, 4, 1, 5]
    array = np.array(ids, dtype=dtype)
    cache = make_cache()
    for tokens in (
        ids,
        tuple(ids),
        array,
        array[::1],
        list(array),
        torch.tensor(ids),
        torch.tensor(ids).int(),
        iter(ids),
    ):
        seq = cache.add_sequence(tokens)
        seq.append(array[:2])
        assert seq.token_ids == [3, 1, 4, 1, 5, 3, 1]
    assert cache.add_sequence(range(2, 6)).token_ids == [2, 3, 4, 5]
    assert cache.add_sequence(torch.tensor(ids)[::2]).token_ids == [3, 4, 5]


def test_tokens_that_are_not_integers() -> None:
    cache = make_cache()
    seq = cache.add_sequence([1])
    for tokens in (
        [1.0],
        np.array([1.0]),
        torch.tensor([1.0]),
        torch.tensor([1.0]).bfloat16(),
        "ab",
        [None],
        1.5,
    ):
        with pytest.raises(TypeError, match="integers"):
            cache.add_sequence(tokens)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="integers"):
            seq.append(tokens)  # type: ignore[arg-type]
    for tokens in (
        np.zeros((1, 2), dtype=int),
        torch.tensor(7),
        [2**63],
        np.array([2**64 - 1], dtype=np.uint64),
    ):
        with pytest.raises(ValueError, match="token_ids"):
            cache.add_sequence(tokens)
    assert seq.token_ids == [1]


def test_append_takes_ids_or_a_count() -> None:
    cache = make_cache()
    seq = cache.add_sequence([1, 2])
    seq.append([3])
    seq.append(np.int64(2))
    seq.append([9])  # behind tokens without ids: counted only
    assert (seq.num_tokens, seq.token_ids) == (6, [1, 2, 3])
    seq.truncate(2)
    seq.append([5])
    assert seq.token_ids == [1, 2, 5]
    counted = cache.add_sequence(num_tokens=3)
    counted.append(0)
    assert (counted.num_tokens, counted.token_ids) == (3, [])
    for call in (
        lambda: seq.append(-1),
        lambda: cache.add_sequence(num_tokens=-1),
        lambda: seq.append(2**63 - 1),
    ):
        with pytest.raises(ValueError, match=r"negative|too many"):
            call()
    with pytest.raises(ValueError, match="not both"):
        cache.add_sequence([1], num_tokens=1)
    assert seq.num_tokens == 3


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_first", [0, 1, 15, 16, 17, 31, 32])
def test_append_boundary(block_size: int, num_first: int) -> None:
    """can_append predicts a batch exactly, with 0 and 1 block free."""
    num_blocks = -(-num_first // block_size)
    for num_free, count in itertools.product((0, 1), range(1, 18)):
        if num_blocks + num_free == 0:
            continue
        cache = make_cache(num_blocks + num_free, block_size, num_layers=1)
        seq = cache.add_sequence(num_tokens=num_first)
        compute(cache, seq)
        fits = -(-(num_first + count) // block_size) <= num_blocks + num_free
        assert cache.can_append([seq], [count]) == fits
        assert cache.can_allocate(count) == (-(-count // block_size) <= num_free)
        seq.append(count)
        assert cache.can_append([seq], [0]) == fits
        if not fits:
            with pytest.raises(OutOfMemoryError):
                cache.batch([seq])
            continue
        batch = cache.batch([seq])
        assert len(seq.block_table) == -(-(num_first + count) // block_size)
        position = num_first + count - 1
        assert (
            batch.slot_mapping[-1]
            == seq.block_table[position // block_size] * block_size + position % block_size
        )


def test_prefill_tokens_double_counted() -> None:
    cache = make_cache(num_blocks=3, block_size=16, num_layers=1)
    seq = cache.add_sequence(num_tokens=32)
    compute(cache, seq)
    assert len(seq.block_table) == 2
    seq.append(1)
    compute(cache, seq)
    assert len(seq.block_table) == 3


def test_partial_allocation_leak() -> None:
    """A batch takes the blocks of all its sequences or none, copies of shared tails included."""
    cache = make_cache(num_blocks=4)
    a = cache.add_sequence(num_tokens=6)
    compute(cache, a)
    b, c = a.fork(), cache.add_sequence(num_tokens=4)
    for seq in (a, b):
        seq.append(1)
    before = state(cache)
    for counts in ([1, 3, 0], [1, 0, 1], [3, 1, 0]):
        assert not cache.can_append([a, b, c], counts)
    d = cache.add_sequence(num_tokens=1)
    for members in ([a, b, c, d], [d, c, b, a]):
        with pytest.raises(OutOfMemoryError, match="batch needs 3, 2 of 4 are free"):
            cache.batch(members)
        assert state(cache) == before
        assert a.block_table == b.block_table == [0, 1]
        assert c.block_table == d.block_table == []
    compute(cache, a, b, c)
    assert cache.stats().num_free == 0


def test_the_last_owner_of_a_tail_in_a_batch_writes_in_place() -> None:
    cache = make_cache()
    a = cache.add_sequence(num_tokens=6)
    compute(cache, a)
    family = [a, a.fork(), a.fork()]
    for seq in family:
        seq.append(1)
    compute(cache, *family)
    assert [seq.block_table for seq in family] == [[0, 2], [0, 3], [0, 1]]


def test_batches_that_are_refused() -> None:
    cache = make_cache()
    a, freed, foreign = (
        cache.add_sequence(num_tokens=6),
        cache.add_sequence(num_tokens=1),
        make_cache().add_sequence([1]),
    )
    freed.free()
    cache.commit(cache.batch([a], [2]))
    before = state(cache)
    cases: list[tuple[list[Any], Any, type[Exception], str]] = [
        ([a, freed], None, ValueError, r"sequences\[1\] was freed"),
        ([a, a], [1, 1], ValueError, r"sequences\[1\] is listed twice"),
        ([foreign], None, ValueError, r"sequences\[0\] belongs to another cache"),
        ([a, 3], None, TypeError, r"sequences\[1\] must be a Sequence, got int"),
        (
            [a],
            [5],
            ValueError,
            r"query_lens\[0\] is 5, but the sequence has 4 uncomputed tokens \(6 known, 2 computed\)",
        ),
        ([a], [-1], ValueError, r"query_lens\[0\] is -1"),
        ([a], [1, 1], ValueError, "query_lens has 2 entries for 1 sequences"),
        ([a], [], ValueError, "query_lens has 0 entries for 1 sequences"),
        ([a], [1.0], TypeError, r"query_lens\[0\] must be integers, got float"),
    ]
    for sequences, query_lens, error, message in cases:
        with pytest.raises(error, match=message):
            cache.batch(sequences, query_lens)
        assert state(cache) == before
    with pytest.raises(ValueError, match="listed twice"):
        cache.can_append([a, a], [1, 1])
    with pytest.raises(ValueError, match=r"counts\[0\]"):
        cache.can_append([a], [-1])
    with pytest.raises(ValueError, match="negative"):
        cache.can_allocate(-1)
    assert cache.batch([a], torch.tensor([4])).num_tokens == 4


def test_counts_beyond_any_pool() -> None:
    cache = make_cache()
    huge = [cache.add_sequence(num_tokens=2**62), cache.add_sequence(num_tokens=2**62)]
    assert not cache.can_append(huge, [1, 1])
    with pytest.raises(ValueError, match=r"2\*\*31 - 1"):
        cache.batch(huge)
    with pytest.raises(OutOfMemoryError):
        cache.batch(huge, [2**30, 2**30 - 1])
    assert cache.stats().num_used == 0


def test_truncate() -> None:
    cache = make_cache()
    seq = cache.add_sequence(num_tokens=10)
    cache.commit(cache.batch([seq], [6]))
    seq.truncate(8)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.block_table) == (8, 6, [0, 1])
    seq.truncate(3)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.block_table) == (3, 3, [0])
    for num_tokens in (4, -1):
        with pytest.raises(ValueError, match="0 to 3"):
            seq.truncate(num_tokens)
    fork = seq.fork()
    fork.truncate(2)
    fork.append(1)
    compute(cache, fork)
    assert (seq.block_table, fork.block_table) == ([0], [1])


def test_fork_shares_blocks_and_known_tokens() -> None:
    cache = make_cache()
    seq = cache.add_sequence([1, 2, 3, 4, 5, 6])
    cache.commit(cache.batch([seq], [5]))
    fork = seq.fork()
    assert fork.block_table == seq.block_table
    assert (fork.token_ids, fork.num_computed_tokens) == (seq.token_ids, 5)
    assert cache.stats().num_used == 2
    seq.free()
    assert cache.stats().num_used == 2
    fork.free()
    assert cache.stats().num_used == 0


def test_a_freed_sequence() -> None:
    cache = make_cache()
    seq = cache.add_sequence([1, 2])
    compute(cache, seq)
    seq.free()
    seq.free()
    assert seq.freed
    assert repr(seq) == "Sequence(freed)"
    for call in (
        lambda: seq.num_tokens,
        lambda: seq.append(1),
        seq.fork,
        lambda: seq.truncate(0),
        lambda: seq.block_table,
    ):
        with pytest.raises(ValueError, match="the sequence was freed"):
            call()
    assert not cache.add_sequence([1]).freed  # it may live where the freed one did
    assert seq.freed


def test_a_sequence_without_handles_is_freed() -> None:
    cache = make_cache()
    compute(cache, cache.add_sequence(num_tokens=5))
    gc.collect()
    assert cache.stats().num_used == 0
    batch: Batch | None = cache.batch([cache.add_sequence(num_tokens=5)])
    gc.collect()
    assert cache.stats().num_used == 2  # an open batch keeps its sequences
    assert batch is not None
    cache.commit(batch)
    batch = None
    gc.collect()
    assert cache.stats().num_used == 0


def test_stats() -> None:
    cache = make_cache()
    empty = cache.stats()
    assert (empty.num_used, empty.num_free, empty.utilization, empty.internal_fragmentation) == (
        0,
        16,
        1.0,
        0.0,
    )
    a = cache.add_sequence(num_tokens=6)
    compute(cache, a)
    forks = [a.fork() for _ in range(3)]
    stats = cache.stats()
    assert (stats.num_used, stats.utilization, stats.internal_fragmentation) == (2, 0.75, 0.25)
    forks[0].truncate(5)  # its tail is fuller in the others
    assert cache.stats().utilization == 0.75
    forks[1].append(1)
    batch = cache.batch([forks[1]])
    assert cache.stats().utilization == (4 + 2 + 3) / 12
    cache.abandon(batch)
    for seq in [a, *forks]:
        seq.free()
    stats = cache.stats()
    assert (stats.num_blocks, stats.num_used, stats.num_free, stats.peak_used) == (16, 0, 16, 3)
    assert stats.bytes == 2 * 2 * 16 * 4 * 2 * 8 * 4


def test_picture() -> None:
    cache = make_cache(num_blocks=40)
    a, b = cache.add_sequence(num_tokens=10), cache.add_sequence(num_tokens=4)
    compute(cache, a, b)
    fork = a.fork()
    fork.append(3)
    compute(cache, fork)
    assert cache.draw(width=8) == " 0  ##aBCc..\n 8  (32 free blocks)"
    b.free()
    assert cache.draw(width=40) == " 0  ##a.Cc" + "." * 34
    assert str(cache) == f"40 blocks of 4 tokens: 5 used (75.0% filled), 35 free, 0.0 MiB\n{cache.draw()}"
    shared = fork.fork()
    assert cache.draw(width=40) == " 0  ##a.#+" + "." * 34
    shared.free()
    with pytest.raises(ValueError, match="width"):
        cache.draw(0)


def test_a_batch_that_nobody_has_gives_its_blocks_back() -> None:
    cache = PagedKVCache(1, 1, 8, num_blocks=4, block_size=4)
    for _ in range(4):
        sequence = cache.add_sequence(num_tokens=4)
        batch = cache.batch([sequence])
        del sequence, batch
    assert cache.stats().num_used == 0
    sequence = cache.add_sequence(num_tokens=4)
    cache.batch([sequence])  # lost: its sequence can be batched again
    assert cache.batch([sequence]).num_tokens == 4


def test_a_lost_batch_whose_last_layer_was_attended_is_committed() -> None:
    cache = PagedKVCache(1, 1, 8, num_blocks=4, block_size=4, dtype=torch.float32)
    sequence = cache.add_sequence(num_tokens=4)
    rows = torch.ones(4, 1, 8)
    cache.attend(0, rows, rows, rows, cache.batch([sequence]))
    assert sequence.num_computed_tokens == 4


@pytest.mark.parametrize("num_rows", [3, 6])
def test_attend_takes_exactly_the_rows_of_its_batch(num_rows: int) -> None:
    cache = PagedKVCache(1, 1, 8, num_blocks=4, block_size=4, dtype=torch.float32)
    sequence = cache.add_sequence(num_tokens=4)
    batch = cache.batch([sequence])
    rows, others = torch.ones(4, 1, 8), torch.ones(num_rows, 1, 8)
    for name, tensors in (
        ("q", (others, rows, rows)),
        ("k", (rows, others, rows)),
        ("v", (rows, rows, others)),
    ):
        with pytest.raises(ValueError, match=f"{name} has {num_rows} rows, but the batch has 4 tokens"):
            cache.attend(0, *tensors, batch)
    assert sequence.num_computed_tokens == 0


def test_a_copied_handle_is_the_handle() -> None:
    cache = PagedKVCache(1, 1, 8, num_blocks=4, block_size=4)
    sequence = cache.add_sequence(num_tokens=4)
    assert copy.copy(sequence) is sequence
