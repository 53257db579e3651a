"""Bookkeeping of blocks: the C++ core against vLLM's managers, in one process, paired round by round.

Traces T1 to T6 are what a serving engine asks of a block manager. vLLM's modules take part with --peers where
they can be imported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import timing

from pagedkv import BlockAllocator, BlockTable
from pagedkv._core import BatchBuffers, Sequences
from pagedkv._prefix import prefix_root

BLOCK_SIZE = 16
POOL = 100_000
ROOT = prefix_root(None, None, BLOCK_SIZE)
Tokens = npt.NDArray[np.int32]


@dataclass
class Row:
    """One contender of one trace: seconds an operation, by round."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def microseconds(self) -> float:
        return statistics.median(self.seconds) * 1e6


@dataclass
class Bar:
    """A number that a row has to reach."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Contest:
    """Rows that are measured in turn, so that the ratios of a round see one state of the machine."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def run(self, rounds: int, contenders: dict[str, Callable[[], float]]) -> None:
        """Each contender does a sample and returns its seconds an operation."""
        names = list(contenders)
        for name in names:
            self.rows[name] = Row(name)
            contenders[name]()
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                self.rows[name].seconds.append(contenders[name]())

    def ratio(self, slow: str, fast: str) -> float | None:
        """Median over the rounds of slow / fast; None where one of them did not run."""
        if slow not in self.rows or fast not in self.rows:
            return None
        pairs = zip(self.rows[slow].seconds, self.rows[fast].seconds, strict=True)
        return statistics.median(a / b for a, b in pairs)


def timed(call: Callable[[], object], num_operations: int) -> float:
    """Seconds an operation."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) / num_operations


# Traces.


def mixed_operations(count: int) -> list[tuple[str, int]]:
    """T1: ("allocate", 1 to 1000 blocks) and ("free", which of the live ones), at most 60 of them."""
    generator = np.random.default_rng(1)
    operations: list[tuple[str, int]] = []
    num_live = 0
    for _ in range(count):
        if num_live >= 60 or (num_live > 0 and generator.random() < 0.45):
            operations.append(("free", int(generator.integers(num_live))))
            num_live -= 1
        else:
            operations.append(("allocate", int(generator.integers(1, 1001))))
            num_live += 1
    return operations


def requests(seed: int) -> Iterator[Tokens]:
    """T3 and T4: 2,048 tokens, the first 1,024 from one of 4 system prompts."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, 128_000, 1024) for _ in range(4)]
    while True:
        tail = generator.integers(0, 128_000, 1024)
        yield np.concatenate([prompts[int(generator.integers(4))], tail]).astype(np.int32)


def replay(
    operations: list[tuple[str, int]],
    allocate: Callable[[int], object],
    free: Callable[[object], object],
) -> float:
    """T1 once, and everything freed at its end."""
    live: list[object] = []

    def run() -> None:
        for verb, number in operations:
            if verb == "allocate":
                live.append(allocate(number))
            else:
                free(live.pop(number))

    seconds = timed(run, len(operations))
    for blocks in live:
        free(blocks)
    return seconds


# The contenders.


def t1_contenders() -> dict[str, Callable[[], float]]:
    operations = mixed_operations(1500)
    pool = BlockAllocator(POOL, BLOCK_SIZE)
    return {
        "T1 array": lambda: replay(operations, pool.allocate_array, pool.free_many),
        "T1 list": lambda: replay(operations, pool.allocate_many, pool.free_many),
    }


class DecodeSteps:
    """T2: 256 sequences of 128 to 4,096 tokens that grow by one token a step."""

    def __init__(self, reuse: bool) -> None:
        self.lens = np.random.default_rng(2).integers(128, 4096, 256)
        self.reuse = reuse
        self.restart()

    def restart(self) -> None:
        self.core = Sequences(POOL, BLOCK_SIZE)
        self.ids = np.array([self.core.add(None, int(n)) for n in self.lens])
        self.core.commit(self.core.open_batch(self.ids).batch_id)
        self.buffers = BatchBuffers(1, 256, 512, 256) if self.reuse else None
        self.num_steps = 0

    def sample(self) -> float:
        def run() -> None:
            for _ in range(20):
                self.core.append_each(self.ids)
                self.core.commit(self.core.open_batch(self.ids, None, self.buffers).batch_id)

        if self.num_steps > 2000:
            self.restart()
        self.num_steps += 20
        return timed(run, 20)


class Requests:
    """T3 (a pool that everything fits into) and T4 (constant eviction), in samples of 20 requests."""

    def __init__(self, num_blocks: int, as_list: bool) -> None:
        self.core = Sequences(num_blocks, BLOCK_SIZE)
        self.source = requests(3)
        self.as_list = as_list

    def sample(self) -> float:
        batch = [next(self.source) for _ in range(20)]
        tokens = [request.tolist() for request in batch] if self.as_list else batch

        def run() -> None:
            for request in tokens:
                sequence = self.core.add(request, 0, ROOT)
                self.core.commit(self.core.open_batch([sequence]).batch_id)
                self.core.free(sequence)

        return timed(run, 20)

    def warm_up(self, num_samples: int) -> Requests:
        """Until the pool is full and every request evicts."""
        for _ in range(num_samples):
            self.sample()
        return self


def t5_contenders() -> dict[str, Callable[[], float]]:
    parent = BlockTable(allocator=BlockAllocator(POOL, BLOCK_SIZE))
    parent.allocate(1000)
    core = Sequences(POOL, BLOCK_SIZE)
    sequence = core.add(list(range(1000)))
    core.commit(core.open_batch([sequence]).batch_id)

    def forks() -> float:
        children: list[BlockTable] = []
        return timed(lambda: children.extend(parent.fork() for _ in range(500)), 500)

    def appends() -> float:
        children = [parent.fork() for _ in range(500)]
        return timed(lambda: [child.allocate(1) for child in children], 500)

    def sequence_forks() -> float:
        children: list[int] = []
        seconds = timed(lambda: children.extend(core.fork(sequence) for _ in range(500)), 500)
        for child in children:
            core.free(child)
        return seconds

    return {"T5 child": forks, "T5 append": appends, "T5 child sequence": sequence_forks}


def t6_contenders() -> dict[str, Callable[[], float]]:
    tokens = np.random.default_rng(6).integers(0, 128_000, 65_536).astype(np.int32)
    as_list = tokens.tolist()
    core = Sequences(8192, BLOCK_SIZE)
    core.commit(core.open_batch([core.add(tokens, 0, ROOT)]).batch_id)
    return {
        "T6 numpy": lambda: timed(lambda: core.probe(tokens, ROOT), 1),
        "T6 list": lambda: timed(lambda: core.probe(as_list, ROOT), 1),
    }


# What has to be reached.


def bars(contest: Contest) -> list[Bar]:
    """The bars of the rows that ran."""
    found: list[Bar] = []

    def ratio(fast: str, slow: str, limit: float) -> None:
        value = contest.ratio(slow, fast)
        if value is not None:
            found.append(Bar(f"{slow} / {fast}", value, limit, at_least=True))

    def at_most(fast: str, slow: str, limit: float) -> None:
        value = contest.ratio(fast, slow)
        if value is not None:
            found.append(Bar(f"{fast} / {slow}", value, limit, at_least=False))

    def absolute(name: str, limit: float) -> None:
        found.append(Bar(f"{name}, us", contest.rows[name].microseconds, limit, at_least=False))

    ratio("T1 array", "T1 vLLM", 40)
    ratio("T1 list", "T1 vLLM", 8)
    ratio("T2 full", "T2 vLLM", 70)
    absolute("T2 full", 25)
    ratio("T2 incremental", "T2 vLLM", 120)
    ratio("T3 numpy", "T3 vLLM", 20)
    ratio("T3 list", "T3 vLLM", 12)
    ratio("T4 numpy", "T4 vLLM", 20)
    at_most("T4 numpy", "T3 numpy", 1.2)
    at_most("T4 32k pool", "T4 numpy", 1.3)
    absolute("T5 child", 1)
    absolute("T5 append", 0.5)
    ratio("T6 numpy", "T6 vLLM", 30)
    ratio("T6 list", "T6 vLLM", 16)
    return found


def contests(peers: dict[str, Callable[[], dict[str, Callable[[], float]]]], rounds: int) -> Contest:
    """All traces, each with the peers that it has."""
    contest = Contest()

    def run(trace: str, contenders: dict[str, Callable[[], float]], rounds: int) -> None:
        contest.run(rounds, {**contenders, **(peers[trace]() if trace in peers else {})})

    run("T1", t1_contenders(), rounds)
    run("T2", {"T2 full": DecodeSteps(False).sample, "T2 incremental": DecodeSteps(True).sample}, rounds)
    run(
        "T3",
        {
            "T3 numpy": Requests(POOL, False).sample,
            "T3 list": Requests(POOL, True).sample,
            "T4 numpy": Requests(4096, False).warm_up(10).sample,
            "T4 32k pool": Requests(32_768, False).warm_up(30).sample,
        },
        rounds,
    )
    run("T5", t5_contenders(), rounds)
    run("T6", t6_contenders(), rounds)
    return contest


def main() -> None:
    """Print where, a line a row, and how many bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="vLLM's managers, where they can be imported")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each row")
    parser.add_argument("--json", type=Path, help="where to write the rows and bars")
    arguments = parser.parse_args()
    print(timing.machine_line())
    peers = {}
    if arguments.peers:
        import manager_peers

        peers = manager_peers.contenders()
    contest = contests(peers, arguments.rounds)
    for row in contest.rows.values():
        print(f"{row.name:<20}{row.microseconds:>12.2f} us")
    found = bars(contest)
    for bar in found:
        sign = ">=" if bar.at_least else "<="
        print(f"{bar.name:<30}{bar.value:>10.2f}  {sign} {bar.limit:g}  {'met' if bar.met else 'MISSED'}")
    if arguments.json:
        rows = {row.name: row.microseconds for row in contest.rows.values()}
        report = {
            "machine": timing.machine_line(),
            "microseconds": rows,
            "bars": [{**vars(bar), "met": bar.met} for bar in found],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"bars met: {sum(bar.met for bar in found)} of {len(found)}")


if __name__ == "__main__":
    main()
