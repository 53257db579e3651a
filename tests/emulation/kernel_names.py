"""Names of kernel instantiations, the same whichever compiler mangled them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# Every __global__ function ends in _kernel; where something follows the parameters, it is a clone of one.
KERNEL = re.compile(r"^(?:void )?pagedkv::cuda::(\w+_kernel(?:<.*>)?)\([\w:]+\)$")


def kernel_name(demangled: str) -> str | None:
    """``decode_kernel<bfloat16, 2, 128, 1>``; None for what is no kernel."""
    match = KERNEL.match(demangled.replace("(anonymous namespace)::", ""))
    return match.group(1).replace("pagedkv::", "") if match else None


def demangle(symbols: list[str]) -> list[str]:
    """The C++ of mangled names."""
    result = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def kernels_in(library: Path) -> dict[int, str]:
    """The kernels that a host library or program holds, by their offset in it."""
    result = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True)
    kernels = {}
    for line in result.stdout.splitlines():
        offset, _, rest = line.partition(" ")
        name = kernel_name(rest[2:])  # after the symbol's type
        if name and offset:
            kernels[int(offset, 16)] = name
    return kernels
