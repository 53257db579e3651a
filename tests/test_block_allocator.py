"""`BlockAllocator`: order, counts, all-or-nothing calls, threads."""

from __future__ import annotations

import pickle
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from pagedkv import BlockAllocator, BlockTable, OutOfMemoryError


def state(pool: BlockAllocator) -> tuple[list[int], list[int]]:
    pool.check_integrity()
    return pool.free_blocks, pool.block_ref_count


def test_hands_out_most_recently_freed_blocks_first_then_unused_ones() -> None:
    pool = BlockAllocator(6, 16)
    assert pool.free_blocks == [0, 1, 2, 3, 4, 5]
    assert [pool.allocate(), *pool.allocate_many(3)] == [0, 1, 2, 3]
    pool.free(1)
    pool.free_many([3, 0])
    assert pool.free_blocks == [0, 3, 1, 4, 5]
    assert pool.allocate() == 0
    assert pool.allocate_many(3) == [3, 1, 4]
    assert state(pool) == ([5], [1, 1, 1, 1, 1, 0])


def test_counts_and_sizes() -> None:
    pool = BlockAllocator(num_blocks=3, block_size=7)
    assert (pool.num_blocks, pool.block_size, pool.num_free_blocks, pool.peak_used_blocks) == (3, 7, 3, 0)
    blocks = pool.allocate_many(2)
    pool.incr_ref(blocks[0])
    pool.free_many(blocks)
    assert (pool.block_ref_count, pool.num_free_blocks, pool.peak_used_blocks) == ([1, 0, 0], 2, 2)
    assert pool.allocate_many(0) == []


@pytest.mark.parametrize("sizes", [(0, 16), (-1, 16), (2**31, 16), (4, 0), (4, -3)])
def test_sizes_that_make_no_pool(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_blocks|block_size"):
        BlockAllocator(*sizes)


def test_a_huge_pool_takes_memory_only_for_blocks_in_use() -> None:
    pool = BlockAllocator(2**31 - 1, 16)
    assert (pool.allocate(), pool.num_free_blocks) == (0, 2**31 - 2)


def test_an_empty_pool_raises_memory_error() -> None:
    pool = BlockAllocator(1, 16)
    pool.allocate()
    with pytest.raises(OutOfMemoryError, match=r"^No free blocks available$") as caught:
        pool.allocate()
    assert isinstance(caught.value, MemoryError)
    assert OutOfMemoryError.__module__ == "pagedkv"
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), OutOfMemoryError)


@pytest.mark.parametrize(
    "blocks",
    [[4], [-1], [2**40], [2], [0, 0, 0], [1, 1], [0, 1, 3], np.array([0, 1, 9])],
    ids=str,
)
def test_freeing_what_is_not_referenced_changes_nothing(blocks: list[int]) -> None:
    pool = BlockAllocator(4, 16)
    pool.allocate_many(2)
    pool.incr_ref(0)
    before = state(pool)
    with pytest.raises(ValueError, match="block"):
        pool.free_many(blocks)
    assert state(pool) == before
    if len(blocks) == 1:
        with pytest.raises(ValueError, match=f"block {blocks[0]}"):
            pool.free(blocks[0])
        with pytest.raises(ValueError, match=f"block {blocks[0]}"):
            pool.incr_ref(blocks[0])
        assert state(pool) == before


def test_negative_count() -> None:
    with pytest.raises(ValueError, match="-1"):
        BlockAllocator(4, 16).allocate_many(-1)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        iter,
        lambda ids: np.array(ids, dtype=np.uint64),
        lambda ids: map(np.int32, ids),
    ],
)
def test_free_many_takes_integers_of_any_kind(make) -> None:  # type: ignore[no-untyped-def]
    pool = BlockAllocator(4, 16)
    pool.allocate_many(3)
    pool.free_many(make([2, 0]))
    assert state(pool) == ([0, 2, 3], [0, 1, 0, 0])


def test_a_list_that_changes_while_it_is_read() -> None:
    class Emptying:
        def __index__(self) -> int:
            values.clear()
            return 1

    class Interrupted:
        def __index__(self) -> int:
            raise KeyboardInterrupt

    values: list[object] = [Emptying(), 0, 2]
    allocator = BlockAllocator(8, 16)
    allocator.allocate_many(3)
    allocator.free_many(values)
    assert allocator.num_free_blocks == 8
    with pytest.raises(KeyboardInterrupt):
        allocator.free_many([Interrupted()])


@pytest.mark.parametrize("blocks", [[0.0], np.array([0.0]), ["0"], 0, None, np.array([True])], ids=repr)
def test_free_many_refuses_what_is_not_integers(blocks: object) -> None:
    pool = BlockAllocator(4, 16)
    pool.allocate()
    with pytest.raises(TypeError, match="must be integers"):
        pool.free_many(blocks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one-dimensional"):
        pool.free_many(np.zeros((1, 1), dtype=np.int64))
    assert pool.num_free_blocks == 3


def test_double_free_window_ring() -> None:
    """A ring table [5, 6, 5, 6] references each block twice, and so does its fork."""
    for order in (0, 1):
        pool = BlockAllocator(7, 16)
        pool.free_many([block for block in pool.allocate_many(7) if block not in (5, 6)])
        ring = [5, 6, 5, 6]
        for block in (5, 6, *ring):
            pool.incr_ref(block)
        child = ring.copy()
        fresh = pool.allocate()  # the child writes past the window: its entry becomes a copy
        pool.free(child[2])
        child[2] = fresh
        for table in (ring, child) if order == 0 else (child, ring):
            pool.free_many(table)
        assert pool.num_free_blocks == 7
        assert state(pool)[1] == [0] * 7
        with pytest.raises(ValueError, match="already free"):
            pool.free_many(ring)


def test_partial_allocation_leak() -> None:
    pool = BlockAllocator(3, 16)
    with pytest.raises(OutOfMemoryError, match="the call needs 5, 3 of 3 are free"):
        pool.allocate_many(5)
    assert pool.num_free_blocks == 3
    assert sorted(pool.allocate_many(3)) == [0, 1, 2]
    assert pool.peak_used_blocks == 3


def test_freed_while_in_flight() -> None:
    """A block that a pending copy still reads is not handed out, though its last owner is gone."""
    pool = BlockAllocator(3, 4)
    parent = BlockTable(4, pool)
    parent.allocate(2)
    child = parent.fork()
    child.allocate(1)
    parent.free()
    assert pool.block_ref_count == [1, 1, 0]
    with pytest.raises(OutOfMemoryError):
        pool.allocate_many(2)
    with pytest.raises(ValueError, match="pending copy"):
        pool.free(0)
    assert child.take_pending_copies() == [(0, 1)]
    assert state(pool) == ([0, 2], [0, 1, 0])


def test_thread_safety_of_allocator() -> None:
    """Calls hold the GIL: eight threads never own the same block, and every block comes back."""
    pool = BlockAllocator(64, 4)
    owners: Counter[int] = Counter()
    lock = threading.Lock()
    clashes: list[int] = []

    def work() -> None:
        for step in range(1000):
            try:
                blocks = pool.allocate_many(step % 4)
                table = BlockTable(4, pool)
                table.allocate(step % 9)
                fork = table.fork()
                fork.allocate(1)
            except OutOfMemoryError:
                blocks = []
            with lock:
                owners.update(blocks)
                clashes.extend(block for block in blocks if owners[block] != 1)
                owners.subtract(blocks)
            pool.free_many(blocks)
            table.free()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.num_free_blocks == 64
    pool.check_integrity()
