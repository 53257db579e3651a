"""Batches in reused buffers hold what batches of their own would."""

from __future__ import annotations

import random

import pytest
import torch
from cache_helpers import make_cache

from pagedkv.cache import Sequence


@pytest.mark.parametrize("sliding_window", [None, [6, None]])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_reused_buffers_hold_what_fresh_tensors_would(
    sliding_window: list[int | None] | None, prefix_caching: bool
) -> None:
    """Rows grow, shrink, move, are forked and swapped: what the buffers hold is the same as without them."""
    generator = random.Random(0)
    cache = make_cache(
        200, 4, prefix_caching=prefix_caching, sliding_window=sliding_window, num_host_blocks=200
    )
    buffers = cache.make_buffers(max_seqs=6, max_tokens=200, max_tokens_per_seq=200)
    addresses = [tensor.data_ptr() for tensor in buffers.tensors(6, 200)]
    seqs = [cache.add_sequence(range(generator.randrange(9))) for _ in range(4)]
    for step in range(150):
        for seq in seqs:
            if seq.swapped_out:
                seq.swap_in()
        cache.append(seqs, [generator.randrange(2) for _ in seqs])
        members = generator.sample(seqs, generator.randrange(1, len(seqs) + 1)) if step % 3 == 0 else seqs
        lens = [seq.num_tokens - seq.num_computed_tokens for seq in members]
        batch = cache.batch(members, buffers=buffers)
        assert [tensor.data_ptr() for tensor in buffers.tensors(6, 200)] == addresses
        assert batch.num_tokens == sum(lens) == len(batch._slot_mappings[0])
        expected_starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        assert batch.query_start_loc.tolist() == expected_starts
        assert batch.context_lens.tolist() == [seq.num_tokens for seq in members]
        for group, tables in enumerate(zip(*(seq.block_tables for seq in members), strict=True)):
            slots = []
            for i, (seq, table) in enumerate(zip(members, tables, strict=True)):
                assert batch._block_tables[group, i, : len(table)].tolist() == table
                positions = range(seq.num_tokens - lens[i], seq.num_tokens)
                slots += [table[position // 4] * 4 + position % 4 for position in positions]
            assert batch._slot_mappings[group].tolist() == slots
        cache.commit(batch)
        disturb(generator, cache.reorder, seqs)
        cache._core.check_integrity()


def disturb(generator: random.Random, reorder: object, seqs: list[Sequence]) -> None:
    """Do something to the tables between two batches."""
    assert callable(reorder)
    i = generator.randrange(len(seqs))
    action = generator.randrange(8)
    if action == 0 or seqs[i].num_tokens > 40:
        seqs[i].truncate(generator.randrange(seqs[i].num_tokens))
    elif action == 1 and len(seqs) < 6:
        seqs.append(seqs[i].fork())
    elif action == 2 and len(seqs) > 2:
        seqs.pop(i).free()
    elif action == 3:
        reorder(seqs, [generator.randrange(len(seqs)) for _ in seqs])
    elif action == 4:
        seqs[i].swap_out()


def test_buffers_that_are_too_small() -> None:
    cache = make_cache(num_blocks=16, block_size=4)
    buffers = cache.make_buffers(max_seqs=2, max_tokens=9, max_tokens_per_seq=8)
    seqs = [cache.add_sequence(num_tokens=n) for n in (8, 1, 1, 9, 2)]
    for members, what in (
        (seqs[:3], "3 sequences, but its buffers hold 2"),
        ([seqs[3]], "3 blocks of a sequence, but its buffers hold 2"),
        ([seqs[0], seqs[4]], "10 tokens, but its buffers hold 9"),
    ):
        with pytest.raises(ValueError, match=what):
            cache.batch(members, buffers=buffers)
        assert cache.stats().peak_used == 0
    assert cache.batch(seqs[:2], buffers=buffers).block_tables.tolist() == [[0, 1], [2, -1]]
    with pytest.raises(ValueError, match="max_seqs must be at least 1, got 0"):
        cache.make_buffers(0, 1, 1)


def test_buffers_of_another_cache_or_an_open_batch() -> None:
    cache, other = make_cache(), make_cache()
    buffers = cache.make_buffers(2, 9, 8)
    first, second = cache.add_sequence(num_tokens=3), cache.add_sequence(num_tokens=3)
    with pytest.raises(ValueError, match="the buffers belong to another cache"):
        other.batch([other.add_sequence([1])], buffers=buffers)
    batch = cache.batch([first], buffers=buffers)
    with pytest.raises(ValueError, match="hold a batch that was neither committed nor abandoned"):
        cache.batch([second], buffers=buffers)
    assert batch.block_tables[0, 0] == 0
    cache.abandon(batch)
    batch = cache.batch([second], buffers=buffers)
    cache.commit(batch)
    batch = cache.batch([first], buffers=buffers)
    del batch  # nobody can end it any more, which ends it
    cache.commit(cache.batch([first], buffers=buffers))


def test_attention_over_reused_buffers() -> None:
    cache = make_cache(num_layers=1)
    buffers = cache.make_buffers(2, 8, 32)
    seq = cache.add_sequence(num_tokens=3)
    values = torch.arange(10.0)
    for start, stop in ((0, 3), (3, 4), (4, 10)):
        seq.append(stop - seq.num_tokens)
        rows = values[start:stop, None, None].expand(-1, 2, 8).contiguous()
        out = cache.attend(
            0, torch.zeros_like(rows), torch.zeros_like(rows), rows, cache.batch([seq], buffers=buffers)
        )
        assert isinstance(out, torch.Tensor)
        torch.testing.assert_close(
            out[:, 0, 0], values.cumsum(0)[start:stop] / torch.arange(start + 1, stop + 1)
        )


def test_append_to_many() -> None:
    cache = make_cache()
    seqs = [cache.add_sequence([1]), cache.add_sequence([2, 3])]
    cache.append(seqs)
    assert [(seq.num_tokens, seq.token_ids) for seq in seqs] == [(2, [1]), (3, [2, 3])]
    with pytest.raises(ValueError, match="token_ids has 1 entries for 2 sequences"):
        cache.append(seqs, [1])
    with pytest.raises(ValueError, match=r"sequences\[2\] is listed twice"):
        cache.append([*seqs, seqs[0]])
    seqs[1].free()
    with pytest.raises(ValueError, match="freed"):
        cache.append(seqs, [1, 2])
    assert seqs[0].num_tokens == 2
