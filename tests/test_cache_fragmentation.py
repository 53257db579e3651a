"""How much of the pool is lost: within blocks, and between them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cache_helpers import compute, make_cache

from pagedkv.cache import Sequence

NUM_SLOTS = 8  # requests that run at a time


def lengths(generator: np.random.Generator, mean: int, sigma: float, low: int, high: int) -> list[int]:
    """96 lengths, log-normal as those of chat conversations are."""
    draws = np.exp(generator.normal(np.log(mean) - sigma**2 / 2, sigma, 96))
    return [int(length) for length in np.clip(np.rint(draws), low, high)]


def shared_prompts() -> list[tuple[list[int], int]]:
    """Requests (prompt, tokens to generate) that start with one of 4 system prompts."""
    generator = np.random.default_rng(11)
    system_prompts = [generator.integers(1000, 48_000, n).tolist() for n in generator.integers(256, 513, 4)]
    which = generator.integers(0, 4, 96)
    user_lens, out_lens = lengths(generator, 64, 0.8, 8, 512), lengths(generator, 96, 0.8, 8, 256)
    users = [generator.integers(1000, 48_000, n).tolist() for n in user_lens]
    return [(system_prompts[w] + user, out) for w, user, out in zip(which, users, out_lens, strict=True)]


def separate_prompts() -> list[tuple[list[int], int]]:
    """Requests with nothing in common."""
    generator = np.random.default_rng(13)
    in_lens, out_lens = lengths(generator, 161, 0.9, 4, 1024), lengths(generator, 128, 0.8, 4, 384)
    return [
        (generator.integers(1000, 48_000, n).tolist(), out) for n, out in zip(in_lens, out_lens, strict=True)
    ]


@pytest.mark.parametrize(("workload", "block_size"), [("shared", 8), ("separate", 16)])
def test_internal_fragmentation_of_chats(workload: str, block_size: int) -> None:
    """Averaged over time, under 4 % of the used slots are empty; a shared block counts once."""
    waiting = shared_prompts() if workload == "shared" else separate_prompts()
    cache = make_cache(16_384 // block_size, block_size, num_layers=1, prefix_caching=workload == "shared")
    running: list[tuple[Sequence, int]] = []
    fragmentation: list[float] = []
    while waiting or running:
        while waiting and len(running) < NUM_SLOTS:
            prompt, num_out = waiting.pop(0)
            running.append((cache.add_sequence(prompt), len(prompt) + num_out))
        compute(cache, *(seq for seq, _ in running))
        fragmentation.append(cache.stats().internal_fragmentation)
        for seq, end in running:
            if seq.num_tokens >= end:
                seq.free()
        running = [(seq, end) for seq, end in running if not seq.freed]
        if running:
            sequences = [seq for seq, _ in running]
            cache.append(sequences, [seq.num_tokens % 997 for seq in sequences])
    assert 0.005 < float(np.mean(fragmentation)) < 0.04
    assert cache.stats().num_used == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_no_external_fragmentation(prefix_caching: bool) -> None:
    """After 100,000 random operations any free block serves any sequence: the pool fills to the last one."""
    generator = random.Random(0)
    cache = make_cache(97, 2, num_layers=1, prefix_caching=prefix_caching)
    core = cache._core
    root = cache._plain_root if prefix_caching else None
    live: list[int] = []
    for _ in range(100_000):
        action = generator.random()
        if action < 0.4 and len(live) < 40:
            live.append(core.add([generator.randrange(3) for _ in range(generator.randrange(9))], 0, root))
        elif action < 0.8 and live:
            sequence = generator.choice(live)
            if core.can_append([sequence], [0]):
                core.commit(core.open_batch([sequence]).batch_id)
                core.append_each([sequence], [generator.randrange(3)])
        elif live:
            core.free(live.pop(generator.randrange(len(live))))
    core.check_integrity()
    last = cache.add_sequence(num_tokens=2 * core.num_free_blocks)
    compute(cache, last)
    stats = cache.stats()
    assert (stats.num_used, stats.num_free, stats.num_cached) == (97, 0, 0)
