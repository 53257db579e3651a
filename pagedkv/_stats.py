"""How full a cache is: see `PagedKVCache.stats`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv import _core, _picture
from pagedkv._swap import HostPool


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
    num_host_blocks: int
    """Blocks of the host's pool."""
    num_host_used: int
    """Of these, the ones that some swapped-out sequence maps."""
    num_host_cached: int
    """Of the others, the ones that are kept for the prefixes they hold."""
    host_hits: int
    """Blocks of prefixes that `add_sequence` has brought back from the host so far."""
    host_bytes: int
    """Bytes of the host's tensors."""


class Observability:
    """The part of `PagedKVCache` that shows what is in it."""

    num_blocks: int
    num_host_blocks: int
    block_size: int
    prefix_caching: bool
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    _key_tensors: list[torch.Tensor]
    _value_tensors: list[torch.Tensor]
    _host: HostPool | None

    def _settled_core(self) -> _core.Sequences:
        """The C++ core, up to date."""
        raise NotImplementedError

    def stats(self) -> CacheStats:
        """Count blocks, filled slots and bytes; O(num_blocks). Slots of an open batch count as filled.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, block_size=16)
        >>> seq = cache.add_sequence(num_tokens=24); cache.commit(cache.batch([seq]))
        >>> cache.stats().utilization
        0.75
        """
        counts = self._settled_core().counts()
        num_slots = counts.num_used * self.block_size
        utilization = counts.num_filled_slots / num_slots if num_slots > 0 else 1.0
        num_queried = counts.num_queried_tokens
        scales = [scale for scale in (self.k_scales, self.v_scales) if scale is not None]
        return CacheStats(
            num_blocks=self.num_blocks,
            num_used=counts.num_used,
            num_cached=counts.num_cached,
            num_free=self.num_blocks - counts.num_used - counts.num_cached,
            utilization=utilization,
            internal_fragmentation=1.0 - utilization,
            peak_used=counts.peak_used,
            hit_rate=counts.num_hit_tokens / num_queried if num_queried > 0 else 0.0,
            evictions=counts.num_evictions,
            bytes=sum(tensor.nbytes for tensor in [*self._key_tensors, *self._value_tensors, *scales]),
            num_host_blocks=self.num_host_blocks,
            num_host_used=counts.num_host_used,
            num_host_cached=counts.num_host_cached,
            host_hits=counts.num_host_hits,
            host_bytes=0 if self._host is None else self._host.nbytes,
        )

    def draw(self, width: int = 64) -> str:
        """A picture of the pool for a terminal, one character a block, `width` blocks a row.

        `.` is free, `-` is kept by the prefix cache alone; a letter is a sequence's own block, in lower case
        where it is partly filled; `#` is shared by several sequences, `+` where it is partly filled. Letters
        are handed out again after 26 sequences. Runs of free rows are left out.

        Raises:
            ValueError: width is below 1.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=8, block_size=2)
        >>> a = cache.add_sequence(num_tokens=5); b = cache.add_sequence(num_tokens=2)
        >>> cache.commit(cache.batch([a, b]))
        >>> print(cache.draw())
        0  AAaB....
        """
        return _picture.draw_pool(*self._settled_core().usage(), self.block_size, width)

    def __str__(self) -> str:
        """Summarise the pool in a line, and draw it."""
        stats = self.stats()
        cached = f"{stats.num_cached} cached, " if self.prefix_caching else ""
        return (
            f"{stats.num_blocks} blocks of {self.block_size} tokens: {stats.num_used} used "
            f"({stats.utilization:.1%} filled), {cached}{stats.num_free} free, "
            f"{stats.bytes / 2**20:.1f} MiB\n{self.draw()}"
        )
