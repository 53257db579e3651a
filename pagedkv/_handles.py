"""Handles to what a `PagedKVCache` holds: `Sequence` and `Batch`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from pagedkv import _core

if TYPE_CHECKING:
    from pagedkv._batching import Batching
    from pagedkv._swap import HostPool
    from pagedkv.cache import PagedKVCache

Ints: TypeAlias = Iterable[int] | npt.NDArray[np.integer[Any]] | torch.Tensor


def host_ints(values: Ints) -> Iterable[int] | npt.NDArray[np.integer[Any]]:
    """What the C++ core takes as integers: a tensor becomes an array, the rest passes."""
    if not isinstance(values, torch.Tensor):
        return values
    if values.is_floating_point() or values.is_complex():
        raise TypeError(f"expected integers, got a tensor of {values.dtype}")
    return values.cpu().numpy()


def reusable_ints(values: Ints) -> Iterable[int] | npt.NDArray[np.integer[Any]]:
    """The same for values that are looked at more than once: an iterator becomes a list."""
    ints = host_ints(values)
    return list(ints) if isinstance(ints, Iterator) else ints


class Sequence:
    """A handle to one sequence of a `PagedKVCache`; made by `add_sequence` and `fork`.

    A sequence whose last handle is dropped is freed.
    """

    __slots__ = ("_cache", "_id")

    def __init__(self, cache: PagedKVCache, sequence_id: int) -> None:
        """Wrap an id of the cache's C++ core."""
        self._cache = cache
        self._id = sequence_id

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: added or appended."""
        return self._sequences.num_tokens(self._id)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache; a commit advances it."""
        return self._sequences.num_computed_tokens(self._id)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were found in the prefix cache when the sequence, or its oldest ancestor, was added."""
        return self._sequences.num_cached_tokens(self._id)

    @property
    def num_shared_tokens(self) -> int:
        """Leading tokens in blocks that others own too: forks, sequences with the same prefix, transfers.

        What frees this sequence gives back at most the blocks behind them.
        """
        return self._sequences.num_shared_tokens(self._id)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the leading tokens, as far as they were given: those behind a counted token are not kept."""
        return self._sequences.token_ids(self._id)

    @property
    def block_table(self) -> list[int]:
        """Physical block ids in order; those of an open batch included, -1 behind a sliding window.

        Of the first group of layers, where there are several: see `block_tables`.
        """
        return self._sequences.blocks(self._id)

    @property
    def block_tables(self) -> list[list[int]]:
        """The block table of each group of layers, see `sliding_window`."""
        num_groups = len(self._cache._groups.windows)
        return [self._sequences.blocks(self._id, group) for group in range(num_groups)]

    @property
    def swapped_out(self) -> bool:
        """Whether the sequence is on the host, with no blocks of the device."""
        return self._sequences.is_swapped_out(self._id)

    @property
    def freed(self) -> bool:
        """Whether `free` was called; every other call but `free` then is a ValueError."""
        return not self._sequences.is_live(self._id)

    def append(self, tokens: int | Ints) -> None:
        """Add known tokens, to be computed by a later batch. Takes no blocks: allowed in an open batch too.

        Args:
            tokens: ids (`[n]`, any sequence, array or tensor of integers), or how many tokens (an int).

        Raises:
            ValueError: the sequence was freed; a negative count.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4)
        >>> seq = cache.add_sequence([5, 6]); seq.append([7]); seq.append(2); seq.num_tokens, seq.token_ids
        (5, [5, 6, 7])
        """
        if isinstance(tokens, int | np.integer):
            self._sequences.append_count(self._id, operator.index(tokens))
        else:
            self._sequences.append_ids(self._id, host_ints(tokens))

    @overload
    def fork(self) -> Sequence: ...
    @overload
    def fork(self, n: int) -> list[Sequence]: ...
    def fork(self, n: int | None = None) -> Sequence | list[Sequence]:
        """A new sequence with the same tokens that shares every block, or a list of n.

        The first to write into a shared block gets a copy of it.

        Raises:
            ValueError: the sequence was freed, or is in an open batch; n is negative.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4)
        >>> seq = cache.add_sequence(num_tokens=20); cache.commit(cache.batch([seq]))
        >>> seq.fork().block_table == seq.block_table, len(seq.fork(3))
        (True, 3)
        """
        if n is None:
            return Sequence(self._cache, self._sequences.fork(self._id))
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        return [self.fork() for _ in range(n)]

    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens from num_tokens on and give back the blocks that only they used.

        Where a sliding window has passed tokens that the rest sees, the whole rest becomes uncomputed; that
        never happens for tokens of the last batch.

        Raises:
            ValueError: num_tokens is negative or above `self.num_tokens`; the sequence was freed, or is in an
                open batch.

        >>> seq = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4).add_sequence([5, 6, 7])
        >>> seq.truncate(1); seq.token_ids
        [5]
        """
        self._sequences.truncate(self._id, num_tokens)

    def swap_out(self) -> None:
        """Move the keys and values to the host, and give back the blocks that nobody else uses.

        Sequences that share blocks share them on the host, too. Until it is swapped in again, a sequence can
        only grow or be freed. On CUDA the copy runs beside other work.

        Raises:
            OutOfMemoryError: too few host blocks are free; nothing was changed.
            ValueError: the cache has no host blocks; the sequence was freed, is swapped out already, or is in
                an open batch.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, num_host_blocks=4)
        >>> seq = cache.add_sequence(num_tokens=20); cache.commit(cache.batch([seq]))
        >>> seq.swap_out(); seq.swapped_out, seq.block_table, cache.stats().num_used
        (True, [], 0)
        """
        self._host().swap_out(self._id)

    def swap_in(self) -> None:
        """Move the keys and values back to the device.

        Blocks that are there, because others use them or the prefix cache kept them, are shared, not copied.

        Raises:
            OutOfMemoryError: too few blocks are free; nothing was changed. `PagedKVCache.can_swap_in` tells.
            ValueError: the sequence was freed, or is not swapped out.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, num_host_blocks=4)
        >>> seq = cache.add_sequence(num_tokens=20); cache.commit(cache.batch([seq]))
        >>> seq.swap_out(); seq.swap_in(); len(seq.block_table)
        2
        """
        host = self._host()
        try:
            host.swap_in(self._id)
        except _core.OutOfMemoryError:
            if not host.finish(wait=True):
                raise
            host.swap_in(self._id)

    def _host(self) -> HostPool:
        host = self._cache._host
        if host is None:
            raise ValueError("the cache has no host blocks to swap to: make it with num_host_blocks")
        self._cache._settled_core()
        return host

    def free(self) -> None:
        """Give back the blocks. A second call does nothing.

        An open batch of this sequence can only be abandoned then. The blocks may be handed out at once: on
        CUDA that is safe for work queued on the same stream; wait for work on another one before.

        >>> seq = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4).add_sequence([5, 6, 7])
        >>> seq.free(); seq.free(); seq.freed
        True
        """
        self._cache._free(self._id)

    @property
    def _sequences(self) -> _core.Sequences:
        return self._cache._settled_core()

    def __del__(self) -> None:
        """Free a sequence that nobody can reach any more. An open batch keeps its sequences alive."""
        if hasattr(self, "_cache"):
            self._cache._core.free(self._id)

    def __copy__(self) -> Sequence:
        """The handle itself: two handles of one sequence would free it twice. See `fork`."""
        return self

    def __repr__(self) -> str:
        """Show tokens and blocks, or that it was freed."""
        if self.freed:
            return "Sequence(freed)"
        return (
            f"Sequence(num_tokens={self.num_tokens}, num_computed_tokens={self.num_computed_tokens}, "
            f"block_table={self.block_table})"
        )


class Batch:
    """What `PagedKVCache.batch` returns: the tensors that an attention layer needs. Made anew for each step.

    Where layers have tables of their own (see `sliding_window`), a batch is for `attend` alone: block_tables
    and slot_mapping are a ValueError.

    Attributes:
        sequences: the sequences, in the order of the rows.
        block_tables: `[num_seqs, max_blocks]` int32, rows padded with -1.
        context_lens: `[num_seqs]` int32, the tokens of this batch included.
        query_start_loc: `[num_seqs + 1]` int32; rows `query_start_loc[i]` to `query_start_loc[i + 1]` are
            those of `sequences[i]`.
        slot_mapping: `[num_tokens]` int64, where the keys and values of each row go.
        num_tokens: rows of the batch, all sequences together.
        max_query_len: the most rows of one sequence.
    """

    def __init__(
        self,
        sequences: tuple[Sequence, ...],
        arrays: _core.Batch,
        tensors: list[torch.Tensor],
        cache: Batching,
    ) -> None:
        """Wrap what the cache's C++ core says, and the tensors of it on the cache's device."""
        self.sequences = sequences
        self.num_tokens = arrays.num_tokens
        # [num_groups, num_seqs, max_blocks] and [num_groups, num_tokens]
        self._block_tables, self.context_lens, self.query_start_loc, self._slot_mappings = tensors
        self.max_query_len = arrays.max_query_len
        self._cache = cache
        self._batch_id = arrays.batch_id
        self._state = "open"  # then "committed", "abandoned", or "stale": a sequence was freed
        self._attended: set[int] = set()  # layers

    def __del__(self) -> None:
        """End a batch that nobody has any more: commit it if its last layer was attended, else abandon it."""
        if hasattr(self, "_state"):
            self._cache._end_lost(self)

    @property
    def block_tables(self) -> torch.Tensor:
        """See the class."""
        return self._of_single_group(self._block_tables)

    @property
    def slot_mapping(self) -> torch.Tensor:
        """See the class."""
        return self._of_single_group(self._slot_mappings)

    def _of_single_group(self, tensors: torch.Tensor) -> torch.Tensor:
        if len(tensors) > 1:
            raise ValueError(
                f"layers of this cache have {len(tensors)} different block tables; use PagedKVCache.attend"
            )
        return tensors[0]

    def _all_attended(self) -> bool:
        return len(self._attended) == self._cache.num_layers

    def _require_open(self, verb: str) -> None:
        if self._state == "stale":
            raise ValueError(f"cannot {verb} the batch: one of its sequences was freed (abandon it)")
        if self._state != "open":
            raise ValueError(f"cannot {verb} the batch: it was {self._state}")

    def __repr__(self) -> str:
        """Show sizes and state."""
        state = "committed" if self._state == "open" and self._all_attended() else self._state
        return f"Batch(num_seqs={len(self.sequences)}, num_tokens={self.num_tokens}, {state})"
