"""What translated PTX computes, instruction by instruction, against values worked out by hand or by torch.

Needs no nvcc: the PTX is written here, and a C++ compiler makes one library of all of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulation.ptx import build, parser, translator
from emulation.ptx.ptx_library import HEADER, Library, entry, signed

ONE, TWO, HALF, MINUS_ZERO, INFINITY, NAN = (
    0x3F800000,
    0x40000000,
    0x3F000000,
    0x80000000,
    0x7F800000,
    0x7FC00000,
)
SUBNORMAL = 0x00400000  # 2 ** -127
MAX32 = 0xFFFFFFFF

# An instruction on %d = f(%a, %b, %c), the widths of d, a, b, c in bits (1: a predicate), a, b, c, and d.
CASES: list[tuple[str, list[int], list[int], int]] = [
    # Integers
    ("add.s32 %d, %a, %b", [32, 32, 32], [5, MAX32], 4),
    ("add.s16 %d, %a, %b", [16, 16, 16], [0x7FFF, 1], 0x8000),
    ("sub.s64 %d, %a, %b", [64, 64, 64], [3, 5], -2),
    ("mul.lo.s32 %d, %a, %b", [32, 32, 32], [-3, 7], -21),
    ("mul.lo.s64 %d, %a, -80", [64, 64], [1 << 40], -80 << 40),
    ("mul.hi.s32 %d, %a, %b", [32, 32, 32], [-3, 7], -1),
    ("mul.hi.u32 %d, %a, %b", [32, 32, 32], [MAX32, MAX32], MAX32 - 1),
    ("mul.hi.u64 %d, %a, %b", [64, 64, 64], [1 << 63, 6], 3),
    ("mul.wide.s32 %d, %a, %b", [64, 32, 32], [-2, 3], -6),
    ("mul.wide.u16 %d, %a, %b", [32, 16, 16], [0xFFFF, 0xFFFF], 0xFFFE0001),
    ("mad.lo.s32 %d, %a, %b, %c", [32, 32, 32, 32], [-3, 7, 1], -20),
    ("mad.wide.u32 %d, %a, %b, %c", [64, 32, 32, 64], [MAX32, 2, 3], 2 * MAX32 + 3),
    ("div.s32 %d, %a, %b", [32, 32, 32], [-7, 2], -3),
    ("div.u32 %d, %a, %b", [32, 32, 32], [-7, 2], (2**32 - 7) // 2),
    ("div.s64 %d, %a, %b", [64, 64, 64], [-(2**63), -1], -(2**63)),
    ("rem.s32 %d, %a, %b", [32, 32, 32], [-7, 2], -1),
    ("rem.s64 %d, %a, %b", [64, 64, 64], [-(2**63), -1], 0),
    ("min.s32 %d, %a, %b", [32, 32, 32], [-1, 1], -1),
    ("min.u32 %d, %a, %b", [32, 32, 32], [-1, 1], 1),
    ("max.s64 %d, %a, %b", [64, 64, 64], [-1, 1], 1),
    ("neg.s32 %d, %a", [32, 32], [5], -5),
    ("abs.s32 %d, %a", [32, 32], [-5], 5),
    ("not.b64 %d, %a", [64, 64], [5], ~5),
    ("not.pred %d, %a", [1, 1], [1], 0),
    ("mov.pred %d, -1", [1], [], 1),
    ("and.b16 %d, %a, %b", [16, 16, 16], [0x0FF0, 0xFF00], 0x0F00),
    ("xor.pred %d, %a, %b", [1, 1, 1], [1, 1], 0),
    ("shl.b32 %d, %a, %b", [32, 32, 32], [1, 32], 0),
    ("shl.b32 %d, %a, 31", [32, 32], [3], 0x80000000),
    ("shl.b16 %d, %a, 8", [16, 16], [0x0180], 0x8000),
    ("shr.s32 %d, %a, %b", [32, 32, 32], [-8, 200], -1),
    ("shr.s64 %d, %a, 63", [64, 64], [-8], -1),
    ("shr.u32 %d, %a, 1", [32, 32], [-8], 0x7FFFFFFC),
    ("shf.l.wrap.b32 %d, %a, %b, %c", [32, 32, 32, 32], [0x80000000, 1, 33], 3),
    ("shf.r.clamp.b32 %d, %a, %b, %c", [32, 32, 32, 32], [7, 1, 40], 1),
    ("popc.b64 %d, %a", [32, 64], [-1], 64),
    ("clz.b32 %d, %a", [32, 32], [1], 31),
    ("brev.b32 %d, %a", [32, 32], [0b110], 0x60000000),
    ("bfe.u32 %d, %a, 4, 8", [32, 32], [0xABC5], 0xBC),
    ("bfe.s32 %d, %a, 4, 8", [32, 32], [0xABC5], -68),
    ("bfi.b32 %d, %a, %b, 8, 4", [32, 32, 32], [0x3F, MAX32], 0xFFFFFFFF),
    ("bfi.b32 %d, %a, %b, 16, 16", [32, 32, 32], [0x1234, 0x5678], 0x12345678),
    ("prmt.b32 %d, %a, %b, 0x5410", [32, 32, 32], [0x33221100, 0x77665544], 0x55441100),
    ("prmt.b32 %d, %a, %b, 0x7f8a", [32, 32, 32], [0x33228100, 0x77665544], 0x77000000),
    ("prmt.b32 %d, %a, %b, %c", [32, 32, 32, 32], [0x80, 0, 0x9988], 0x0000FFFF),
    ("lop3.b32 %d, %a, %b, %c, 0xe8", [32, 32, 32, 32], [0b0011, 0b0101, 0b1001], 0b0001),
    ("lop3.b32 %d, %a, %b, %c, 0x96", [32, 32, 32, 32], [0b0011, 0b0101, 0b1001], 0b1111),
    ("lop3.b32 %d, %a, %b, %c, 0x0c", [32, 32, 32, 32], [0b0011, 0b0101, 0], 0b0100),
    # Floating-point numbers
    ("mul.rn.f32 %d, %a, 0f3F000000", [32, 32], [ONE], HALF),
    ("fma.rn.f32 %d, %a, %b, %c", [32, 32, 32, 32], [0x3F800001, 0x3F800001, 0xBF800002], 0x28800000),
    ("fma.rm.f32 %d, %a, %b, %c", [32, 32, 32, 32], [ONE, ONE, 0xA8800000], 0x3F7FFFFF),
    ("add.ftz.f32 %d, %a, %b", [32, 32, 32], [SUBNORMAL, SUBNORMAL], 0),
    ("add.f32 %d, %a, %b", [32, 32, 32], [SUBNORMAL, SUBNORMAL], 0x00800000),
    ("max.f32 %d, %a, %b", [32, 32, 32], [NAN, ONE], ONE),
    ("max.NaN.f32 %d, %a, %b", [32, 32, 32], [NAN, ONE], NAN),
    ("min.f32 %d, %a, %b", [32, 32, 32], [TWO, ONE], ONE),
    ("copysign.f32 %d, %a, %b", [32, 32, 32], [MINUS_ZERO, ONE], 0xBF800000),
    ("neg.f32 %d, %a", [32, 32], [ONE], 0xBF800000),
    ("ex2.approx.ftz.f32 %d, %a", [32, 32], [0xFF800000], 0),
    ("ex2.approx.ftz.f32 %d, %a", [32, 32], [ONE], TWO),
    ("ex2.approx.ftz.f32 %d, %a", [32, 32], [0xC2FE8000], 0),  # 2 ** -127.25 is subnormal
    ("rcp.approx.ftz.f32 %d, %a", [32, 32], [TWO], HALF),
    ("div.rn.f64 %d, %a, %b", [64, 64, 64], [0x3FF0000000000000, 0x4000000000000000], 0x3FE0000000000000),
    ("fma.rn.f16x2 %d, %a, %b, %c", [32, 32, 32, 32], [0x3C004000, 0x40004000, 0x3C003C00], 0x42004500),
    ("mul.rn.bf16x2 %d, %a, %b", [32, 32, 32], [0x3F804000, 0x40004000], 0x40004080),
    ("add.f16 %d, %a, %b", [16, 16, 16], [0x3C00, 0x7C00], 0x7C00),
    ("neg.f16x2 %d, %a", [32, 32], [0x3C00BC00], 0xBC003C00),
    ("ex2.approx.f16x2 %d, %a", [32, 32], [0x3C004000], 0x40004400),
    ("tanh.approx.f32 %d, %a", [32, 32], [INFINITY], ONE),
    # Comparison and selection
    ("setp.lt.s32 %d, %a, %b", [1, 32, 32], [-1, 1], 1),
    ("setp.lt.u32 %d, %a, %b", [1, 32, 32], [-1, 1], 0),
    ("setp.ne.s16 %d, %a, 0", [1, 16], [256], 1),
    ("setp.hi.u32 %d, %a, %b", [1, 32, 32], [-1, 1], 1),
    ("setp.eq.f32 %d, %a, %b", [1, 32, 32], [0, MINUS_ZERO], 1),
    ("setp.ne.f32 %d, %a, %b", [1, 32, 32], [NAN, ONE], 0),
    ("setp.neu.f32 %d, %a, %b", [1, 32, 32], [NAN, ONE], 1),
    ("setp.leu.f32 %d, %a, %b", [1, 32, 32], [NAN, ONE], 1),
    ("setp.equ.f32 %d, %a, %b", [1, 32, 32], [ONE, TWO], 0),
    ("setp.nan.f32 %d, %a, %a", [1, 32], [NAN], 1),
    ("setp.num.f32 %d, %a, %a", [1, 32], [NAN], 0),
    ("setp.gt.and.f32 %d, %a, %b, !%c", [1, 32, 32, 1], [TWO, ONE, 1], 0),
    ("setp.gt.or.f32 %d, %a, %b, %c", [1, 32, 32, 1], [ONE, TWO, 1], 1),
    ("setp.eq.s32 %c|%d, %a, %b", [1, 32, 32, 1], [1, 2, 0], 1),
    ("selp.b32 %d, %a, %b, %c", [32, 32, 32, 1], [7, 8, 0], 8),
    # Moves and conversions
    ("mov.b64 %d, {%a, %b}", [64, 32, 32], [1, 2], 2 << 32 | 1),
    ("mov.b32 {_, %d}, %a", [16, 32], [0x12345678], 0x1234),
    ("cvt.s64.s32 %d, %a", [64, 32], [-5], -5),
    ("cvt.u64.u32 %d, %a", [64, 32], [-5], 2**32 - 5),
    ("cvt.u16.u32 %d, %a", [16, 32], [0x12345], 0x2345),
    ("cvt.s16.s8 %d, %a", [16, 16], [0x12F0], -16),
    ("cvt.u32.u8 %d, %a", [32, 32], [0x1F0], 0xF0),
    ("cvt.sat.s8.s32 %d, %a", [32, 32], [-500], -128),
    ("cvt.rn.f32.s32 %d, %a", [32, 32], [2], TWO),
    ("cvt.rzi.s32.f32 %d, %a", [32, 32], [0xC0200000], -2),
    ("cvt.rni.s32.f32 %d, %a", [32, 32], [0x40200000], 2),
    ("cvt.rmi.s32.f32 %d, %a", [32, 32], [0xC0200000], -3),
    ("cvt.rzi.s32.f32 %d, %a", [32, 32], [0x4F000000], 0x7FFFFFFF),
    ("cvt.rzi.u32.f32 %d, %a", [32, 32], [0xBF800000], 0),
    ("cvt.rzi.s32.f32 %d, %a", [32, 32], [NAN], 0),
    ("cvt.rni.f32.f32 %d, %a", [32, 32], [0x40200000], TWO),
    ("cvt.sat.f32.f32 %d, %a", [32, 32], [TWO], ONE),
    ("cvt.sat.f32.f32 %d, %a", [32, 32], [NAN], 0),
    ("cvt.f32.f16 %d, %a", [32, 16], [0x3C00], ONE),
    ("cvt.rn.f16.f32 %d, %a", [16, 32], [0x3F801000], 0x3C00),  # a tie goes to even
    ("cvt.rn.bf16x2.f32 %d, %a, %b", [32, 32, 32], [TWO, ONE], 0x40003F80),
    ("cvt.rn.f16x2.f32 %d, %a, %b", [32, 32, 32], [TWO, NAN], 0x40007FFF),
    ("cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b", [16, 32, 32], [INFINITY, ONE], 0x7E38),
    ("cvt.rn.satfinite.e5m2x2.f16x2 %d, %a", [16, 32], [0x3C004000], 0x3C40),
    # Predicated instructions, constants, braces within inline assembly
    ("@%c mov.u32 %d, 1", [32, 32, 32, 1], [0, 0, 1], 1),
    ("mov.u32 %d, 3; @!%c mov.u32 %d, 1", [32, 32, 32, 1], [0, 0, 1], 3),
    ("{ .reg .b32 d; mov.u32 d, %a; { .reg .b32 d; mov.u32 d, 9; } mov.u32 %d, d; }", [32, 32], [7], 7),
    ("mov.u64 %d, 0xffffffff00000000", [64], [], 0xFFFFFFFF00000000),
    ("mov.f32 %d, 0fFF800000", [32], [], 0xFF800000),
]  # fmt: skip

# Kernels of a warp: every thread's result of 32 bits goes to out[thread].
WARP_KERNELS = {
    "shfl_bfly": "shfl.sync.bfly.b32 %d|%p, %t, 5, 0x1f, -1;",
    "shfl_idx_8": "shfl.sync.idx.b32 %d|%p, %t, 3, 0x181f, -1;",
    "shfl_up_16": "shfl.sync.up.b32 %d|%p, %t, 2, 0x1000, -1;",
    "shfl_down": "shfl.sync.down.b32 %d|%p, %t, 4, 0x1f, -1; selp.b32 %d, %d, -1, %p;",
    "ballot": "setp.lt.u32 %p, %t, 3; vote.sync.ballot.b32 %d, %p, -1;",
    "any": "setp.eq.u32 %p, %t, 3; vote.sync.any.pred %p, %p, -1; selp.b32 %d, 1, 0, %p;",
    "all": "setp.ne.u32 %p, %t, 3; vote.sync.all.pred %p, %p, -1; selp.b32 %d, 1, 0, %p;",
    "redux": "redux.sync.add.u32 %d, %t, -1;",
    "match": "and.b32 %d, %t, 1; match.any.sync.b32 %d, %d, -1;",
    "lanemask": "mov.u32 %d, %lanemask_lt;",
    "count": """griddepcontrol.wait; setp.lt.u32 %p, %t, 7; bar.red.popc.u32 %d, 0, %p;
        griddepcontrol.launch_dependents;""",
    "shared": """mov.u32 %r1, shared; shl.b32 %r2, %t, 2; add.s32 %r3, %r1, %r2; st.shared.u32 [%r3], %t;
        bar.sync 0; xor.b32 %r2, %r2, 124; add.s32 %r3, %r1, %r2; ld.shared.u32 %d, [%r3+0];""",
    "generic": """mov.u64 %rd1, shared; cvta.shared.u64 %rd1, %rd1; mul.wide.u32 %rd2, %t, 4;
        add.s64 %rd1, %rd1, %rd2; st.u32 [%rd1], %t;
        cvta.to.shared.u64 %rd1, %rd1; ld.shared.u32 %d, [%rd1];""",
    "atomic": """mov.u32 %r1, shared; setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [%r1], 100; bar.sync 0;
        atom.shared.add.u32 %d, [%r1], 2; red.shared.max.u32 [%r1], 101; bar.sync 0;
        atom.shared.cas.b32 %r2, [%r1], 0, 1; mov.u32 %d, %r2;""",
    "copy": """mov.u32 %r1, shared; mad.lo.s32 %r1, %t, 16, %r1;
        cp.async.cg.shared.global.L2::128B [%r1], [%in], 16, 8; cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.v4.u32 {%d, %r2, %r3, %r4}, [%r1]; add.s32 %d, %r2, %r3;""",
    "local": """mov.u64 %rd1, depot; mad.wide.u32 %rd1, %t, 4, %rd1; st.local.u32 [%rd1], %t;
        ld.local.v2.u32 {%d, %r2}, [depot]; ld.local.u32 %d, [%rd1+-0];""",
    "loop": """mov.u32 %d, 0; mov.u32 %r1, 0; $again: setp.ge.u32 %p, %r1, %t; @%p bra $done;
        add.s32 %d, %d, %r1; add.s32 %r1, %r1, 1; bra.uni $again; $done:""",
    "call": """{ .param .b32 a; st.param.b32 [a+0], %t; .param .b32 r;
        call.uni (r), square, (a); ld.param.b32 %d, [r+0]; }""",
    "table": """mul.wide.u32 %rd1, %t, 2; mov.u64 %rd2, table; add.s64 %rd1, %rd1, %rd2;
        ld.const.u16 %rs1, [%rd1]; cvt.u32.u16 %d, %rs1;""",
    "e4m3": "mad.lo.s32 %d, %t, 8, 7; cvt.u16.u32 %rs1, %d; cvt.rn.f16x2.e4m3x2 %d, %rs1;",
    "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 %d, %t;",
}  # fmt: skip

# Kernels that end with a report.
FAULTS = {
    "misaligned": "  .reg .b32 %r<3>;\n  ld.global.v2.u32 {%r1, %r2}, [%in+4];",
    "null": "  .reg .b64 %rd<3>; .reg .b32 %r1;\n  mov.u64 %rd1, 16;\n  ld.global.u32 %r1, [%rd1];",
    "beyond": "  .reg .b32 %r<3>;\n  mov.u32 %r1, shared;\n  st.shared.u32 [%r1+1024], %r1;",
    "zero": "  .reg .b32 %r<3>;\n  mov.u32 %r1, 0;\n  div.s32 %r1, %r1, %r1;",
    "divergent": """  .reg .b32 %r<3>; .reg .pred %p;
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p, %r1, 16;
  @%p shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;
  shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;""",
    "partial": "  bar.sync 1;",
    "pending": """  .reg .b32 %r1;
  mov.u32 %r1, shared;
  cp.async.ca.shared.global [%r1], [%in], 8;""",
}


def case_body(instruction: str, widths: list[int]) -> str:
    """Loads a, b and c, as 8 bytes each, runs the instruction, stores d as 8 bytes."""
    lines = ["  .reg .b64 %wide; .reg .b32 %narrow;"]
    for i, (name, width) in enumerate(zip("dabc", widths, strict=False)):
        lines.append(f"  .reg .{'pred' if width == 1 else f'b{width}'} %{name};")
        if i == 0:
            continue
        if width == 1:
            lines.append(f"  ld.global.u32 %narrow, [%in+{8 * i - 8}]; setp.ne.u32 %{name}, %narrow, 0;")
        else:
            lines.append(f"  ld.global.b{width} %{name}, [%in+{8 * i - 8}];")
    lines.append(f"  {instruction}" + ("" if instruction.startswith("{") else ";"))
    if widths[0] == 1:
        lines.append("  selp.b64 %wide, 1, 0, %d; st.global.u64 [%out], %wide;")
    else:
        lines.append(f"  st.global.b{widths[0]} [%out], %d;")
    return "\n".join(lines)


def warp_body(text: str) -> str:
    return (
        "  .local .align 8 .b8 depot[128];\n"
        "  .reg .pred %p; .reg .b16 %rs<3>; .reg .b32 %d, %t, %r<5>; .reg .b64 %rd<3>;\n"
        f"  mov.u32 %t, %tid.x;\n  {text}\n"
        "  mul.wide.u32 %rd1, %t, 4; add.s64 %rd1, %out, %rd1; st.global.u32 [%rd1], %d;"
    )


@pytest.fixture(scope="module")
def library() -> Library:
    kernels = {f"case_{i}": entry(f"case_{i}", case_body(case[0], case[1])) for i, case in enumerate(CASES)}
    kernels |= {name: entry(name, warp_body(text)) for name, text in WARP_KERNELS.items()}
    kernels |= {name: entry(name, text) for name, text in FAULTS.items()}
    return Library(kernels)


@pytest.mark.parametrize("i", range(len(CASES)), ids=[case[0] for case in CASES])
def test_instruction(library: Library, i: int) -> None:
    _, widths, values, expected = CASES[i]
    out, error = library.run(f"case_{i}", 1, values)
    assert error == ""
    bits = int(out[:2].view(torch.int64).item())
    width = 64 if widths[0] == 1 else widths[0]
    assert f"{bits & ((1 << width) - 1):#x}" == f"{expected & ((1 << width) - 1):#x}"


THREADS = torch.arange(32, dtype=torch.int32)
WARP_RESULTS = {
    "shfl_bfly": THREADS ^ 5,
    "shfl_idx_8": THREADS // 8 * 8 + 3,
    "shfl_up_16": torch.where(THREADS % 16 >= 2, THREADS - 2, THREADS),
    "shfl_down": torch.where(THREADS < 28, THREADS + 4, -1),
    "ballot": torch.full((32,), 0b111),
    "any": torch.ones(32),
    "all": torch.zeros(32),
    "redux": torch.full((32,), 496),
    "match": torch.where(THREADS % 2 == 1, signed(0xAAAAAAAA, 32), 0x55555555),
    "lanemask": torch.tensor([signed((1 << i) - 1, 32) for i in range(32)]),
    "count": torch.full((32,), 7),
    "shared": 31 - THREADS,
    "generic": THREADS,
    "atomic": torch.full((32,), 164),
    "copy": torch.full((32,), 2),
    "local": THREADS,
    "loop": THREADS * (THREADS - 1) // 2,
    "call": THREADS * THREADS,
    "table": torch.tensor([7, 0, 16] + [0] * 29),
}


@pytest.mark.parametrize("name", WARP_RESULTS)
def test_warp(library: Library, name: str) -> None:
    out, error = library.run(name, 32, [1 | 2 << 32, -1])
    assert error == ""
    assert torch.equal(out[:32].long(), WARP_RESULTS[name].long())


def test_float8_is_widened_as_torch_does(library: Library) -> None:
    out, error = library.run("e4m3", 32, [])
    assert error == ""
    codes = torch.stack([THREADS * 8 + 7, THREADS // 32], dim=1).to(torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float16)
    assert torch.equal(out[:32].view(torch.float16).view(32, 2).nan_to_num(9.0), expected.nan_to_num(9.0))


def test_movmatrix_transposes(library: Library) -> None:
    out, error = library.run("movmatrix", 32, [])
    assert error == ""
    matrix = THREADS.view(torch.int16).reshape(8, 8)
    assert torch.equal(out[:32].view(torch.int16).reshape(8, 8), matrix.T)


@pytest.mark.parametrize(("name", "text"), [
    ("misaligned", "is not aligned to 8 bytes"),
    ("null", "address 0x10 is a null pointer's"),
    ("beyond", "are not inside the 1024 bytes of shared memory"),
    ("zero", "integer division by zero"),
    ("divergent", "divergent shfl.sync"),
    ("partial", "barrier 1; supported: barrier 0 of the whole CTA"),
    ("pending", "cp.async copies that no wait covers"),
])  # fmt: skip
def test_fault(library: Library, name: str, text: str) -> None:
    _, error = library.run(name, 32, [0, 0])
    assert text in error
    assert "test.ptx:" in error or name == "pending"  # where the copies were issued is not kept


@pytest.mark.parametrize(("statement", "message"), [
    ("fma.rn.f128 %a, %a, %a, %a;", "the modifier '.f128' is not known"),
    ("frobnicate.b32 %a, %a;", "the instruction 'frobnicate' is not known"),
    ("add.sat.s32 %a, %a, %a;", "the modifier '.sat' is not known"),
    ("rcp.rn.f64 %a, %a;", "this instruction is not known for the type .f64"),
    ("mul.rn.ftz.f16x2 %a, %a, %a;", "the modifier '.ftz' is known for f32 only"),
    ("add.s32 %a, %a;", "3 operands were expected"),
    ("add.s32 %a, %a, %b;", "the operand '%b' is not known"),
    ("add.s64 %a, %a, %a;", "the operand '%a' is narrower than its use"),
    ("mov.u32 %a, %clock;", "the operand '%clock' is not known"),
    ("cvt.rz.f16.f32 %a, %a;", "the modifier '.rz' is not known"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%a}, {%a}, {%a}, {%a};", "is not known"),
    ("bar.sync 1, 64;", "1 operands were expected"),
    ("cp.async.bulk.commit_group;", "this copy is not known"),
    ("@%a mov.u32 %a, 0;", "'%a' is not a predicate"),
    (".reg .b128 %q;", "registers of type .b128 are not known"),
])  # fmt: skip
def test_unknown_ptx_is_an_error_with_its_line(statement: str, message: str) -> None:
    text = (
        HEADER
        + entry("kernel", f"  .reg .b32 %a;\n  .loc 1 57 3\n  {statement}")
        + '.file 1 "/src/csrc/x.cu"\n'
    )
    module = parser.parse(text, "x.ptx", "/src")
    line = text[: text.index(statement)].count("\n") + 1
    with pytest.raises(parser.PtxError) as error:
        translator.translate(module, {"kernel": module.entries[0]}, "x.ptx")
    assert message in str(error.value)
    assert str(error.value).startswith(f"x.ptx:{line} (from csrc/x.cu:57): ")


def test_static_shared_memory_is_an_error() -> None:
    text = ".shared .align 4 .b8 buffer[64];\n" + entry("kernel", "")
    module = parser.parse(text, "x.ptx")
    with pytest.raises(parser.PtxError, match="static shared memory \\(buffer\\)"):
        translator.translate(module, {"kernel": module.entries[0]}, "x.ptx")


def test_architectures_are_those_that_the_code_asks_for(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.cu"
    kernel.write_text('#include "params.h"\n#if __CUDA_ARCH__ >= 890\n#endif\n')
    assert build.architectures_of(kernel) == [80, 89]
    kernel.write_text("#if defined(__CUDA_ARCH__)\n#endif\n")
    assert build.architectures_of(kernel) == [80]
