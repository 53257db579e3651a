"""Says how many kernel instantiations ship and how many of them were launched, by which route.

    PAGEDKV_EMULATOR_LAUNCHES=FILE python -m pytest -k emulated
    python -m emulation.launched FILE

Those that ship are the kernels in the installed CUDA build or, in a CPU build, in the emulated library, which
is compiled from the same files. Ends with an error if one of them was launched on no route.

Each line of FILE begins with the route: `source`, the kernel compiled by the host compiler, with the library
and the kernel's place in it (launch_record.h); or another one with the kernel's mangled name.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from pathlib import Path

from emulation.kernel_names import demangle, kernel_name, kernels_in

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARY = "pagedkv_emulated.so"

kernels_of = functools.cache(kernels_in)


def launched(record: Path) -> dict[str, set[str]]:
    """The kernels that were launched, by route."""
    routes: dict[str, set[str]] = defaultdict(set)
    mangled: dict[str, list[str]] = defaultdict(list)
    for line in sorted(set(record.read_text().splitlines())):
        route, *fields = line.split(" ")
        if route != "source":
            mangled[route].append(fields[0])
        elif Path(fields[0]).name == LIBRARY:
            routes[route].add(kernels_of(Path(fields[0])).get(int(fields[1], 16), f"unknown at {fields[1]}"))
    for route, symbols in mangled.items():
        routes[route] |= {kernel_name(text) or text for text in demangle(symbols)}
    return routes


def shipped() -> tuple[set[str], Path]:
    """The kernels that ship, and where they were counted."""
    for library in (*(ROOT / "pagedkv").glob("_C.*.so"), *(ROOT / "build" / "emulated").glob(f"*/{LIBRARY}")):
        kernels = set(kernels_of(library).values())
        if kernels:
            return kernels, library
    sys.exit("there is no library with kernels: run the emulated tests first")


def main() -> int:
    """1 if a kernel that ships was not launched, or something was that does not ship."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m emulation.launched FILE")
    record = Path(sys.argv[1])
    if not record.exists():
        sys.exit(f"{record}: nothing was launched")
    kernels, library = shipped()
    routes = launched(record)
    print(f"{len(kernels)} kernel instantiations ship, counted in {library.relative_to(ROOT)}")
    for route, names in sorted(routes.items()):
        print(f"{len(names & kernels)} of them were executed by route '{route}'")
    executed = set().union(*routes.values())
    for name in sorted(kernels - executed):
        print(f"never executed: {name}")
    for name in sorted(executed - kernels):
        print(f"executed, but does not ship: {name}")
    return int(executed != kernels)


if __name__ == "__main__":
    sys.exit(main())
