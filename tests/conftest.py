"""Fixtures of the operator tests: the back-ends, and a fixed hypothesis profile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is loaded: OpenMP's threads wait asleep instead of spinning. Tests make thousands of tiny
# parallel regions, and several workers share the cores; spinning makes that ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch
from helpers import Backend

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

CUDA_SOURCES = Path(__file__).parent.parent / "csrc" / "cuda"


def has_cuda_kernel(operator: str) -> bool:
    """Whether the operator has a CUDA kernel: its sources are a file or a folder of its name."""
    return (CUDA_SOURCES / f"{operator}.cu").exists() or (CUDA_SOURCES / operator).is_dir()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker that `pytest_generate_tests` reads."""
    config.addinivalue_line("markers", "operators(*names): the operators that a test needs of its back-end")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``backend`` on each back-end that has every operator the test uses.

    The operators are those that the test's module lists in ``OPERATORS``, or that the test names itself with
    ``@pytest.mark.operators("gather_kv", ...)``.
    """
    if "backend" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("operators")
    operators = marker.args if marker else metafunc.module.OPERATORS
    names = ["cpu"]
    if all(has_cuda_kernel(operator) for operator in operators):
        names.append("emulated")
        if torch.cuda.is_available():
            names.append("cuda")
    metafunc.parametrize("backend", names, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of offsets beyond 32 bits take tens of GB on a card: one at a time, with --dist loadgroup."""
    for item in items:
        if "offset" in item.name and "[cuda" in item.name:
            item.add_marker(pytest.mark.xdist_group("huge caches"))


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """One way to run the operators; ``pagedkv.ops`` uses it for the length of the test."""
    import pagedkv.ops

    name: str = request.param
    if name == "emulated":
        from emulation import build

        build.load()
        monkeypatch.setattr(pagedkv.ops, "_library", torch.ops.pagedkv_emulated)
    yield Backend(name, torch.device("cuda" if name == "cuda" else "cpu"), pagedkv.ops)
    if name == "cuda":
        torch.cuda.empty_cache()  # other processes test on the same card
