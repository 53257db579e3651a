"""Builds the emulated library with nvcc's PTX, translated into C++, in place of the kernels' source.

``load()`` of ``emulation.build`` comes here where ``PAGEDKV_EMULATOR_ROUTE`` is ``ptx``. Bindings, checks and
launchers are the same; a launch then runs what nvcc made of the kernel. Every file is compiled for
compute_80, and where its code asks for ``__CUDA_ARCH__``, for the architectures from which on the answer
differs too; ``PAGEDKV_EMULATOR_ARCHITECTURE`` (80 if unset) says which of them runs.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from emulation import build as emulated

from . import parser, translator

HERE = Path(__file__).resolve().parent
FIRST_ARCHITECTURE = 80
# -Og: -O1 takes twice as long to compile; at -O0 the many small functions take ten times as long to run.
# Registers that are declared and not used are the rule in PTX.
FLAGS = [
    *(flag for flag in emulated.FLAGS if flag not in ("-O2", "-Wall")),
    "-Og",
    "-fwrapv",
    "-Wall",
    "-Wno-unused-variable",
    "-Wno-unused-but-set-variable",
    "-Wno-unused-label",
    "-Wno-maybe-uninitialized",
]  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A kernel as nvcc compiled it: one instantiation for one architecture."""

    file: str  # "paged_attention_float16"
    kernel: str  # "pagedkv::cuda::decode_kernel<pagedkv::float16, 1, 64, 1>"
    params: str  # the C++ type of its parameter
    num_bytes: int  # and its size in PTX
    architecture: int
    max_threads: int
    symbol: str  # its mangled name
    source: str  # the C++ file of its translation

    @property
    def function(self) -> str:
        """The name of its translation."""
        return f"ptx_{self.architecture}_{self.symbol}"


@functools.cache
def setup_module() -> types.ModuleType:
    """The package's setup.py, which knows where CUDA lies and how kernels are compiled."""
    spec = importlib.util.spec_from_file_location("pagedkv_setup", emulated.ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@functools.cache
def find_nvcc() -> Path:
    """The nvcc that an installation would use.

    Raises:
        RuntimeError: there is none.
    """
    home, problem = setup_module().find_cuda_home(os.environ)
    if home is None:
        raise RuntimeError(f"the PTX route needs nvcc: {problem}; put it on PATH or set CUDA_HOME")
    nvcc: Path = home / "bin" / "nvcc"
    return nvcc


@functools.cache
def nvcc_version() -> bytes:
    """All that nvcc says of itself."""
    return subprocess.run([find_nvcc(), "--version"], capture_output=True, check=True).stdout


def included_files(path: Path) -> list[Path]:
    """A source file and all files of ``csrc`` that it includes."""
    found: dict[Path, None] = {}
    pending = [path]
    while pending:
        file = pending.pop()
        if file in found:
            continue
        found[file] = None
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.MULTILINE):
            pending += [candidate for candidate in (emulated.CSRC / name,) if candidate.exists()]
    return list(found)


def architectures_of(kernel: Path) -> list[int]:
    """compute_80, and those at which a comparison with ``__CUDA_ARCH__`` in the file begins to hold."""
    text = "\n".join(path.read_text() for path in included_files(kernel))
    bounds = re.findall(r"__CUDA_ARCH__\s*(?:<|<=|>|>=|==)\s*(\d+)", text)
    return sorted({FIRST_ARCHITECTURE, *(int(bound) // 10 for bound in bounds if int(bound) >= 800)})


def stem(kernel: Path) -> str:
    """``paged_attention_float16``"""
    return "_".join(kernel.relative_to(emulated.CSRC / "cuda").with_suffix("").parts)


def compile_to_ptx(kernel: Path, architecture: int, output: Path, include: Path = emulated.CSRC) -> None:
    """Run nvcc with the flags of the package's build that have a say in the PTX, and with torch's."""
    command = [
        str(find_nvcc()),
        "-ptx",
        f"-arch=compute_{architecture}",
        *(flag for flag in setup_module().NVCC_FLAGS if not flag.startswith("-X")),
        "--expt-relaxed-constexpr",
        "-DPAGEDKV_WITH_CUDA",
        f"-I{include}",
        str(kernel),
        "-o",
        str(output),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


def demangle(names: list[str]) -> list[str]:
    """C++ names, each as ``name(parameters)``, without anonymous namespaces and return types."""
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = [name.replace("(anonymous namespace)::", "") for name in result.stdout.splitlines()]
    return [name.removeprefix("void ") for name in plain]


def write_if_different(path: Path, text: str) -> Path:
    """Leave a file's time alone where nothing has changed."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def digest(kernel: Path) -> str:
    """Of all that the PTX of a kernel file and its translation are made from."""
    digest = hashlib.sha256(nvcc_version())
    translator_files = [path for path in HERE.glob("*.py") if path.name not in ("run.py", "traffic.py")]
    for path in sorted([*included_files(kernel), *translator_files, emulated.ROOT / "setup.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamp(kernel: Path, architecture: int, directory: Path) -> Path:
    """The file that says what was generated, and from what."""
    return directory / f"{stem(kernel)}.{architecture}.json"


def generated(kernel: Path, architecture: int, directory: Path) -> list[Entry] | None:
    """The entries of a kernel file, if they lie translated in the folder and nothing has changed since."""
    path = stamp(kernel, architecture, directory)
    if not path.exists():
        return None
    written = json.loads(path.read_text())
    if written["digest"] != digest(kernel):
        return None
    return [Entry(**entry) for entry in written["entries"]]


def generate(kernel: Path, architecture: int, directory: Path) -> list[Entry]:
    """Write the PTX of a kernel file and the C++ of its entries."""
    ptx = directory / f"{stem(kernel)}.{architecture}.ptx"
    compile_to_ptx(kernel, architecture, ptx)
    module = parser.parse(ptx.read_text(), ptx.name, str(emulated.ROOT))
    entries = []
    signatures = demangle([entry.name for entry in module.entries])
    for idx, (function, signature) in enumerate(zip(module.entries, signatures, strict=True)):
        name, _, params = signature.removesuffix(")").partition("(")
        if len(function.parameters) != 1:
            raise parser.PtxError(f"{function.location}: {name}: a kernel takes one parameter")
        entry = Entry(
            file=stem(kernel),
            kernel=name,
            params=params,
            num_bytes=function.parameters[0].num_bytes,
            architecture=architecture,
            max_threads=function.max_threads,
            symbol=function.name,
            source=f"{stem(kernel)}.{architecture}.{idx}.cpp",
        )
        text = translator.translate(module, {entry.function: function}, ptx.name)
        write_if_different(directory / entry.source, text)
        entries.append(entry)
    written = {"digest": digest(kernel), "entries": [asdict(entry) for entry in entries]}
    stamp(kernel, architecture, directory).write_text(json.dumps(written))
    return entries


def code(entry: Entry, directory: Path) -> str:
    """The translation of an entry without what names its architecture and its place in the PTX."""
    text = re.sub(r"^(//|#line).*\n", "", (directory / entry.source).read_text(), flags=re.MULTILINE)
    return text.replace(entry.function, "")


def without_repetitions(entries: list[Entry], directory: Path) -> list[Entry]:
    """The entries of a kernel file that are not, word for word, those of an earlier architecture.

    On a later architecture the emulator runs the last version that there is of a kernel.
    """
    versions: dict[str, str] = {}
    kept = []
    for entry in entries:
        text = code(entry, directory)
        if versions.get(entry.symbol) != text:
            versions[entry.symbol] = text
            kept.append(entry)
    return kept


def registration(kernel: Path, entries: list[Entry]) -> str:
    """A kernel file for the host compiler, followed by the translations that run in its kernels' place.

    In one file with the kernels, since many are of an unnamed namespace. The host compiler has the same idea
    of a parameter struct's size as nvcc, or this does not compile.
    """
    lines = [f'#include "{kernel}"']
    for entry in entries:
        lines += [
            f"namespace pagedkv::emulator::ptx {{ void {entry.function}(const unsigned char* params); }}",
            f"static_assert(sizeof({entry.params}) == {entry.num_bytes});",
        ]
    lines.append("[[maybe_unused]] static const bool REPLACED = [] {")
    for entry in entries:
        lines += [
            f"  void (*const kernel_{len(lines)})({entry.params}) = {entry.kernel};",
            f"  pagedkv::emulator::replace_kernel(reinterpret_cast<const void*>(kernel_{len(lines)}), "
            f'{{"{entry.symbol}", pagedkv::emulator::ptx::{entry.function}, {entry.max_threads}u, '
            f"{entry.architecture}}});",
        ]
    return "\n".join([*lines, "  return true;", "}();", ""])


def build_directory() -> Path:
    """Where PTX, translations and library lie."""
    return emulated.ROOT / "build" / "emulated-ptx" / f"torch-{torch.__version__}"


def generate_all(directory: Path) -> tuple[list[Entry], list[Path]]:
    """The entries of every kernel file, and the C++ files to compile."""
    jobs = [
        (kernel, architecture)
        for kernel in emulated.kernel_files()
        for architecture in architectures_of(kernel)
    ]
    results = [generated(*job, directory) for job in jobs]
    missing = [job for job, result in zip(jobs, results, strict=True) if result is None]
    if missing:
        num_processes = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with concurrent.futures.ProcessPoolExecutor(num_processes) as pool:
            made = pool.map(generate, *zip(*missing, strict=True), [directory] * len(missing))
            of_job = dict(zip(missing, made, strict=True))
        results = [of_job.get(job, result) for job, result in zip(jobs, results, strict=True)]
    all_entries = []
    sources = []
    for kernel in emulated.kernel_files():
        of_kernel = [result or [] for job, result in zip(jobs, results, strict=True) if job[0] == kernel]
        entries = without_repetitions([entry for entries in of_kernel for entry in entries], directory)
        text = registration(kernel, entries)
        sources.append(write_if_different(directory / f"{stem(kernel)}.kernels.cpp", text))
        sources += [directory / entry.source for entry in entries]
        all_entries += entries
    return all_entries, sources


@functools.cache
def load() -> list[Entry]:
    """Compile what has changed since the last call, in any process, and load the library.

    ``PAGEDKV_EMULATOR_LIBRARY`` names another library to load, one made from this by exchanging kernels.
    """
    directory = build_directory()
    directory.mkdir(parents=True, exist_ok=True)
    if library := os.environ.get("PAGEDKV_EMULATOR_LIBRARY"):
        torch.ops.load_library(library)
        return []
    with emulated.exclusive(directory):
        entries, kernel_sources = generate_all(directory)
        emulated.load_library([*kernel_sources, *sorted(HERE.glob("*.cpp"))], directory, FLAGS)
    return entries
