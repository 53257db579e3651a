"""The tools behind `make mutants`, `make budgets` and `make emulated`, and what they find in the kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emulation import kernel_names
from emulation.budgets import limits, sass
from emulation.mutants import attention, caches
from emulation.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent
CUDA_SOURCES = ROOT / "csrc" / "cuda"
MUTANTS = [*attention.MUTANTS, *caches.MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_fault_has_its_place(mutant: Mutant) -> None:
    found = [path.read_text().count(mutant.text) for path in CUDA_SOURCES.glob(mutant.files)]
    assert sum(found) == 1, f"anchor it again in csrc/cuda/{mutant.files}: {mutant.text}"
    assert (CUDA_SOURCES / mutant.unit).exists()
    assert mutant.build in ("plain", "asan", "tsan")


def test_planted_faults_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 12


def test_every_kernel_has_a_name_by_which_it_is_counted() -> None:
    for path in [*CUDA_SOURCES.rglob("*.cu"), *CUDA_SOURCES.rglob("*.h")]:
        for declaration in re.findall(r"__global__ void[^{;]*", path.read_text()):
            name = re.findall(r"(\w+)\(const \w+ \w+\)\s*$", declaration)
            assert name, declaration
            assert name[0].endswith("_kernel"), declaration


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        (
            "void pagedkv::cuda::decode_kernel<pagedkv::bfloat16, 2, 128, 1>(pagedkv::cuda::AttentionLaunch)",
            "decode_kernel<bfloat16, 2, 128, 1>",
        ),
        (
            "pagedkv::cuda::(anonymous namespace)::copy_blocks_kernel"
            "(pagedkv::cuda::(anonymous namespace)::Launch)",
            "copy_blocks_kernel",
        ),
        ("void pagedkv::cuda::a_kernel<float>(pagedkv::cuda::Launch) [clone .cold]", None),
        ("pagedkv::cuda::copy_blocks(pagedkv::CopyBlocksParams const&, CUstream_st*)", None),
        ("pagedkv::emulator::sum_kernel(pagedkv::emulator::SumParams)", None),
    ],
)
def test_kernel_name(demangled: str, name: str | None) -> None:
    assert kernel_names.kernel_name(demangled) == name


# Two loops, one in the other; ptxas has put the copy of the inner one behind the function's end.
LISTING = """
.text.first:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_2:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0030*/              @!P0 BRA `(.L_x_4) ;
.L_x_3:
        /*0040*/                   LDSM.16.M88.4 R8, [R20] ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   STL [R1], R4 ;
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/                   LDGSTS.E.BYPASS.LTC128B.128 [R2], [R6.64] ;
        /*00a0*/                   BRA `(.L_x_3) ;
.text.second:
        /*0000*/                   EXIT ;
"""


def test_main_loop_is_the_inner_one_wherever_its_parts_lie() -> None:
    functions = sass.functions(LISTING)
    blocks = sass.control_flow(functions["first"])
    counts = sass.count(blocks, sass.main_loop(blocks))
    assert counts == {"HMMA": 1, "LDSM": 1, "LDGSTS.128": 1, "BRA": 3}
    assert sass.count(blocks, set(range(len(blocks))))["STL"] == 1
    assert sass.main_loop(sass.control_flow(functions["second"])) == set()


def test_limits_are_held_from_the_right_side() -> None:
    def figures(registers: int = 100, ctas: int = 4, copies: int = 8, local: int = 0) -> limits.Figures:
        return limits.Figures(registers, 1000, ctas, {"LDGSTS.128": copies}, local)

    limit = {
        "registers": 100,
        "shared_bytes": 1000,
        "ctas_per_sm": {"sm_90": 4},
        "main_loop": {"LDGSTS.128": 8},
    }

    def problems(figure: limits.Figures) -> list[str]:
        return limits.check({"a": limit}, {"a": {"sm_90": figure}})

    assert problems(figures()) == []
    assert problems(figures(registers=90, ctas=5, copies=1)) == []
    for worse in (figures(registers=101), figures(ctas=3), figures(copies=9), figures(local=1)):
        assert len(problems(worse)) == 1
    assert len(problems(figures(copies=0))) == 1  # the loop was not found, or copies in another way


def test_hot_kernels_have_every_limit() -> None:
    hot = limits.read()
    decode = hot["decode_kernel<bfloat16, 2, 128, 1>"]
    assert decode["registers"] <= 128
    assert decode["ctas_per_sm"]["sm_80"] >= 3
    assert decode["ctas_per_sm"]["sm_90"] >= 4
    for limit in hot.values():
        assert set(limit) == {"registers", "shared_bytes", "ctas_per_sm", "main_loop"}
        assert set(limit["main_loop"]) == {*limits.KINDS, "all"}
