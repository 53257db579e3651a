"""Tensors that batches are written to, one after the other: see `PagedKVCache.make_buffers`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from pagedkv import _core
from pagedkv._staging import PinnedStaging

if TYPE_CHECKING:
    from pagedkv._handles import Batch


class BatchBuffers:
    """Where `PagedKVCache.batch` writes a batch instead of making new tensors.

    The addresses stay the same, as a CUDA graph needs, and only rows that have changed are written. A batch
    is overwritten by the next one that is made with its buffers.

    Attributes:
        max_seqs: sequences that a batch can have.
        max_tokens: query tokens of all its sequences.
        max_blocks: blocks of a sequence.
    """

    def __init__(
        self,
        sequences: _core.Sequences,
        num_groups: int,
        max_seqs: int,
        max_tokens: int,
        max_blocks: int,
        device: torch.device,
        staging: PinnedStaging | None,
    ) -> None:
        """Allocate them, for the batches of one core's sequences.

        Without staging, on the CPU, the tensors are the arrays that the C++ core writes.
        """
        self._sequences = sequences
        self.max_seqs, self.max_tokens, self.max_blocks = max_seqs, max_tokens, max_blocks
        self._core = _core.BatchBuffers(num_groups, max_seqs, max_blocks, max_tokens)
        self._host = [
            torch.from_numpy(array)
            for array in (
                self._core.block_tables,
                self._core.context_lens,
                self._core.query_start_loc,
                self._core.slot_mapping,
            )
        ]
        self._staging = staging
        self._batch: weakref.ref[Batch] | None = None  # the one that was written last
        self._tensors = self._host if staging is None else [tensor.to(device) for tensor in self._host]

    def _require_free(self, sequences: _core.Sequences) -> None:
        """Refuse to be written for another cache, or over a batch that is open."""
        if sequences is not self._sequences:
            raise ValueError("the buffers belong to another cache")
        batch = self._batch() if self._batch is not None else None
        if batch is not None and batch._state == "open":
            raise ValueError("the buffers hold a batch that was neither committed nor abandoned")

    def tensors(self, num_seqs: int, num_tokens: int) -> list[torch.Tensor]:
        """The batch that was written last: block_tables, context_lens, query_start_loc, slot_mapping."""

        def parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            sizes = ((1, num_seqs), (0, num_seqs), (0, num_seqs + 1), (1, num_tokens))
            return [tensor.narrow(dim, 0, size) for tensor, (dim, size) in zip(tensors, sizes, strict=True)]

        written = parts(self._tensors)
        if self._staging is not None:
            self._staging.send([part.numpy() for part in parts(self._host)], written)
        return written
