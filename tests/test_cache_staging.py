"""The pinned memory that batches pass through, with stand-ins for the device."""

from __future__ import annotations

import numpy as np
import torch

from pagedkv._staging import _NUM_SLOTS, PinnedStaging


class Event:
    """Stands in for a CUDA event; what it was recorded behind is done when somebody waits."""

    def __init__(self) -> None:
        self.pending = False
        self.num_waits = 0

    def record(self) -> None:
        assert not self.pending
        self.pending = True

    def synchronize(self) -> None:
        self.num_waits += self.pending
        self.pending = False


class Staging(PinnedStaging):
    def __init__(self) -> None:
        self.num_allocations = 0
        super().__init__(torch.device("cpu"))

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self.num_allocations += 1
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def _make_event(self) -> torch.cuda.Event:
        return Event()  # type: ignore[return-value]

    def _record(self, event: torch.cuda.Event) -> None:
        event.record()


def arrays(value: int, size: int = 5) -> list[np.ndarray]:
    tables = np.full((2, 3, size), value, dtype=np.int32)
    return [tables[:, :2], np.array([value], dtype=np.int32), np.full((1, size), value, dtype=np.int64)]


def test_arrays_arrive_as_they_were() -> None:
    staging = Staging()
    for value in range(3):
        sent = arrays(value)
        tensors = staging.send(sent)
        for tensor, array in zip(tensors, sent, strict=True):
            assert tensor.tolist() == array.tolist()
            assert tensor.dtype == torch.from_numpy(array).dtype
            array[...] = -1
        assert [tensor.flatten()[0].item() for tensor in tensors] == [value] * 3
    assert [tensor.numel() for tensor in staging.send([np.empty((1, 0, 0), dtype=np.int32)])] == [0]


def test_arrays_arrive_in_given_places() -> None:
    staging = Staging()
    target = torch.zeros(2, 4, 5, dtype=torch.int32)
    places = [
        target[:, :2],
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 9, dtype=torch.int64)[:, :5],
    ]
    assert staging.send(arrays(7), places)[0] is places[0]
    assert [place.unique().tolist() for place in places] == [[7]] * 3
    assert target[:, 2:].unique().tolist() == [0]


def test_fault_pinned_staging_buffer_reuse() -> None:
    """A slot is not written again before the copies out of it are done."""
    staging = Staging()
    events: list[Event] = staging._events  # type: ignore[assignment]
    for value in range(_NUM_SLOTS):
        staging.send(arrays(value))
    assert [event.num_waits for event in events] == [0] * _NUM_SLOTS
    assert all(event.pending for event in events)
    held = [buffer.clone() for buffer in staging._buffers]
    num_allocations = staging.num_allocations
    staging.send(arrays(9))
    assert [event.num_waits for event in events] == [1] + [0] * (_NUM_SLOTS - 1)
    assert not torch.equal(staging._buffers[0], held[0])
    assert all(torch.equal(a, b) for a, b in zip(staging._buffers[1:], held[1:], strict=True))
    assert staging.num_allocations == num_allocations
    staging.send(arrays(9, size=500))  # needs a larger slot
    assert staging.num_allocations == num_allocations + 1
