"""Mistakes in inline assembly, which running the source cannot see: an operator's test catches each.

They are made in a copy of `csrc/cuda/primitives.h`. One kernel that uses it goes through nvcc again and takes
its place in a library of its own, on which the test named below must fail. Part of `make emulated-ptx`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from emulation import build as emulated
from emulation.ptx import build, parser, translator

ON_PTX = os.environ.get("PAGEDKV_EMULATOR_ROUTE") == "ptx"
pytestmark = pytest.mark.skipif(not ON_PTX, reason="runs with make emulated-ptx, which needs nvcc")

KERNEL = "pagedkv::cuda::decode_kernel<pagedkv::bfloat16, 2, 64, 1"
SHORT = "test_every_option_with_every_dtype[emulated-bfloat16-bfloat16-decode-plain]"
LONG = "test_every_dtype_with_few_and_many_rows[emulated-bfloat16-bfloat16-64-decode]"

# The test that catches a mistake, and the mistake: a text of primitives.h and what stands there instead.
MISTAKES: dict[str, tuple[str, str, str]] = {
    "none": (LONG, "", ""),
    "mma_swapped_a": (SHORT, '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])'),
    "mma_swapped_b": (SHORT, '"r"(b[0]), "r"(b[1])', '"r"(b[1]), "r"(b[0])'),
    "mma_swapped_d": (SHORT, '"+f"(d[0]), "+f"(d[1])', '"+f"(d[1]), "+f"(d[0])'),
    "mma_other_format": (SHORT, "f32.bf16.bf16.f32", "f32.f16.f16.f32"),
    "ldmatrix_without_trans": (SHORT, "m8n8.x4.trans.shared", "m8n8.x4.shared"),
    "ldmatrix_swapped_registers": (SHORT, "{%0, %1, %2, %3}, [%4]", "{%0, %2, %1, %3}, [%4]"),
    "cp_async_inverted_predicate": (SHORT, "read ? 16 : 0", "read ? 0 : 16"),
    "cp_async_wait_one_off": (LONG, '"n"(NUM_PENDING)', '"n"(NUM_PENDING + 1)'),
    "pack_swapped_halves": (SHORT, '"f"(high), "f"(low)', '"f"(low), "f"(high)'),
    "ex2_is_lg2": (SHORT, "ex2.approx.ftz.f32", "lg2.approx.ftz.f32"),
}  # fmt: skip


def compile_with(mistake: str, replacement: str, entry: build.Entry, directory: Path) -> Path:
    """The object file of one kernel, made by nvcc from a source with the mistake."""
    shutil.copytree(emulated.CSRC, directory / "csrc")
    primitives = directory / "csrc" / "cuda" / "primitives.h"
    text = primitives.read_text()
    assert mistake in text, "primitives.h has changed: plant the mistake anew"
    primitives.write_text(text.replace(mistake, replacement))
    kernel = directory / "kernel.cu"
    kernel.write_text(
        '#include "cuda/paged_attention/decode.h"\n'
        f"template __global__ void {entry.kernel}({entry.params});\n"
    )
    ptx = directory / "kernel.ptx"
    build.compile_to_ptx(kernel, entry.architecture, ptx, include=directory / "csrc")
    module = parser.parse(ptx.read_text(), ptx.name, str(directory))
    source = directory / "kernel.cpp"
    source.write_text(translator.translate(module, {entry.function: module.entries[0]}, ptx.name))
    includes = [f"-I{path}" for path in (emulated.CSRC, emulated.EMULATOR, build.HERE)]
    object_file = source.with_suffix(".o")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *build.FLAGS, "-fPIC", *includes, "-c", source, "-o", object_file], check=True)
    return object_file


def link_with(object_file: Path, entry: build.Entry) -> Path:
    """The emulated library with another object in the kernel's place, linked as ninja linked it."""
    library_directory = build.build_directory()
    command = subprocess.run(
        ["ninja", "-t", "commands", "pagedkv_emulated.so"],
        cwd=library_directory, capture_output=True, text=True, check=True,
    ).stdout.splitlines()[-1]  # fmt: skip
    library = object_file.with_name("pagedkv_emulated.so")
    words = []
    for word in command.split():
        if word == "pagedkv_emulated.so":
            word = str(library)
        elif word == Path(entry.source).with_suffix(".o").name:
            word = str(object_file)
        words.append(word)
    assert str(object_file) in words
    subprocess.run(" ".join(words), shell=True, cwd=library_directory, check=True)
    return library


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_assembly_is_caught_emulated(name: str, tmp_path: Path) -> None:
    test, mistake, replacement = MISTAKES[name]
    entry = next(entry for entry in build.load() if entry.kernel.startswith(KERNEL))
    library = link_with(compile_with(mistake, replacement, entry, tmp_path), entry)
    environment = os.environ | {"PAGEDKV_EMULATOR_LIBRARY": str(library)}
    environment.pop("PAGEDKV_EMULATOR_LAUNCHES", None)
    test = f"tests/test_paged_attention.py::{test}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    result = subprocess.run(
        command, cwd=emulated.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if name == "none":
        assert result.returncode == 0, result.stdout
    elif result.returncode != -signal.SIGSEGV:  # how a copy from a null pointer ends
        assert result.returncode == 1, result.stdout
        assert "1 failed" in result.stdout
        assert "Error" in result.stdout
