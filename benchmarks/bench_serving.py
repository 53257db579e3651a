"""Throughput on a real model: paged against contiguous caches, transformers and vLLM, at equal KV memory.

    make bench-serving            ours and transformers', about 45 minutes
    make bench-serving PEERS=1    with vLLM's CPU engine, which VLLM_PYTHON's environment has, and with
                                  VLLM_PRELOAD's libraries, such as libiomp5.so and tcmalloc

SmolLM2-135M, one thread, workloads of serving_workloads.py, requests a second of CPU time. Each stage is a
process of its own; finished ones are kept in build/serving and not run again with the same code (--fresh
does). pagedkv and vLLM take turns, and their ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
from serving_workloads import KV_TOKENS, WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ["bfloat16", "float32"]
KEPT = ROOT / "build" / "serving"
# Slow systems see the beginning of a workload.
PREFIX = {"S": 24, "D": 8, "B": 24}
WHOLE = {"pagedkv", "vllm", "slots"}
# Rough requests a second in bfloat16, to say beforehand how long it takes.
ROUGH_RATE = {
    "pagedkv": {"S": 2.5, "D": 1.5, "B": 1.8},
    "vllm": {"S": 2.3, "D": 1.3, "B": 1.4},
    "slots": {"S": 0.9, "D": 0.3, "B": 1.1},
    "traditional": {"S": 0.6, "D": 0.2, "B": 0.5},
    "transformers": {"S": 0.25, "D": 0.1, "B": 0.2},
    "generate_batch": {"S": 0.2, "D": 0.1, "B": 0.2},
}
START_SECONDS = {"vllm": 60}
FLOAT32_FACTOR = 1.7


@dataclass(frozen=True)
class Stage:
    """One run of one system."""

    system: str
    workload: str
    dtype: str
    pair: int

    @property
    def row(self) -> str:
        return f"{self.workload} {self.dtype} {self.system}"

    @property
    def limit(self) -> int:
        return len(WORKLOADS[self.workload]()) if self.system in WHOLE else PREFIX[self.workload]

    @property
    def rough_seconds(self) -> float:
        factor = FLOAT32_FACTOR if self.dtype == "float32" else 1.0
        return (
            START_SECONDS.get(self.system, 12) + factor * self.limit / ROUGH_RATE[self.system][self.workload]
        )


@dataclass
class Bar:
    """A ratio or share that has to be reached."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value >= self.limit


def stages(peers: bool, pairs: int, dtypes: list[str], workloads: list[str]) -> Iterator[Stage]:
    """In the order in which they run: pairs take turns."""
    for dtype in dtypes:
        for workload in workloads:
            for pair in range(pairs):
                yield Stage("pagedkv", workload, dtype, pair)
                if peers:
                    yield Stage("vllm", workload, dtype, pair)
            yield Stage("traditional", workload, dtype, 0)
            if workload != "D":
                yield Stage("slots", workload, dtype, 0)
            if dtype == "bfloat16":
                yield Stage("transformers", workload, dtype, 0)
                if workload == "S":
                    yield Stage("generate_batch", workload, dtype, 0)


def prepare_model() -> Path:
    """SmolLM2's weights where every system can load them."""
    path = KEPT / "model"
    if not (path / "config.json").exists():
        spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
        assert spec is not None
        assert spec.loader is not None
        demo = importlib.util.module_from_spec(spec)
        sys.modules["demo"] = demo
        spec.loader.exec_module(demo)
        import transformers

        loaded, _ = demo.load_model()
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(path)
    return path


@functools.cache
def code_key() -> str:
    """Changes with the code of what is measured."""
    digest = hashlib.sha256()
    for pattern in ("pagedkv/**/*.py", "pagedkv/*.so", "benchmarks/serving_*.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def run_stage(stage: Stage, model: Path, fresh: bool) -> dict[str, Any]:
    """The stage's result, from its file if it was run before."""
    kept = KEPT / f"{code_key()}-{stage.row.replace(' ', '-')}-{stage.pair}.json"
    if kept.exists() and not fresh:
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    python = os.environ.get("VLLM_PYTHON", sys.executable) if stage.system == "vllm" else sys.executable
    script = ROOT / "benchmarks" / "serving_systems.py"
    command = [python, script, stage.system, stage.workload, stage.dtype, model, "--limit", str(stage.limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if stage.system == "vllm" and "VLLM_PRELOAD" in os.environ:
        environment["LD_PRELOAD"] = os.environ["VLLM_PRELOAD"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{stage.row} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    kept.write_text(json.dumps(result))
    return result


def print_rows(results: dict[Stage, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A line a row, medians over its runs."""
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'row':<28}{'requests/s':>11}{'tokens/s':>10}", end="")
    print(f"{'running':>14}{'KV filled':>11}{'hits':>7}{'preempted':>11}")
    for row in dict.fromkeys(stage.row for stage in results):
        runs = [result for stage, result in results.items() if stage.row == row]
        middle = sorted(runs, key=lambda run: run["requests"] / run["cpu_s"])[len(runs) // 2]
        rate = middle["requests"] / middle["cpu_s"]
        rows[row] = {**middle, "rate": rate, "rates": [run["requests"] / run["cpu_s"] for run in runs]}
        line = f"{row:<28}{rate:>11.3f}{middle['tokens'] / middle['cpu_s']:>10.1f}"
        if "utilization" in middle:
            running = f"{middle['mean_concurrency']:.1f} (max {middle['peak_concurrency']})"
            line += f"{running:>14}{middle['utilization']:>11.1%}{middle['hit_rate']:>7.1%}"
            line += f"{middle['preemptions']:>11}"
        print(line)
    return rows


def bars(results: dict[Stage, dict[str, Any]], rows: dict[str, dict[str, Any]]) -> Iterator[Bar]:
    """What has to be reached, of what was run."""

    def ratio(workload: str, dtype: str, fast: str, slow: str) -> float | None:
        """Median over the pairs; of a system that ran once, with the first run."""
        rates: list[list[float]] = []
        for system in (fast, slow):
            runs = {s.pair: r for s, r in results.items() if s.row == f"{workload} {dtype} {system}"}
            rates.append([runs[pair]["requests"] / runs[pair]["cpu_s"] for pair in sorted(runs)])
        return statistics.median(a / b for a, b in zip(*rates, strict=False)) if all(rates) else None

    def at_least(limits: dict[str, float], dtype: str, fast: str, slow: str) -> Iterator[Bar]:
        for workload, limit in limits.items():
            value = ratio(workload, dtype, fast, slow)
            if value is not None:
                yield Bar(f"{workload} {dtype} {fast} / {slow}", value, limit)

    for dtype in ("bfloat16", "float32"):
        yield from at_least({"S": 3.5, "D": 5.5, "B": 2.7}, dtype, "pagedkv", "traditional")
        yield from at_least({"S": 2.3, "B": 1.35}, dtype, "pagedkv", "slots")
        yield from at_least({"S": 0.25, "D": 0.17, "B": 0.36}, dtype, "traditional", "vllm")
        low = 1.15 if dtype == "bfloat16" else 1.05
        against_vllm = list(at_least(dict.fromkeys(WORKLOADS, low), dtype, "pagedkv", "vllm"))
        yield from against_vllm
        if dtype == "bfloat16" and len(against_vllm) == len(WORKLOADS):
            mean = math.prod(bar.value for bar in against_vllm) ** (1 / len(against_vllm))
            yield Bar("bfloat16 pagedkv / vllm, geometric mean", mean, 1.3)
        yield from at_least({"S": 8, "D": 10, "B": 6}, dtype, "pagedkv", "transformers")
        for workload in ("S", "B"):
            row = rows.get(f"{workload} {dtype} pagedkv")
            if row is not None:
                yield Bar(f"{workload} {dtype} pagedkv, KV filled", row["utilization"], 0.96)


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """KV memory over time: what is filled, and what is taken for it."""
    from matplotlib.figure import Figure

    shown = [(name, row) for name, row in rows.items() if "samples" in row and "bfloat16" in name]
    figure = Figure(figsize=(12, 2.2 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots(max(1, len(shown)), 1, squeeze=False)[:, 0]
    for axis, (name, row) in zip(axes, shown, strict=True):
        seconds, taken, filled, _ = zip(*row["samples"], strict=True)
        axis.fill_between(seconds, taken, step="post", color="#d0d7de", label="taken")
        axis.fill_between(seconds, filled, step="post", color="#2f6fde", label="filled")
        axis.axhline(KV_TOKENS, color="black", linewidth=0.8)
        axis.set_title(f"{name}: {row['utilization']:.1%} of what is taken is filled", loc="left", fontsize=9)
        axis.set_ylabel("slots")
    axes[0].legend(loc="lower right")
    axes[-1].set_xlabel("CPU seconds")
    figure.savefig(path, dpi=80)


def main() -> None:
    """Run what is missing, print tables and bars."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", action="store_true", help="vLLM too")
    parser.add_argument("--pairs", type=int, default=3, help="runs of pagedkv and of vLLM")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--fresh", action="store_true", help="run every stage again")
    parser.add_argument("--json", type=Path, help="where to write rows and bars")
    parser.add_argument("--plot", type=Path, help="where to draw KV memory over time")
    arguments = parser.parse_args()
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {arguments.json.absolute().parent}")
    KEPT.mkdir(parents=True, exist_ok=True)
    print(timing.machine_line(), flush=True)
    model = prepare_model()
    todo = list(stages(arguments.peers, arguments.pairs, arguments.dtypes, arguments.workloads))
    minutes = sum(stage.rough_seconds for stage in todo) / 60
    print(f"{len(todo)} stages, about {minutes:.0f} minutes on a quiet machine, less those kept in {KEPT}")
    from tqdm import tqdm

    results: dict[Stage, dict[str, Any]] = {}
    with tqdm(total=round(sum(stage.rough_seconds for stage in todo)), unit="s", file=sys.stdout) as bar:
        for stage in todo:
            bar.set_description(f"{stage.row} {stage.pair + 1}")
            results[stage] = run_stage(stage, model, arguments.fresh)
            bar.update(round(stage.rough_seconds))
    rows = print_rows(results)
    found = list(bars(results, rows))
    for line in found:
        print(f"{line.name:<42}{line.value:>8.3f}  >= {line.limit:g}  {'met' if line.met else 'MISSED'}")
    if arguments.json:
        report = {
            "machine": timing.machine_line(),
            "rows": {name: {k: v for k, v in row.items() if k != "samples"} for name, row in rows.items()},
            "bars": [{**vars(line), "met": line.met} for line in found],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    print(f"bars met: {sum(line.met for line in found)} of {len(found)}")


if __name__ == "__main__":
    main()
