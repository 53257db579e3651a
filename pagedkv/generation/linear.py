"""Linear layers for inference: weights packed once, and rows whose bits do not depend on the batch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

# With one row oneDNN may choose a kernel that sums in another order; from two rows on a row's bits stay.
_MIN_ROWS = 2
# Rows of the GEMM where weights cannot be packed: always the same shape, hence the same kernel.
_ROW_TILE = 32
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # of Linux 6.1, not yet in mmap


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` without gradients, for any number of leading dimensions.

    On a CPU the weight is packed into oneDNN's own layout, once; `torch.nn.functional.linear` does so in
    every call. torch's operators for that are private: where they are missing or refuse the weight, plain
    linear layers do the work.

    Args:
        weight: `[out_features, in_features]`; a copy is packed.
        bias: `[out_features]` or None.
        reproducible: a row's result has the same bits in every batch. Costs time only where the weight could
            not be packed.

    >>> layer = PackedLinear(torch.eye(3), reproducible=True)
    >>> layer(torch.ones(2, 1, 3)).shape
    torch.Size([2, 1, 3])
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, reproducible: bool = False) -> None:
        """Pack the weight."""
        super().__init__()
        weight = weight.detach()
        packed = pack_weight(weight)
        self.is_packed = packed is not None
        self.reproducible = reproducible
        # Neither parameters nor buffers: a packed tensor is opaque and cannot be copied or saved.
        self._weight = weight if packed is None else packed
        self._bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`, added to the residual of this shape."""
        if x.dim() != 2:
            added = None if residual is None else residual.reshape(-1, self.out_features)
            rows = self.forward(x.reshape(-1, self.in_features), added)
            return rows.view(*x.shape[:-1], self.out_features)
        if not self.is_packed:
            out = self._tiled(x) if self.reproducible else functional.linear(x, self._weight, self._bias)
            return out if residual is None else out + residual
        if self.reproducible and len(x) < _MIN_ROWS:
            repeated = None if residual is None else residual.expand(_MIN_ROWS, -1).contiguous()
            return self._packed(x.expand(_MIN_ROWS, -1).contiguous(), repeated)[: len(x)]
        return self._packed(x, residual)

    def _packed(self, rows: Tensor, added: Tensor | None) -> Tensor:
        linear, weight, bias = torch.ops.mkldnn._linear_pointwise, self._weight, self._bias
        out: Tensor = (
            linear.default(rows, weight, bias, "none", [], "")
            if added is None
            else linear.binary(rows, added, weight, bias, "add")
        )
        return out

    def _tiled(self, rows: Tensor) -> Tensor:
        num_tiles = -(-len(rows) // _ROW_TILE)
        padded = functional.pad(rows, (0, 0, 0, num_tiles * _ROW_TILE - len(rows)))
        tiles = [functional.linear(tile, self._weight, self._bias) for tile in torch.split(padded, _ROW_TILE)]
        return torch.cat(tiles)[: len(rows)]


def pack_weight(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout; None where that is not possible."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        row = weight.new_zeros(1, weight.shape[1])
        torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], "")
        torch.ops.mkldnn._linear_pointwise.binary(row, weight.new_zeros(1, len(weight)), packed, None, "add")
    except (AttributeError, RuntimeError):
        return None
    return packed


def pack_linears(module: nn.Module, *, reproducible: bool = False) -> None:
    """Put a PackedLinear in the place of every `nn.Linear` in the module, but not of its subclasses."""
    packed: list[PackedLinear] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed.append(PackedLinear(child.weight, child.bias, reproducible=reproducible))
                setattr(parent, name, packed[-1])
    use_huge_pages(packed)


def use_huge_pages(layers: Iterable[PackedLinear]) -> None:
    """Have the system move packed weights to huge pages; where it will not, nothing changes.

    A step of few rows mostly reads weights, and the processor fetches ahead up to the end of a page only.
    """
    packed = [layer._weight for layer in layers if layer.is_packed]
    try:
        spans = [(torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)) for weight in packed]
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, RuntimeError):
        return
    # First all of them: pages are moved only where all that lies in a huge one has the same settings.
    for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
        for address, num_bytes in spans:
            begin = address // _HUGE_PAGE * _HUGE_PAGE
            for page in range(begin, address + num_bytes, _HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), advice)
