"""An operator's name is the key to its files, and data flows from Python to binding to kernel."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from emulation import build

import pagedkv
from pagedkv import _loader, ops, reference

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CXX_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h", ".cu", ".cuh"))
OPERATORS = sorted(set(ops.__all__) - {"set_debug"})
CUDA_OPERATORS = sorted({path.relative_to(CSRC / "cuda").parts[0] for path in (CSRC / "cuda").rglob("*.cu")})
CUDA_OPERATORS = [name.removesuffix(".cu") for name in CUDA_OPERATORS]


def includes(path: Path) -> list[str]:
    """What a file includes, without the brackets or quotes."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def name_of(path: Path) -> str:
    """Test ids: the path from the root."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "path", [path for path in CXX_FILES if path.parent != CSRC / "bindings"], ids=name_of
)
def test_only_the_bindings_see_torch(path: Path) -> None:
    seen = [name for name in includes(path) if re.match(r"(torch|ATen|c10|caffe2)(/|$)", name)]
    assert seen == []


@pytest.mark.parametrize(
    "path", [path for path in CXX_FILES if path.parent != CSRC / "bindings"], ids=name_of
)
def test_nothing_includes_what_calls_it(path: Path) -> None:
    """Kernels do not know the bindings, the CPU not the CUDA back-end, common and core neither of them."""
    folder = path.relative_to(CSRC).parts[0]
    above = {
        "common": {"bindings", "core", "cpu", "cuda"},
        "core": {"bindings", "cpu", "cuda"},
        "cpu": {"bindings", "core", "cuda"},
        "cuda": {"bindings", "core", "cpu"},
    }.get(folder, {"bindings", "core", "cpu", "cuda"})
    assert [name for name in includes(path) if name.split("/")[0] in above] == []


@pytest.mark.parametrize("path", [path for path in CXX_FILES if path.parent == CSRC / "core"], ids=name_of)
def test_block_structures_see_python_in_their_bindings_only(path: Path) -> None:
    if path.name in ("bindings.h", "module.cpp") or path.name.startswith("bind_"):
        return
    assert [name for name in includes(path) if name.startswith(("pybind11", "Python.h", "numpy"))] == []


@pytest.mark.parametrize("op", OPERATORS)
def test_name_of_an_operator_finds_its_files(op: str) -> None:
    assert (CSRC / "cpu" / f"{op}.cpp").exists()
    assert (CSRC / "bindings" / f"{op}.cpp").exists()
    assert (ROOT / "tests" / f"test_{op}.py").exists()
    assert getattr(pagedkv, op) is getattr(ops, op)
    assert inspect.isfunction(getattr(reference, op))


def test_every_kernel_file_belongs_to_an_operator() -> None:
    assert set(OPERATORS) == set(_loader._OPS)
    assert set(CUDA_OPERATORS) <= set(OPERATORS)
    isa_variants = {f"{op}_{isa}" for op in OPERATORS for isa in ("avx2", "avx512", "neon", "sve")}
    others = {"layers"}  # private to pagedkv.generation
    assert {path.stem for path in (CSRC / "cpu").glob("*.cpp")} <= set(OPERATORS) | isa_variants | others


@pytest.mark.parametrize("op", OPERATORS)
def test_binding_registers_exactly_the_back_ends_that_exist(op: str) -> None:
    """A CUDA kernel that nobody registers, or a missing one that is registered, shows without a GPU."""
    registrations = re.findall(
        r"^(PAGEDKV_\w*OP)\(\s*(\w+)", (CSRC / "bindings" / f"{op}.cpp").read_text(), re.MULTILINE
    )
    assert registrations == [("PAGEDKV_OP" if op in CUDA_OPERATORS else "PAGEDKV_CPU_OP", op)]


@pytest.mark.parametrize("op", OPERATORS)
def test_operator_has_a_fake_and_a_reference_of_the_same_signature(op: str) -> None:
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv::{op}", key), key

    def parameters(function: object) -> dict[str, tuple[object, object]]:
        assert callable(function)
        return {p.name: (p.kind, p.default) for p in inspect.signature(function).parameters.values()}

    wrapper, specification = parameters(getattr(ops, op)), parameters(getattr(reference, op))
    extra = set(specification) - set(wrapper)  # a reference may have keywords for the tests' own use
    assert extra <= {"compute_dtype"}
    assert list(wrapper.items()) == [item for item in specification.items() if item[0] not in extra]


@pytest.mark.parametrize("op", CUDA_OPERATORS)
def test_fault_op_schema_drift_cpu_cuda(op: str) -> None:
    """The CUDA side, as the emulated library registers it, has the schema and defaults of the CPU side."""
    build.load()
    native = getattr(torch.ops.pagedkv, op).default._schema
    emulated = getattr(torch.ops.pagedkv_emulated, op).default._schema
    assert str(native).replace("pagedkv::", "") == str(emulated).replace("pagedkv_emulated::", "")


@pytest.mark.parametrize("op", CUDA_OPERATORS)
def test_fault_device_guard(op: str) -> None:
    """Kernels are reached through the one place that sets device and stream (a run takes two GPUs)."""
    binding = (CSRC / "bindings" / f"{op}.cpp").read_text()
    assert re.search(rf"PAGEDKV_RUN\({op}, ", binding)
    assert f"cuda::{op}(" not in binding
    checks = (CSRC / "bindings" / "checks.h").read_text()
    assert re.search(
        r"CUDAGuard guard\(device\);\s*check_cuda\(op, cuda\(params, .*getCurrentCUDAStream", checks
    )


@pytest.mark.parametrize("path", CXX_FILES, ids=name_of)
def test_nothing_ends_the_process_or_launches_unchecked(path: Path) -> None:
    code = re.sub(r"//.*", "", path.read_text())
    assert re.findall(r"\b(?:exit|abort|terminate)\s*\(", code) == []
    if path.name != "device.h":  # its launch() returns the error
        assert "<<<" not in code
