"""Layers with a sliding window: blocks behind it, groups of layers, rollback, prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_helpers import compute, make_cache, tokens_of

from pagedkv import OutOfMemoryError, PagedKVCache, reference
from pagedkv._layers import group_layers
from pagedkv.cache import Sequence


def test_groups_of_layers() -> None:
    assert group_layers(3, None).windows == (0,)
    assert group_layers(3, 7).windows == (7,)
    assert group_layers(3, 7).num_tensors == 3
    mixed = group_layers(8, [4, 4, 4, None] * 2)
    assert (mixed.windows, mixed.num_tensors) == ((4, 4, 0, 4), 2)
    assert mixed.group_of_layer == (0, 0, 1, 2, 1, 3, 3, 2)
    nearly_equal = group_layers(9, [4, None] * 4 + [4])
    assert (nearly_equal.windows, nearly_equal.num_tensors) == ((4, 0), 5)
    two_windows = group_layers(4, [4, 8, 4, 8])
    assert two_windows.windows == (4, 8)
    for groups in (mixed, nearly_equal, two_windows):  # no two layers at one place
        places = list(zip(groups.group_of_layer, groups.tensor_of_layer, strict=True))
        assert len(set(places)) == len(places)
    wrong: Any
    for wrong, error in (([4], ValueError), (0, ValueError), ([4, -1], ValueError), ([4, 2.5], TypeError)):
        with pytest.raises(error, match="sliding_window"):
            make_cache(num_layers=2, sliding_window=wrong)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
def test_fault_ring_buffer_read_index(window: int) -> None:
    """20 tokens one by one: steps see the last `window` keys and hold no more blocks than these need."""
    cache = make_cache(num_layers=1, sliding_window=window)
    seq = cache.add_sequence()
    values: list[float] = []
    for token in range(20):
        seq.append(1)
        batch = cache.batch([seq])
        values.append(float(token))
        out = cache.attend(
            0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.full((1, 2, 8), float(token)), batch
        )
        assert isinstance(out, torch.Tensor)
        seen = values[-window:]
        assert out[0, 0, 0].item() == pytest.approx(sum(seen) / len(seen), abs=1e-5)
        held = [block for block in seq.block_table if block != -1]
        assert len(held) <= -(-window // 4) + 1
        assert seq.block_table[: len(seq.block_table) - len(held)] == [-1] * (token // 4 + 1 - len(held))
        cache._core.check_integrity()
    assert cache.stats().peak_used <= -(-window // 4) + 1


def dense(layer: int, rows: torch.Tensor, window: int | None, query_len: int) -> torch.Tensor:
    """Attention of the last tokens without a cache; row i of a layer depends on its token alone."""
    q, k, v = tokens_in(layer, rows)
    out = reference.paged_attention(
        q[len(q) - query_len :],
        torch.zeros(1, 1, dtype=torch.int32),
        k[None],
        v[None],
        torch.tensor([len(rows)], dtype=torch.int32),
        query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
        window=window,
    )
    assert isinstance(out, torch.Tensor)
    return out


def tokens_in(layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = [tokens_of(1, layer, int(row)) for row in rows]
    q, k, v = (torch.cat(part) for part in zip(*parts, strict=True))
    return q, k, v


WINDOWS = [3, None, 3, 3, None, 6]


def step(cache: PagedKVCache, seqs: list[Sequence]) -> None:
    """Compute all uncomputed tokens of all layers, and compare each with dense attention."""
    batch = cache.batch(seqs)
    lens = [seq.num_tokens - seq.num_computed_tokens for seq in seqs]
    ids = [torch.tensor(seq.token_ids) for seq in seqs]
    for layer, window in enumerate(WINDOWS):
        new = torch.cat([row[len(row) - n :] for row, n in zip(ids, lens, strict=True)])
        out = cache.attend(layer, *tokens_in(layer, new), batch)
        assert isinstance(out, torch.Tensor)
        expected = [dense(layer, row, window, n) for row, n in zip(ids, lens, strict=True)]
        torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)
    cache._core.check_integrity()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_mixed_layers_in_one_pool(prefix_caching: bool) -> None:
    """Six layers in four kinds of groups: prefill, decode, fork, rollback, swap, prefix hits."""
    cache = make_cache(
        num_blocks=80,
        num_layers=len(WINDOWS),
        sliding_window=WINDOWS,
        prefix_caching=prefix_caching,
        num_host_blocks=80,
    )
    a, b = cache.add_sequence(range(11)), cache.add_sequence(range(30, 35))
    step(cache, [a, b])
    for token in range(11, 19):
        a.append([token])
        b.append([token + 50])
        step(cache, [b, a])
    fork = a.fork()
    fork.append([70])
    a.append([71, 72, 73])
    step(cache, [a, fork])
    a.truncate(20)  # two of three speculated tokens were wrong
    a.append([80])
    step(cache, [a, b])
    a.swap_out()
    fork.free()
    a.swap_in()
    a.append([81])
    step(cache, [a])
    hit = cache.add_sequence([*range(17), 90, 91])
    assert (hit.num_cached_tokens > 0) == prefix_caching
    step(cache, [hit])
    for seq in (a, b, hit):
        seq.free()
    assert cache.stats().num_used == 0


def test_blocks_and_bytes_of_mixed_layers() -> None:
    cache = make_cache(num_blocks=32, num_layers=len(WINDOWS), sliding_window=WINDOWS)
    assert len(cache.key_caches) == 6
    groups = len(cache._groups.windows)
    assert len({tensor.data_ptr() for tensor in cache.key_caches}) == cache._groups.num_tensors
    assert cache.stats().bytes == 32 * cache.bytes_per_block
    seq = cache.add_sequence(num_tokens=16)
    assert cache.can_allocate(16 * 2) == (8 * groups <= 32)
    compute(cache, seq)
    assert cache.stats().num_used == 4 * groups
    seq.append(1)
    batch = cache.batch([seq])
    full = [
        table for table, window in zip(seq.block_tables, cache._groups.windows, strict=True) if window == 0
    ]
    assert all(-1 not in table for table in full)
    with pytest.raises(ValueError, match="different block tables"):
        _ = batch.block_tables
    with pytest.raises(ValueError, match="different block tables"):
        _ = batch.slot_mapping


def test_rollback_beyond_the_window() -> None:
    """Where the window has passed what is needed, all that is left is computed again."""
    cache = make_cache(num_layers=1, sliding_window=4)
    seq = cache.add_sequence(range(12))
    compute(cache, seq)
    seq.truncate(1)  # the last batch can be taken back as far as one likes
    assert (seq.num_tokens, seq.num_computed_tokens) == (1, 1)
    seq.append(range(1, 12))
    compute(cache, seq)
    seq.append([12])
    compute(cache, seq)  # gives back blocks 0 and 1
    assert seq.block_table[:2] == [-1, -1]
    seq.truncate(11)
    assert seq.num_computed_tokens == 11
    seq.truncate(10)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.block_table) == (10, 0, [])
    compute(cache, seq)
    assert -1 not in seq.block_table
    cache._core.check_integrity()


def test_prefix_of_window_layers_needs_the_window_only() -> None:
    cache = make_cache(num_layers=1, sliding_window=5, prefix_caching=True)
    seq = cache.add_sequence(range(16))
    compute(cache, seq)
    for token in range(16, 24):
        seq.append([token])
        compute(cache, seq)
    assert seq.block_table[:4] == [-1] * 4
    hit = cache.add_sequence(range(23))
    assert hit.num_cached_tokens == 20
    assert hit.block_table[:4] == [-1] * 4
    assert all(block == seq.block_table[i] for i, block in enumerate(hit.block_table) if block != -1)
    cache._core.check_integrity()
    cache.evict(3)
    assert cache.probe(range(9)) < 8  # its blocks were given back, and are gone
    assert cache.probe(range(23)) == 20


def test_a_window_that_is_wider_than_the_layers() -> None:
    cache = make_cache(num_layers=2, sliding_window=[4, None])
    batch = cache.batch([cache.add_sequence(num_tokens=3)])
    for window in (5, None):
        with pytest.raises(ValueError, match="layer 0 keeps only 4 keys"):
            cache.attend(0, *tokens_of(3), batch, window=window)
    cache.attend(0, *tokens_of(3), batch, window=2)
    cache.attend(1, *tokens_of(3), batch, window=9)


def test_a_context_longer_than_the_pool() -> None:
    cache = make_cache(num_blocks=4)
    seq = cache.add_sequence(num_tokens=17)
    with pytest.raises(OutOfMemoryError, match="needs 5, 4 of 4 are free; it does not fit into this pool"):
        cache.batch([seq])


def test_fault_double_free_window_ring() -> None:
    for order in ((0, 1), (1, 0)):
        cache = make_cache(num_layers=1, sliding_window=8)
        seq = cache.add_sequence(num_tokens=16)
        compute(cache, seq)
        family = [seq, seq.fork()]
        for _ in range(12):
            family[1].append(1)
            compute(cache, family[1])
        for i in order:
            family[i].free()
        assert cache.stats().num_free == 16
        cache._core.check_integrity()
