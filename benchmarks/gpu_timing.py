"""How the GPU benchmarks time: calls in a row, by events, over more data than the L2 cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

# Calls rotate over copies of their data, as a model's layers do. Together the copies are many times the L2
# cache of any card, so that every call finds its own in memory.
COLD_BYTES = 2**30
ROUNDS = 9


def num_copies(num_bytes: int, device: torch.device) -> int:
    """Copies of num_bytes that calls have to rotate over; the CPU's run is only a rehearsal."""
    return max(1, min(256, -(-COLD_BYTES // num_bytes))) if device.type == "cuda" else 2


def repeat(calls: Sequence[Call], device: torch.device, in_graph: bool) -> Callable[[], float]:
    """A function that runs the calls one after another and returns the seconds that one of them took.

    Replayed from a CUDA graph, as engines do, the host's part is left out.
    """
    if device.type == "cpu":
        return lambda: _host_seconds(calls) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles, and allocates what is allocated once
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if in_graph:
        with torch.cuda.graph(graph):
            for call in calls:
                call()

    def seconds() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if in_graph:
            graph.replay()
        else:
            for call in calls:
                call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / len(calls)

    seconds()
    return seconds


def _host_seconds(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def measure(
    contenders: dict[str, Sequence[Call]], device: torch.device, *, in_graph: bool = True
) -> dict[str, list[float]]:
    """Seconds a call of each contender, ROUNDS samples, taken in turn.

    One that fails is named and left out, unless it is pagedkv.
    """
    repeats = {}
    for name, calls in contenders.items():
        try:
            repeats[name] = repeat(calls, device, in_graph)
        except (RuntimeError, NotImplementedError, ValueError) as reason:
            if name == "pagedkv":
                raise
            print(f"  {name} is left out, it says: {str(reason).strip().splitlines()[0]}")
    samples: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(ROUNDS if device.type == "cuda" else 1):
        for name, seconds in repeats.items():
            samples[name].append(seconds())
    return samples


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy from device memory to device memory."""
    source = torch.empty(
        2**31 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device
    ).random_()
    destination = torch.empty_like(source)
    samples = measure({"copy": [lambda: destination.copy_(source)] * 4}, device, in_graph=False)["copy"]
    return 2 * source.nbytes / statistics.median(samples)


def matrix_rate(device: torch.device) -> float:
    """Floating-point operations a second of a large bfloat16 product by torch."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    samples = measure({"product": [lambda: torch.mm(a, b, out=out)] * 4}, device)["product"]
    return 2 * size**3 / statistics.median(samples)
