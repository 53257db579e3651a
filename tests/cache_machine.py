"""A hypothesis state machine over a whole `PagedKVCache`, against an oracle that knows every slot's content.

Each write puts a number of its own into the cache, and the oracle remembers which tokens it was written for.
So a block that is shared, copied, swapped or found again has to hold what its sequence wrote, or, where the
prefix cache put another block in its place, what was written for the same tokens.
"""

from __future__ import annotations

import functools
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv
from pagedkv import OutOfMemoryError, PagedKVCache, _core
from pagedkv.cache import Sequence

MAX_SEQS = 6
Prefix = tuple[object, ...]  # a salt and the tokens up to one, or something that is equal to nothing else


class Twin:
    """A sequence, and what the oracle knows of it."""

    def __init__(self, real: Sequence, salt: str | None, tokens: list[int | None], num_groups: int) -> None:
        self.real, self.salt = real, salt
        self.tokens = tokens  # None: without an id
        self.num_computed = 0
        self.stamps: list[dict[int, int]] = [{} for _ in range(num_groups)]  # [group]: by position

    def fork(self, real: Sequence) -> Twin:
        child = Twin(real, self.salt, self.tokens.copy(), len(self.stamps))
        child.num_computed = self.num_computed
        child.stamps = [stamps.copy() for stamps in self.stamps]
        return child

    def prefix(self, position: int) -> Prefix | None:
        """What a token's key and value depend on; None where nobody can know."""
        tokens = self.tokens[: position + 1]
        return None if None in tokens else (self.salt, *tokens)


class CacheMachine(RuleBasedStateMachine):
    """Every rule does one thing to the cache and to the oracle; the invariant compares them."""

    num_steps = 0
    device = "cpu"

    @initialize(
        num_blocks=st.sampled_from([40, 24, 16, 8, 4]),
        block_size=st.sampled_from([4, 2, 3, 1]),
        prefix_caching=st.sampled_from([True, True, False]),
        num_host_blocks=st.sampled_from([40, 12, 4, 0]),
        sliding_window=st.sampled_from([None, None, 3, [None, 3], [4, None, None, 4]]),
        compare_tokens=st.booleans(),
        key_bits=st.sampled_from([256, 2]),
        num_spared=st.sampled_from([0, 0, 2]),
        max_tokens_per_seq=st.sampled_from([None, 20]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        num_host_blocks: int,
        sliding_window: list[int | None] | int | None,
        compare_tokens: bool,
        key_bits: int,
        num_spared: int,
        max_tokens_per_seq: int | None,
    ) -> None:
        num_layers = len(sliding_window) if isinstance(sliding_window, list) else 2
        self.max_used = num_blocks - num_spared
        self.max_tokens = max_tokens_per_seq or 10**9
        # Where tokens are compared, colliding keys do no harm.
        core = functools.partial(_core.Sequences, key_bits=key_bits if compare_tokens else 256)
        with mock.patch.object(_core, "Sequences", core):
            self.cache = PagedKVCache(
                num_layers,
                1,
                1,
                num_blocks=num_blocks,
                block_size=block_size,
                prefix_caching=prefix_caching,
                compare_tokens=compare_tokens and prefix_caching,
                num_host_blocks=num_host_blocks,
                max_used_blocks=self.max_used,
                max_tokens_per_seq=max_tokens_per_seq,
                sliding_window=sliding_window,
                device=self.device,
            )
        for tensor in [*self.cache._key_tensors, *self.cache._value_tensors]:
            tensor.fill_(float("nan"))
        self.groups = self.cache._groups
        self.twins: list[Twin] = []
        self.written_for: list[Prefix | None] = []  # by stamp
        # Hypothesis leaves out some rules in each run: without `add` there would be nothing to do.
        self.add(head=13, tail=[], salt=None, computed=True)
        self.add(head=9, tail=[1, 0], salt=None, computed=True)

    def pick(self, index: int) -> Twin:
        return self.twins[index % len(self.twins)]

    def resident(self) -> list[Twin]:
        return [twin for twin in self.twins if not twin.real.swapped_out]

    # What is in the cache.

    def read(self, twin: Twin) -> list[dict[int, int]]:
        """The stamps that the sequence's slots hold, by group and position; all layers of a group agree."""
        found: list[dict[int, int]] = [{} for _ in self.groups.windows]
        if self.device == "cuda":
            torch.cuda.synchronize()  # what came back from the host is there for the next batch, not at once
        num_computed = twin.real.num_computed_tokens
        tables = twin.real.block_tables
        for layer in range(self.cache.num_layers):
            group = self.groups.group_of_layer[layer]
            start = min(tables[group].count(-1) * self.cache.block_size, num_computed)
            keys, values = pagedkv.gather_kv(
                self.cache.key_caches[layer],
                self.cache.value_caches[layer],
                torch.tensor([tables[group]], dtype=torch.int32, device=self.device).reshape(1, -1),
                torch.tensor([num_computed], dtype=torch.int32, device=self.device),
                kv_starts=torch.tensor([start], dtype=torch.int32, device=self.device),
            )
            stamps = (keys.flatten() - layer / 4).tolist()
            assert (-values.flatten() - layer / 4).tolist() == stamps
            content = {start + i: int(stamp) for i, stamp in enumerate(stamps)}
            assert content == (found[group] or content)
            found[group] = content
        return found

    def reconcile(self, twin: Twin) -> None:
        """Accept blocks that were written for the same tokens in place of the sequence's own."""
        for expected, found in zip(twin.stamps, self.read(twin), strict=True):
            for position, stamp in found.items():
                if expected.get(position) != stamp:
                    assert self.cache.prefix_caching
                    assert self.written_for[stamp] == twin.prefix(position) is not None
            expected.clear()
            expected.update(found)

    def write(self, twins: list[Twin], batch: pagedkv.cache.Batch, query_lens: list[int]) -> None:
        first_row = 0
        for twin, query_len in zip(twins, query_lens, strict=True):
            for row in range(query_len):
                position, stamp = twin.num_computed + row, len(self.written_for)
                self.written_for.append(twin.prefix(position))
                for layer in range(self.cache.num_layers):
                    group = self.groups.group_of_layer[layer]
                    slot = divmod(int(batch._slot_mappings[group][first_row + row]), self.cache.block_size)
                    self.cache.key_caches[layer][slot] = stamp + layer / 4
                    self.cache.value_caches[layer][slot] = -stamp - layer / 4
                    twin.stamps[group][position] = stamp
            first_row += query_len

    def snapshot(self) -> object:
        core = self.cache._core
        tables = [twin.real.block_tables for twin in self.twins]
        return (
            tables,
            [usage.tolist() for usage in core.usage()],
            core.num_free_blocks,
            core.num_free_host_blocks,
        )

    # Rules.

    @rule(
        head=st.sampled_from([9, 12, 13, 8, 4, 5, 1, 0]),
        tail=st.lists(st.integers(0, 1), max_size=5),
        salt=st.sampled_from([None, None, "a"]),
        computed=st.sampled_from([True, True, False]),
    )
    @precondition(lambda self: len(self.twins) < MAX_SEQS)
    def add(self, head: int, tail: list[int], salt: str | None, computed: bool) -> None:
        tokens: list[int | None] = [*range(head), *tail]
        ids = [*range(head), *tail]
        num_known = self.cache.probe(ids, salt=salt)
        fits = self.cache.can_allocate(ids, salt=salt)
        twin = Twin(self.cache.add_sequence(ids, salt=salt), salt, tokens, len(self.groups.windows))
        twin.num_computed = twin.real.num_cached_tokens
        assert twin.num_computed == num_known
        assert num_known <= max(0, len(ids) - 1)
        self.twins.append(twin)
        self.reconcile(twin)
        assert self.cache.can_append([twin.real], [0]) == fits
        if computed:
            self.compute_next([twin], [len(ids) - num_known])

    @rule(num_tokens=st.integers(0, 9))
    @precondition(lambda self: len(self.twins) < MAX_SEQS)
    def add_unnamed(self, num_tokens: int) -> None:
        real = self.cache.add_sequence(num_tokens=num_tokens)
        self.twins.append(Twin(real, None, [None] * num_tokens, len(self.groups.windows)))
        assert self.cache.can_append([real], [0]) == self.cache.can_allocate(num_tokens)

    @rule(index=st.integers(0, 9), tokens=st.lists(st.integers(0, 2), max_size=4), named=st.booleans())
    @precondition(lambda self: self.twins)
    def append(self, index: int, tokens: list[int], named: bool) -> None:
        twin = self.pick(index)
        if len(twin.tokens) + len(tokens) > self.max_tokens:
            with pytest.raises(ValueError, match="at most 20 tokens"):
                twin.real.append(tokens if named else len(tokens))
            return
        twin.real.append(tokens if named else len(tokens))
        named = named and None not in twin.tokens
        twin.tokens += tokens if named else [None] * len(tokens)

    @rule(data=st.data(), ending=st.sampled_from(["commit", "commit", "commit", "abandon"]))
    @precondition(lambda self: self.resident())
    def compute(self, data: st.DataObject, ending: str) -> None:
        twins = data.draw(st.lists(st.sampled_from(self.resident()), min_size=1, unique=True))
        uncomputed = [len(twin.tokens) - twin.num_computed for twin in twins]
        partly = data.draw(st.booleans())
        lens = [data.draw(st.integers(0, n)) for n in uncomputed] if partly else uncomputed
        self.compute_next(twins, lens, ending)

    @rule(token=st.integers(0, 2))
    @precondition(lambda self: self.resident())
    def decode(self, token: int) -> None:
        """A step of all sequences."""
        twins = [twin for twin in self.resident() if len(twin.tokens) < self.max_tokens]
        self.cache.append([twin.real for twin in twins], [token] * len(twins))
        for twin in twins:
            twin.tokens.append(None if None in twin.tokens else token)
        self.compute_next(twins, [len(twin.tokens) - twin.num_computed for twin in twins])

    def compute_next(self, twins: list[Twin], lens: list[int], ending: str = "commit") -> None:
        """A batch of the next lens[i] tokens of each, where it fits."""
        partly = lens != [len(twin.tokens) - twin.num_computed for twin in twins]
        sequences = [twin.real for twin in twins]
        fits = self.cache.can_append(sequences, [0] * len(twins))
        before = self.snapshot()
        try:
            batch = self.cache.batch(sequences, lens)
            assert fits or partly
        except OutOfMemoryError:
            assert not fits
            assert self.snapshot() == before
            return
        assert batch.context_lens.tolist() == [t.num_computed + n for t, n in zip(twins, lens, strict=True)]
        self.write(twins, batch, lens)
        if ending == "abandon":
            self.cache.abandon(batch)
            for twin in twins:
                self.forget(twin, twin.num_computed)
            return
        self.cache.commit(batch)
        for twin, query_len in zip(twins, lens, strict=True):
            twin.num_computed += query_len
            self.reconcile(twin)

    def forget(self, twin: Twin, num_computed: int) -> None:
        """Drop what the oracle knows of slots that are no longer computed, or were given back."""
        twin.num_computed = num_computed
        tables = twin.real.block_tables
        for stamps, table in zip(twin.stamps, tables, strict=True):
            start = table.count(-1) * self.cache.block_size
            for position in [p for p in stamps if not start <= p < num_computed]:
                del stamps[position]

    @rule(index=st.integers(0, 9), n=st.integers(1, 2))
    @precondition(lambda self: self.resident() and len(self.twins) < MAX_SEQS)
    def fork(self, index: int, n: int) -> None:
        resident = self.resident()
        parent = resident[index % len(resident)]
        self.twins += [parent.fork(real) for real in parent.real.fork(n)]

    @rule(data=st.data())
    @precondition(lambda self: self.resident())
    def reorder(self, data: st.DataObject) -> None:
        twins = self.resident()
        parents = data.draw(
            st.lists(st.integers(0, len(twins) - 1), min_size=len(twins), max_size=len(twins))
        )
        self.cache.reorder([twin.real for twin in twins], parents)
        olds = [twin.fork(twin.real) for twin in twins]
        for twin, parent in zip(twins, parents, strict=True):
            twin.__dict__.update(olds[parent].fork(twin.real).__dict__)

    @rule(index=st.integers(0, 9), share=st.floats(0, 1))
    @precondition(lambda self: self.resident())
    def truncate(self, index: int, share: float) -> None:
        resident = self.resident()
        twin = resident[index % len(resident)]
        num_tokens = int(share * len(twin.tokens))
        released = [table.count(-1) * self.cache.block_size for table in twin.real.block_tables]
        twin.real.truncate(num_tokens)
        del twin.tokens[num_tokens:]
        num_computed = min(twin.num_computed, num_tokens)
        seen_from = [max(0, num_computed - window + 1) if window else 0 for window in self.groups.windows]
        if num_computed < twin.num_computed and any(a < b for a, b in zip(seen_from, released, strict=True)):
            num_computed = 0
        self.forget(twin, num_computed)

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.twins)
    def free(self, index: int) -> None:
        self.twins.pop(index % len(self.twins)).real.free()

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.resident() and self.cache.num_host_blocks > 0)
    def swap_out(self, index: int) -> None:
        resident = self.resident()
        twin = resident[index % len(resident)]
        before = self.snapshot()
        try:
            twin.real.swap_out()
        except OutOfMemoryError:
            assert self.snapshot() == before
            return
        assert all(table == [] for table in twin.real.block_tables)

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: len(self.resident()) < len(self.twins))
    def swap_in(self, index: int) -> None:
        away = [twin for twin in self.twins if twin.real.swapped_out]
        twin = away[index % len(away)]
        fits = self.cache.can_swap_in(twin.real)
        before = self.snapshot()
        try:
            twin.real.swap_in()
        except OutOfMemoryError:
            assert not fits
            assert self.snapshot() == before
            return
        self.reconcile(twin)
        more = max(0, 1 - (len(twin.tokens) - twin.num_computed))
        if len(twin.tokens) + more <= self.max_tokens:
            assert self.cache.can_append([twin.real], [more]) == fits

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        num_cached = self.cache.stats().num_cached
        assert self.cache.evict(count) == min(count, num_cached)

    @rule(count=st.integers(0, 6))
    @precondition(lambda self: self.cache.num_host_blocks > 0)
    def swap_out_prefixes(self, count: int) -> None:
        before, free = self.cache.stats(), self.cache._core.num_free_blocks
        num_moved = self.cache.swap_out_prefixes(count)
        after = self.cache.stats()
        assert num_moved <= min(count, before.num_cached)
        assert after.num_cached == before.num_cached - num_moved
        assert (after.num_used, after.num_host_used) == (before.num_used, before.num_host_used)
        assert self.cache._core.num_free_blocks == free

    @rule()
    def reset(self) -> None:
        stats = self.cache.stats()
        if stats.num_used + stats.num_host_used > 0:
            with pytest.raises(ValueError, match="reset"):
                self.cache.reset_prefix_cache()
        else:
            self.cache.reset_prefix_cache()
            assert self.cache.stats().num_free == self.cache.num_blocks

    @invariant()
    def agrees(self) -> None:
        CacheMachine.num_steps += 1
        if not hasattr(self, "cache"):
            return
        self.cache._core.check_integrity()
        stats = self.cache.stats()
        assert stats.num_used + stats.num_cached + stats.num_free == stats.num_blocks
        assert stats.num_used <= self.max_used
        mapped: set[int] = set()
        for twin in self.twins:
            assert twin.real.num_tokens == len(twin.tokens)
            assert twin.real.num_computed_tokens == twin.num_computed
            if twin.real.swapped_out:
                continue
            for table in twin.real.block_tables:
                assert len(table) == -(-twin.num_computed // self.cache.block_size)
                mapped.update(block for block in table if block != -1)
            for group, found in enumerate(self.read(twin)):
                assert found == {p: s for p, s in twin.stamps[group].items() if p in found}
        assert stats.num_used == len(mapped)
