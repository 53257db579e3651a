"""Runs the operators' tests on nvcc's PTX and tells which of its kernels ran: what `make emulated-ptx` does.

    PYTHONPATH=tests python -m emulation.ptx.run [arguments of pytest]

Ends with an error where a test fails or a kernel was not executed. Needs nvcc, but no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import build

TESTS = Path(__file__).resolve().parent.parent.parent


def test_files(entries: list[build.Entry]) -> list[Path]:
    """For the first architecture every test, for another those of the operators that have kernels for it."""
    if any(entry.architecture == build.FIRST_ARCHITECTURE for entry in entries):
        return [TESTS]
    operators = {path.stem for path in (TESTS.parent / "csrc" / "cpu").glob("*.cpp")}
    chosen = {name for name in operators for entry in entries if entry.file.startswith(name)}
    return sorted(path for name in chosen for path in TESTS.glob(f"test_{name}*.py"))


def run_tests(architecture: int, files: list[Path], record: Path, arguments: list[str]) -> int:
    """Pytest on the PTX route, which appends a line to `record` for each kernel that ran."""
    environment = os.environ | {
        "PAGEDKV_EMULATOR_ROUTE": "ptx",
        "PAGEDKV_EMULATOR_ARCHITECTURE": str(architecture),
        "PAGEDKV_EMULATOR_LAUNCHES": str(record),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-k", "emulated", *map(str, files), *arguments]
    return subprocess.run(command, env=environment, cwd=TESTS.parent, check=False).returncode


def main(arguments: list[str]) -> int:
    """Build, run, report."""
    start = time.monotonic()
    try:
        build.find_nvcc()
    except RuntimeError as error:
        print(f"make emulated-ptx: {error}")
        return 1
    entries = build.load()
    print(
        f"nvcc's PTX of {len(entries)} kernels translated and compiled in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    status = 0
    with tempfile.NamedTemporaryFile(suffix=".launches") as own_record:
        record = Path(os.environ.get("PAGEDKV_EMULATOR_LAUNCHES", own_record.name))
        for architecture in sorted({entry.architecture for entry in entries}):
            files = test_files([entry for entry in entries if entry.architecture == architecture])
            status = run_tests(architecture, files, record, arguments) or status
        executed = set(record.read_text().splitlines())
    missing = [entry for entry in entries if f"ptx_{entry.architecture} {entry.symbol}" not in executed]
    for architecture in sorted({entry.architecture for entry in entries}):
        total, not_run = (sum(e.architecture == architecture for e in some) for some in (entries, missing))
        print(f"compute_{architecture}: {total} kernels in nvcc's PTX, {total - not_run} executed")
    for entry in missing:
        print(f"not executed: {entry.kernel} of compute_{entry.architecture}")
    print(f"{time.monotonic() - start:.0f} s in all")
    return status or (1 if missing else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
