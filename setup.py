"""Builds `pagedkv._core` (block structures, no torch) and `pagedkv._C` (operators) with torch.utils.cpp_extension.

Environment: PAGEDKV_CUDA=0/1 forces the CUDA back-end off or on (default: on where torch has CUDA and nvcc is found);
TORCH_CUDA_ARCH_LIST and MAX_JOBS are torch's own.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# Machine code for every card from A100 on; compute_90 PTX lets later cards compile for themselves.
DEFAULT_ARCH_LIST = "8.0;8.6;8.9;9.0+PTX;10.0;12.0"
PLATFORMS = {("Linux", "x86_64"), ("Linux", "aarch64")}

if (platform.system(), platform.machine()) not in PLATFORMS:
    sys.exit(
        f"pagedkv supports Linux on x86-64 and aarch64, not {platform.system()} on {platform.machine()}."
    )

try:
    import torch
except ImportError:
    sys.exit(
        "pagedkv is compiled against the torch that is installed, and none is. Install torch first, then run "
        "`pip install --no-build-isolation .`"
    )


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: CUDA_HOME, CUDA_PATH, or where the nvcc on PATH says it lives (nvcc may be a wrapper script)."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            home = Path(os.environ[variable])
            return home if (home / "bin" / "nvcc").exists() else None
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return Path("/usr/local/cuda") if Path("/usr/local/cuda/bin/nvcc").exists() else None
    dryrun = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.*)$", dryrun.stderr + dryrun.stdout, re.MULTILINE)
    return Path(top.group(1).strip()).resolve() if top else Path(nvcc).resolve().parent.parent


def nvcc_version(cuda_home: Path) -> str:
    output = subprocess.run([cuda_home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"release (\d+\.\d+)", output.stdout)
    if version is None:
        sys.exit(f"{cuda_home}/bin/nvcc --version names no release:\n{output.stdout}")
    return version.group(1)


def choose_cuda() -> tuple[bool, str]:
    """Whether to build the CUDA back-end, and why."""
    forced = os.environ.get("PAGEDKV_CUDA")
    if forced not in (None, "", "0", "1"):
        sys.exit(f"PAGEDKV_CUDA must be 0 or 1, not {forced!r}")
    if forced == "0":
        return False, "PAGEDKV_CUDA=0 was set at build time"
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is a CPU build; install a CUDA build of torch and reinstall pagedkv"
    elif (cuda_home := find_cuda_home()) is None:
        why = (
            f"no nvcc was found; install the CUDA {torch.version.cuda} toolkit, or set CUDA_HOME to it, and "
            "reinstall pagedkv"
        )
    else:
        found = nvcc_version(cuda_home)
        if found.split(".")[0] != torch.version.cuda.split(".")[0]:
            sys.exit(
                f"nvcc {found} in {cuda_home} does not fit torch {torch.__version__}, which was built with CUDA "
                f"{torch.version.cuda}: the major versions must agree. Set CUDA_HOME to a CUDA "
                f"{torch.version.cuda.split('.')[0]}.x toolkit, install a torch built for CUDA {found.split('.')[0]}, "
                "or set PAGEDKV_CUDA=0 for a CPU-only build."
            )
        os.environ["CUDA_HOME"] = str(cuda_home)
        return True, f"nvcc {found} in {cuda_home}"
    if forced == "1":
        sys.exit(f"PAGEDKV_CUDA=1, but the CUDA back-end cannot be built: {why}")
    return False, why


WITH_CUDA, CUDA_REASON = choose_cuda()
if WITH_CUDA:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST)

# Imported only now: it reads CUDA_HOME at import.
from torch.utils import cpp_extension  # noqa: E402


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def headers() -> list[str]:
    return sorted(str(path) for path in (ROOT / "csrc").rglob("*.h*"))


def extensions() -> list[object]:
    # -ffp-contract=off: the portable kernels give the same bits on every architecture.
    cxx_flags = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-ffp-contract=off"]
    include_dirs = [str(ROOT / "csrc")]
    core = cpp_extension.CppExtension(
        "pagedkv._core",
        sources("csrc/core/*.cpp"),
        include_dirs=include_dirs,
        depends=headers(),
        extra_compile_args={"cxx": cxx_flags},
    )
    core.libraries = []  # torch is used for its copy of the pybind11 headers alone
    core.library_dirs = []
    cxx_flags = [*cxx_flags, "-fopenmp"]
    if not WITH_CUDA:
        return [
            core,
            cpp_extension.CppExtension(
                "pagedkv._C",
                sources("csrc/bindings/*.cpp", "csrc/cpu/**/*.cpp"),
                include_dirs=include_dirs,
                depends=headers(),
                extra_compile_args={"cxx": cxx_flags},
                extra_link_args=["-fopenmp"],
            ),
        ]
    return [
        core,
        cpp_extension.CUDAExtension(
            "pagedkv._C",
            sources("csrc/bindings/*.cpp", "csrc/cpu/**/*.cpp", "csrc/cuda/**/*.cu"),
            include_dirs=include_dirs,
            depends=headers(),
            define_macros=[("PAGEDKV_WITH_CUDA", None)],
            extra_compile_args={
                "cxx": cxx_flags,
                "nvcc": ["-O3", "-std=c++20", "--threads=2", "-Xcompiler=-fvisibility=hidden", "-lineinfo"],
            },
            extra_link_args=["-fopenmp"],
        ),
    ]


class BuildExtension(cpp_extension.BuildExtension):
    """Also leaves `pagedkv/_build_info.py` beside the extensions: what `import pagedkv` and `python -m pagedkv` report."""

    def run(self) -> None:
        super().run()
        package = Path(self.get_ext_fullpath("pagedkv._C")).parent
        (package / "_build_info.py").write_text(
            '"""Written by setup.py: what this build of pagedkv was made with."""\n\n'
            f"TORCH_VERSION = {torch.__version__!r}\n"
            f"CUDA_VERSION = {torch.version.cuda if WITH_CUDA else None!r}\n"
            f"CUDA_ARCH_LIST = {os.environ['TORCH_CUDA_ARCH_LIST'] if WITH_CUDA else ''!r}\n"
            f"CUDA_REASON = {CUDA_REASON!r}\n"
        )


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension})
