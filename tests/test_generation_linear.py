"""Packed linear layers: what `nn.Linear` gives, and with `reproducible` the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pagedkv.generation import PackedLinear, linear, pack_linears

SHAPES = [(576, 1536), (960, 576), (97, 64), (100, 40), (64, 4864)]


@pytest.fixture(params=["packed", "plain"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch's private operators, and as if they were gone."""
    if request.param == "plain":
        monkeypatch.setattr(linear, "pack_weight", lambda weight: None)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_values(packing: str, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 24, bias=bias, dtype=dtype)
    packed = PackedLinear(layer.weight, layer.bias, reproducible=True)
    assert packed.is_packed == (packing == "packed")
    for shape in ((1, 40), (5, 40), (2, 3, 40), (70, 40)):
        x = torch.randn(shape, dtype=dtype)
        torch.testing.assert_close(packed(x), layer(x))
        residual = torch.randn(*shape[:-1], 24, dtype=dtype)
        expected = (layer(x).float() + residual.float()).to(dtype)
        torch.testing.assert_close(packed(x, residual), expected, rtol=1.6e-2, atol=1e-2)  # rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_same_bits_in_every_batch(
    packing: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(131, shape[1], generator=generator).to(dtype)
    layer = PackedLinear(weight, reproducible=True)
    residual = torch.randn(131, shape[0], generator=generator).to(dtype)
    expected, added = layer(x), layer(x, residual)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 64, 130):
        for begin in (0, 1, 131 - num_rows):
            rows = slice(begin, begin + num_rows)
            assert torch.equal(layer(x[rows]), expected[rows]), (num_rows, begin)
            assert torch.equal(layer(x[rows], residual[rows]), added[rows]), (num_rows, begin)


def test_why_plain_layers_are_not_enough() -> None:
    """float32: another kernel for few rows. Should this fail, torch has changed, and PackedLinear may go."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(960, 576, generator=generator), torch.randn(64, 576, generator=generator)
    expected = functional.linear(x, weight)
    assert not all(
        torch.equal(functional.linear(x[:num_rows], weight), expected[:num_rows]) for num_rows in range(1, 10)
    )


def test_linears_of_a_module_are_replaced_but_not_their_subclasses() -> None:
    class Special(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"inner": nn.Linear(8, 4), "other": Special(4, 4)}))
    pack_linears(module)
    inner = module[1]
    assert isinstance(module[0], PackedLinear)
    assert isinstance(inner["inner"], PackedLinear)
    assert isinstance(inner["other"], Special)


def test_weights_on_huge_pages_are_the_same() -> None:
    torch.manual_seed(0)
    layers = [PackedLinear(torch.randn(1536, 576)) for _ in range(4)]
    x = torch.randn(3, 576)
    expected = [layer(x) for layer in layers]
    linear.use_huge_pages(layers)
    assert all(torch.equal(layer(x), out) for layer, out in zip(layers, expected, strict=True))
