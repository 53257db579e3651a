"""The instruction sets of CPU attention: each passes the operator's tests, and one is chosen by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv import _loader

TESTS = Path(__file__).parent
SUPPORTED = _loader.CPU_ISAS.split(", ")


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PAGEDKV_CPU_ISA": isa}
    environ.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, *arguments],
        env=environ,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_portable_is_always_there_and_the_best_is_the_default() -> None:
    assert SUPPORTED[0] == "portable"
    assert os.environ.get("PAGEDKV_CPU_ISA", SUPPORTED[-1]) == _loader.CPU_ISA


@pytest.mark.parametrize("isa", SUPPORTED)
def test_python_m_pagedkv_names_it(isa: str) -> None:
    result = run(isa, "-m", "pagedkv")
    assert result.returncode == 0, result.stderr
    assert f"instruction set of attention: {isa} " in result.stdout


def test_a_name_that_is_not_supported_is_an_error() -> None:
    result = run("sse9", "-c", "import pagedkv")
    assert result.returncode != 0
    assert f'PAGEDKV_CPU_ISA is "sse9"; supported on this processor: {_loader.CPU_ISAS}' in result.stderr


@pytest.mark.parametrize("isa", [isa for isa in SUPPORTED if isa != _loader.CPU_ISA])
def test_the_operators_tests_pass(isa: str) -> None:
    files = sorted(str(path) for path in TESTS.glob("test_paged_attention*.py"))
    result = run(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "[cpu", *files)
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout
