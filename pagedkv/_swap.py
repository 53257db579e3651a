"""The host's pool of a cache: where swapped-out sequences and prefixes lie, and the copies there and back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagedkv import _core, ops
from pagedkv._pool import make_pool


class HostPool:
    """Tensors on the host like those of a cache, pinned where the cache is on CUDA.

    On CUDA the copies run on a stream of their own. They wait for what was queued before, `wait_for_arrivals`
    has the current stream wait for what came back, and the blocks that a copy reads are not handed out before
    `finish` has seen it done.

    What the C++ core says has moved has only moved once the copy is queued. Hence the lock: other threads get
    to see both or neither.
    """

    def __init__(
        self,
        core: _core.Sequences,
        caches: Sequence[torch.Tensor],
        num_blocks: int,
        device: torch.device,
        lock: threading.RLock,
    ) -> None:
        """Allocate num_blocks blocks on the host for each of the caches, `[any, ...]`."""
        self._core = core
        self._lock = lock
        self._device = device
        self._device_tensors = list(caches)
        pinned = device.type == "cuda"
        self._tensors = [
            make_pool((num_blocks, *cache.shape[1:]), cache.dtype, torch.device("cpu"), pin_memory=pinned)
            for cache in caches
        ]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[torch.cuda.Event, int]] = deque()
        self._last_arrival: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def swap_out(self, sequence_id: int) -> None:
        """Move a sequence to the host."""
        with self._lock:
            self._copy_out(*self._core.swap_out(sequence_id))

    def swap_out_prefixes(self, num_blocks: int) -> int:
        """Move cached blocks to the host; how many."""
        with self._lock:
            num_moved, transfer_id, pairs = self._core.swap_out_prefixes(num_blocks)
            self._copy_out(transfer_id, pairs)
        return num_moved

    def swap_in(self, sequence_id: int) -> None:
        """Move a sequence back."""
        with self._lock:
            self._copy_in(*self._core.swap_in(sequence_id))

    def add(self, token_ids: Iterable[int] | npt.NDArray[np.integer], root: bytes) -> int:
        """Add a sequence to the core, and move back what it found on the host."""
        with self._lock:
            sequence_id = self._core.add(token_ids, 0, root)
            for transfer_id, pairs in self._core.take_arrivals():
                self._copy_in(transfer_id, pairs)
        return sequence_id

    def _copy_out(self, transfer_id: int, pairs: npt.NDArray[np.int64]) -> None:
        self._copy(self._device_tensors, self._tensors, transfer_id, pairs)

    def _copy_in(self, transfer_id: int, pairs: npt.NDArray[np.int64]) -> None:
        self._last_arrival = self._copy(self._tensors, self._device_tensors, transfer_id, pairs)

    def _copy(
        self,
        source: list[torch.Tensor],
        destination: list[torch.Tensor],
        transfer_id: int,
        pairs: npt.NDArray[np.int64],
    ) -> torch.cuda.Event | None:
        mapping = torch.from_numpy(pairs)
        if self._stream is None:
            ops.swap_blocks(source, destination, mapping)
            self._core.finish_transfer(transfer_id)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            ops.swap_blocks(source, destination, mapping)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._in_flight.append((event, transfer_id))
        return event

    def wait_for_arrivals(self) -> None:
        """Have the current stream wait for the blocks that are on their way back."""
        if self._last_arrival is not None:
            self._last_arrival.wait(torch.cuda.current_stream(self._device))

    def finish(self, *, wait: bool = False) -> bool:
        """Let go of the blocks whose copies are done, or wait for all copies; whether there were any."""
        if not self._in_flight:
            return False
        with self._lock:
            num_before = len(self._in_flight)
            while self._in_flight:
                event, transfer_id = self._in_flight[0]
                if wait:
                    event.synchronize()
                elif not event.query():  # type: ignore[no-untyped-call]
                    break
                self._core.finish_transfer(transfer_id)
                self._in_flight.popleft()
            return len(self._in_flight) < num_before
