"""merge_attn_states: the attention over a union of key sets from the attention over each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from helpers import FLOAT_DTYPES, Backend, assert_as_exact_as, assert_same_bits, dtype_name, embed, poisoned
from torch import Tensor

from pagedkv import reference

OPERATORS = ("merge_attn_states",)


def state(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, backend: Backend, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    lse = torch.randn(num_tokens, num_heads, generator=generator) * 4
    return out.to(backend.device), lse.to(backend.device)


def check_merge(
    backend: Backend, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    out, lse = backend.ops.merge_attn_states(*a, *b)
    double_a, double_b = (a[0].double(), a[1]), (b[0].double(), b[1])
    exact, _ = reference.merge_attn_states(*double_a, *double_b)
    weights = torch.softmax(torch.stack([a[1], b[1]]), dim=0).nan_to_num(
        0
    )  # the same in float32, rounded once
    plain = weights[0, ..., None] * a[0].float().nan_to_num(0) + weights[1, ..., None] * b[
        0
    ].float().nan_to_num(0)
    assert_as_exact_as(out, exact, plain.to(out.dtype), what="out")
    exact_lse = torch.logaddexp(a[1].double(), b[1].double())
    # An absolute error of one epsilon in a logarithm is a relative one in what it stands for.
    assert_as_exact_as(lse, exact_lse, torch.logaddexp(a[1], b[1]), what="lse", slack=2.4e-7)
    assert lse.dtype == torch.float32
    assert out.dtype == a[0].dtype
    assert out.is_contiguous()
    assert lse.is_contiguous()
    return out, lse


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 20, 64, 66, 96, 128, 200, 256, 512, 576])
def test_every_dtype_and_head_dim(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    check_merge(backend, state(5, 3, head_dim, dtype, backend, 0), state(5, 3, head_dim, dtype, backend, 1))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 63, 300])
@pytest.mark.parametrize("num_heads", [1, 7, 64])
def test_sizes(backend: Backend, num_tokens: int, num_heads: int) -> None:
    dtype = torch.bfloat16
    check_merge(
        backend,
        state(num_tokens, num_heads, 16, dtype, backend, 0),
        state(num_tokens, num_heads, 16, dtype, backend, 1),
    )


def test_equal_states_give_their_mean(backend: Backend) -> None:
    ones, lse = torch.ones(2, 3, 8, device=backend.device), torch.full((2, 3), 2.0, device=backend.device)
    out, merged = backend.ops.merge_attn_states(ones, lse, 3 * ones, lse)
    assert (out == 2).all()
    torch.testing.assert_close(merged, lse + math.log(2))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_merge_two_empty_states(backend: Backend, dtype: torch.dtype) -> None:
    infinite = torch.full((4, 2), -torch.inf, device=backend.device)
    finite_out, finite_lse = state(4, 2, 24, dtype, backend, 0)
    zeros = torch.zeros_like(finite_out)
    garbage = poisoned(4, 2, 24, dtype=dtype, device=backend.device)
    for a in (zeros, garbage):
        for b in (zeros, garbage):
            out, lse = backend.ops.merge_attn_states(a, infinite, b, infinite)
            assert_same_bits(out, zeros)
            assert (lse == -torch.inf).all()
        # Exactly the finite state, whichever side it is on and whatever the empty one holds.
        for arguments in ((a, infinite, finite_out, finite_lse), (finite_out, finite_lse, a, infinite)):
            out, lse = backend.ops.merge_attn_states(*arguments)
            assert_same_bits(out, finite_out)
            assert_same_bits(lse, finite_lse)


def test_empty_and_finite_rows_side_by_side(backend: Backend) -> None:
    a, b = state(6, 4, 16, torch.float32, backend, 0), state(6, 4, 16, torch.float32, backend, 1)
    a[1][::2, 1] = -torch.inf
    a[0][::2, 1] = torch.nan
    b[1][1:3, ::2] = -torch.inf
    b[0][1:3, ::2] = torch.inf
    out, _ = check_merge(backend, a, b)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "lse_pair", [(1e4, -1e4), (-1e4, 1e4), (3e38, 1.0), (-3e38, -3e38), (88.8, 88.8), (500.0, 500.0)]
)
def test_extreme_lse(backend: Backend, lse_pair: tuple[float, float]) -> None:
    (out_a, lse_a), (out_b, lse_b) = (state(2, 2, 8, torch.float32, backend, seed) for seed in range(2))
    check_merge(backend, (out_a, lse_a.fill_(lse_pair[0])), (out_b, lse_b.fill_(lse_pair[1])))


def test_nan_is_not_swallowed(backend: Backend) -> None:
    a, b = state(1, 3, 8, torch.float32, backend, 0), state(1, 3, 8, torch.float32, backend, 1)
    a[0][0, 0, 3] = torch.nan
    a[1][0, 1] = torch.nan
    out, lse = backend.ops.merge_attn_states(*a, *b)
    assert out[0, 0].isnan().tolist() == [i == 3 for i in range(8)]
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan()
    assert out[0, 2].isfinite().all()
    assert lse[0, 2].isfinite()


def test_order_of_the_parts_does_not_matter(backend: Backend) -> None:
    a, b = state(9, 4, 32, torch.bfloat16, backend, 0), state(9, 4, 32, torch.bfloat16, backend, 1)
    for left, right in zip(
        backend.ops.merge_attn_states(*a, *b), backend.ops.merge_attn_states(*b, *a), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-6)


def test_strided_inputs(backend: Backend) -> None:
    for dtype in FLOAT_DTYPES:
        a, b = state(5, 3, 24, dtype, backend, 0), state(5, 3, 24, dtype, backend, 1)
        expected = backend.ops.merge_attn_states(*a, *b)
        wide_lse = torch.full((5, 8), torch.nan, device=backend.device)
        wide_lse[:, 2:5] = a[1]
        strided = backend.ops.merge_attn_states(
            embed(a[0], tail_dim=3),
            wide_lse[:, 2:5],
            b[0].transpose(0, 1).contiguous().transpose(0, 1),
            b[1],
        )
        for actual, right in zip(strided, expected, strict=True):
            assert_same_bits(actual, right)


def test_inputs_are_not_changed_and_calls_repeat(backend: Backend) -> None:
    a, b = state(40, 3, 24, torch.float16, backend, 0), state(40, 3, 24, torch.float16, backend, 1)
    copies = [x.clone() for x in (*a, *b)]
    first = backend.ops.merge_attn_states(*a, *b)
    second = backend.ops.merge_attn_states(*a, *b)
    for x, old in zip((*a, *b), copies, strict=True):
        assert_same_bits(x, old)
    for x, y in zip(first, second, strict=True):
        assert_same_bits(x, y)


@hypothesis.given(lse_a=st.floats(-80, 80, width=32), lse_b=st.floats(-80, 80, width=32))
@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_weights_are_a_partition(backend: Backend, lse_a: float, lse_b: float) -> None:
    one = torch.ones(1, 1, 8, device=backend.device)
    a, b = (torch.full((1, 1), lse, device=backend.device) for lse in (lse_a, lse_b))
    out, _ = backend.ops.merge_attn_states(one, a, one, b)
    torch.testing.assert_close(out, one, rtol=2e-7, atol=0)
    check_merge(backend, (one, a), (-one, b))


Call = dict[str, Any]
MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "out_a rank": (ValueError, "out_a.*num_tokens", lambda a: {"out_a": a["out_a"][0]}),
    "out_b tokens": (ValueError, "out_b", lambda a: {"out_b": a["out_b"][1:]}),
    "out_b heads": (ValueError, "out_b", lambda a: {"out_b": a["out_b"][:, 1:]}),
    "out_b head_dim": (ValueError, "out_b", lambda a: {"out_b": a["out_b"][..., 1:]}),
    "out_a strided": (
        ValueError,
        "out_a.*contiguous",
        lambda a: {"out_a": a["out_a"].repeat(1, 1, 2)[..., ::2]},
    ),
    "out_b strided": (
        ValueError,
        "out_b.*contiguous",
        lambda a: {"out_b": a["out_b"].repeat(1, 1, 2)[..., ::2]},
    ),
    "lse_a transposed": (
        ValueError,
        "lse_a.*contiguous",
        lambda a: {"lse_a": a["lse_a"].t().contiguous().t()},
    ),
    "lse_a shape": (ValueError, "lse_a", lambda a: {"lse_a": a["lse_a"].t()}),
    "lse_b shape": (ValueError, "lse_b", lambda a: {"lse_b": a["lse_b"][1:]}),
    "lse_b rank": (ValueError, "lse_b", lambda a: {"lse_b": a["lse_b"][..., None]}),
    "out_a dtype": (
        TypeError,
        "out_a.*float16, bfloat16, float32",
        lambda a: {"out_a": a["out_a"].double(), "out_b": a["out_b"].double()},
    ),
    "out dtypes": (TypeError, "out_b.*out_a", lambda a: {"out_b": a["out_b"].half()}),
    "lse dtype": (TypeError, "(?i)lse_a.*float", lambda a: {"lse_a": a["lse_a"].double()}),
    "lse half": (TypeError, "(?i)lse_b.*float", lambda a: {"lse_b": a["lse_b"].half()}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors(backend: Backend, mistake: str) -> None:
    exception, message, change = MISTAKES[mistake]
    out_a, lse_a = state(5, 3, 16, torch.float32, backend, 0)
    out_b, lse_b = state(5, 3, 16, torch.float32, backend, 1)
    arguments: Call = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    arguments |= change(arguments)
    with pytest.raises(exception, match=f"(?s){message}"):
        backend.ops.merge_attn_states(**arguments)


@pytest.mark.parametrize("place", range(4))
def test_inference_only(backend: Backend, place: int) -> None:
    arguments = [*state(5, 3, 16, torch.float32, backend, 0), *state(5, 3, 16, torch.float32, backend, 1)]
    arguments[place].requires_grad_()
    name = ("out_a", "lse_a", "out_b", "lse_b")[place]
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*torch\.no_grad\(\)"):
        backend.ops.merge_attn_states(*arguments)
