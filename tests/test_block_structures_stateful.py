"""Allocator and tables against a plain Python oracle, with the tokens that the blocks would hold."""

from __future__ import annotations

import gc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv import BlockAllocator, BlockTable, OutOfMemoryError

NUM_STEPS = 10_000


class OraclePool:
    """Reference counts and a free list, the obvious way."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))  # next to be handed out first
        self.owners = [0] * num_blocks
        self.copies: dict[int, int] = {}  # destination: source, not taken yet

    def counts(self) -> list[int]:
        sources = list(self.copies.values())
        return [owners + sources.count(block) for block, owners in enumerate(self.owners)]

    def allocate(self) -> int:
        block = self.free.pop(0)
        self.owners[block] = 1
        return block

    def release(self, block: int) -> None:
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.take(block)
            if self.counts()[block] == 0:
                self.free.insert(0, block)

    def take(self, destination: int) -> tuple[int, int] | None:
        source = self.copies.pop(destination, None)
        if source is None:
            return None
        if self.counts()[source] == 0:
            self.free.insert(0, source)
        return source, destination


class OracleTable:
    """A table, the tokens it stands for, and from where on they are not written to the blocks yet."""

    def __init__(self, real: BlockTable) -> None:
        self.real = real
        self.blocks: list[int] = []
        self.tokens: list[int] = []
        self.num_written = 0

    def fork(self) -> OracleTable:
        child = OracleTable(self.real.fork())
        child.blocks, child.tokens = self.blocks.copy(), self.tokens.copy()
        child.num_written = self.num_written
        return child


class BlockStructures(RuleBasedStateMachine):
    """Every rule does one thing to the real structures and to the oracle; the invariant compares them."""

    num_steps = 0

    @initialize(num_blocks=st.integers(1, 16), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockAllocator(num_blocks, block_size)
        self.block_size = block_size
        self.oracle = OraclePool(num_blocks)
        self.tables: list[OracleTable] = []
        self.loose: list[int] = []  # references taken from the allocator itself
        self.contents = np.full((num_blocks, block_size), -1)
        self.next_token = 0

    def pick(self, index: int) -> OracleTable:
        return self.tables[index % len(self.tables)]

    @rule()
    @precondition(lambda self: len(self.tables) < 8)
    def new_table(self) -> None:
        self.tables.append(OracleTable(BlockTable(self.block_size, self.pool)))

    @rule(index=st.integers(0, 7), count=st.integers(0, 12), written=st.booleans())
    @precondition(lambda self: self.tables)
    def allocate(self, index: int, count: int, written: bool) -> None:
        table = self.pick(index)
        old_size = len(table.tokens)
        num_new = -(-(old_size + count) // self.block_size) - len(table.blocks)
        tail_shared = (
            count > 0 and old_size % self.block_size > 0 and self.oracle.owners[table.blocks[-1]] > 1
        )
        if num_new + tail_shared > len(self.oracle.free):
            with pytest.raises(OutOfMemoryError):
                table.real.allocate(count)
            return
        new_blocks = table.real.allocate(count)
        if tail_shared:
            tail, copy = table.blocks[-1], self.oracle.allocate()
            self.oracle.copies[copy] = self.oracle.copies.get(tail, tail)
            self.oracle.release(tail)
            table.blocks[-1] = copy
        assert new_blocks == [self.oracle.allocate() for _ in range(num_new)]
        table.blocks += new_blocks
        table.tokens += range(self.next_token, self.next_token + count)
        self.next_token += count
        if written:
            self.write_all()

    @rule()
    def write_all(self) -> None:
        """Run every copy that is due, then write every token that is not: what a step of a model does."""
        pairs = [pair for table in self.tables for pair in self.take_pairs(table)]
        sources = [self.contents[source].copy() for source, _ in pairs]
        for (_, destination), source in zip(pairs, sources, strict=True):
            self.contents[destination] = source
        for table in self.tables:
            slots = table.real.slot_mapping(table.num_written, len(table.tokens))
            self.contents.reshape(-1)[slots] = table.tokens[table.num_written :]
            table.num_written = len(table.tokens)

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: self.tables)
    def run_copies_of_one_table(self, index: int) -> None:
        for source, destination in self.take_pairs(self.pick(index)):
            self.contents[destination] = self.contents[source]

    def take_pairs(self, table: OracleTable) -> list[tuple[int, int]]:
        pairs = table.real.take_pending_copies()
        expected = [pair for block in table.blocks if (pair := self.oracle.take(block)) is not None]
        assert sorted(pairs) == sorted(expected)
        return pairs

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: 0 < len(self.tables) < 8)
    def fork(self, index: int) -> None:
        child = self.pick(index).fork()
        for block in child.blocks:
            self.oracle.owners[block] += 1
        self.tables.append(child)

    @rule(index=st.integers(0, 7), share=st.floats(0, 1))
    @precondition(lambda self: self.tables)
    def truncate(self, index: int, share: float) -> None:
        table = self.pick(index)
        num_tokens = int(share * len(table.tokens))
        table.real.truncate(num_tokens)
        self.shrink(table, num_tokens)
        with pytest.raises(ValueError, match="truncate"):
            table.real.truncate(num_tokens + 1)

    @rule(index=st.integers(0, 7), how=st.sampled_from(["free", "free twice", "collect"]))
    @precondition(lambda self: self.tables)
    def give_up(self, index: int, how: str) -> None:
        table = self.tables.pop(index % len(self.tables))
        if how == "collect":
            del table.real
            gc.collect(0)
        else:
            table.real.free()
            if how == "free twice":
                table.real.free()
        self.shrink(table, 0)

    def shrink(self, table: OracleTable, num_tokens: int) -> None:
        while len(table.blocks) > -(-num_tokens // self.block_size):
            self.oracle.release(table.blocks.pop())
        del table.tokens[num_tokens:]
        table.num_written = min(table.num_written, num_tokens)

    @rule(count=st.integers(-1, 5))
    def allocate_loose(self, count: int) -> None:
        if count < 0:
            with pytest.raises(ValueError, match="negative"):
                self.pool.allocate_many(count)
        elif count > len(self.oracle.free):
            with pytest.raises(OutOfMemoryError):
                self.pool.allocate_many(count)
        else:
            blocks = self.pool.allocate_many(count)
            assert blocks == [self.oracle.allocate() for _ in range(count)]
            self.loose += blocks

    @rule(index=st.integers(0, 30))
    @precondition(lambda self: 0 < len(self.loose) < 30)
    def reference_again(self, index: int) -> None:
        block = self.loose[index % len(self.loose)]
        self.pool.incr_ref(block)
        self.oracle.owners[block] += 1
        self.loose.append(block)

    @rule(data=st.data())
    def free_loose(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(self.loose))[: data.draw(st.integers(0, len(self.loose)))]
        self.pool.free_many(blocks)
        for block in blocks:
            self.oracle.release(block)
            self.loose.remove(block)

    @rule(block=st.integers(-2, 17))
    def free_what_is_free(self, block: int) -> None:
        if 0 <= block < self.pool.num_blocks and self.oracle.owners[block] > 0:
            too_often = [*self.loose, *([block] * (self.oracle.owners[block] + 1))]
            with pytest.raises(ValueError, match="block"):
                self.pool.free_many(too_often)
        else:
            with pytest.raises(ValueError, match="block"):
                self.pool.free_many([*self.loose, block])

    @invariant()
    def agrees(self) -> None:
        BlockStructures.num_steps += 1
        self.pool.check_integrity()
        assert self.pool.free_blocks == self.oracle.free
        assert self.pool.block_ref_count == self.oracle.counts()
        assert self.pool.num_free_blocks == len(self.oracle.free)
        for table in self.tables:
            assert table.real.physical_blocks == table.blocks
            assert table.real.num_tokens == len(table.tokens)
        if not self.oracle.copies:
            for table in self.tables:
                slots = table.real.slot_mapping(0, table.num_written)
                assert self.contents.reshape(-1)[slots].tolist() == table.tokens[: table.num_written]


def test_block_structures_agree_with_the_oracle() -> None:
    BlockStructures.num_steps = 0
    run_state_machine_as_test(
        BlockStructures,
        settings=settings(max_examples=130, stateful_step_count=120, derandomize=True, deadline=None),
    )
    assert BlockStructures.num_steps >= NUM_STEPS
