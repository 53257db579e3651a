"""The emulated library as Python sees it: its errors, its schedules, its place beside the installed one."""

from __future__ import annotations

import pytest
import torch
from emulation import build


@pytest.fixture(autouse=True)
def library() -> None:
    build.load()


def merge() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    out_a, out_b = (torch.randn(5, 3, 40, generator=generator) for _ in range(2))
    lse_a, lse_b = (torch.randn(5, 3, generator=generator) for _ in range(2))
    return list(torch.ops.pagedkv_emulated.merge_attn_states(out_a, lse_a, out_b, lse_b))


@pytest.mark.parametrize("schedule", ["ascending", "descending", "random:1", "random:2"])
def test_every_schedule_gives_the_same_bits(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = merge()
    monkeypatch.setenv("PAGEDKV_EMULATOR_SCHEDULE", schedule)
    monkeypatch.setenv("PAGEDKV_EMULATOR_WORKERS", "2")
    for actual, wanted in zip(merge(), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_failed_launch_is_a_runtime_error_with_the_emulators_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_EMULATOR_SCHEDULE", "sideways")
    with pytest.raises(RuntimeError, match="'sideways'; supported: ascending, descending, random:SEED"):
        merge()
    monkeypatch.delenv("PAGEDKV_EMULATOR_SCHEDULE")
    merge()


def test_every_kernel_file_is_in_the_library() -> None:
    for kernel in build.kernel_files():
        operator = kernel.relative_to(build.CSRC / "cuda").parts[0].removesuffix(".cu")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv_emulated::{operator}", "CPU")


def test_library_leaves_the_installed_one_alone() -> None:
    """Two copies of the bindings in one process share no state: each has a debug mode of its own."""
    import pagedkv

    cache, rows = torch.zeros(1, 4, 1, 8), torch.ones(1, 1, 8)
    beyond = torch.tensor([4])
    pagedkv.set_debug(True)
    try:
        arguments = (rows, rows, cache, cache.clone(), beyond, None, None, None, None)
        torch.ops.pagedkv_emulated.reshape_and_cache(*arguments)
        torch.ops.pagedkv_emulated._set_debug(True)
        with pytest.raises(IndexError, match=r"slot_mapping\[0\] is 4"):
            torch.ops.pagedkv_emulated.reshape_and_cache(*arguments)
    finally:
        torch.ops.pagedkv_emulated._set_debug(False)
        pagedkv.set_debug(False)
    assert not cache.any()
