"""Attention over a paged cache on the CPU, beside its peers and the machine's limits.

Without arguments: the table of attention_rows.py, and which of its bars are met. `--rows decode-32/8` runs
the rows that begin so, `--peers` has others' kernels take part (attention_peers.py says what they need), and
any option of a shape (`--batch 4 --context 1000 --dtype fp32 --threads 2`) runs that shape alone.

All contenders of a row are checked against float64, then timed in turn, in every round anew: percentages and
ratios are medians over rounds. Rows that are finished are kept in build/benchmarks and not run again for the
same commit, unless `--fresh` says so or files differ from the commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_peers
import roofs
import timing
import torch
from attention_cases import Call, Case, Shape, error, in_turn, make_case, pagedkv_calls, pagedkv_pools
from attention_rows import MEAN_READ_ROOF, ROWS, Bar, Row, is_decode
from tqdm import tqdm

LAYOUTS = ("HND", "NHD")
MAX_SECONDS = 1.5  # of a contender in a row
LARGEST_ERROR = {"fp16": 3e-3, "bf16": 1e-2, "fp32": 1e-4}  # beyond it a contender computes something else
CHOICES = {  # of the fields of a shape that are names
    "dtype": list(LARGEST_ERROR),
    "cache_dtype": ["int8", "e4m3", "e5m2"],
    "block_order": ["random", "sequential"],
}


@dataclasses.dataclass
class Result:
    """What a row gave: seconds of a call, in order of rounds, and relative errors, by contender."""

    samples: dict[str, list[float]]
    errors: dict[str, float]

    def seconds(self, name: str) -> float:
        """The median."""
        return statistics.median(self.samples[name])

    def layout(self, which: str = "best") -> str:
        """A contender of ours: a layout's, or that of the faster one."""
        ours = [f"pagedkv {layout}" for layout in LAYOUTS if f"pagedkv {layout}" in self.samples]
        return min(ours, key=self.seconds) if which == "best" else f"pagedkv {which}"

    def peers(self) -> list[str]:
        """Those that took part."""
        return [name for name in self.samples if name in attention_peers.NAMES]

    def ratio(self, slow: str, fast: str) -> float:
        """Median of slow / fast, round by round."""
        return timing.ratio(self.samples, slow, fast)

    def of_roof(self, roof: str, row: Row, layout: str = "best") -> float:
        """The time that the limit allows over ours. The product measured has other operations than ours."""
        work = row.shape.flops / roofs.GEMM_FLOPS if roof == "GEMM" else 1.0
        return self.ratio(f"{roof} roof", self.layout(layout)) * work

    def value(self, bar: Bar, row: Row) -> float | None:
        """What the bar is about; None where the contenders it needs did not take part."""
        ours = self.layout(bar.layout)
        if ours not in self.samples:
            return None
        if bar.kind == "error":
            return self.errors[ours]
        if bar.kind == "roof":
            return self.of_roof(bar.of, row, bar.layout)
        if bar.kind == "speed":
            named = self.peers() if bar.of == "any" else bar.of.split(",")
            there = [name for name in named if name in self.samples]
            return min((self.ratio(name, ours) for name in there), default=None)
        variant, _, other = bar.of.partition(" / ")
        names = {"": ours, "plain": ours}
        first, second = names.get(variant, variant), names.get(other, other)
        return self.ratio(first, second) if bar.kind == "cost" else self.ratio(second, first)


def run_row(
    row: Row, rounds: int, with_peers: bool, with_kernels: bool, tick: Callable[[], object]
) -> Result:
    """Build, check and time every contender of the row."""
    torch.set_num_threads(row.threads)
    case = make_case(row.shape)
    pools = {layout: pagedkv_pools(case, layout) for layout in LAYOUTS[: 1 if row.variants else None]}
    calls = {f"pagedkv {layout}": pagedkv_calls(case, pools[layout]) for layout in pools}
    cases: dict[str, Case] = dict.fromkeys(calls, case)
    for name, changes in row.variants.items():
        cases[name] = make_case(dataclasses.replace(row.shape, **changes))
        calls[name] = pagedkv_calls(cases[name], pagedkv_pools(cases[name], "HND"))
    if with_peers and not row.variants:
        peers = attention_peers.peer_calls(case, pools["NHD"], with_kernels)
        calls |= peers
        cases |= dict.fromkeys(peers, case)
    errors = {name: checked_error(row, name, cases[name], calls[name][0]) for name in calls}
    contenders = {name: in_turn(calls[name]) for name, relative in errors.items() if relative is not None}
    readers = [roofs.reader([key.transpose(1, 2), value.transpose(1, 2)]) for key, value in pools["HND"]]
    contenders["read roof"] = in_turn(readers)
    if row.shape.query_len == 1 and pools["HND"][0][0][0].nbytes % roofs.PAGE_STEP == 0:
        pages = [
            roofs.page_reader(list(pool), table)
            for pool, table in zip(pools["HND"], case.block_tables, strict=True)
        ]
        contenders["page roof"] = in_turn(pages)
    contenders["GEMM roof"] = roofs.gemm(case.query.dtype)
    samples = timing.measure(contenders, rounds, torch.device("cpu"), MAX_SECONDS, tick)
    return Result(samples, {name: relative for name, relative in errors.items() if relative is not None})


def checked_error(row: Row, name: str, case: Case, call: Call) -> float | None:
    """The error against float64; None, with a word about it, for a peer that cannot take part."""
    try:
        relative = error(case, call())
    except (RuntimeError, NotImplementedError) as reason:
        if name not in attention_peers.NAMES:
            raise
        print(f"{row.name}: {name} is left out, it says: {str(reason).splitlines()[0]}")
        return None
    if not relative <= LARGEST_ERROR[row.shape.dtype]:
        print(f"{row.name}: {name} is left out, its error against float64 is {relative:.2g}")
        return None
    return relative


def print_row(row: Row, result: Result) -> None:
    """One line a contender: median, share of either limit, and how pagedkv compares."""
    print(f"\n{row.name}  ({row.shape.kv_bytes / 2**20:.1f} MiB, {row.shape.flops / 1e9:.1f} GFLOP)")
    best = result.layout()
    for name in result.samples:
        if name.endswith(" roof"):
            continue
        read = result.ratio("read roof", name)
        product = result.ratio("GEMM roof", name) * row.shape.flops / roofs.GEMM_FLOPS
        print(
            f"  {name:<20}{result.seconds(name) * 1e3:>10.3f} ms{read:>7.1%} of read{product:>7.1%} of GEMM"
            f"{result.ratio(name, best):>8.2f}x  error {result.errors[name]:.1e}"
        )
    gigabytes = row.shape.kv_bytes / result.seconds("read roof") / 1e9
    gigaflops = roofs.GEMM_FLOPS / result.seconds("GEMM roof") / 1e9
    pages = ""
    if "page roof" in result.samples:
        paged = row.shape.kv_bytes / result.seconds("page roof") / 1e9
        pages = f", pages in order {paged:.1f} GB/s ({result.ratio('page roof', best):.0%} used)"
    print(f"  roofs: read {gigabytes:.1f} GB/s{pages}, GEMM {gigaflops:.0f} GFLOP/s")


def judge(results: dict[str, Result], rows: list[Row]) -> list[dict[str, Any]]:
    """Every bar of the rows that ran, with its value."""
    found = []

    def add(name: str, value: float | None, limit: float, at_least: bool) -> None:
        met = None if value is None else (value >= limit if at_least else value <= limit)
        found.append({"bar": name, "value": value, "limit": limit, "at_least": at_least, "met": met})

    for row in rows:
        for bar in row.bars:
            nhd = " (NHD)" if bar.layout == "NHD" else ""
            name = f"{row.name}: {bar.kind} {bar.of}{nhd}"
            add(name, results[row.name].value(bar, row), bar.limit, bar.at_least)
    shares = [results[row.name].of_roof("read", row) for row in rows if is_decode(row)]
    if shares:
        add(
            f"decode, {len(shares)} rows: roof read, mean",
            statistics.geometric_mean(shares),
            MEAN_READ_ROOF,
            True,
        )
    return found


def print_bars(found: list[dict[str, Any]]) -> None:
    """The missed ones with their figures, and how many are met."""
    print()
    for bar in found:
        if bar["met"] is None:
            print(f"not measured  {bar['bar']}")
        elif not bar["met"]:
            sign = ">=" if bar["at_least"] else "<="
            print(f"MISSED  {bar['bar']:<66}{bar['value']:>9.4g}  {sign} {bar['limit']:g}")
    measured = [bar for bar in found if bar["met"] is not None]
    print(f"bars met: {sum(bar['met'] for bar in measured)} of {len(found)}")


def plot(path: Path, results: dict[str, Result], rows: list[Row]) -> None:
    """Share of the nearer limit, pagedkv and the best peer of each row."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.35 * len(rows) + 1.5), layout="constrained")
    for i, row in enumerate(rows):
        result = results[row.name]

        def share(name: str, row: Row = row, result: Result = result) -> float:
            work = row.shape.flops / roofs.GEMM_FLOPS
            return max(result.ratio("read roof", name), result.ratio("GEMM roof", name) * work)

        axes.barh(i - 0.2, share(result.layout()), 0.4, color="C0", label="pagedkv" if i == 0 else None)
        if result.peers():
            fastest = min(result.peers(), key=result.seconds)
            axes.barh(i + 0.2, share(fastest), 0.4, color="C7", label="best peer" if i == 0 else None)
            axes.text(0.01, i + 0.2, fastest, va="center", fontsize="x-small", color="white")
    axes.set(yticks=range(len(rows)), yticklabels=[row.name for row in rows], xlim=(0, 1.1))
    axes.set_xlabel("share of the machine's limit: memory read or matrix product, whichever is nearer")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(path)


class Store:
    """Finished rows, in a file of the commit. A tree that differs from its commit has none."""

    def __init__(self, fresh: bool, key: str) -> None:
        """Read what is there."""
        commit = timing.commit()
        self.path = roofs.BUILD / f"paged_attention-{commit}.json"
        self.key = key
        self.is_kept = commit != "" and not commit.endswith("-dirty")
        self.rows: dict[str, Any] = {}
        if self.is_kept and not fresh and self.path.exists():
            self.rows = json.loads(self.path.read_text())

    def get(self, row: Row) -> Result | None:
        """The row's result, if it was finished as it is now."""
        kept = self.rows.get(f"{row.name} {self.key}")
        return Result(**kept["result"]) if kept and kept["row"] == repr(row) else None

    def put(self, row: Row, result: Result) -> None:
        """Keep it."""
        self.rows[f"{row.name} {self.key}"] = {"row": repr(row), "result": dataclasses.asdict(result)}
        if self.is_kept:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows))


def at_least(minimum: float, kind: type) -> Callable[[str], Any]:
    """The type of an option whose values start at the minimum."""

    def number(text: str) -> Any:
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return value

    return number


def parse_arguments() -> tuple[argparse.Namespace, list[Row]]:
    """The options, of which every field of a shape is one, and the rows that they choose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = at_least(1, int)
    parser.add_argument("--rows", nargs="+", help="the rows whose names begin so")
    parser.add_argument("--peers", action="store_true", help="others' kernels take part")
    parser.add_argument("--rounds", type=count, default=9, help="samples of each contender of a row")
    parser.add_argument("--fresh", action="store_true", help="run the rows again that were finished before")
    parser.add_argument("--json", type=Path, help="where to write rows and bars")
    parser.add_argument("--plot", type=Path, help="where to draw shares of the machine's limits")
    group = parser.add_argument_group("a shape of your own, instead of the table")
    group.add_argument("--threads", type=count, help="default: 1")
    for field in dataclasses.fields(Shape):
        option = "--" + field.name.replace("_", "-")
        default = field.default
        if isinstance(default, bool):
            group.add_argument(option, action="store_const", const=True, help="on")
        elif isinstance(default, str):
            choices = CHOICES[field.name]
            group.add_argument(option, choices=choices, help=f"default: {default or 'that of the queries'}")
        else:
            kind = at_least(1 if default else 0, type(default))
            group.add_argument(option, type=kind, help=f"default: {default or 'off'}")
    arguments = parser.parse_args()
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent} to write {path.name} into")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    try:
        return arguments, choose_rows(arguments)
    except ValueError as reason:
        parser.error(str(reason))


def choose_rows(arguments: argparse.Namespace) -> list[Row]:
    """The shape that was described, or the rows of the table that this process has cores for."""
    names = [field.name for field in dataclasses.fields(Shape)]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if given or arguments.threads:
        if arguments.rows:
            raise ValueError("--rows chooses from the table, which a shape of your own replaces")
        shape = Shape(**given)
        if shape.query_len > shape.context:
            raise ValueError(
                f"query_len {shape.query_len} is more than context {shape.context}, which counts queries too"
            )
        if shape.heads % shape.kv_heads != 0:
            raise ValueError(f"heads, {shape.heads}, is no multiple of kv_heads, {shape.kv_heads}")
        if shape.head_dim % 8 != 0 or shape.head_dim > 256:
            raise ValueError(f"head_dim is {shape.head_dim}; supported: multiples of 8 up to 256")
        return [Row("shape", shape, arguments.threads or 1, [])]
    num_cores = len(os.sched_getaffinity(0))
    rows = [row for row in ROWS if row.name.startswith(tuple(arguments.rows or [""]))]
    if not rows:
        raise ValueError(f"no row's name begins with {' or '.join(arguments.rows)}")
    for row in rows:
        if row.threads > num_cores:
            print(f"left out for want of cores: {row.name}")
    return [row for row in rows if row.threads <= num_cores]


def main() -> None:
    """Run the rows, print them and the bars."""
    arguments, rows = parse_arguments()
    with_kernels = arguments.peers and attention_peers.load_kernels()
    print(timing.machine_line())
    store = Store(arguments.fresh, f"peers={arguments.peers} rounds={arguments.rounds}")
    results: dict[str, Result] = {}
    with tqdm(total=len(rows) * arguments.rounds, smoothing=0, unit="round", dynamic_ncols=True) as bar:
        for row in rows:
            bar.set_description(row.name)
            result = store.get(row)
            if result is None:
                result = run_row(row, arguments.rounds, arguments.peers, with_kernels, bar.update)
                store.put(row, result)
            else:
                bar.update(arguments.rounds)
            results[row.name] = result
            with bar.external_write_mode():
                print_row(row, result)
    found = judge(results, rows)
    print_bars(found)
    if arguments.json:
        report = {
            "machine": timing.machine_line(),
            "rows": {name: dataclasses.asdict(result) for name, result in results.items()},
            "bars": found,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(arguments.plot, results, rows)


if __name__ == "__main__":
    main()
