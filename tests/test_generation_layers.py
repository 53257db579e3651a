"""The passes between linear layers: as exact as torch's, and each row alone."""

from __future__ import annotations

import pytest
import torch
from generation_helpers import packed_model
from torch import Tensor
from torch.nn import functional

from pagedkv.generation.layers import rms_norm, silu_and_mul
from pagedkv.generation.sampling import greedy_tokens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 31, 64, 576, 1000]


def assert_as_exact(actual: Tensor, same_in_torch: Tensor, expected: Tensor) -> None:
    """At most twice torch's error against float64, and an ulp at the largest value."""
    ulp = torch.finfo(actual.dtype).eps * expected.abs().max()
    assert (actual - expected).abs().max() <= 2 * (same_in_torch - expected).abs().max() + ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, generator=generator).to(dtype)
    x = torch.randn(9, 2 * width, generator=generator).to(dtype)[:, :width]
    out = rms_norm(x, weight, 1e-5)
    expected = functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    assert_as_exact(out, functional.rms_norm(x, (width,), weight, 1e-5), expected)
    assert torch.equal(rms_norm(x[4:5], weight, 1e-5), out[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(9, 2 * width, generator=generator)).to(dtype)
    out = silu_and_mul(x)
    gate, up = x.chunk(2, -1)
    assert_as_exact(out, functional.silu(gate) * up, functional.silu(gate.double()) * up)
    assert torch.equal(silu_and_mul(x[4:5]), out[4:5])


def test_silu_far_from_zero() -> None:
    gate = torch.tensor([-torch.inf, -1e30, -200.0, -80.0, 80.0, 200.0, 1e30, torch.inf, torch.nan])
    out = silu_and_mul(torch.cat([gate, torch.ones(9)]).unsqueeze(0))[0]
    assert (out[1:4].abs() < 1e-30).all()
    assert torch.equal(out[4:8], gate[4:8])
    assert out[8].isnan()


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.float32), ("gemma2", torch.bfloat16)])
def test_activations_of_whole_models_do_not_depend_on_threads(family: str, dtype: torch.dtype) -> None:
    """Those of torch do: SiLU in float32, GELU in bfloat16 too."""
    activation = packed_model(family, 64).model.model.layers[0].mlp.act_fn
    x = 4 * torch.randn(1, 3000, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = activation(x)
        for threads in (3, 5, 7):
            torch.set_num_threads(threads)
            for num_rows in (8, 100, 171, 900, 2003, 3000):
                assert torch.equal(activation(x[:, :num_rows]), expected[:, :num_rows]), (threads, num_rows)
    finally:
        torch.set_num_threads(num_threads)


def test_errors() -> None:
    with pytest.raises(ValueError, match="width of x"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="two halves"):
        silu_and_mul(torch.ones(2, 7))
    with pytest.raises(TypeError, match="x"):
        rms_norm(torch.ones(2, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [100, 512, 1024])
@pytest.mark.parametrize("highest", [-1.0, 0.0, 3.0])
def test_greedy_tokens_are_the_first_of_the_largest(
    dtype: torch.dtype, vocab_size: int, highest: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (highest - 0.5 - torch.rand(5, vocab_size, generator=generator)).to(dtype)
    logits[1:, 70] = logits[1:, 90] = highest
    logits[2, 60] = -0.0 if highest == 0 else highest
    expected = [row.tolist().index(row.max().item()) for row in logits]
    assert greedy_tokens(logits) == expected
    assert expected[1:] == [70, 60, 70, 70]
