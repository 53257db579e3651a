"""Compiles every planted fault into the kernel tests, runs them, and prints what caught it.

    python -m emulation.mutants [--jobs N] [PART_OF_A_NAME]

Needs the libraries in build/emulation (CMakeLists.txt), with which it links the file that has the fault. Ends
with an error if a fault stays unnoticed, is noticed by something else than the check that is named for it, or
cannot be planted because the kernels' text has changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from emulation.mutants import attention, caches
from emulation.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"
EMULATOR = ROOT / "tests" / "emulation"
LIBRARIES = ROOT / "build" / "emulation"
WORK = ROOT / "build" / "mutants"

# ThreadSanitizer finds no lines of templates in unoptimised code.
BUILD_OPTIONS = {
    "plain": ["-O0"],
    "asan": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "tsan": ["-O1", "-fsanitize=thread"],
}
# The first report is enough; a few random schedules show what a fixed order hides.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PAGEDKV_TEST_SEEDS": "2", "TSAN_OPTIONS": "halt_on_error=1"}
TIME_LIMIT_S = 300


class MutantError(Exception):
    """A fault that was not caught, or could not be planted."""


def plant(mutant: Mutant, csrc: Path) -> None:
    """Copy the sources to ``csrc`` with the fault in them."""
    shutil.copytree(CSRC, csrc, ignore=shutil.ignore_patterns("bindings", "core"))
    found = [path for path in sorted((csrc / "cuda").glob(mutant.files)) if mutant.text in path.read_text()]
    counts = {path.name: path.read_text().count(mutant.text) for path in found}
    if sum(counts.values()) != 1:
        raise MutantError(
            f"its text must stand once in csrc/cuda/{mutant.files}, and stands {counts or 'nowhere'}:\n"
            f"{mutant.text}"
        )
    found[0].write_text(found[0].read_text().replace(mutant.text, mutant.replacement))


def compile_tests(mutant: Mutant, directory: Path) -> Path:
    """The kernel tests with the fault: its file is compiled anew and comes before the libraries."""
    program = directory / "test_kernels"
    command = ["g++", "-std=c++20", "-g", "-w", "-fno-strict-aliasing", "-DPAGEDKV_EMULATED"]
    command += BUILD_OPTIONS[mutant.build]
    command += [f"-ffile-prefix-map={directory}/=", f"-I{EMULATOR}", f"-I{directory / 'csrc'}"]
    command += ["-x", "c++", str(directory / "csrc" / "cuda" / mutant.unit)]
    command += [str(EMULATOR / "test_main.cpp"), "-x", "none"]
    tests, kernels, emulator = (
        str(LIBRARIES / f"lib{name}_{mutant.build}.a") for name in ("kernel_tests", "kernels", "emulator")
    )
    command += ["-Wl,--whole-archive", tests, "-Wl,--no-whole-archive", kernels, emulator]
    command += ["-fopenmp", "-pthread", "-o", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise MutantError(f"does not compile:\n{result.stderr[-3000:]}")
    return program


def run_tests(mutant: Mutant, program: Path) -> str:
    """What the tests print; they must fail."""
    command = [str(program), mutant.test]
    setarch = shutil.which("setarch")
    if mutant.build == "tsan" and setarch:  # it does not start where addresses are spread widely
        command = [setarch, "--addr-no-randomize", *command]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIME_LIMIT_S,
            env={**os.environ, **ENVIRONMENT},
        )
    except subprocess.TimeoutExpired as error:
        raise MutantError(f"the tests took over {TIME_LIMIT_S} s") from error
    output = result.stdout + result.stderr
    if result.returncode == 0:
        raise MutantError(f"survived:\n{output[-1000:]}")
    if not re.search(mutant.report, output):
        raise MutantError(f"no report matches {mutant.report!r}:\n{output[-3000:]}")
    return output


def caught_at(mutant: Mutant, output: str) -> str:
    """The first place after the report in the kernels or, failing that, in the tests."""
    report = re.search(mutant.report, output)
    assert report is not None
    line_begin = output.rfind("\n", 0, report.start()) + 1
    for files in (r"csrc/cuda/[\w/.]+:\d+", r"[\w/.]+\.(?:cpp|h):\d+"):
        place = re.search(files, output[line_begin:])
        if place:
            return re.sub(r"^(\.\./)+", "", place.group())
    return "?"


def catch(idx: int, mutant: Mutant) -> str:
    """Where the fault was caught. Raises MutantError where it was not."""
    directory = WORK / str(idx)
    shutil.rmtree(directory, ignore_errors=True)
    plant(mutant, directory / "csrc")
    place = caught_at(mutant, run_tests(mutant, compile_tests(mutant, directory)))
    shutil.rmtree(directory)
    return place


def main() -> int:
    """The number of faults that were not caught."""
    parser = argparse.ArgumentParser(description="Faults planted in the CUDA kernels, and what catches them")
    parser.add_argument("part", nargs="?", default="", help="only those whose name contains it")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    mutants = [mutant for mutant in [*attention.MUTANTS, *caches.MUTANTS] if arguments.part in mutant.name]
    if not mutants:
        parser.error(f"no planted fault has {arguments.part!r} in its name")
    failures = []
    print(f"{'planted fault':<67} {'build':<5} {'test':<40} where")
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(catch, idx, mutant) for idx, mutant in enumerate(mutants)]
        for mutant, future in zip(mutants, futures, strict=True):
            try:
                place = future.result()
            except MutantError as error:
                place = "NOT CAUGHT"
                failures.append(f"{mutant.name}: {error}")
            print(f"{mutant.name:<67} {mutant.build:<5} {mutant.test:<40} {place}", flush=True)
    print(f"{len(mutants) - len(failures)} of {len(mutants)} planted faults were caught")
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    return min(len(failures), 100)


if __name__ == "__main__":
    sys.exit(main())
