"""Many requests through a pool that is too small, cancelled and forked. SOAK_REQUESTS=2000: a long run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from generation_helpers import VOCAB_SIZE, assert_nothing_is_held, expected_tokens, make_generator

from pagedkv.generation import Request

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "80"))
NUM_CHECKED = 50
# Bytes. A short run is hardly warm, and freed memory stays with the process in part.
MAX_GROWTH = (32 if NUM_REQUESTS >= 1000 else 64) << 20


def own_bytes() -> int:
    """Resident memory, without pages of files: libraries come in as their code is first run."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_soak(num_host_blocks: int) -> None:
    draws = np.random.default_rng(num_host_blocks)
    generator = make_generator(
        num_blocks=60, num_host_blocks=num_host_blocks, reserve=0.0, max_batch_tokens=48, max_num_seqs=32
    )
    heads = [draws.integers(2, VOCAB_SIZE, length).tolist() for length in (24, 40)]
    requests: list[Request] = []
    warm = 0
    while len(requests) < NUM_REQUESTS or not all(request.done for request in requests[-200:]):
        while len(requests) < NUM_REQUESTS and generator.num_waiting < 8:
            head = heads[draws.integers(2)] if draws.random() < 0.6 else []
            tail = draws.integers(2, VOCAB_SIZE, draws.integers(1, 30)).tolist()
            num_forks = int(draws.choice([1, 1, 1, 2, 4]))
            greedy = bool(draws.random() < 0.5)
            requests.append(
                generator.submit(
                    head + tail,
                    max_new_tokens=int(draws.integers(1, 24)),
                    n=num_forks,
                    temperature=0.0 if greedy else 1.0,
                    seed=len(requests),
                )
            )
        generator.step()
        if draws.random() < 0.1:
            generator.cancel(requests[draws.integers(len(requests))])
        if len(requests) > NUM_REQUESTS // 2 and warm == 0:
            warm = own_bytes()
    assert own_bytes() - warm < MAX_GROWTH
    assert_nothing_is_held(generator)
    stats = generator.stats
    assert stats.num_preemptions > NUM_REQUESTS // 20
    assert (stats.num_swaps > 0) == (num_host_blocks > 0)
    assert stats.num_finished == sum(request.sampling.n for request in requests)
    greedy_requests = [request for request in requests if request.sampling.temperature == 0]
    for i in draws.permutation(len(greedy_requests))[:NUM_CHECKED]:
        check_tokens(greedy_requests[i])


def check_tokens(request: Request) -> None:
    """Against a dense re-computation, as far as a cancelled one came."""
    tokens = expected_tokens("llama", tuple(request.prompt), 24)
    for completion in request.completions:
        num_tokens = len(completion.token_ids)
        assert completion.token_ids == tokens[:num_tokens]
        assert completion.finish_reason == "cancelled" or num_tokens == request.sampling.max_new_tokens
