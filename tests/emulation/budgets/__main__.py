"""Static limits of the CUDA kernels: what nvcc has made of them, read from the built extension.

    python -m emulation.budgets [--update]

No kernel may use local memory, which is where spilled registers go, on any architecture that the extension
has machine code for. For the hot kernels, those named in limits.toml, the registers, the shared memory, the
CTAs that fit an SM and the instructions of the main loop must keep to the limits there; --update writes the
present figures into it. Needs the CUDA toolkit's headers, cuobjdump and nvdisasm (their Python packages, from
13.2.51 on) and, for the shared memory of each launch, the kernel tests in build/emulation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulation.budgets import limits, sass
from emulation.kernel_names import demangle, kernel_name, kernels_in
from emulation.ptx.build import find_nvcc

ROOT = Path(__file__).resolve().parents[3]
KERNEL_TESTS = ROOT / "build" / "emulation" / "test_kernels_plain"


@dataclass
class Compiled:
    """A kernel on one architecture."""

    registers: int
    local_bytes: int  # of a thread: its stack, with what was spilled
    cubin: str  # the name of the file that cuobjdump makes of its code
    symbol: str


def arch_number(arch: str) -> int:
    """100 of sm_100."""
    return int(arch.removeprefix("sm_"))


def find_extension() -> Path:
    """The extension that was built into the source tree."""
    found = sorted((ROOT / "pagedkv").glob("_C.*.so"))
    if not found:
        sys.exit("make budgets needs a CUDA build in the source tree; pagedkv/ holds no extension")
    return found[0]


def find_tool(name: str) -> str:
    """The path of a program of the Python package nvidia-cuda-<name>."""
    package = f"nvidia-cuda-{name}"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"make budgets needs {name}: pip install --group budgets")
    return next(str(path.locate()) for path in files if path.name == name)


def read_usage(extension: Path) -> dict[str, dict[str, Compiled]]:
    """Every kernel's figures, by kernel and architecture."""
    command = [find_tool("cuobjdump"), "--dump-resource-usage", extension]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    entry = re.compile(
        r"^arch = (?P<arch>\w+)|^identifier = .*?(?P<file>\w+)\.cu$|^ Function (?P<symbol>\w+):"
        r"|^ +REG:(?P<registers>\d+) STACK:(?P<stack>\d+) .*?LOCAL:(?P<local>\d+)",
        re.MULTILINE,
    )
    kernels: dict[str, dict[str, Compiled]] = defaultdict(dict)
    fields: dict[str, str] = {}
    for match in entry.finditer(output):
        fields |= {name: text for name, text in match.groupdict().items() if text is not None}
        if match["registers"] is not None:
            local_bytes = int(fields["stack"]) + int(fields["local"])
            cubin = f"{fields['file']}.{fields['arch']}.cubin"
            compiled = Compiled(int(fields["registers"]), local_bytes, cubin, fields["symbol"])
            kernels[fields["symbol"]][fields["arch"]] = compiled
    names = [kernel_name(text) or text for text in demangle(list(kernels))] if kernels else []
    return {
        name: dict(sorted(by_arch.items(), key=lambda item: arch_number(item[0])))
        for name, by_arch in zip(names, kernels.values(), strict=True)
    }


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


def ctas_per_sm(queries: list[str], directory: Path) -> list[int]:
    """CUDA's own calculation (cuda_occupancy.h) for lines of occupancy.cpp."""
    program = directory / "occupancy"
    source = Path(__file__).with_name("occupancy.cpp")
    include = find_nvcc().parent.parent / "include"
    subprocess.run(["g++", "-std=c++20", f"-I{include}", source, "-o", program], check=True)
    text = "\n".join(queries)
    answer = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [int(line) for line in answer.stdout.split()]


def measure(
    extension: Path, hot: list[str], kernels: dict[str, dict[str, Compiled]]
) -> dict[str, dict[str, limits.Figures]]:
    """The figures of the hot kernels, by kernel and architecture."""
    sizes = launch_sizes()
    for name in hot:
        if name not in kernels or name not in sizes:
            sys.exit(
                f"limits.toml names {name}, which is not among the kernels: {', '.join(sorted(kernels))}"
            )
    figures: dict[str, dict[str, Any]] = defaultdict(dict)
    queries = []
    with tempfile.TemporaryDirectory() as folder:
        extract = [find_tool("cuobjdump"), "--extract-elf", "all", extension]
        subprocess.run(extract, cwd=folder, stdout=subprocess.DEVNULL, check=True)
        listings: dict[str, dict[str, list[str]]] = {}
        for cubin in {compiled.cubin for name in hot for compiled in kernels[name].values()}:
            disassemble = [find_tool("nvdisasm"), "-c", cubin]
            text = subprocess.run(disassemble, cwd=folder, capture_output=True, text=True, check=True)
            listings[cubin] = sass.functions(text.stdout)
        for name in hot:
            num_threads, shared_bytes = sizes[name]
            for arch, compiled in kernels[name].items():
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
        answers = iter(ctas_per_sm(queries, Path(folder)))
    for by_arch in figures.values():
        for figure in by_arch.values():
            figure.ctas_per_sm = next(answers)
    return figures


def main() -> int:
    """1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description="Static limits of the CUDA kernels")
    parser.add_argument("--update", action="store_true", help="write the present figures into limits.toml")
    arguments = parser.parse_args()
    extension = find_extension()
    kernels = read_usage(extension)
    if not kernels:
        sys.exit(f"{extension.name} is a CPU build: make budgets needs a CUDA build")
    architectures = sorted({arch for by_arch in kernels.values() for arch in by_arch}, key=arch_number)
    problems = []
    for name, by_arch in sorted(kernels.items()):
        if set(by_arch) != set(architectures):
            problems.append(f"{name} was compiled for {sorted(by_arch)} alone")
        for arch, compiled in by_arch.items():
            if compiled.local_bytes > 0:
                problems.append(f"{name} has {compiled.local_bytes} bytes of local memory on {arch}")
    print(
        f"{extension.name}, {extension.stat().st_size / 1e6:.1f} MB: {len(kernels)} kernels for each of "
        f"{', '.join(architectures)}; {len(problems)} use local memory"
    )
    hot = limits.read()
    figures = measure(extension, list(hot), kernels)
    print(limits.table(figures))
    if arguments.update:
        left_out = {arch for limit in hot.values() for arch in limit["ctas_per_sm"]} - set(architectures)
        if left_out:
            sys.exit(f"--update needs a build for {', '.join(sorted(left_out))} too")
        limits.write(figures)
    else:
        problems += limits.check(hot, figures)
    for problem in problems:
        print(f"over budget: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
