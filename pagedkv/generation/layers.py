"""What lies between attention and linear layers, in one pass over memory where torch takes several."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` of each row of `[num_rows, width]`, a row's bits in any batch.

    >>> rms_norm(torch.full((1, 2), 3.0), torch.ones(2), 0.0)
    tensor([[1., 1.]])
    """
    if x.device.type == "cpu":
        out: Tensor = torch.ops.pagedkv._rms_norm.default(x, weight, eps)
        return out
    return functional.rms_norm(x, weight.shape, weight, eps)


def silu_and_mul(gate_and_up: Tensor) -> Tensor:
    """`silu(gate) * up`, the two halves of each row: `[num_rows, 2 * width]` -> `[num_rows, width]`.

    >>> silu_and_mul(torch.tensor([[0.0, 5.0]]))
    tensor([[0.]])
    """
    if gate_and_up.device.type == "cpu":
        out: Tensor = torch.ops.pagedkv._silu_and_mul.default(gate_and_up)
        return out
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
