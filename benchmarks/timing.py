"""What the benchmarks share: contenders timed in turn, compared pairwise, and a line that says where."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import pagedkv

MIN_ROUNDS = 3
SAMPLE_SECONDS = 0.02  # long enough for the clock, short enough that a round sees one state of the machine


def parse_arguments(description: str) -> argparse.Namespace:
    """The options of every benchmark; sets the number of threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of torch")
    parser.add_argument("--rounds", type=int, default=31, help="samples of each contender")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


def commit() -> str:
    """The commit that is checked out, `-dirty` where files differ from it; empty where git cannot tell.

    PAGEDKV_COMMIT names that of a copy without a repository.
    """
    if named := os.environ.get("PAGEDKV_COMMIT"):
        return named
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", root, "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine_line() -> str:
    """Machine, versions and commit: a number means nothing without them."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    version = f"pagedkv {pagedkv.__version__} at {commit() or 'an unknown commit'}"
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
        f"{device}; torch {torch.__version__}, {version}"
    )


def measure(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    max_seconds: float = math.inf,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds a call of each contender, `rounds` samples, taken in turn so that all see the same drift.

    A sample is as many calls as take SAMPLE_SECONDS; each round starts with another contender. One that has
    taken max_seconds and MIN_ROUNDS samples sits out the later rounds, so that slow ones do not take it all.
    """
    counts = {}
    for name, call in contenders.items():
        once = elapsed(call, 1, device)  # warm up
        if once < max_seconds / 10:
            once = min(elapsed(call, 1, device) for _ in range(3))
        counts[name] = max(1, round(SAMPLE_SECONDS / once))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken = sum(samples[name]) * counts[name]
            if taken < max_seconds or len(samples[name]) < MIN_ROUNDS:
                samples[name].append(elapsed(contenders[name], counts[name], device) / counts[name])
        after_round()
    return samples


def ratio(samples: dict[str, list[float]], slow: str, fast: str) -> float:
    """The median of slow / fast over the rounds that both took part in, which are the first ones."""
    return statistics.median(a / b for a, b in zip(samples[slow], samples[fast], strict=False))


def elapsed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds for `count` calls, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def memcpy(destination: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """A call that copies a contiguous tensor: on the CPU by as many memcpy of libc as torch has threads."""
    if source.is_cuda or destination.is_cuda:
        return lambda: destination.copy_(source)
    function = ctypes.CDLL(None).memcpy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return lambda: function(destination.data_ptr(), source.data_ptr(), source.nbytes)
    pool = ThreadPoolExecutor(num_threads)
    parts = list(zip(destination.chunk(num_threads), source.chunk(num_threads), strict=True))
    return lambda: list(
        pool.map(lambda pair: function(pair[0].data_ptr(), pair[1].data_ptr(), pair[1].nbytes), parts)
    )


def print_table(title: str, samples: dict[str, list[float]], num_bytes: int) -> None:
    """Median time, bytes a second, and the median of the ratios to pagedkv of the same round."""
    print(f"\n{title} ({num_bytes / 1e6:.1f} MB moved)")
    print(f"  {'':<28}{'median':>12}{'GB/s':>9}{'of pagedkv':>12}")
    for name, seconds in samples.items():
        median = statistics.median(seconds)
        relative = ratio(samples, name, "pagedkv")
        print(f"  {name:<28}{median * 1e6:>9.1f} us{num_bytes / median / 1e9:>9.2f}{relative:>11.2f}x")


def print_bars(bars: list[tuple[str, float, float]]) -> None:
    """What has to be reached: name, value, and what the value has to be at least."""
    print()
    for name, value, limit in bars:
        print(f"{name:<60}{value:>8.2f}  >= {limit:g}  {'met' if value >= limit else 'MISSED'}")
    print(f"bars met: {sum(value >= limit for _, value, limit in bars)} of {len(bars)}")
