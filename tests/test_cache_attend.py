"""`PagedKVCache.attend`: a batch from opening to commit, copy-on-write, chunks, compiled graphs."""

from __future__ import annotations

import itertools

import pytest
import torch
from cache_helpers import compute, make_cache, state, tokens_of

import pagedkv
from pagedkv import PagedKVCache
from pagedkv.cache import Batch


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_cow_copy_skipped(order: tuple[int, ...], kv_dtype: torch.dtype | None) -> None:
    """Children that append different tokens read their own history, one by one or as one batch."""
    scales = {"k_scales": 0.5, "v_scales": 0.25} if kv_dtype is not None else {}
    for together in (False, True):
        cache = make_cache(kv_dtype=kv_dtype, **scales)
        parent = cache.add_sequence(num_tokens=6)
        keys = [tokens_of(6, 0, layer)[1].round() for layer in range(2)]
        batch = cache.batch([parent])
        for layer in range(2):
            cache.attend(layer, tokens_of(6)[0], keys[layer], -keys[layer], batch)
        family = [parent, parent.fork(), parent.fork()]
        history = [[keys[layer]] * 3 for layer in range(2)]
        for step in range(3):
            for members in [list(order)] if together else [[i] for i in order]:
                for i in members:
                    family[i].append(1)
                batch = cache.batch([family[i] for i in members])
                for layer in range(2):
                    new = torch.cat([tokens_of(1, 1 + i, step, layer)[1].round() for i in members])
                    cache.attend(layer, tokens_of(len(members))[0], new, -new, batch)
                    for row, i in enumerate(members):
                        history[layer][i] = torch.cat([history[layer][i], new[row : row + 1]])
        batch = cache.batch(family)
        for layer in range(2):
            k, v = pagedkv.gather_kv(
                cache.key_caches[layer],
                cache.value_caches[layer],
                batch.block_tables,
                batch.context_lens,
                k_scale=scales.get("k_scales"),
                v_scale=scales.get("v_scales"),
            )
            torch.testing.assert_close(k, torch.cat(history[layer]), rtol=0, atol=0)
            torch.testing.assert_close(v, -torch.cat(history[layer]), rtol=0, atol=0)


def test_chunks_and_forks_attend_like_one_prompt() -> None:
    cache = make_cache(num_layers=1)
    q, k, v = tokens_of(11, 5)
    whole = cache.add_sequence(num_tokens=11)
    expected = cache.attend(0, q, k, v, cache.batch([whole]), window=6)
    seq = cache.add_sequence(num_tokens=11)
    rows = []
    for begin, end in [(0, 3), (3, 4), (4, 9), (9, 11)]:
        rows.append(
            cache.attend(
                0, q[begin:end], k[begin:end], v[begin:end], cache.batch([seq], [end - begin]), window=6
            )
        )
        fork = seq.fork()
        seq.free()
        seq = fork
    torch.testing.assert_close(torch.cat(rows), expected)  # type: ignore[arg-type]


def test_attend_options_and_value_head_dim() -> None:
    cache = PagedKVCache(1, 2, 8, value_head_dim=24, num_blocks=4, block_size=4)
    seq = cache.add_sequence(num_tokens=5)
    v = torch.ones(5, 2, 24)
    out, lse = cache.attend(
        0, torch.zeros(5, 4, 8), torch.zeros(5, 2, 8), v, cache.batch([seq]), return_lse=True
    )
    assert torch.equal(out, torch.ones(5, 4, 24))
    torch.testing.assert_close(lse, torch.arange(1.0, 6.0).log()[:, None].expand(5, 4))


def test_a_batch_is_committed_by_its_last_layer() -> None:
    cache = make_cache(num_layers=3)
    seq = cache.add_sequence(num_tokens=2)
    batch = cache.batch([seq])
    for layer in (2, 0, 0, 1):
        assert seq.num_computed_tokens == 0
        cache.attend(layer, *tokens_of(2), batch)
    assert seq.num_computed_tokens == 2
    cache.commit(batch)
    with pytest.raises(ValueError, match="committed"):
        cache.attend(0, *tokens_of(2), batch)
    with pytest.raises(ValueError, match="truncate"):
        cache.abandon(batch)
    seq.append(1)
    second = cache.batch([seq])
    cache.attend(1, *tokens_of(1), second)
    cache.commit(second)  # before its time
    assert seq.num_computed_tokens == 3


def test_abandon_gives_back_the_blocks() -> None:
    cache = make_cache()
    seq = cache.add_sequence(num_tokens=3)
    compute(cache, seq)
    before = state(cache)
    seq.append(9)
    batch = cache.batch([seq])
    cache.attend(0, *tokens_of(9), batch)
    assert cache.stats().num_used == 3
    cache.abandon(batch)
    cache.abandon(batch)
    assert state(cache) == before
    assert (seq.num_tokens, seq.num_computed_tokens) == (12, 3)
    for call in (lambda: cache.attend(1, *tokens_of(9), batch), lambda: cache.commit(batch)):
        with pytest.raises(ValueError, match="abandoned"):
            call()
    compute(cache, seq)
    assert seq.num_computed_tokens == 12


def test_an_open_batch_holds_its_sequences() -> None:
    cache = make_cache()
    a, b = cache.add_sequence(num_tokens=2), cache.add_sequence(num_tokens=2)
    batch = cache.batch([a])
    for call in (a.fork, lambda: a.truncate(1)):
        with pytest.raises(ValueError, match="commit or abandon the batch first"):
            call()
    with pytest.raises(
        ValueError, match=r"sequences\[1\] is in a batch that was neither committed nor abandoned"
    ):
        cache.batch([b, a])
    a.append(3)
    cache.commit(batch)
    assert (a.num_tokens, a.num_computed_tokens, b.block_table) == (5, 2, [])


def test_freeing_a_sequence_makes_its_open_batch_stale() -> None:
    cache = make_cache()
    a, b = cache.add_sequence(num_tokens=2), cache.add_sequence(num_tokens=2)
    batch = cache.batch([a, b])
    a.free()
    assert cache.stats().num_used == 1
    for call in (lambda: cache.attend(0, *tokens_of(4), batch), lambda: cache.commit(batch)):
        with pytest.raises(ValueError, match="freed"):
            call()
    with pytest.raises(ValueError, match="neither committed nor abandoned"):
        cache.batch([b])
    cache.abandon(batch)
    assert cache.stats().num_used == 0
    compute(cache, b)


def test_attend_and_commit_that_are_refused() -> None:
    cache, other = make_cache(), make_cache()
    batch = cache.batch([cache.add_sequence(num_tokens=2)])
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=f"layer {layer} is outside 0 to 1"):
            cache.attend(layer, *tokens_of(2), batch)
    for call in (
        lambda: other.attend(0, *tokens_of(2), batch),
        lambda: other.commit(batch),
        lambda: other.abandon(batch),
    ):
        with pytest.raises(ValueError, match="another cache"):
            call()


def test_attend_in_a_compiled_graph() -> None:
    """Two layers in one graph, several steps: as eager, and committed all the same."""
    compiled_cache, eager_cache = make_cache(), make_cache()

    def step(
        cache: PagedKVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        hidden = cache.attend(0, q, k, v, batch)
        out = cache.attend(1, q + hidden, k + 1, v, batch, window=3)
        assert isinstance(out, torch.Tensor)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.no_grad():
        seqs = [cache.add_sequence(num_tokens=5) for cache in (compiled_cache, eager_cache)]
        for num_new, num_next in [(5, 1), (1, 1), (1, 2), (2, 0)]:
            inputs = tokens_of(num_new, num_new)
            out = compiled(compiled_cache, *inputs, compiled_cache.batch([seqs[0]]))
            expected = step(eager_cache, *inputs, eager_cache.batch([seqs[1]]))
            assert torch.equal(out, expected)
            assert seqs[0].num_computed_tokens == seqs[1].num_computed_tokens == seqs[0].num_tokens
            for seq in seqs:
                seq.append(num_next)


def test_copies_run_before_the_batch_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    parent = cache.add_sequence(num_tokens=2)
    compute(cache, parent)
    child = parent.fork()
    child.append(1)
    mappings: list[list[list[int]]] = []
    monkeypatch.setattr(
        pagedkv.ops, "copy_blocks", lambda keys, values, mapping: mappings.append(mapping.tolist())
    )
    compute(cache, child)
    assert mappings == [[[0, 1]]]
