"""`BlockTable`: growth, slots, forks and copy-on-write, truncation, failure."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

from pagedkv import BlockAllocator, BlockTable, OutOfMemoryError


class Contents:
    """A cache of one integer a slot, and the tables written to it: shows whose tokens a block holds."""

    def __init__(self, num_slots: int) -> None:
        self.slots = np.full(num_slots, -1)

    def append(self, table: BlockTable, tokens: list[int]) -> None:
        begin = table.num_tokens
        table.allocate(len(tokens))
        self.run(table)
        self.slots[table.slot_mapping(begin, table.num_tokens)] = tokens

    def run(self, table: BlockTable) -> None:
        blocks = self.slots.reshape(-1, table.block_size)
        pairs = np.array(table.take_pending_copies(), dtype=np.int64).reshape(-1, 2)
        blocks[pairs[:, 1]] = blocks[pairs[:, 0]]

    def read(self, table: BlockTable) -> list[int]:
        return self.slots[table.slot_mapping(0, table.num_tokens)].tolist()


def test_views_agree() -> None:
    pool = BlockAllocator(8, 4)
    pool.allocate_many(3)
    table = BlockTable(4, pool)
    assert table.allocate(9) == [3, 4, 5]
    assert table.allocate(3) == []
    assert table.allocate(1) == [6]
    assert table.physical_blocks == [3, 4, 5, 6]
    assert table.logical_to_physical == {0: 3, 1: 4, 2: 5, 3: 6}
    assert [table.get_physical_block(i) for i in range(4)] == [3, 4, 5, 6]
    assert (table.num_tokens, table.num_blocks, table.block_size) == (13, 4, 4)
    for unmapped in (-1, 4, 2**40):
        with pytest.raises(IndexError, match="not mapped"):
            table.get_physical_block(unmapped)


def test_a_private_allocator_grows() -> None:
    table = BlockTable()
    assert table.block_size == 16
    assert table.allocate(16 * 5000) == list(range(5000))
    other = BlockTable(block_size=3)
    assert other.allocate(4) == [0, 1]


def test_block_size_is_the_allocators() -> None:
    pool = BlockAllocator(4, 8)
    assert BlockTable(allocator=pool).block_size == 8
    assert BlockTable(8, pool).block_size == 8
    with pytest.raises(ValueError, match=r"16.*8"):
        BlockTable(16, pool)
    for size in (0, -1):
        with pytest.raises(ValueError, match="block_size"):
            BlockTable(size)


def test_slot_mapping() -> None:
    pool = BlockAllocator(8, 3)
    first, second = BlockTable(3, pool), BlockTable(3, pool)
    for _ in range(3):
        first.allocate(3)
        second.allocate(3)
    assert first.physical_blocks == [0, 2, 4]
    slots = second.slot_mapping(2, 8)
    assert slots.dtype == np.int64
    assert slots.tolist() == [5, 9, 10, 11, 15, 16]
    assert second.slot_mapping(9, 9).tolist() == []


def test_write_past_table_row() -> None:
    """Two blocks of 16 have no slot for position 32 or 33."""
    table = BlockTable(16, BlockAllocator(4, 16))
    table.allocate(32)
    for start, stop in [(32, 33), (33, 34), (0, 33), (-1, 4), (5, 4), (0, 2**62)]:
        with pytest.raises(IndexError, match="room for tokens 0 to 32"):
            table.slot_mapping(start, stop)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_first", [0, 1, 15, 16, 17, 31, 32])
def test_append_boundary(block_size: int, num_first: int) -> None:
    def check(table: BlockTable) -> None:
        assert table.num_blocks == -(-table.num_tokens // block_size)
        blocks = table.physical_blocks
        expected = [blocks[i // block_size] * block_size + i % block_size for i in range(table.num_tokens)]
        assert table.slot_mapping(0, table.num_tokens).tolist() == expected

    one_by_one = BlockTable(block_size)
    one_by_one.allocate(num_first)
    for num_more in range(1, 18):
        one_by_one.allocate(1)
        check(one_by_one)
        in_bulk = BlockTable(block_size)
        in_bulk.allocate(num_first)
        in_bulk.allocate(num_more)
        check(in_bulk)
        assert in_bulk.physical_blocks == one_by_one.physical_blocks


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_shared_partial_tail_no_cow(order: tuple[int, ...]) -> None:
    """Parent of 20 tokens, two forks, three different tokens appended in any order: nobody sees another's."""
    pool = BlockAllocator(8, 16)
    contents = Contents(8 * 16)
    parent = BlockTable(16, pool)
    contents.append(parent, list(range(20)))
    tables = [parent, parent.fork(), parent.fork()]
    old_tail = parent.physical_blocks[1]
    for num_writers, i in enumerate(order):
        assert pool.block_ref_count[old_tail] == 3 - num_writers
        contents.append(tables[i], [100 + i])
        if num_writers < 2:
            new_tail = tables[i].physical_blocks[1]
            assert new_tail != old_tail
            assert contents.slots[new_tail * 16 : new_tail * 16 + 4].tolist() == [16, 17, 18, 19]
            assert pool.block_ref_count[old_tail] == 2 - num_writers
        else:
            assert tables[i].physical_blocks[1] == old_tail  # the last owner writes in place
    for i, table in enumerate(tables):
        assert contents.read(table) == [*range(20), 100 + i]
        assert table.physical_blocks[0] == parent.physical_blocks[0]
    pool.check_integrity()


def test_a_pending_copy_does_not_make_the_last_owner_copy() -> None:
    pool = BlockAllocator(4, 4)
    parent = BlockTable(4, pool)
    parent.allocate(2)
    child = parent.fork()
    child.allocate(1)
    assert pool.block_ref_count == [2, 1, 0, 0]  # parent, and the pair that is not taken yet
    parent.allocate(1)
    assert (parent.physical_blocks, parent.take_pending_copies()) == ([0], [])
    assert child.take_pending_copies() == [(0, 1)]
    assert child.take_pending_copies() == []
    assert pool.block_ref_count == [1, 1, 0, 0]


def test_full_tail_and_empty_growth_copy_nothing() -> None:
    pool = BlockAllocator(4, 4)
    parent = BlockTable(4, pool)
    parent.allocate(4)
    child = parent.fork()
    assert child.allocate(1) == [1]
    other = child.fork()
    assert other.allocate(0) == []
    assert other.take_pending_copies() == []
    assert other.physical_blocks == [0, 1]


def test_a_fork_of_a_table_with_pending_copies() -> None:
    """The copy waits for whichever table asks first, and a copy of the waiting block reads the original."""
    pool = BlockAllocator(8, 4)
    parent = BlockTable(4, pool)
    parent.allocate(2)
    child = parent.fork()
    child.allocate(1)
    grandchild, other = child.fork(), child.fork()
    grandchild.allocate(1)
    assert grandchild.take_pending_copies() == [(0, 2)]
    assert other.take_pending_copies() == [(0, 1)]
    assert child.take_pending_copies() == []
    pool.check_integrity()


@pytest.mark.parametrize("drop", ["truncate", "free", "collect"])
def test_pending_copies_go_with_their_destination(drop: str) -> None:
    pool = BlockAllocator(4, 4)
    parent = BlockTable(4, pool)
    parent.allocate(6)
    child = parent.fork()
    child.allocate(1)
    assert pool.block_ref_count == [2, 2, 1, 0]
    if drop == "collect":
        del child
        gc.collect()
        assert pool.block_ref_count == [1, 1, 0, 0]
        return
    if drop == "truncate":
        child.truncate(4)
    else:
        child.free()
    assert child.take_pending_copies() == []
    assert pool.block_ref_count[1:] == [1, 0, 0]
    pool.check_integrity()


def test_a_write_into_a_shared_full_block_after_truncation_copies_it() -> None:
    pool = BlockAllocator(8, 4)
    contents = Contents(32)
    parent = BlockTable(4, pool)
    contents.append(parent, list(range(8)))
    child = parent.fork()
    child.truncate(6)
    assert pool.block_ref_count[:2] == [2, 2]
    contents.append(child, [60, 70, 80])
    assert contents.read(parent) == list(range(8))
    assert contents.read(child) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    parent.truncate(7)
    contents.append(parent, [77])  # its own again: in place
    assert parent.physical_blocks == [0, 1]


def test_truncate() -> None:
    pool = BlockAllocator(4, 4)
    table = BlockTable(4, pool)
    table.allocate(10)
    table.truncate(10)
    table.truncate(8)
    assert (table.num_tokens, table.physical_blocks) == (8, [0, 1])
    table.truncate(0)
    assert pool.num_free_blocks == 4
    for num_tokens in (-1, 1):
        with pytest.raises(ValueError, match="truncate"):
            table.truncate(num_tokens)
    assert table.allocate(16) == [0, 1, 2, 3]


def test_free_and_collection_give_the_blocks_back() -> None:
    pool = BlockAllocator(4, 4)
    table = BlockTable(4, pool)
    table.allocate(7)
    fork = table.fork()
    table.free()
    table.free()
    assert (table.num_tokens, table.physical_blocks, pool.num_free_blocks) == (0, [], 2)
    del fork
    gc.collect()
    assert pool.num_free_blocks == 4


def test_a_table_keeps_its_allocator_alive() -> None:
    table = BlockTable(4, BlockAllocator(4, 4))
    gc.collect()
    assert table.fork().allocate(16) == [0, 1, 2, 3]


def test_partial_allocation_leak() -> None:
    """Growth counts all it needs first: new blocks, and the copy of a shared tail."""
    pool = BlockAllocator(3, 16)
    table = BlockTable(16, pool)
    with pytest.raises(OutOfMemoryError, match="the table needs 4, 3 of 3 are free"):
        table.allocate(49)
    assert (table.num_tokens, pool.num_free_blocks) == (0, 3)
    table.allocate(20)
    child = table.fork()
    before = (child.physical_blocks, child.num_tokens, pool.free_blocks, pool.block_ref_count)
    for num_tokens in (13, 2**62, 2**63 - 1):
        with pytest.raises(OutOfMemoryError, match="No free blocks available"):
            child.allocate(num_tokens)
        assert (child.physical_blocks, child.num_tokens, pool.free_blocks, pool.block_ref_count) == before
        assert child.take_pending_copies() == []
    assert child.allocate(12) == []
    pool.check_integrity()


def test_negative_count() -> None:
    table = BlockTable(4)
    with pytest.raises(ValueError, match="-1"):
        table.allocate(-1)
    assert table.num_tokens == 0


def test_a_block_freed_behind_the_tables_back_is_an_error() -> None:
    pool = BlockAllocator(4, 4)
    table = BlockTable(4, pool)
    table.allocate(8)
    pool.free(1)
    with pytest.raises(ValueError, match="block 1: it is already free"):
        table.free()
    assert table.physical_blocks == [0, 1]
    del table  # must not bring the process down
    pool.check_integrity()
