"""How full a cache is: see `PagedKVCache.stats`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """How full a cache is, at one moment: `num_blocks == num_used + num_cached + num_free`."""

    num_blocks: int
    """Blocks in the pool."""
    num_used: int
    """Blocks that some sequence maps; a shared block counts once."""
    num_cached: int
    """Blocks that no sequence maps, kept for the prefixes they hold until nothing else is free."""
    num_free: int
    """Blocks that hold nothing."""
    utilization: float
    """Filled slots of distinct used blocks / (num_used * block_size); 1.0 where no block is used."""
    internal_fragmentation: float
    """1 - utilization."""
    peak_used: int
    """The largest num_used so far."""
    hit_rate: float
    """Tokens found in the prefix cache / tokens looked up by `add_sequence`, so far; 0.0 before the first."""
    evictions: int
    """Cached blocks that were given up so far, for room or by `evict`."""
    bytes: int
    """Bytes of the pool's tensors, scales included."""
