"""Builds `pagedkv._core` (block structures, no torch) and `pagedkv._C` (operators).

Environment:
    PAGEDKV_CUDA           0 or 1 forces the CUDA back-end off or on. Default: on where torch has CUDA and
                           nvcc is found.
    CUDA_HOME, CUDA_PATH   the CUDA toolkit. Default: that of the nvcc on PATH, then /usr/local/cuda.
    TORCH_CUDA_ARCH_LIST   GPU architectures to compile for. Default: see `default_arch_list`.
    MAX_JOBS               compilers at a time. Default: one per core.

The file only defines functions until `main`, so that tests can import it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).resolve().parent
PLATFORMS = {("Linux", "x86_64"), ("Linux", "aarch64")}
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
# -fmad=false: as on the CPU, so that both write the same bytes; kernels that want one write fmaf.
NVCC_FLAGS = [
    "-O3",
    "-fmad=false",
    "-std=c++20",
    "--threads=2",
    "-Xcompiler=-fvisibility=hidden",
    "-lineinfo",
    "-Xfatbin=-compress-all",  # line tables too: a quarter of the size
]
# Torch's libstdc++, also where the compiler would put a copy of its own into the library: exceptions and
# strings go to and fro between the two. Named by its file, as not every machine has one to link with.
SHARED_LIBSTDCXX = ["-l:libstdc++.so.6"]


@dataclass(frozen=True)
class CudaChoice:
    """Whether the CUDA back-end is built and why; with which toolkit and for which architectures."""

    enabled: bool
    reason: str
    home: Path | None = None
    arch_list: str = ""


def check_platform(system: str, machine: str) -> None:
    """Refuse what pagedkv was never compiled on."""
    if (system, machine) not in PLATFORMS:
        sys.exit(f"pagedkv supports Linux on x86-64 and aarch64, not {system} on {machine}.")


def find_cuda_home(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The CUDA toolkit, or None and what was looked for in vain."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            home = Path(environ[variable])
            if (home / "bin" / "nvcc").exists():
                return home, ""
            return None, f"{variable} is {home}, which has no bin/nvcc"
    nvcc = shutil.which("nvcc", path=environ.get("PATH", ""))
    if nvcc is None:
        if (DEFAULT_CUDA_HOME / "bin" / "nvcc").exists():
            return DEFAULT_CUDA_HOME, ""
        return None, "no nvcc was found"
    # The nvcc on PATH may be a script elsewhere; a dry run names the toolkit.
    dry_run = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.*)$", dry_run.stderr + dry_run.stdout, re.MULTILINE)
    return Path(top.group(1).strip()).resolve() if top else Path(nvcc).resolve().parent.parent, ""


def nvcc_version(cuda_home: Path) -> str:
    """The release of a toolkit's nvcc, such as "13.0"."""
    nvcc = cuda_home / "bin" / "nvcc"
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+\.\d+)", output.stdout)
    if release is None:
        sys.exit(f"{nvcc} --version names no release:\n{output.stdout}{output.stderr}")
    return release.group(1)


def default_arch_list(nvcc: str) -> str:
    """Machine code for every card from A100 on, and PTX from which later cards compile for themselves.

    compute_90 PTX serves the cards between 9.0 and 12.0 that have no machine code here, compute_120 those
    after 12.0.
    """
    if tuple(map(int, nvcc.split("."))) < (12, 8):  # the first to know 10.0 and 12.0
        return "8.0;8.6;8.9;9.0+PTX"
    return "8.0;8.6;8.9;9.0+PTX;10.0;12.0+PTX"


def choose_cuda(environ: Mapping[str, str], torch_version: str, torch_cuda: str | None) -> CudaChoice:
    """Decide on the CUDA back-end for a torch of this version, built with this CUDA (None: a CPU build).

    A toolkit that does not fit, or CUDA that is asked for and cannot be built, ends the installation.
    """
    forced = environ.get("PAGEDKV_CUDA", "")
    if forced not in ("", "0", "1"):
        sys.exit(f"PAGEDKV_CUDA must be 0 or 1, not {forced!r}")
    if forced == "0":
        return CudaChoice(False, "PAGEDKV_CUDA=0 was set when it was built; reinstall pagedkv without it")
    if torch_cuda is None:
        why = f"torch {torch_version} is a CPU build; install a CUDA build of torch and reinstall pagedkv"
    else:
        home, problem = find_cuda_home(environ)
        if home is not None:
            return _choose_toolkit(environ, torch_version, torch_cuda, home)
        why = (
            f"{problem}; install the CUDA {torch_cuda} toolkit, or set CUDA_HOME to it, "
            "and reinstall pagedkv with --force-reinstall"
        )
    if forced == "1":
        sys.exit(f"PAGEDKV_CUDA=1, but the CUDA back-end cannot be built: {why}")
    return CudaChoice(False, why)


def _choose_toolkit(
    environ: Mapping[str, str], torch_version: str, torch_cuda: str, home: Path
) -> CudaChoice:
    found = nvcc_version(home)
    found_major, needed_major = found.split(".")[0], torch_cuda.split(".")[0]
    if found_major != needed_major:
        sys.exit(
            f"nvcc {found} in {home} does not fit torch {torch_version}, which was built with CUDA "
            f"{torch_cuda}: the major versions must agree. Set CUDA_HOME to a CUDA {needed_major}.x toolkit, "
            f"install a torch built for CUDA {found_major}, or set PAGEDKV_CUDA=0 for a CPU-only build."
        )
    arch_list = environ.get("TORCH_CUDA_ARCH_LIST") or default_arch_list(found)
    return CudaChoice(True, f"nvcc {found} in {home}", home, arch_list)


def build_info(torch_version: str, torch_cuda: str | None, cuda: CudaChoice) -> str:
    """The text of `pagedkv/_build_info.py`: what `import pagedkv` and `python -m pagedkv` report."""
    return (
        '"""Written by setup.py: what this build of pagedkv was made with."""\n\n'
        f"TORCH_VERSION = {torch_version!r}\n"
        f"CUDA_VERSION = {torch_cuda if cuda.enabled else None!r}\n"
        f"CUDA_ARCH_LIST = {cuda.arch_list!r}\n"
        f"CUDA_REASON = {cuda.reason!r}\n"
    )


def sources(*patterns: str) -> list[str]:
    """Source files, relative to the root as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def extensions(cpp_extension: Any, cuda: CudaChoice) -> list[Any]:
    """The two extension modules; `cpp_extension` is torch.utils.cpp_extension."""
    # -ffp-contract=off: the portable kernels give the same bits on every architecture. -fno-trapping-math:
    # nobody reads the exception flags, and loops over conversions between dtypes become vector loops. -g0:
    # Python's own flags ask for debug information, which makes the libraries over twenty times as large.
    cxx_flags = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-ffp-contract=off"]
    cxx_flags += ["-fno-trapping-math", "-g0"]
    common = {
        "include_dirs": [str(ROOT / "csrc")],
        "depends": sorted(str(path) for path in (ROOT / "csrc").rglob("*.h*")),
    }
    core = cpp_extension.CppExtension(
        "pagedkv._core", sources("csrc/core/*.cpp"), extra_compile_args={"cxx": cxx_flags}, **common
    )
    core.libraries = []  # of torch it uses the pybind11 headers alone
    core.library_dirs = []
    core.extra_link_args = SHARED_LIBSTDCXX
    operator_sources = sources("csrc/bindings/*.cpp", "csrc/cpu/**/*.cpp")
    operator_args = {"cxx": [*cxx_flags, "-fopenmp"]}
    common["extra_link_args"] = ["-fopenmp", *SHARED_LIBSTDCXX]
    if not cuda.enabled:
        return [
            core,
            cpp_extension.CppExtension(
                "pagedkv._C", operator_sources, extra_compile_args=operator_args, **common
            ),
        ]
    operator_args["nvcc"] = NVCC_FLAGS
    operators = cpp_extension.CUDAExtension(
        "pagedkv._C",
        [*operator_sources, *sources("csrc/cuda/**/*.cu")],
        define_macros=[("PAGEDKV_WITH_CUDA", None)],
        extra_compile_args=operator_args,
        **common,
    )
    return [core, operators]


def build_ext_class(cpp_extension: Any, torch_version: str, info: str) -> type:
    """A build_ext of torch's, which also leaves `pagedkv/_build_info.py` beside the extensions."""

    class BuildExt(cpp_extension.BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            if self.editable_mode:
                # Objects in a folder that lasts, so that the next build compiles only what has changed.
                folder = f"{sys.implementation.cache_tag}-torch-{torch_version}"
                self.build_temp = str(ROOT / "build" / folder)

        def run(self) -> None:
            super().run()
            self._info_path().write_text(info)

        def get_outputs(self) -> list[str]:
            return [*super().get_outputs(), str(self._info_path())]

        def _info_path(self) -> Path:
            return Path(self.get_ext_fullpath("pagedkv._C")).parent / "_build_info.py"

    return BuildExt


def main() -> None:
    """Build or install."""
    check_platform(platform.system(), platform.machine())
    try:
        import torch
    except ImportError:
        sys.exit(
            "pagedkv is compiled against the torch that is installed, and none is. Install torch first, then "
            "run `pip install --no-build-isolation .`"
        )
    if shutil.which("ninja") is None:  # an environment that is not activated has its ninja here
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cuda = choose_cuda(os.environ, torch.__version__, torch.version.cuda)
    if cuda.enabled:
        os.environ["CUDA_HOME"] = str(cuda.home)
        os.environ["TORCH_CUDA_ARCH_LIST"] = cuda.arch_list
    # Imported only now: it reads CUDA_HOME at import.
    from torch.utils import cpp_extension

    info = build_info(torch.__version__, torch.version.cuda, cuda)
    setup(
        ext_modules=extensions(cpp_extension, cuda),
        cmdclass={"build_ext": build_ext_class(cpp_extension, torch.__version__, info)},
    )


if __name__ == "__main__":
    main()
