"""The whole cache under random use: against an oracle, and from several threads."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Iterable

import pytest
import torch
from cache_machine import CacheMachine
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from pagedkv import OutOfMemoryError, PagedKVCache
from pagedkv.cache import Sequence

NUM_STEPS = 20_000


def test_the_cache_agrees_with_the_oracle() -> None:
    CacheMachine.num_steps = 0
    options = settings(max_examples=100, stateful_step_count=60, database=None, deadline=None)
    for number in itertools.count():
        run_state_machine_as_test(seed(number)(CacheMachine), settings=options)
        if CacheMachine.num_steps >= NUM_STEPS:
            break


class Worker:
    """Random steps of one thread on sequences of its own, against what it knows of them."""

    def __init__(self, cache: PagedKVCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.known: dict[Sequence, list[int | None]] = {}  # token ids
        self.num_computed: dict[Sequence, int] = {}

    def run(self, num_steps: int) -> None:
        steps = [
            self.add,
            self.append,
            self.compute,
            self.decode,
            self.fork,
            self.reorder,
            self.truncate,
            self.free,
            self.swap,
            self.ask,
        ]
        for _ in range(num_steps):
            if len(self.known) < 2:
                self.add()
            elif len(self.known) > 4:
                self.free()
            self.random.choice(steps)()
            self.cache._core.check_integrity()
            for seq, tokens in self.known.items():
                assert seq.num_tokens == len(tokens)
                assert seq.num_computed_tokens == self.num_computed[seq]
        for seq in self.known:
            seq.free()

    def resident(self) -> list[Sequence]:
        return [seq for seq in self.known if not seq.swapped_out]

    def pick(self, seqs: Iterable[Sequence]) -> Sequence | None:
        candidates = list(seqs)
        return self.random.choice(candidates) if candidates else None

    def add(self) -> None:
        tokens = [*range(self.random.randrange(20)), self.random.randrange(3)]
        seq = self.cache.add_sequence(tokens, salt=self.random.choice([None, None, "a"]))
        assert seq.num_cached_tokens < len(tokens)
        self.known[seq], self.num_computed[seq] = [*tokens], seq.num_cached_tokens

    def append(self) -> None:
        if (seq := self.pick(self.known)) is not None:
            seq.append([1, 2])
            self.known[seq] += [1, 2]

    def compute(self) -> None:
        seqs = [seq for seq in self.resident() if self.random.random() < 0.7]
        lens = [self.random.randint(0, len(self.known[seq]) - self.num_computed[seq]) for seq in seqs]
        try:
            batch = self.cache.batch(seqs, lens)
        except OutOfMemoryError:
            return
        if self.random.random() < 0.2:
            self.cache.abandon(batch)
            return
        if self.random.random() < 0.5:
            self.cache.commit(batch)
        else:  # the cache commits it by itself
            kv = torch.zeros(batch.num_tokens, 1, 8)
            for layer in range(self.cache.num_layers):
                self.cache.attend(layer, kv, kv, kv, batch)
        for seq, num_new in zip(seqs, lens, strict=True):
            self.num_computed[seq] += num_new

    def decode(self) -> None:
        seqs = self.resident()
        self.cache.append(seqs, [7] * len(seqs))
        for seq in seqs:
            self.known[seq].append(7)
        try:
            self.cache.commit(self.cache.batch(seqs))
        except OutOfMemoryError:
            return
        for seq in seqs:
            self.num_computed[seq] = len(self.known[seq])

    def fork(self) -> None:
        if (parent := self.pick(self.resident())) is not None:
            child = parent.fork()
            self.known[child], self.num_computed[child] = [*self.known[parent]], self.num_computed[parent]

    def reorder(self) -> None:
        seqs = self.resident()
        parents = [self.random.randrange(len(seqs)) for _ in seqs]
        self.cache.reorder(seqs, parents)
        old = [([*self.known[seq]], self.num_computed[seq]) for seq in seqs]
        for seq, parent in zip(seqs, parents, strict=True):
            tokens, num_computed = old[parent]
            self.known[seq], self.num_computed[seq] = [*tokens], num_computed

    def truncate(self) -> None:
        if (seq := self.pick(self.resident())) is not None:
            num_tokens = self.random.randint(0, len(self.known[seq]))
            seq.truncate(num_tokens)
            del self.known[seq][num_tokens:]
            # Fewer where the window has passed what is left.
            assert seq.num_computed_tokens in (min(num_tokens, self.num_computed[seq]), 0)
            self.num_computed[seq] = seq.num_computed_tokens

    def free(self) -> None:
        if (seq := self.pick(self.known)) is not None:
            seq.free()
            del self.known[seq], self.num_computed[seq]

    def swap(self) -> None:
        if (seq := self.pick(self.known)) is not None:
            with contextlib.suppress(OutOfMemoryError):
                seq.swap_in() if seq.swapped_out else seq.swap_out()

    def ask(self) -> None:
        """What concerns all threads' blocks."""
        action = self.random.randrange(6)
        if action == 0:
            self.cache.evict(self.random.randrange(4))
        elif action == 1:
            self.cache.swap_out_prefixes(self.random.randrange(4))
        elif action == 2:
            with contextlib.suppress(ValueError):
                self.cache.reset_prefix_cache()
        elif action == 3:
            assert 0 <= self.cache.probe(range(12)) < 12
        elif action == 4:
            self.cache.can_allocate(range(12))
            self.cache.can_append(self.resident(), [1] * len(self.resident()))
        else:
            stats = self.cache.stats()
            assert stats.num_used + stats.num_cached + stats.num_free == stats.num_blocks


@pytest.mark.parametrize("sliding_window", [None, [6, None]])
def test_fault_thread_safety(sliding_window: list[int | None] | None) -> None:
    """8 threads share a cache, each with sequences of its own."""
    num_threads = 8
    cache = PagedKVCache(
        2,
        1,
        8,
        num_blocks=96,
        block_size=4,
        prefix_caching=True,
        compare_tokens=sliding_window is None,
        num_host_blocks=64,
        sliding_window=sliding_window,
    )
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            Worker(cache, seed).run(NUM_STEPS // 2 // num_threads)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # threads take turns 50 times as often as usual
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    stats = cache.stats()
    assert (stats.num_used, stats.num_host_used) == (0, 0)
    assert stats.num_cached + stats.num_free == 96
    cache.reset_prefix_cache()
    assert cache.stats().num_free == 96
