"""The whole cache under random use: against an oracle, and from several threads."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from cache_helpers import make_cache
from cache_machine import CacheMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from pagedkv import OutOfMemoryError
from pagedkv.cache import Sequence

NUM_STEPS = 20_000


def test_the_cache_agrees_with_the_oracle() -> None:
    CacheMachine.num_steps = 0
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(max_examples=460, stateful_step_count=60, derandomize=True, deadline=None),
    )
    assert CacheMachine.num_steps >= NUM_STEPS


@pytest.mark.parametrize("num_threads", [8])
def test_fault_thread_safety(num_threads: int) -> None:
    """Threads that share a cache, each with sequences of its own: every count is right in the end."""
    cache = make_cache(64, 4, num_layers=1, prefix_caching=True, num_host_blocks=64)
    errors: list[BaseException] = []
    rows = torch.zeros(64, 2, 8)

    def work(seed: int) -> None:
        generator = random.Random(seed)
        seqs: list[Sequence] = []
        try:
            for _ in range(250):
                act(generator, seqs)
            for seq in seqs:
                seq.free()
        except BaseException as error:
            errors.append(error)

    def act(generator: random.Random, seqs: list[Sequence]) -> None:
        action = generator.randrange(7)
        if len(seqs) < 3 or action == 0:
            seqs.append(cache.add_sequence(range(generator.randrange(1, 12))))
        elif action == 1 or len(seqs) > 5:
            seqs.pop(generator.randrange(len(seqs))).free()
        elif action == 2:
            seqs.append(generator.choice(seqs).fork())
        elif action == 3:
            seq = generator.choice(seqs)
            seq.truncate(generator.randrange(seq.num_tokens + 1))
        elif action == 4:
            seq = generator.choice(seqs)
            try:
                seq.swap_out()
                seq.swap_in()
            except OutOfMemoryError:
                if seq.swapped_out:
                    seqs.remove(seq)
        else:
            cache.append(seqs, [generator.randrange(3) for _ in seqs])
            try:
                batch = cache.batch(seqs)
            except OutOfMemoryError:
                return
            kv = rows[: batch.num_tokens]
            cache.attend(0, kv, kv, kv, batch)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    cache._settled_core().check_integrity()
    stats = cache.stats()
    assert (stats.num_used, stats.num_host_used) == (0, 0)
    assert stats.num_cached + stats.num_free == 64
