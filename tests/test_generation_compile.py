"""torch.compile of a decode step: one graph, fixed buffers, and not another graph when sequences grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generation_helpers import random_prompts
from small_models import make_model
from torch._dynamo.utils import counters

from pagedkv.integrations.ragged import RaggedModel, make_cache

PROMPTS = random_prompts((5, 17, 9))
NUM_STEPS = 12


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def decode(model: RaggedModel, step: Any) -> list[list[int]]:
    """Greedy tokens: prompts as they are, then NUM_STEPS decode steps by `step`, on buffers that stay."""
    cache = model.cache
    sequences = [cache.add_sequence(prompt) for prompt in PROMPTS]
    buffers = cache.make_buffers(max_seqs=3, max_tokens=64, max_tokens_per_seq=64)
    positions = torch.cat([torch.arange(len(prompt)) for prompt in PROMPTS])
    logits = model(
        torch.tensor([token for prompt in PROMPTS for token in prompt]),
        positions,
        cache.batch(sequences, buffers=buffers),
    )
    token_ids = torch.empty(len(PROMPTS), dtype=torch.int64)
    positions = torch.tensor([len(prompt) - 1 for prompt in PROMPTS])
    rows = []
    addresses = set()
    for _ in range(NUM_STEPS):
        token_ids.copy_(logits.argmax(-1))
        positions += 1
        rows.append(token_ids.tolist())
        cache.append(sequences, token_ids)
        batch = cache.batch(sequences, buffers=buffers)
        addresses.add((batch._block_tables.data_ptr(), batch.context_lens.data_ptr()))
        logits = step(token_ids, positions, batch)
    assert len(addresses) == 1
    for sequence in sequences:
        sequence.free()
    return rows


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_decode_step_is_one_graph_that_stays(family: str) -> None:
    model = make_model(family)
    ragged = RaggedModel(model, make_cache(model, num_blocks=64, block_size=4), pack=False)
    expected = decode(ragged, ragged)
    compiled = torch.compile(ragged, fullgraph=True, dynamic=False, backend="inductor")
    counters.clear()
    assert decode(ragged, compiled) == expected
    assert counters["stats"]["unique_graphs"] == 1
