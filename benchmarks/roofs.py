"""What the machine can do at best, measured in the same rounds as the kernels: reading, matrix products."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

BUILD = Path(__file__).resolve().parent.parent / "build" / "benchmarks"

# Each thread sums its share of the bytes: eight accumulators, and a prefetch into the L2 cache ahead of them.
# OpenMP, since that is what torch and the kernels use: its threads are awake.
_READ_SOURCE = """
#include <omp.h>
#include <stddef.h>
#include <stdint.h>

typedef uint64_t Vector __attribute__((vector_size(64)));

enum { LANES = 8, STEP = LANES * sizeof(Vector), AHEAD = 4096 };

uint64_t read_bytes(const char* data, size_t num_bytes, int num_threads) {
  uint64_t total = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : total)
  {
    const size_t num_all = omp_get_num_threads(), thread = omp_get_thread_num(), steps = num_bytes / STEP;
    const char* end = data + steps * (thread + 1) / num_all * STEP;
    Vector sum[LANES] = {{0}};
    for (const char* here = data + steps * thread / num_all * STEP; here < end; here += STEP) {
      for (int lane = 0; lane < LANES; ++lane) {
        __builtin_prefetch(here + AHEAD + lane * sizeof(Vector), 0, 2);
        sum[lane] += *(const Vector*)(here + lane * sizeof(Vector));
      }
    }
    for (int lane = 0; lane < LANES; ++lane) {
      for (size_t j = 0; j < sizeof(Vector) / sizeof(uint64_t); ++j) total += sum[lane][j];
    }
  }
  for (size_t i = num_bytes / STEP * STEP; i < num_bytes; ++i) total += (unsigned char)data[i];
  return total;
}

/* The pages in their order, each thread a share of them. Hardware does not know which page is the next
   one: lines are asked for FAR ahead, into the L2 cache, once more a little later, since requests get lost
   when memory is busy, and SOON before their use into the L1 cache. */
enum { FAR = 64 * 1024, AGAIN = FAR - 8 * 1024, SOON = 1024 };

typedef struct {
  size_t page, byte;
} Place;

static Place place_at(size_t begin, size_t byte, size_t page_bytes) {
  return (Place){begin + byte / page_bytes, byte % page_bytes};
}

static const char* step(Place* place, const char* const* pages, size_t end, size_t page_bytes) {
  const char* here = pages[place->page < end ? place->page : end - 1] + place->byte;
  place->byte += STEP;
  if (place->byte == page_bytes) *place = (Place){place->page + 1, 0};
  return here;
}

uint64_t read_pages(const char* const* pages, size_t num_pages, size_t page_bytes, int num_threads) {
  uint64_t total = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : total)
  {
    const size_t num_all = omp_get_num_threads(), thread = omp_get_thread_num();
    const size_t begin = num_pages * thread / num_all, end = num_pages * (thread + 1) / num_all;
    Place now = {begin, 0}, soon = place_at(begin, SOON, page_bytes);
    Place far = place_at(begin, FAR, page_bytes), again = place_at(begin, AGAIN, page_bytes);
    Vector sum[LANES] = {{0}};
    while (now.page < end) {
      const char* here = step(&now, pages, end, page_bytes);
      const char* next = step(&soon, pages, end, page_bytes);
      const char* there = step(&far, pages, end, page_bytes);
      const char* once_more = step(&again, pages, end, page_bytes);
      for (int lane = 0; lane < LANES; ++lane) {
        __builtin_prefetch(there + lane * sizeof(Vector), 0, 2);
        __builtin_prefetch(once_more + lane * sizeof(Vector), 0, 2);
        __builtin_prefetch(next + lane * sizeof(Vector), 0, 3);
        sum[lane] += *(const Vector*)(here + lane * sizeof(Vector));
      }
    }
    for (int lane = 0; lane < LANES; ++lane) {
      for (size_t j = 0; j < sizeof(Vector) / sizeof(uint64_t); ++j) total += sum[lane][j];
    }
  }
  return total;
}
"""

PAGE_STEP = 512  # bytes that read_pages takes at a time

# A square that reaches the full rate on one core and on two, and no larger: it is timed often.
_GEMM_SIZE = 768
GEMM_FLOPS = 2 * _GEMM_SIZE**3


@functools.cache
def _library() -> ctypes.CDLL:
    """The C functions, compiled for this machine at their first use."""
    name = hashlib.sha256(_READ_SOURCE.encode()).hexdigest()[:16]
    library = BUILD / f"read-{name}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        source = library.with_suffix(".c")
        source.write_text(_READ_SOURCE)
        command = ["gcc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", source, "-o", library]
        subprocess.run(command, check=True)
    functions = ctypes.CDLL(str(library))
    functions.read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    functions.read_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    functions.read_bytes.restype = functions.read_pages.restype = ctypes.c_uint64
    return functions


def reader(tensors: list[torch.Tensor]) -> Callable[[], object]:
    """A call that reads every byte of the contiguous CPU tensors once, on as many threads as torch has."""
    read = _library().read_bytes
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    num_threads = torch.get_num_threads()

    def call() -> None:
        for address, num_bytes in places:
            read(address, num_bytes, num_threads)

    return call


def page_reader(pools: list[torch.Tensor], block_table: torch.Tensor) -> Callable[[], object]:
    """A call that reads the blocks of a table in its order, of all pools in turn, and nothing else.

    Args:
        pools: `[num_blocks, ...]` CPU tensors of one shape, blocks contiguous and multiples of PAGE_STEP.
        block_table: block ids of any shape.
    """
    page_bytes = pools[0][0].nbytes
    if page_bytes % PAGE_STEP != 0:
        raise ValueError(f"a block has {page_bytes} bytes; page_reader takes multiples of {PAGE_STEP}")
    places = [
        pool.data_ptr() + block * page_bytes for block in block_table.flatten().tolist() for pool in pools
    ]
    pages = (ctypes.c_void_p * len(places))(*places)
    read, num_threads = _library().read_pages, torch.get_num_threads()
    return lambda: read(pages, len(places), page_bytes, num_threads)


def gemm(dtype: torch.dtype) -> Callable[[], object]:
    """A call of GEMM_FLOPS floating-point operations by torch; float16, which torch has slow, as bfloat16."""
    dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    a, b = (torch.randn(_GEMM_SIZE, _GEMM_SIZE).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)
