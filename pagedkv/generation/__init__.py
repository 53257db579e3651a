"""Text generation with continuous batching on a paged cache: a library's loop, not a server.

`Generator` is where to begin.
"""

from pagedkv.generation.generator import Generator
from pagedkv.generation.linear import PackedLinear, pack_linears
from pagedkv.generation.requests import Completion, Event, Request, Sampling
from pagedkv.generation.scheduling import GeneratorStats

__all__ = [
    "Completion",
    "Event",
    "Generator",
    "GeneratorStats",
    "PackedLinear",
    "Request",
    "Sampling",
    "pack_linears",
]
