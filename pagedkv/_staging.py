"""The way of a batch's arrays to a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_NUM_SLOTS = 4
_ALIGNMENT = 16  # of each array within a slot


class PinnedStaging:
    """Pinned memory through which arrays go to the device, kept from one batch to the next.

    A few slots take turns, so that the host can prepare batches while the device is busy with earlier ones. A
    slot is written again only when the copies out of it are done.
    """

    def __init__(self, device: torch.device) -> None:
        """Make empty slots; they grow as needed."""
        self._device = device
        self._buffers = [self._allocate(0) for _ in range(_NUM_SLOTS)]
        self._events = [self._make_event() for _ in range(_NUM_SLOTS)]
        self._next_slot = 0

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _make_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _record(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._device))  # of this device, whichever is current

    def send(
        self, arrays: Sequence[npt.NDArray[np.generic]], destinations: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Queue the arrays for the device, and return them there: in one new tensor, or in the destinations.

        The arrays may be changed as soon as this returns.
        """
        begins = [0]
        for array in arrays:
            begins.append(begins[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
        slot = self._next_slot
        self._next_slot = (slot + 1) % _NUM_SLOTS
        self._events[slot].synchronize()  # returns at once where nothing was recorded yet
        if self._buffers[slot].nbytes < begins[-1]:
            self._buffers[slot] = self._allocate(2 * begins[-1])
        staged = self._buffers[slot][: begins[-1]]
        parts = _parts(staged, begins, arrays)
        for part, array in zip(parts, arrays, strict=True):
            part.copy_(torch.from_numpy(array))
        if destinations is None:
            moved = staged.to(self._device, non_blocking=True, copy=True)
            result = _parts(moved, begins, arrays)
        else:
            result = list(destinations)
            for destination, part in zip(result, parts, strict=True):
                destination.copy_(part, non_blocking=True)
        self._record(self._events[slot])
        return result


def _parts(
    buffer: torch.Tensor, begins: Sequence[int], arrays: Sequence[npt.NDArray[np.generic]]
) -> list[torch.Tensor]:
    """The arrays' places in a buffer, as tensors of their dtypes and shapes."""
    return [
        buffer[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for begin, array in zip(begins, arrays, strict=False)
    ]
