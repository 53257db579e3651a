"""All that a GPU has to say, in one run of less than nine minutes: builds, tests and measures pagedkv on it.

    python benchmarks/bench_gpu.py --out results

Needs torch with CUDA, nvcc, pytest with pytest-xdist, and hypothesis; no network, and no pagedkv installed.
Each stage is a process with a time limit of its own, so that a slow one does not take the others' time, and
leaves a log in the folder `--out`. `report.md` there is what belongs into RESULTS.md.

    build       for this card alone
    small       every kernel on small shapes, against the CPU
    golden      what the primitives of the kernels give, against tests/emulation/golden/golden.txt
    attention   paged attention beside torch's, as shares of the card's limits
    operators   cache write, gather, copy and swap, likewise
    tests       the operators' tests on the back-end `cuda`, with CUDA graphs and streams
    cache       the state machine of the cache, on the card
    memcheck    the small shapes under compute-sanitizer
    racecheck   likewise, for shared memory

`--dry-run` goes through the stages that a CPU can rehearse, on small shapes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = "tests/emulation/golden/golden.txt"
SHOWN_LINES = 12  # of a log, where a stage failed


@dataclass(frozen=True)
class Stage:
    """One process.

    Attributes:
        seconds: its time limit.
        rehearsal: its command on a CPU; empty where there is none.
        is_reported: whether what it prints belongs into the report.
    """

    name: str
    seconds: int
    command: list[str]
    rehearsal: list[str] = field(default_factory=list)
    is_reported: bool = False


def stages(out: Path) -> list[Stage]:
    """In their order; together less than nine minutes."""
    python = sys.executable
    jobs = str(min(16, os.cpu_count() or 1))
    small = [python, "tests/small_set.py"]
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    record = str(out / "record")
    flags = "-std=c++20 -fmad=false --expt-relaxed-constexpr -arch=native -I csrc"
    golden = f"nvcc {flags} tests/emulation/golden/record.cu -o {record} && {record} > {out}/golden.txt"
    return [
        Stage("build", 150, [python, "setup.py", "build_ext", "--inplace"]),
        Stage("small", 20, [*small, "cuda"], [*small, "cpu"]),
        Stage("golden", 30, ["bash", "-c", f"{golden} && diff {GOLDEN} {out}/golden.txt"]),
        Stage(
            "attention",
            60,
            [python, "benchmarks/gpu_attention.py", "--seconds", "45", "--json", f"{out}/attention.json"],
            [python, "benchmarks/gpu_attention.py", "--device", "cpu"],
            is_reported=True,
        ),
        Stage(
            "operators",
            30,
            [python, "benchmarks/gpu_cache_ops.py", "--json", f"{out}/operators.json"],
            [python, "benchmarks/gpu_cache_ops.py", "--device", "cpu"],
            is_reported=True,
        ),
        Stage(
            "tests",
            140,
            [python, "-m", "pytest", "-q", "-n", jobs, "--dist", "loadgroup", "-k", "cuda and not emulated"],
        ),
        Stage(
            "cache",
            30,
            [python, "tests/fuzz_cache.py", "1", "cuda"],
            [python, "tests/fuzz_cache.py", "1", "cpu"],
        ),
        Stage("memcheck", 40, [sanitizer, "--tool", "memcheck", "--error-exitcode", "1", *small, "cuda"]),
        Stage(
            "racecheck", 40, [sanitizer, "--tool", "racecheck", "--error-exitcode", "1", *small, "cuda", "8"]
        ),
    ]


def environment(is_dry: bool) -> dict[str, str]:
    """Of every stage: this tree's pagedkv, built for this card."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    found = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if not is_dry:
        major, minor = torch.cuda.get_device_capability()
        found |= {"PAGEDKV_CUDA": "1", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}
        found.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    return found


def run(command: list[str], seconds: int, log: Path, variables: dict[str, str]) -> str:
    """How it ended."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=variables, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {seconds} s"
    return "passed" if status == 0 else f"FAILED with {status}"


def machine() -> str:
    """Card, driver and versions."""
    card = "no GPU"
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return f"{card}; torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"


def main() -> int:
    """Run the stages; 1 where one did not pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="where logs and results go")
    parser.add_argument("--stages", nargs="*", help="these alone")
    parser.add_argument("--commit", help="of this tree, where it is a copy without a repository")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on the CPU")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --dry-run rehearses on the CPU")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    variables = environment(arguments.dry_run)
    if arguments.commit:
        variables["PAGEDKV_COMMIT"] = arguments.commit
    begin = time.monotonic()
    report = [f"{machine()}; `{' '.join(['python', 'benchmarks/bench_gpu.py', *sys.argv[1:]])}`", ""]
    summary, num_failed = [], 0
    for stage in stages(out):
        command = stage.rehearsal if arguments.dry_run else stage.command
        if not command or (arguments.stages is not None and stage.name not in arguments.stages):
            continue
        log, start = out / f"{stage.name}.log", time.monotonic()
        ending = run(command, stage.seconds, log, variables)
        lines = log.read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "")[:120]
        summary.append(f"{stage.name:<12}{ending:<20}{time.monotonic() - start:>6.0f} s  {last}")
        print(summary[-1], flush=True)
        if ending != "passed":
            num_failed += 1
            print("\n".join(f"    {line[:160]}" for line in lines[-SHOWN_LINES:]), flush=True)
        if stage.is_reported:
            report += ["```", *lines, "```", ""]
            print("\n".join(lines), flush=True)
    report += ["```", *summary, "```", ""]
    (out / "report.md").write_text("\n".join(report))
    print(f"{len(summary) - num_failed} of {len(summary)} stages passed, {time.monotonic() - begin:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
