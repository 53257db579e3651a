"""Prints what each load, store and copy in the PTX of an attention kernel costs on a device.

    PYTHONPATH=tests python -m emulation.ptx.traffic --context 512 --group 4

A line for each instruction: how often a warp came by, the bytes, and its turns over the least possible:
32-byte sectors of global memory, wavefronts (bank conflicts) of shared memory. Needs nvcc, but no GPU.
"""

from __future__ import annotations

import argparse
import ctypes

import torch
from helpers import Backend, build_case

import pagedkv.ops

from . import build


def traffic(case_options: dict[str, object], context: int, query_len: int) -> list[list[str]]:
    """Run ``paged_attention`` once on the PTX route, and return the fields of each instruction."""
    build.load()
    library = ctypes.CDLL(str(build.build_directory() / "pagedkv_emulated.so"))
    library.pagedkv_take_traffic.restype = ctypes.c_char_p
    pagedkv.ops._library = torch.ops.pagedkv_emulated
    device = torch.device("cpu")
    case = build_case([context], [query_len], device=device, **case_options)  # type: ignore[arg-type]
    library.pagedkv_start_trace()
    case.run(Backend("emulated", device, pagedkv.ops))
    return [line.split("\t") for line in library.pagedkv_take_traffic().decode().splitlines()]


def main() -> None:
    """The table of one call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in [
        ("context", 512),
        ("query-len", 1),
        ("group", 4),
        ("head-dim", 128),
        ("block-size", 16),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-dtype", help="that of the queries if not given")
    arguments = parser.parse_args()
    options = {
        "num_heads": arguments.group,
        "num_kv_heads": 1,
        "head_dim": arguments.head_dim,
        "block_size": arguments.block_size,
        "dtype": getattr(torch, arguments.dtype),
        "cache_dtype": getattr(torch, arguments.cache_dtype) if arguments.cache_dtype else None,
    }
    rows = traffic(options, arguments.context, arguments.query_len)
    print(f"{'requests':>8} {'bytes':>9} {'turns/least':>11}  instruction")
    for place, kind, space, requests, num_bytes, turns, least in sorted(rows, key=lambda row: -int(row[4])):
        ratio = int(turns) / int(least)
        print(f"{requests:>8} {num_bytes:>9} {ratio:>11.2f}  {kind} {space} {place}")


if __name__ == "__main__":
    main()
