"""The specification itself, against values worked out by hand and against PyTorch's own attention."""

from __future__ import annotations

import doctest
import math
from typing import Any

import pytest
import torch
from helpers import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    LAYOUTS,
    Backend,
    Case,
    assert_as_exact_as,
    assert_same_bits,
    build_case,
    poison_,
    poisoned,
    ulp,
)
from torch import Tensor

from pagedkv import reference

CPU = torch.device("cpu")


def test_docstring_examples() -> None:
    results = doctest.testmod(reference)
    assert results.attempted > 20
    assert results.failed == 0


def dense_attention(case: Case, seq_idx: int, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch's scaled_dot_product_attention in float64 over the keys and values the case was built from."""
    query_begin, query_end = seq_idx, seq_idx + 1
    if case.query_start_loc is not None:
        query_begin, query_end = case.query_start_loc[seq_idx : seq_idx + 2].tolist()
    query = case.query[query_begin:query_end].double().transpose(0, 1)
    group = query.shape[0] // case.keys[seq_idx].shape[1]
    key, value = (
        x[seq_idx].double().transpose(0, 1).repeat_interleave(group, dim=0) for x in (case.keys, case.values)
    )
    attn_mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    if bias is not None:
        attn_mask = attn_mask + bias
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask.expand(query.shape[0], -1, -1)
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8, *FLOAT8_DTYPES])
@pytest.mark.parametrize("option", ["causal", "non_causal", "window", "kv_starts", "alibi"])
def test_attention_equals_dense_pytorch(option: str, cache_dtype: torch.dtype, layout: str) -> None:
    context_lens, query_lens = [17, 5, 30], [4, 5, 1]
    settings: dict[str, dict[str, Any]] = {
        "causal": {},
        "non_causal": {"causal": False},
        "window": {"window": 6},
        "kv_starts": {"kv_starts": [3, 0, 11]},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    }
    case = build_case(
        context_lens, query_lens, device=CPU, cache_dtype=cache_dtype, layout=layout, **settings[option]
    )
    out = reference.paged_attention(*case.arguments, **case.keywords, compute_dtype=torch.float64)
    begin = 0
    for seq_idx, (context_len, query_len) in enumerate(zip(context_lens, query_lens, strict=True)):
        positions = torch.arange(context_len - query_len, context_len)[:, None]
        distance = torch.arange(context_len)[None] - positions
        mask = distance <= 0 if option != "non_causal" else torch.ones_like(distance, dtype=torch.bool)
        if option == "window":
            mask &= distance > -6
        if option == "kv_starts":
            mask &= (torch.arange(context_len) >= settings[option]["kv_starts"][seq_idx])[None]
        bias = None
        if option == "alibi":
            bias = settings[option]["alibi_slopes"].double()[:, None, None] * distance
        expected = dense_attention(case, seq_idx, mask, bias)
        # The case keeps dequantised rows in float32.
        torch.testing.assert_close(out[begin : begin + query_len], expected, rtol=1e-5, atol=1e-6)
        begin += query_len


def test_two_keys_by_hand() -> None:
    # Scaled logits 10 and 0, values 1 and 0; then with a cap of 5, a sink of 1, a slope of 2.
    query = torch.tensor([[[10.0]]])
    keys, values = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    arguments = query, torch.tensor([[0]]), keys, values, torch.tensor([2])

    def run(**options: Any) -> tuple[float, float]:
        out, lse = reference.paged_attention(*arguments, softmax_scale=1.0, return_lse=True, **options)
        return out.item(), lse.item()

    def softmax(first: float, *others: float) -> tuple[float, float]:
        total = sum(math.exp(x) for x in (first, *others))
        return math.exp(first) / total, math.log(total)

    capped = 5 * math.tanh(2)
    assert run() == pytest.approx(softmax(10, 0), rel=1e-6)
    assert run(softcap=5.0) == pytest.approx(softmax(capped, 0), rel=1e-6)
    assert run(softcap=5.0)[0] == pytest.approx(0.99200, abs=1e-5)
    assert run(sinks=torch.tensor([1.0])) == pytest.approx(softmax(10, 0, 1), rel=1e-6)
    assert run(alibi_slopes=torch.tensor([2.0])) == pytest.approx(softmax(8, 0), rel=1e-6)
    assert run(softcap=5.0, alibi_slopes=torch.tensor([2.0])) == pytest.approx(
        softmax(capped - 2, 0), rel=1e-6
    )
    assert run(window=1) == (0.0, 0.0)
    assert run(kv_starts=torch.tensor([1])) == (0.0, 0.0)
    assert run(kv_starts=torch.tensor([2])) == (0.0, -math.inf)
    assert run(kv_starts=torch.tensor([2]), sinks=torch.tensor([1.5])) == (0.0, 1.5)


def drawn(visible: Tensor) -> str:
    return "".join("x" if v else "." for v in visible)


def test_visible_keys_by_hand() -> None:
    assert drawn(reference.visible_keys(4, 5)) == "xxxxx"
    assert drawn(reference.visible_keys(2, 5)) == "xxx.."
    assert drawn(reference.visible_keys(-1, 2)) == ".."
    assert drawn(reference.visible_keys(-1, 2, causal=False)) == "xx"
    assert drawn(reference.visible_keys(4, 5, window=2)) == "...xx"
    assert drawn(reference.visible_keys(4, 5, window=99)) == "xxxxx"
    assert drawn(reference.visible_keys(2, 6, window=2, causal=False)) == ".xxx.."
    assert drawn(reference.visible_keys(4, 5, kv_start=3)) == "...xx"
    assert drawn(reference.visible_keys(4, 5, kv_start=9)) == "....."

    def tree(row: str, **options: Any) -> str:
        tree_row = torch.tensor([c == "x" for c in row])
        return drawn(reference.visible_keys(tree_row=tree_row, **options))

    assert tree("x.x", position=4, context_len=7) == "xxxxx.x"
    assert tree("..x", position=1, context_len=5) == "xx..x"  # may look ahead
    assert tree("x.x", position=0, context_len=7) == "x...x.x"  # what is before the tree stays causal
    assert tree("xx.x.", position=5, context_len=7, window=3) == "...x.x."
    assert tree("xxx.x", position=0, context_len=2) == ".x"  # columns before key 0 are ignored


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 9, 0, None), (0, 0)),
        ((1, 9, 0, None), (0, 9)),
        ((1, 9, 4, None), (4, 9)),
        ((1, 9, 12, None), (9, 9)),
        ((3, 9, 0, 2), (5, 9)),
        ((3, 9, 7, 2), (7, 9)),
        ((9, 4, 0, 2), (0, 4)),
        ((1, 0, 0, None), (0, 0)),
    ],
)
def test_needed_keys_by_hand(arguments: tuple[int, int, int, int | None], expected: tuple[int, int]) -> None:
    assert reference.needed_keys(*arguments) == expected


def test_index_errors_name_the_entry() -> None:
    case = build_case([9, 4], device=CPU)
    case.block_tables[1, 0] = 99
    with pytest.raises(IndexError, match=r"block_tables\[1, 0\] is 99"):
        reference.paged_attention(*case.arguments)
    with pytest.raises(IndexError, match=r"context_lens\[0\] is 21"):
        reference.paged_attention(*case.arguments[:4], torch.tensor([21, 4]))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_rounding_to_a_dtype_costs_what_it_should(dtype: torch.dtype) -> None:
    # The plain computation that the tolerance rule compares with errs by about the dtype's precision.
    case = build_case([64], [8], device=CPU, dtype=dtype)
    exact = reference.paged_attention(*case.arguments, **case.keywords, compute_dtype=torch.float64)
    plain = reference.paged_attention(*case.arguments, **case.keywords, compute_dtype=dtype)
    rounded = reference.paged_attention(*case.arguments, **case.keywords)
    error = (plain.double() - exact).abs().max().item()
    assert plain.dtype == rounded.dtype == dtype
    assert exact.dtype == torch.float64
    assert 0.05 * torch.finfo(dtype).eps < error < 10 * torch.finfo(dtype).eps
    assert_same_bits(rounded, exact.to(dtype))


def test_quantize_by_hand() -> None:
    x = torch.tensor([1000, -1000, 448, 464, 300, 272, 304, 440, 2**-9, 2**-10, 1.5 * 2**-9]).view(1, -1)
    expected = [448, -448, 448, 448, 288, 256, 320, 448, 2**-9, 0, 2**-8]
    assert reference.quantize(x, None, torch.float8_e4m3fn).float().tolist() == [expected]
    x = torch.tensor([[1.0, 3.0], [1.0, 3.0]])
    scales = torch.tensor([2.0, 0.5])
    assert reference.quantize(x, scales, torch.int8).tolist() == [[0, 2], [2, 6]]


# ------------------------------------------------------------------ the tools that the tests rest on


def test_builder_poisons_all_that_no_query_may_see() -> None:
    case = build_case([9, 0, 30], device=CPU, block_size=4, kv_starts=[2, 0, 0], window=6)
    visible = [(3, 9), (0, 0), (24, 30)]
    expected = torch.zeros(case.key_cache.shape[:2], dtype=torch.bool)
    for seq_idx, (begin, end) in enumerate(visible):
        slots = reference.token_slots(case.block_tables, seq_idx, begin, end, case.key_cache)
        expected.view(-1)[slots] = True
    for cache in case.arguments[2:4]:
        assert torch.equal(cache.abs().flatten(2).amax(2) < 100, expected)
    tables = case.block_tables
    valid = (tables >= 0) & (tables < case.key_cache.shape[0])
    assert valid.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [0] * 10,
        [0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_builder_lays_out_the_same_values_in_every_layout(layout: str) -> None:
    plain, other = (build_case([9, 4], device=CPU, layout=name) for name in ("contiguous", layout))
    assert torch.equal(plain.query, other.query)
    assert torch.equal(plain.block_tables, other.block_tables)
    for cache, same in zip(plain.arguments[2:4], other.arguments[2:4], strict=True):
        slots = reference.token_slots(plain.block_tables, 0, 0, 9, cache)
        assert_same_bits(reference.read_slots(cache, slots), reference.read_slots(same, slots))
        assert same.stride(3) == 1


def test_tolerance_rule_catches_what_it_should() -> None:
    exact = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    plain = (exact + 1e-6).float()
    assert_as_exact_as((exact + 2.9e-6).float(), exact, plain, what="x")
    for wrong in (
        (exact + 5e-6).float(),
        torch.tensor([1.0, torch.nan, 3.0]),
        torch.tensor([1.0, 2.0, torch.inf]),
    ):
        with pytest.raises(AssertionError, match=r"x differs .* first is at \(\d,\)"):
            assert_as_exact_as(wrong, exact, plain, what="x")
    infinite = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
    assert_as_exact_as(infinite.float(), infinite, infinite.float(), what="x")
    with pytest.raises(AssertionError):
        assert_as_exact_as(torch.tensor([0.0, 1.0]), infinite, infinite.float(), what="x")
    assert ulp(1.0, torch.float32) == 2**-23
    assert ulp(3.9, torch.bfloat16) == 2**-6


def test_same_bits_tells_zero_from_minus_zero_and_nan_from_nan() -> None:
    nan = torch.tensor([torch.nan])
    assert_same_bits(nan, nan.clone())
    for a, b in (([0.0], [-0.0]), ([1.0], [1.0000001])):
        with pytest.raises(AssertionError, match=r"first is at \(0,\)"):
            assert_same_bits(torch.tensor(a), torch.tensor(b))
    with pytest.raises(AssertionError, match="float16"):
        assert_same_bits(torch.zeros(1), torch.zeros(1, dtype=torch.float16))


def test_poison_differs_from_zero_everywhere() -> None:
    for dtype in (*FLOAT_DTYPES, *FLOAT8_DTYPES, torch.int8):
        assert (reference.as_bytes(poison_(torch.zeros(64, dtype=dtype))) != 0).all()
    assert poisoned(7, dtype=torch.float32, device=CPU).abs().nan_to_num(torch.inf).min() > 1e38
    assert Backend("cpu", CPU, reference).checks_indices
