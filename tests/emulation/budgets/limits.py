"""The hot kernels' limits in limits.toml: what they are, how figures are held against them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("limits.toml")
# Instructions of the main loop: tensor-core products, their operands' loads, and 16-byte asynchronous copies.
KINDS = ("HMMA", "LDSM", "LDGSTS.128")

HEADER = """\
# Limits of the hot kernels, which `make budgets` compares with what nvcc makes of them (13.0 wrote these;
# `make budgets BUDGETS_ARGS=--update` writes them anew).
#
# registers      a thread's, at most, on every architecture
# shared_bytes   dynamic shared memory of a CTA, at most (without what split_size may add)
# ctas_per_sm    at least
# main_loop      instructions of the innermost loop with tensor-core products, their loads and copies: at most
#                so many, and of each kind at least one
"""


@dataclass
class Figures:
    """A kernel on one architecture."""

    registers: int
    shared_bytes: int
    ctas_per_sm: int
    main_loop: dict[str, int]
    local_accesses: int  # loads and stores of local memory, in the whole kernel


def read() -> dict[str, dict[str, Any]]:
    """The limits, by kernel."""
    return tomllib.loads(FILE.read_text())


def write(figures: dict[str, dict[str, Figures]]) -> None:
    """Make the present figures the limits."""
    text = HEADER
    for name, by_arch in figures.items():
        worst_loop = {
            kind: max(figure.main_loop[kind] for figure in by_arch.values()) for kind in (*KINDS, "all")
        }
        ctas = ", ".join(f"{arch} = {figure.ctas_per_sm}" for arch, figure in by_arch.items())
        loop = ", ".join(f'"{kind}" = {number}' for kind, number in worst_loop.items())
        text += (
            f'\n["{name}"]\n'
            f"registers = {max(figure.registers for figure in by_arch.values())}\n"
            f"shared_bytes = {max(figure.shared_bytes for figure in by_arch.values())}\n"
            f"ctas_per_sm = {{ {ctas} }}\n"
            f"main_loop = {{ {loop} }}\n"
        )
    FILE.write_text(text)


def check(limits: dict[str, dict[str, Any]], figures: dict[str, dict[str, Figures]]) -> list[str]:
    """What does not keep to its limit, a sentence each."""
    problems = []
    for name, limit in limits.items():
        for arch, figure in figures[name].items():
            where = f"{name} on {arch}"
            for what in ("registers", "shared_bytes"):
                if getattr(figure, what) > limit[what]:
                    problems.append(f"{where}: {what} {getattr(figure, what)}, limit {limit[what]}")
            fewest = limit["ctas_per_sm"].get(arch, 1)
            if figure.ctas_per_sm < fewest:
                problems.append(f"{where}: {figure.ctas_per_sm} CTAs per SM, at least {fewest}")
            for kind, most in limit["main_loop"].items():
                if not 0 < figure.main_loop[kind] <= most:
                    problems.append(f"{where}: {figure.main_loop[kind]} {kind} in the main loop, 1 to {most}")
            if figure.local_accesses > 0:
                problems.append(f"{where}: {figure.local_accesses} accesses to local memory")
    return problems


def table(figures: dict[str, dict[str, Figures]]) -> str:
    """The figures for people."""
    header = ["hot kernel", "arch", "registers", "shared", "CTAs/SM", *KINDS, "all", "local"]
    rows = [header]
    for name, by_arch in figures.items():
        for arch, figure in by_arch.items():
            numbers = [figure.registers, figure.shared_bytes, figure.ctas_per_sm]
            numbers += [figure.main_loop[kind] for kind in (*KINDS, "all")] + [figure.local_accesses]
            rows.append([name, arch, *map(str, numbers)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
