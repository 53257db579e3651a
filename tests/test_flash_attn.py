"""The FlashAttention-shaped functions against attention written out in float64."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv.integrations import _flash_attn_checks
from pagedkv.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (3, -1)},
    {"causal": True, "window_size": (0, 0)},
    {"window_size": (4, 4)},
    {"window_size": (2, 0)},
    {"causal": True, "softcap": 1.5, "softmax_scale": 0.7},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.25, 1.0])},
    {"causal": True, "s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0])},
]


def dense(q: Tensor, k: Tensor, v: Tensor, start: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """`[seqlen_q, num_heads, head_dim]` and `[num_heads, seqlen_q]`; keys before start are not seen."""
    q, k, v = q.double(), *(states.double().repeat_interleave(2, 1) for states in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.get("softmax_scale", HEAD_DIM**-0.5)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    distance = torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q))[:, None]
    if "alibi_slopes" in options:
        scores = scores + options["alibi_slopes"].double()[:, None, None] * distance
    before, after = options.get("window_size", (-1, -1))
    after = 0 if options.get("causal") else after
    hidden = (torch.arange(len(k)) < start) | (distance > after if after >= 0 else distance > len(k))
    hidden = hidden | (distance < -before) if before >= 0 else hidden
    scores = scores.masked_fill(hidden, -math.inf)
    if "s_aux" in options:
        sinks = options["s_aux"].double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], -1)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).nan_to_num()[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).float(), lse.float()


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts_of(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_dense(options: dict[str, Any]) -> None:
    q = states(2, 5, NUM_HEADS, HEAD_DIM)
    k, v = states(2, 2, 9, NUM_KV_HEADS, HEAD_DIM, seed=1)
    out, lse, nothing = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert nothing is None
    assert torch.equal(flash_attn_func(q, k, v, **options), out)
    for i in range(2):
        expected, expected_lse = dense(q[i], k[i], v[i], **options)
        close(out[i], expected)
        close(lse[i], expected_lse)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_varlen(options: dict[str, Any], paged: bool) -> None:
    lens_q, lens_k = (3, 1, 0, 7, 1), (8, 5, 4, 7, 1)
    q = states(sum(lens_q), NUM_HEADS, HEAD_DIM)
    k, v = states(2, sum(lens_k), NUM_KV_HEADS, HEAD_DIM, seed=1)
    parts = [list(t.split(lens)) for t, lens in ((q, lens_q), (k, lens_k), (v, lens_k))]
    table = None
    if paged:
        table = torch.tensor([[9, 3, 4], [1, 0, -7], [2, -1, 99], [5, 6, -1], [8, -1, -1]], dtype=torch.int32)
        k, v = (torch.full((10, 4, NUM_KV_HEADS, HEAD_DIM), math.nan) for _ in range(2))
        for i, length in enumerate(lens_k):
            for cache, rows in ((k, parts[1][i]), (v, parts[2][i])):
                for position in range(length):
                    cache[table[i, position // 4], position % 4] = rows[position]
    out, lse, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        starts_of(lens_q),
        starts_of(lens_k),
        max(lens_q),
        max(lens_k),
        block_table=table,
        return_attn_probs=True,
        **options,
    )
    for begin, *rows in zip(starts_of(lens_q).tolist(), *parts, strict=False):
        expected, expected_lse = dense(*rows, **options)
        close(out[begin : begin + len(expected)], expected)
        close(lse[:, begin : begin + len(expected)], expected_lse)


@pytest.mark.parametrize("layout", ["rows", "chosen rows", "block_table", "page_table"])
@pytest.mark.parametrize("seqlen_new", [0, 1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_with_kvcache(options: dict[str, Any], seqlen_new: int, layout: str) -> None:
    lens = torch.tensor([6, 0, 11], dtype=torch.int32) + (seqlen_new == 0)
    q = states(3, max(seqlen_new, 1), NUM_HEADS, HEAD_DIM)
    history = states(2, 3, 16, NUM_KV_HEADS, HEAD_DIM, seed=1)
    new = states(2, 3, seqlen_new, NUM_KV_HEADS, HEAD_DIM, seed=2) if seqlen_new else (None, None)
    keywords: dict[str, Any] = {}
    if "table" in layout:
        table = torch.tensor([[3, 9, 0, 5], [2, 1, 11, 4], [7, 6, 8, 10]], dtype=torch.int32)
        keywords[layout] = table
        caches = torch.empty(2, 12, 4, NUM_KV_HEADS, HEAD_DIM)
        caches[:, table.flatten().long()] = history.view(2, 12, 4, NUM_KV_HEADS, HEAD_DIM)
    else:
        rows = torch.tensor([4, 0, 2]) if layout == "chosen rows" else torch.arange(3)
        if layout == "chosen rows":
            keywords["cache_batch_idx"] = rows.int()
        caches = torch.full((2, 5 if layout == "chosen rows" else 3, 16, NUM_KV_HEADS, HEAD_DIM), math.nan)
        caches[:, rows] = history
    out, lse = flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=lens, return_softmax_lse=True, **keywords, **options
    )
    for i, length in enumerate(lens.tolist()):
        k, v = (
            torch.cat([past[i, :length], fresh[i]]) if seqlen_new else past[i, :length]
            for past, fresh in zip(history, new if seqlen_new else history, strict=True)
        )
        expected, expected_lse = dense(q[i], k, v, **options)
        close(out[i], expected)
        close(lse[i], expected_lse)


def rotated(x: Tensor, positions: list[int], cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`[n, heads, head_dim]` with the first 8 elements of each head turned."""
    c, s = cos[positions][:, None], sin[positions][:, None]
    turning, rest = x[..., :8], x[..., 8:]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pairs = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seqlen", [1, 3])
def test_with_kvcache_rotates(seqlen: int, interleaved: bool) -> None:
    lens = [6, 2]
    q, cos, sin = states(2, seqlen, NUM_HEADS, HEAD_DIM), states(20, 4, seed=3), states(20, 4, seed=4)
    caches = states(2, 2, 16, NUM_KV_HEADS, HEAD_DIM, seed=1)
    k, v = states(2, 2, seqlen, NUM_KV_HEADS, HEAD_DIM, seed=2)
    before, past = q.clone(), caches.clone()
    out = flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cos,
        sin,
        cache_seqlens=torch.tensor(lens, dtype=torch.int32),
        causal=True,
        rotary_interleaved=interleaved,
    )
    assert torch.equal(q, before)
    for i, length in enumerate(lens):
        positions = list(range(length, length + seqlen))
        query, key = (rotated(x[i], positions, cos, sin, interleaved) for x in (q, k))
        close(caches[0, i, length : length + seqlen], key)
        keys, values = torch.cat([past[0, i, :length], key]), torch.cat([past[1, i, :length], v[i]])
        close(out[i], dense(query, keys, values, causal=True)[0])


def test_left_padding_and_lengths() -> None:
    q, (k, v) = states(2, 1, NUM_HEADS, HEAD_DIM), states(2, 2, 16, NUM_KV_HEADS, HEAD_DIM, seed=1)
    padding = torch.tensor([3, 0], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=9, cache_leftpad=padding)
    for i, start in enumerate(padding.tolist()):
        close(out[i], dense(q[i], k[i, :9], v[i, :9], start=start)[0])
    assert torch.equal(flash_attn_with_kvcache(q, k, v), flash_attn_func(q, k, v))


def test_what_is_not_supported_says_so() -> None:
    q = k = states(1, 3, NUM_HEADS, HEAD_DIM)
    cos = states(20, 4)
    starts = starts_of((3,))
    slopes = torch.ones(1, NUM_HEADS)
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (NotImplementedError, "dropout_p", flash_attn_func, {"dropout_p": 0.1}),
        (NotImplementedError, r"window_size=\(2, 1\)", flash_attn_func, {"window_size": (2, 1)}),
        (NotImplementedError, "alibi_slopes", flash_attn_func, {"alibi_slopes": slopes, "causal": True}),
        (NotImplementedError, "alibi_slopes", flash_attn_func, {"alibi_slopes": slopes[0]}),
        (ValueError, "k and v", flash_attn_with_kvcache, {"k": k}),
        (ValueError, "two names", flash_attn_with_kvcache, {"block_table": starts, "page_table": starts}),
        (ValueError, "cache_batch_idx", flash_attn_with_kvcache, {"page_table": 1, "cache_batch_idx": 1}),
        (ValueError, "rotary_cos needs k", flash_attn_with_kvcache, {"rotary_cos": cos}),
        (ValueError, "together", flash_attn_with_kvcache, {"k": k[:, :1], "v": k[:, :1], "rotary_cos": cos}),
        (
            IndexError,
            "1 new keys do not fit behind the 3 of sequence 0",
            flash_attn_with_kvcache,
            {"k": k[:, :1], "v": k[:, :1], "cache_seqlens": 3},
        ),
    ]
    new = {"k": k, "v": k, "rotary_cos": cos, "rotary_sin": cos, "cache_seqlens": 0}
    left = torch.zeros(1, dtype=torch.int32)
    cases += [
        (NotImplementedError, "several queries", flash_attn_with_kvcache, new),
        (NotImplementedError, "cache_leftpad", flash_attn_with_kvcache, {**new, "cache_leftpad": left}),
    ]
    for error, message, function, keywords in cases:
        with pytest.raises(error, match=message):
            function(q[:, :1] if message == "together" else q, k, k, **keywords)
    with pytest.raises(NotImplementedError, match="1 queries beside 3"):
        flash_attn_with_kvcache(q[:, :1], k, k, **new)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn_varlen_func(q[0], k[0], k[0], starts, starts, 3, 3, dropout_p=0.5)


def test_nothing_is_written_before_an_error() -> None:
    """Whatever is wrong, the caches are as they were."""
    q, new = states(3, 1, NUM_HEADS, HEAD_DIM), states(3, 1, NUM_KV_HEADS, HEAD_DIM, seed=1)
    caches = states(2, 3, 16, NUM_KV_HEADS, HEAD_DIM, seed=2)
    before = caches.clone()
    rotary, pairs = states(20, 4), new.expand(3, 2, -1, -1)
    table = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (NotImplementedError, "window_size", {"window_size": (2, 1)}),
        (NotImplementedError, "alibi_slopes", {"alibi_slopes": torch.ones(NUM_HEADS)}),
        (TypeError, "window_size", {"window_size": 4}),
        (TypeError, "Half", {"q": q.half()}),
        (TypeError, "alibi_slopes", {"alibi_slopes": torch.ones(NUM_HEADS).half(), "causal": True}),
        (ValueError, "softcap", {"softcap": -1.0}),
        (ValueError, "sinks", {"s_aux": torch.ones(5)}),
        (ValueError, "heads", {"q": q[:, :, :3]}),
        (ValueError, "^k must be", {"k": torch.cat([new, new]), "v": torch.cat([new, new])}),
        (ValueError, "^k must be", {"k": new[:2], "v": new[:2]}),
        (ValueError, "^v must be", {"k": pairs, "v": pairs.transpose(0, 1)}),
        (ValueError, "^v must be", {"v": pairs}),
        (ValueError, "rotary_sin", {"rotary_sin": rotary}),
        (ValueError, "rotary_sin", {"rotary_cos": rotary}),
        (ValueError, "^cache_seqlens", {"cache_seqlens": table[:1, 0]}),
        (ValueError, "^cache_batch_idx", {"cache_batch_idx": table[:1, 0]}),
        (ValueError, "^block_table", {"block_table": table[:1]}),
        (ValueError, "^k_cache has 2 rows", {"k_cache": caches[0, :2], "v_cache": caches[1, :2]}),
        (IndexError, "cache_seqlens.0. is -1", {"cache_seqlens": table[:, 0] - 1}),
        (IndexError, "behind the 16 of sequence 1: .* room for 16", {"cache_seqlens": table[:, 0] * 16}),
        (IndexError, "sequence 2 needs block 3", {"block_table": table + 1}),
        (IndexError, "sequence 0 needs block -1", {"cache_batch_idx": table[:, 0] - 1}),
        (
            NotImplementedError,
            "leftpad",
            {"rotary_cos": rotary, "rotary_sin": rotary, "cache_leftpad": table[:, 0]},
        ),
        (IndexError, "positions", {"rotary_cos": rotary[:4], "rotary_sin": rotary[:4]}),
    ]
    for error, message, keywords in cases:
        arguments = {
            "q": q,
            "k_cache": caches[0],
            "v_cache": caches[1],
            "k": new,
            "v": new,
            "cache_seqlens": 4,
        }
        with pytest.raises(error, match=message):
            flash_attn_with_kvcache(**{**arguments, **keywords})
        assert torch.equal(caches, before), message


@pytest.mark.parametrize(
    ("starts_k", "message"),
    [
        ([0, 5, 12], r"cu_seqlens_k\[2\] is 12, past the 9 tokens"),
        ([0, 5, 4], r"cu_seqlens_k\[2\] is 4"),
        ([-2, 5, 9], r"cu_seqlens_k\[0\] is -2"),
        ([0, 4, 7], r"cu_seqlens_q\[1\] is 5"),
    ],
)
def test_starts_that_lead_outside(starts_k: list[int], message: str) -> None:
    q, k = states(4, NUM_HEADS, HEAD_DIM), states(9, NUM_KV_HEADS, HEAD_DIM)
    starts_q = [0, 5, 4] if "cu_seqlens_q" in message else [0, 1, 4]
    with pytest.raises(IndexError, match=message):
        flash_attn_varlen_func(q, k, k, torch.tensor(starts_q).int(), torch.tensor(starts_k).int(), 4, 9)


def test_keys_past_the_end_are_zeros_where_the_host_sees_no_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device. Memory of nobody, which they could be instead, is NaN here."""
    monkeypatch.setattr(_flash_attn_checks, "host_sees", lambda tensor: False)
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, *shape, **kinds: self.new_full(shape, math.nan, **kinds)
    )
    q, k = states(3, NUM_HEADS, HEAD_DIM), states(9, NUM_KV_HEADS, HEAD_DIM)
    out = flash_attn_varlen_func(q, k, k, starts_of((1, 2)), starts_of((5, 7)), 2, 9)
    monkeypatch.undo()
    padded = torch.cat([k[5:], torch.zeros(3, NUM_KV_HEADS, HEAD_DIM)])
    close(out[1:], dense(q[1:], padded, padded)[0])


def test_sizes_that_differ_name_the_argument() -> None:
    q, k = states(2, 3, NUM_HEADS, HEAD_DIM), states(3, 3, NUM_KV_HEADS, HEAD_DIM)
    for arguments, message in (
        ((q, k, k), "^k must be .* dimension 0 must be 2"),
        ((q, k[:2], k), "^v must be .* dimension 0 must be 2"),
        ((q, k[:2], k[:2, :2]), "^v must be .* dimension 1 must be 3"),
        ((q[0], k, k), "^q must be"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_func(*arguments)


def test_no_keys_and_no_queries() -> None:
    """Output 0 and log-sum-exp -inf where there is no key; results without rows where there is no query."""
    for batch_size, seqlen_q, seqlen_k in ((2, 3, 0), (2, 0, 3), (0, 3, 3), (0, 0, 0), (2, 0, 0)):
        q, k = (states(batch_size, n, NUM_HEADS, HEAD_DIM) for n in (seqlen_q, seqlen_k))
        out, lse, _ = flash_attn_func(q, k, k, return_attn_probs=True)
        assert torch.equal(out, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((batch_size, NUM_HEADS, seqlen_q), -math.inf))
        out, lse = flash_attn_with_kvcache(q, k, k, return_softmax_lse=True)
        assert torch.equal(out, torch.zeros_like(q))
        assert lse.shape == (batch_size, NUM_HEADS, seqlen_q)
        starts = [torch.arange(batch_size + 1).int() * n for n in (seqlen_q, seqlen_k)]
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        out, lse, _ = flash_attn_varlen_func(q, k, k, *starts, seqlen_q, seqlen_k, return_attn_probs=True)
        assert torch.equal(out, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((NUM_HEADS, len(q)), -math.inf))


def test_none_is_off() -> None:
    q, (k, v) = states(2, 5, NUM_HEADS, HEAD_DIM), states(2, 2, 9, NUM_KV_HEADS, HEAD_DIM, seed=1)
    expected = flash_attn_func(q, k, v)
    for window in (None, (None, None), (-1, None)):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window, softcap=None), expected)


def test_arguments_are_those_of_flash_attention() -> None:
    """flash-attn 2.8: names, order and defaults; ours may have more, by keyword."""
    expected = {
        flash_attn_func: "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes "
        "deterministic return_attn_probs",
        flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
        "softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs block_table",
        flash_attn_with_kvcache: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
        "num_splits return_softmax_lse",
    }
    for function, names in expected.items():
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == names.split()
