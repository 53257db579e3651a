"""Builds and loads the back-end ``emulated``: bindings and CUDA kernels, on the emulator of this folder.

The library registers ``torch.ops.pagedkv_emulated.*`` for CPU tensors, beside the ``torch.ops.pagedkv.*`` of
the installed package; the two share no symbol.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

EMULATOR = Path(__file__).resolve().parent
ROOT = EMULATOR.parent.parent
CSRC = ROOT / "csrc"

# Strict aliasing is off because kernels view memory as vectors of other types. The prefix map lets fault
# reports name files as the repository does.
FLAGS = [
    "-std=c++20",
    "-O2",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-DPAGEDKV_EMULATED",
    "-DPAGEDKV_NAMESPACE=pagedkv_emulated",
    f"-ffile-prefix-map={ROOT}/=",
]


def kernel_files() -> list[Path]:
    """Every ``.cu`` file of the CUDA back-end."""
    return sorted((CSRC / "cuda").rglob("*.cu"))


def binding_files() -> list[Path]:
    """The bindings, without the package's Python module and without operators that have no CUDA kernel."""
    cpu_operators = {path.stem for path in (CSRC / "cpu").glob("*.cpp")}
    cuda_operators = {path.relative_to(CSRC / "cuda").parts[0].removesuffix(".cu") for path in kernel_files()}
    excluded = (cpu_operators - cuda_operators) | {"module"}
    return sorted(path for path in (CSRC / "bindings").glob("*.cpp") if path.stem not in excluded)


def emulator_files() -> list[Path]:
    """The emulator, without its own tests."""
    return sorted(path for path in EMULATOR.glob("*.cpp") if not path.stem.startswith("test_"))


def wrap_kernels(directory: Path) -> list[Path]:
    """Give each ``.cu`` file a ``.cpp`` that includes it, since torch hands ``.cu`` files to nvcc."""
    wrappers = []
    for kernel in kernel_files():
        name = "_".join(kernel.relative_to(CSRC / "cuda").with_suffix("").parts)
        wrapper = directory / f"{name}.emulated.cpp"
        text = f'#include "{kernel}"\n'
        if not wrapper.exists() or wrapper.read_text() != text:
            wrapper.write_text(text)
        wrappers.append(wrapper)
    return wrappers


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep other processes out while this one builds; a process that dies lets the next one in."""
    with (directory / "exclusive").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        # torch's own lock is a file that a killed build leaves behind, and then waits for without end.
        (directory / "lock").unlink(missing_ok=True)
        yield


def find_ninja() -> None:
    """Put the ninja of this virtual environment on PATH, where torch looks for it."""
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def load_library(kernel_sources: list[Path], directory: Path, flags: list[str]) -> None:
    """Compile bindings, emulator and the given kernels with torch's builder and load the library."""
    # Slow to import, and those who only ask for the lists of files do not need it.
    from torch.utils import cpp_extension

    find_ninja()
    cpp_extension.load(
        name="pagedkv_emulated",
        sources=[str(path) for path in [*binding_files(), *kernel_sources, *emulator_files()]],
        extra_include_paths=[str(CSRC), str(EMULATOR), str(EMULATOR / "ptx")],
        extra_cflags=flags,
        extra_ldflags=["-fopenmp"],
        build_directory=str(directory),
        with_cuda=False,
        is_python_module=False,
    )


@functools.cache
def load() -> None:
    """Compile what has changed since the last call, in any process, and load the library.

    ``PAGEDKV_EMULATOR_ROUTE`` chooses what runs as a kernel: its ``source`` (the default) or nvcc's ``ptx``.

    Raises:
        RuntimeError: the compiler or ninja failed; the message holds their output.
    """
    route = os.environ.get("PAGEDKV_EMULATOR_ROUTE", "source")
    if route == "ptx":
        from emulation.ptx import build as ptx

        ptx.load()
        return
    if route != "source":
        raise RuntimeError(f"PAGEDKV_EMULATOR_ROUTE is {route!r}; supported: 'source', 'ptx'")
    directory = ROOT / "build" / "emulated" / f"torch-{torch.__version__}"
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive(directory):
        load_library(wrap_kernels(directory), directory, FLAGS)
