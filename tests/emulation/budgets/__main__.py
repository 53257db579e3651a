"""Static limits of the CUDA kernels: what nvcc makes of them on every architecture that ships.

    python -m emulation.budgets [--jobs N] [--update]

No kernel may spill registers. For the hot kernels, those named in limits.toml, the registers, the shared
memory, the CTAs that fit an SM and the instructions of the main loop must keep to the limits there; --update
writes the present figures into it. Needs nvcc, nvdisasm (`pip install nvidia-cuda-nvdisasm`, from 13.2.51 on)
and, for the shared memory of each launch, the kernel tests in build/emulation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from emulation.budgets import limits, sass
from emulation.kernel_names import demangle, kernel_name, kernels_in

ROOT = Path(__file__).resolve().parents[3]
WORK = ROOT / "build" / "budgets"
KERNEL_TESTS = ROOT / "build" / "emulation" / "test_kernels_plain"


@dataclass
class Compiled:
    """What ptxas says of a kernel on one architecture."""

    registers: int
    spilled_bytes: int
    cubin: Path
    symbol: str


def load_setup() -> ModuleType:
    """setup.py, whose flags and architectures these are."""
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_py"] = module
    spec.loader.exec_module(module)
    return module


def toolkit() -> tuple[Path, list[str], list[str]]:
    """The CUDA toolkit, nvcc's flags, and the architectures that ship machine code."""
    setup = load_setup()
    home, problem = setup.find_cuda_home(os.environ)
    if home is None:
        sys.exit(f"make budgets needs the CUDA toolkit: {problem}")
    arch_list = setup.default_arch_list(setup.nvcc_version(home))
    recorder = SimpleNamespace(
        CppExtension=lambda name, sources, **options: SimpleNamespace(**options),
        CUDAExtension=lambda name, sources, **options: SimpleNamespace(**options),
    )
    choice = setup.CudaChoice(True, "", home, arch_list)
    _, operators = setup.extensions(recorder, choice)
    flags = [*operators.extra_compile_args["nvcc"], "--expt-relaxed-constexpr"]  # the last one is torch's
    architectures = [f"sm_{arch.replace('.', '').removesuffix('+PTX')}" for arch in arch_list.split(";")]
    return home, flags, architectures


def compile_cubins(home: Path, flags: list[str], architectures: list[str], num_jobs: int) -> list[Path]:
    """One cubin per kernel file and architecture, with ptxas's remarks beside it; only what has changed."""
    WORK.mkdir(parents=True, exist_ok=True)
    nvcc = home / "bin" / "nvcc"
    rule = [
        f"builddir = {WORK}",
        "rule cubin",
        f"  command = {nvcc} -cubin -arch=$arch {' '.join(flags)} -I{ROOT / 'csrc'} -Xptxas -v "
        "-MD -MF $out.d $in -o $out > $out.log 2>&1 || (cat $out.log; false)",
        "  depfile = $out.d",
        "  description = $out",
    ]
    cubins = []
    for source in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")):
        for arch in architectures:
            cubin = WORK / f"{source.stem}.{arch}.cubin"
            rule += [f"build {cubin}: cubin {source}", f"  arch = {arch}"]
            cubins.append(cubin)
    ninja_file = WORK / "build.ninja"
    ninja_file.write_text("\n".join(rule) + "\n")
    command = [sys.executable, "-m", "ninja", "-f", str(ninja_file), "-j", str(num_jobs), "--quiet"]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit("nvcc failed")
    return cubins


def read_remarks(cubins: list[Path]) -> dict[str, dict[str, Compiled]]:
    """Every kernel's figures, by kernel and architecture."""
    remark = re.compile(
        r"Compiling entry function '(\S+)' for '(\S+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    kernels: dict[str, dict[str, Compiled]] = defaultdict(dict)
    for cubin in cubins:
        found = remark.findall(Path(f"{cubin}.log").read_text())
        for (symbol, arch, stores, loads, registers), text in zip(
            found, demangle([entry[0] for entry in found]) if found else [], strict=True
        ):
            name = kernel_name(text) or text
            kernels[name][arch] = Compiled(int(registers), int(stores) + int(loads), cubin, symbol)
    return kernels


def launch_sizes() -> dict[str, tuple[int, int]]:
    """Threads of a CTA and its least bytes of shared memory, by kernel, as the kernel tests launch it."""
    if not KERNEL_TESTS.exists():
        sys.exit(f"{KERNEL_TESTS} is missing: make emulator-build")
    with tempfile.NamedTemporaryFile(mode="r", suffix=".launches") as record:
        environment = {"PAGEDKV_EMULATOR_LAUNCHES": record.name, "PAGEDKV_TEST_SEEDS": "0"}
        environment["OMP_NUM_THREADS"] = "1"
        subprocess.run(
            [KERNEL_TESTS], env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL
        )
        lines = record.read().splitlines()
    names = kernels_in(KERNEL_TESTS)
    sizes: dict[str, tuple[int, int]] = {}
    for line in lines:
        _, _, offset, num_threads, shared_bytes = line.split(" ")
        name = names[int(offset, 16)]
        size = int(num_threads), int(shared_bytes)
        sizes[name] = min(size, sizes.get(name, size))
    return sizes


def ctas_per_sm(home: Path, queries: list[str]) -> list[int]:
    """CUDA's own calculation (cuda_occupancy.h) for lines of occupancy.cpp."""
    program = WORK / "occupancy"
    source = Path(__file__).with_name("occupancy.cpp")
    subprocess.run(["g++", "-std=c++20", f"-I{home / 'include'}", source, "-o", program], check=True)
    text = "\n".join(queries)
    answer = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [int(line) for line in answer.stdout.split()]


def find_nvdisasm() -> str:
    """The disassembler, of the toolkit or of its Python package."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    try:
        for path in importlib.metadata.files("nvidia-cuda-nvdisasm") or []:
            if path.name == "nvdisasm":
                return str(path.locate())
    except importlib.metadata.PackageNotFoundError:
        pass
    sys.exit("make budgets needs nvdisasm: pip install 'nvidia-cuda-nvdisasm>=13.2.51'")


def measure(home: Path, hot: list[str], kernels: dict[str, dict[str, Compiled]]) -> dict[str, dict[str, Any]]:
    """The figures of the hot kernels, by kernel and architecture."""
    sizes = launch_sizes()
    nvdisasm = find_nvdisasm()
    listings: dict[Path, dict[str, list[str]]] = {}
    figures: dict[str, dict[str, Any]] = defaultdict(dict)
    queries = []
    for name in hot:
        if name not in kernels or name not in sizes:
            sys.exit(
                f"limits.toml names {name}, which is not among the kernels: {', '.join(sorted(kernels))}"
            )
        num_threads, shared_bytes = sizes[name]
        for arch, compiled in kernels[name].items():
            if compiled.cubin not in listings:
                text = subprocess.run(
                    [nvdisasm, "-c", compiled.cubin], capture_output=True, text=True, check=True
                )
                listings[compiled.cubin] = sass.functions(text.stdout)
            blocks = sass.control_flow(listings[compiled.cubin][compiled.symbol])
            everything = sass.count(blocks, set(range(len(blocks))))
            loop = sass.count(blocks, sass.main_loop(blocks))
            figures[name][arch] = limits.Figures(
                registers=compiled.registers,
                shared_bytes=shared_bytes,
                ctas_per_sm=0,
                main_loop={kind: loop[kind] for kind in limits.KINDS} | {"all": loop.total()},
                local_accesses=everything["LDL"] + everything["STL"],
            )
            queries.append(f"{arch} {compiled.registers} {num_threads} {shared_bytes}")
    answers = iter(ctas_per_sm(home, queries))
    for by_arch in figures.values():
        for figure in by_arch.values():
            figure.ctas_per_sm = next(answers)
    return figures


def main() -> int:
    """1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description="Static limits of the CUDA kernels")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--update", action="store_true", help="write the present figures into limits.toml")
    arguments = parser.parse_args()
    home, flags, architectures = toolkit()
    kernels = read_remarks(compile_cubins(home, flags, architectures, arguments.jobs))
    problems = []
    for name, by_arch in sorted(kernels.items()):
        if set(by_arch) != set(architectures):
            problems.append(f"{name} was compiled for {sorted(by_arch)} alone")
        for arch, compiled in by_arch.items():
            if compiled.spilled_bytes > 0:
                problems.append(f"{name} spills {compiled.spilled_bytes} bytes on {arch}")
    print(f"{len(kernels)} kernels on {', '.join(architectures)}: {len(problems)} of them spill registers")
    hot = limits.read()
    figures = measure(home, list(hot), kernels)
    print(limits.table(figures))
    if arguments.update:
        limits.write(figures)
    else:
        problems += limits.check(hot, figures)
    for problem in problems:
        print(f"over budget: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
