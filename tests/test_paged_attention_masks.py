"""paged_attention: what a query sees and how scores become weights, with values worked out by hand.

Keys of zero make every weight equal, so that the output is the mean of the visible values and lse the
logarithm of their number; values equal to the key's position turn an off-by-one into a difference of 0.5.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import FLOAT_DTYPES, Backend, Case, assert_same_bits, build_case, check_attention, dtype_name
from torch import Tensor

OPERATORS = ("paged_attention",)


def mean_case(
    backend: Backend, context_lens: list[int], query_lens: list[int] | None = None, **settings: Any
) -> Case:
    """A case with K = 0 and V[i] = i, poisoned as always elsewhere; one head."""
    settings = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, **settings}
    case = build_case(context_lens, query_lens, device=backend.device, **settings)
    for seq_idx, context_len in enumerate(context_lens):
        for token_idx in range(context_len):
            block = int(case.block_tables[seq_idx, token_idx // case.key_cache.shape[1]])
            if 0 <= block < case.key_cache.shape[0]:
                offset = token_idx % case.key_cache.shape[1]
                if case.key_cache[block, offset].isfinite().all():
                    case.key_cache[block, offset] = 0
                    case.value_cache[block, offset] = token_idx
    return case


def first_elements(out: Tensor) -> list[float]:
    """Element 0 of head 0 of each row."""
    return [float(x) for x in out[:, 0, 0]]


def two_key_case(backend: Backend, logit: float, query_len: int = 1) -> Case:
    """Two keys with scaled logits `logit` and 0 and values 1 and 0; head_dim 64, scale 0.125."""
    case = build_case([2], [query_len], device=backend.device, num_heads=1, num_kv_heads=1, head_dim=64)
    block = int(case.block_tables[0, 0])
    case.query.zero_()
    case.query[..., 0] = 8.0
    for cache, first in ((case.key_cache, logit), (case.value_cache, 1.0)):
        cache[block, :2] = 0
        cache[block, 0, 0, 0] = first
    return case


@pytest.mark.parametrize("split_size", [None, 1, 64])
def test_causal_top_left(backend: Backend, split_size: int | None) -> None:
    case = mean_case(backend, [5], [2])
    out, lse = case.run(backend, split_size=split_size, return_lse=True)
    assert first_elements(out) == pytest.approx([1.5, 2.0], rel=1e-6)
    assert lse[:, 0].tolist() == pytest.approx([math.log(4), math.log(5)], rel=1e-6)
    out = case.run(backend, split_size=split_size, causal=False)
    assert first_elements(out) == pytest.approx([2.0, 2.0], rel=1e-6)


@pytest.mark.parametrize("split_size", [None, 1, 64])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_fully_masked_row(backend: Backend, dtype: torch.dtype, split_size: int | None) -> None:
    case = mean_case(backend, [2, 0], [5, 3], dtype=dtype)
    out, lse = case.run(backend, return_lse=True, split_size=split_size)
    assert first_elements(out) == [0, 0, 0, 0, 0.5, 0, 0, 0]
    assert (out[[0, 1, 2, 5, 6, 7]] == 0).all()
    infinite = -torch.inf
    assert lse[:, 0].tolist() == pytest.approx(
        [infinite, infinite, infinite, 0, math.log(2), infinite, infinite, infinite], rel=1e-6
    )
    # Without causality the early rows see both keys.
    out = case.run(backend, causal=False, split_size=split_size)
    assert first_elements(out) == [0.5] * 5 + [0] * 3


def test_fully_masked_row_with_sink(backend: Backend) -> None:
    case = mean_case(backend, [2], [5])
    out, lse = case.run(backend, return_lse=True, sinks=torch.full((1,), -1.5, device=backend.device))
    assert (out[:3] == 0).all()
    assert lse[:3, 0].tolist() == [-1.5, -1.5, -1.5]


@pytest.mark.parametrize("window", [1, 128, 299, 300, 301, 100_000])
@pytest.mark.parametrize("split_size", [None, 7, 64])
def test_window_off_by_one_decode(backend: Backend, window: int, split_size: int | None) -> None:
    case = mean_case(backend, [300], block_size=16, window=window)
    out, lse = case.run(backend, return_lse=True, split_size=split_size)
    visible = min(window, 300)
    assert first_elements(out) == pytest.approx([299 - (visible - 1) / 2], rel=1e-6)  # 128: 235.5
    assert lse.item() == pytest.approx(math.log(visible), rel=1e-6)
    if window >= 300:
        assert_same_bits(out, case.run(backend, split_size=split_size, window=None))


@pytest.mark.parametrize("window", [0, -1])
def test_window_below_one_is_refused(backend: Backend, window: int) -> None:
    case = build_case([5], device=backend.device)
    with pytest.raises(ValueError, match=r"window.*-?\d"):
        case.run(backend, window=window)


def test_window_without_causality_is_two_sided(backend: Backend) -> None:
    # |key - query| < 3: queries at 4, 5, 6 of 7 keys see 2-6, 3-6 and 4-6.
    case = mean_case(backend, [7], [3], window=3)
    out, lse = case.run(backend, causal=False, return_lse=True)
    assert first_elements(out) == pytest.approx([4.0, 4.5, 5.0], rel=1e-6)
    assert lse[:, 0].exp().tolist() == pytest.approx([5, 4, 3], rel=1e-6)
    case = mean_case(backend, [7], [7], window=3)
    out = case.run(backend, causal=False)
    assert first_elements(out) == pytest.approx([1, 1.5, 2, 3, 4, 4.5, 5], rel=1e-6)


@pytest.mark.parametrize("context_len", [7, 8, 9, 32])
def test_window_ignored_in_decode(backend: Backend, context_len: int) -> None:
    window = 8
    decode = build_case([context_len], device=backend.device, window=window)
    prefill = build_case([context_len], [1], device=backend.device, window=window)
    out = check_attention(backend, decode)
    assert_same_bits(out, check_attention(backend, prefill))
    assert_same_bits(decode.run(backend, split_size=4), prefill.run(backend, split_size=4))
    if context_len > window:
        assert not torch.equal(out, build_case([context_len], device=backend.device).run(backend))


@pytest.mark.parametrize("split_size", [None, 16, 64])
def test_window_masks_first_tile(backend: Backend, split_size: int | None) -> None:
    for query_len in (10, 130):
        case = build_case(
            [1000],
            [query_len],
            device=backend.device,
            head_dim=8,
            block_size=16,
            window=8,
            split_size=split_size,
        )
        check_attention(backend, case)


def test_window_with_chunked_prefill(backend: Backend) -> None:
    whole = build_case([13], [13], device=backend.device)
    expected = check_attention(backend, whole, window=5)
    for chunks in ([4, 4, 4, 1], [1] * 13):
        begin = 0
        for chunk in chunks:
            end = begin + chunk
            out = backend.ops.paged_attention(
                whole.query[begin:end],
                *whole.arguments[1:4],
                backend.tensor([end]),
                query_start_loc=backend.tensor([0, chunk]),
                window=5,
            )
            torch.testing.assert_close(out, expected[begin:end], rtol=1e-5, atol=1e-6)
            begin = end


# --------------------------------------------------------------------------------------- score steps


@pytest.mark.parametrize("split_size", [None, 1, 64])
@pytest.mark.parametrize("query_len", [None, 1, 2])
def test_softcap_dropped(backend: Backend, query_len: int | None, split_size: int | None) -> None:
    case = two_key_case(backend, 10.0, query_len or 1)
    options: dict[str, Any] = {"split_size": split_size}
    if query_len is None:
        options["query_start_loc"] = None
    outs = [case.run(backend, softcap=cap, **options)[-1, 0, 0].item() for cap in (0.0, 5.0, 50.0)]
    expected = [1 / (1 + math.exp(-x)) for x in (10, 5 * math.tanh(2), 50 * math.tanh(0.2))]
    assert outs == pytest.approx(expected, abs=2e-6)
    assert outs[:2] == pytest.approx([0.999955, 0.99200], abs=1e-5)
    assert len(set(outs)) == 3


def test_softcap_order(backend: Backend) -> None:
    case = two_key_case(backend, 10.0)  # raw q.k is 80
    assert case.run(backend, softcap=5.0)[0, 0, 0].item() == pytest.approx(0.99200, abs=1e-5)
    # The cap comes before ALiBi: a bias of -20 on the first key outweighs the cap of 5.
    slopes = torch.full((1,), 20.0, device=backend.device)
    expected = 1 / (1 + math.exp(-(5 * math.tanh(2) - 20)))
    assert case.run(backend, softcap=5.0, alibi_slopes=slopes)[0, 0, 0].item() == pytest.approx(
        expected, rel=1e-4
    )


def test_softcap_takes_extreme_scores(backend: Backend) -> None:
    case = two_key_case(backend, 1e30)
    out, lse = case.run(backend, softcap=5.0, return_lse=True)
    assert out[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-5)), rel=1e-6)
    assert lse.item() == pytest.approx(math.log(math.exp(5) + 1), rel=1e-6)


@pytest.mark.parametrize("logit", [1e4, 1e30, -1e30])
def test_extreme_scores_do_not_overflow(backend: Backend, logit: float) -> None:
    out, lse = two_key_case(backend, logit).run(backend, return_lse=True)
    assert out[0, 0, 0].item() == (1.0 if logit > 0 else 0.0)
    assert lse.item() == pytest.approx(max(logit, 0.0), rel=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-3, 3.0])
def test_softmax_scale_may_be_any_number(backend: Backend, scale: float) -> None:
    check_attention(backend, build_case([9, 30], [3, 1], device=backend.device), softmax_scale=scale)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8, torch.float8_e5m2], ids=dtype_name)
@pytest.mark.parametrize("split_size", [None, 1, 2, 64])
def test_sink_counted_twice_or_lost(
    backend: Backend, split_size: int | None, cache_dtype: torch.dtype
) -> None:
    case = build_case([4, 0], device=backend.device, cache_dtype=cache_dtype, num_heads=2, num_kv_heads=1)
    block = int(case.block_tables[0, 0])
    case.key_cache[block] = 0
    case.value_cache[block] = 1
    if cache_dtype != torch.float32:
        case.options["v_scale"] = 1.0
    sinks = torch.zeros(2, device=backend.device)
    out, lse = case.run(backend, sinks=sinks, split_size=split_size, return_lse=True)
    torch.testing.assert_close(out[0], torch.full_like(out[0], 0.8), rtol=1e-6, atol=0)
    assert lse[0].tolist() == pytest.approx([math.log(5)] * 2, rel=1e-6)
    assert (out[1] == 0).all()
    assert (lse[1] == 0).all()
    # A window that empties the first splits.
    out = case.run(backend, sinks=sinks, split_size=split_size, window=1)
    torch.testing.assert_close(out[0], torch.full_like(out[0], 0.5), rtol=1e-6, atol=0)


def test_sink_of_minus_infinity_is_no_sink(backend: Backend) -> None:
    case = build_case([4, 9, 0], device=backend.device)
    sinks = torch.full((4,), -torch.inf, device=backend.device)
    out, lse = case.run(backend, sinks=sinks, return_lse=True)
    expected_out, expected_lse = case.run(backend, return_lse=True)
    torch.testing.assert_close(out, expected_out, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_large_sinks(backend: Backend) -> None:
    case = mean_case(backend, [4, 70])
    for sink in (100.0, -100.0, 1e30, -1e30):
        check_attention(backend, case, sinks=torch.full((1,), sink, device=backend.device))


@pytest.mark.operators("paged_attention", "merge_attn_states")
def test_lse_base_mismatch(backend: Backend) -> None:
    _, lse = mean_case(backend, [8]).run(backend, return_lse=True)
    assert lse.item() == pytest.approx(2.0794, abs=1e-4)
    # A prefix of 4000 keys and a suffix of 96, merged, against all 4096 at once.
    case = build_case([4096], device=backend.device, head_dim=64, block_size=16)
    whole, whole_lse = case.run(backend, return_lse=True)
    arguments = case.query, case.block_tables, case.key_cache, case.value_cache
    prefix = backend.ops.paged_attention(*arguments, backend.tensor([4000]), return_lse=True)
    suffix = case.run(backend, kv_starts=backend.tensor([4000]), return_lse=True)
    merged, merged_lse = backend.ops.merge_attn_states(*prefix, *suffix)
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged_lse, whole_lse, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------- ALiBi


@pytest.mark.parametrize("split_size", [None, 1, 2, 64])
def test_alibi_relative_distance(backend: Backend, split_size: int | None) -> None:
    slopes = torch.full((1,), 0.5, device=backend.device)
    results = []
    for query_lens in (None, [1], [3]):
        case = mean_case(backend, [5], query_lens)
        out, lse = case.run(backend, alibi_slopes=slopes, return_lse=True, split_size=split_size)
        assert lse[-1].item() == pytest.approx(0.84710, abs=1e-5)
        weights = [math.exp(0.5 * (i - 4)) for i in range(5)]
        expected = sum(i * weight for i, weight in enumerate(weights)) / sum(weights)
        assert first_elements(out)[-1] == pytest.approx(expected, rel=1e-6)
        results.append(out[-1])
    if split_size is not None:
        assert_same_bits(results[0], results[1])
        assert_same_bits(results[0], results[2])


def test_alibi_without_causality_is_not_symmetric(backend: Backend) -> None:
    # bias = slope * (key - query), positive for keys after the query.
    case = mean_case(backend, [3], [3])
    slopes = torch.ones(1, device=backend.device)
    _, lse = case.run(backend, alibi_slopes=slopes, causal=False, return_lse=True)
    expected = [math.log(sum(math.exp(key - query) for key in range(3))) for query in range(3)]
    assert lse[:, 0].tolist() == pytest.approx(expected, rel=1e-6)


def test_alibi_slope_precision(backend: Backend) -> None:
    context_len = 8192
    slope = torch.tensor([0.0039215])  # not a bfloat16
    case = mean_case(backend, [context_len], dtype=torch.bfloat16, block_size=16)
    case.query.zero_()
    values = (torch.arange(context_len) % 2).to(torch.bfloat16)
    case.value_cache[case.block_tables[0, : context_len // 16].long()] = (
        values.view(-1, 16, 1, 1).expand(-1, 16, 1, 8).to(backend.device)
    )
    out, lse = case.run(backend, alibi_slopes=slope.to(backend.device), return_lse=True)
    bias = slope.double() * (torch.arange(context_len) - (context_len - 1))
    weights = torch.softmax(bias, 0)
    assert lse.item() == pytest.approx(torch.logsumexp(bias, 0).item(), abs=1e-4)
    assert out[0, 0, 0].item() == pytest.approx((weights @ values.double()).item(), rel=4e-3)
    with pytest.raises(TypeError, match=r"alibi_slopes.*[Ff]loat"):
        case.run(backend, alibi_slopes=slope.to(torch.bfloat16).to(backend.device))


# ------------------------------------------------------------------------------- kv_starts and trees


@pytest.mark.parametrize("split_size", [None, 3, 64])
def test_kv_starts_hide_left_padding(backend: Backend, split_size: int | None) -> None:
    case = mean_case(backend, [9, 9, 9, 9], [2, 2, 2, 2], kv_starts=[0, 3, 8, 9])
    out, lse = case.run(backend, return_lse=True, split_size=split_size)
    assert first_elements(out) == pytest.approx([3.5, 4.0, 5.0, 5.5, 0.0, 8.0, 0.0, 0.0], rel=1e-6)
    assert (out[[4, 6, 7]] == 0).all()
    assert (lse[[4, 6, 7]] == -torch.inf).all()
    check_attention(backend, case, window=4)
    check_attention(backend, case, causal=False)


def test_kv_start_beyond_the_context_sees_nothing(backend: Backend) -> None:
    case = mean_case(backend, [9, 5], kv_starts=[2, 50])
    out, lse = case.run(backend, return_lse=True)
    assert first_elements(out) == pytest.approx([5.0, 0.0], rel=1e-6)
    assert lse[1].item() == -torch.inf


def tree(rows: list[str], device: torch.device) -> Tensor:
    """A tree mask drawn with x and dots."""
    return torch.tensor([[c == "x" for c in row] for row in rows], device=device)


@pytest.mark.parametrize("split_size", [None, 1, 64])
def test_tree_mask_replaces_causality(backend: Backend, split_size: int | None) -> None:
    # Five keys before the tree; four draft tokens: a root, two children, and a child of the first.
    mask = tree(["x...", "xx..", "x.x.", "xx.x"], backend.device)
    case = mean_case(backend, [9], [4], tree_mask=mask)
    out, lse = case.run(backend, return_lse=True, split_size=split_size)
    seen = [[5], [5, 6], [5, 7], [5, 6, 8]]
    expected = [(10 + sum(row)) / (5 + len(row)) for row in seen]
    assert first_elements(out) == pytest.approx(expected, rel=1e-6)
    assert lse[:, 0].exp().tolist() == pytest.approx([6, 7, 7, 8], rel=1e-6)


def test_tree_mask_wider_than_the_sequence(backend: Backend) -> None:
    # Columns before key 0 are ignored, whatever they hold: the last column is the last key.
    mask = tree(["xxx.x", "x..xx", "xx..x"], backend.device)
    case = mean_case(backend, [2], [3], tree_mask=mask)
    out, lse = case.run(backend, return_lse=True)
    assert first_elements(out) == pytest.approx([1.0, 0.5, 1.0], rel=1e-6)
    assert lse[:, 0].exp().tolist() == pytest.approx([1, 2, 1], rel=1e-6)


def test_tree_mask_may_see_forward_and_nothing(backend: Backend) -> None:
    # The mask decides alone among its keys: a row may see a later key, and may see none.
    case = mean_case(
        backend, [3, 6], [3, 2], tree_mask=tree(["..x", "...", "x.x", "..x", "..."], backend.device)
    )
    out, lse = case.run(backend, return_lse=True)
    assert first_elements(out) == pytest.approx([2.0, 0.0, 1.0, 2.0, 1.0], rel=1e-6)
    assert lse[1].item() == -torch.inf


def test_tree_mask_narrower_than_the_queries(backend: Backend) -> None:
    # Keys before the tree stay causal: query 0 at position 2 does not see keys 3 and 4, only 0 - 2.
    case = mean_case(backend, [7], [5], tree_mask=tree(["..", "..", "x.", "x.", ".x"], backend.device))
    out = case.run(backend)
    assert first_elements(out) == pytest.approx([1.0, 1.5, 15 / 6, 15 / 6, 16 / 6], rel=1e-6)


def test_tree_mask_with_window_needs_both(backend: Backend) -> None:
    # Queries at 5 and 6 with a window of 3 see from keys 3 and 4 on.
    case = mean_case(backend, [7], [2], tree_mask=tree(["xx.x.", "x.x.x"], backend.device), window=3)
    out, lse = case.run(backend, return_lse=True)
    assert first_elements(out) == pytest.approx([(3 + 5) / 2, (4 + 6) / 2], rel=1e-6)
    assert lse[:, 0].exp().tolist() == pytest.approx([2, 2], rel=1e-6)


def test_tree_mask_in_decode_and_strided(backend: Backend) -> None:
    mask = tree(["x..x.x", "..x..x"], backend.device)
    check_attention(backend, build_case([9, 3], device=backend.device, tree_mask=mask[:, 2:]))
    check_attention(backend, build_case([9, 3], device=backend.device, tree_mask=mask[:, :0]))


def test_tree_mask_equal_to_causal_changes_nothing(backend: Backend) -> None:
    query_lens = [5, 3]
    rows = torch.cat([torch.tril(torch.ones(n, 5, dtype=torch.bool), 5 - n) for n in query_lens])
    case = build_case([20, 11], query_lens, device=backend.device)
    expected = case.run(backend, split_size=64)
    assert_same_bits(case.run(backend, split_size=64, tree_mask=rows.to(backend.device)), expected)


def test_tree_mask_without_causality_is_refused(backend: Backend) -> None:
    case = build_case([5], [2], device=backend.device)
    with pytest.raises(ValueError, match=r"tree_mask.*causal"):
        case.run(backend, tree_mask=tree(["xx", "xx"], backend.device), causal=False)
