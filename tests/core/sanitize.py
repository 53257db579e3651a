"""Runs tests of the cache on a core with AddressSanitizer and UBSan: `python tests/core/sanitize.py [tests]`.

Without arguments, these are the state machine, the threads and the tests of what moves blocks. The core is
built into build/sanitized-core, and used in place of the package's own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitized-core"
LIBRARY = BUILD / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
CXX = os.environ.get("CXX", "g++")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = [
    "-std=c++20",
    "-O1",
    "-g",
    "-fPIC",
    "-fvisibility=hidden",
    *SANITIZE,
    f"-I{ROOT / 'csrc'}",
    f"-isystem{Path(torch.__file__).parent / 'include'}",  # pybind11
    f"-isystem{sysconfig.get_path('include')}",
]
TESTS = ["stateful", "second_tier", "swapping", "windows"]


def build() -> None:
    """Compile what has changed since the last time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    headers = max(header.stat().st_mtime for header in (ROOT / "csrc" / "core").glob("*.h"))

    def compiled(source: Path) -> Path:
        target = BUILD / f"{source.stem}.o"
        newest = max(headers, source.stat().st_mtime)
        if not target.exists() or target.stat().st_mtime < newest:
            subprocess.run([CXX, *FLAGS, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 1))) as pool:
        objects = list(pool.map(compiled, sorted((ROOT / "csrc" / "core").glob("*.cpp"))))
    subprocess.run([CXX, "-shared", *SANITIZE, *objects, "-o", LIBRARY], check=True)


def run_with_sanitizers(arguments: list[str]) -> int:
    """This program again, in a process that has the sanitizers' libraries from its start."""
    # libstdc++ too: the sanitizer looks for the function that throws exceptions when it starts.
    libraries = [
        subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(library.stdout.strip() for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves a lot behind
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run([sys.executable, __file__, "--run", *arguments], env=environment).returncode


def run_tests(arguments: list[str]) -> int:
    """Put the library in the place of pagedkv._core, and run pytest."""
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("pagedkv._core", LIBRARY)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    sys.modules["pagedkv._core"] = core
    spec.loader.exec_module(core)
    import pytest

    import pagedkv

    assert pagedkv.BlockAllocator is core.BlockAllocator
    # What a sanitizer says goes to stderr itself, and then the process ends.
    return pytest.main(["-q", "-p", "no:cacheprovider", "--capture=sys", *arguments])


def main() -> None:
    """Build, then run the tests named, or those that matter most."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--run"]:
        sys.exit(run_tests(arguments[1:]))
    build()
    tests = [str(ROOT / "tests" / f"test_cache_{name}.py") for name in TESTS]
    tests.append(str(ROOT / "tests" / "test_prefix_cache_tokens.py"))
    sys.exit(run_with_sanitizers(arguments or tests))


if __name__ == "__main__":
    main()
