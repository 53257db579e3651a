"""What fits into a `PagedKVCache`, and what its prefix cache knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from pagedkv import _core
from pagedkv._handles import Ints, Sequence, host_ints, reusable_ints
from pagedkv._prefix import Extra, prefix_root

if TYPE_CHECKING:
    from pagedkv._swap import HostPool


class Capacity:
    """The part of `PagedKVCache` that answers questions about room and prefixes."""

    block_size: int
    _host: HostPool | None
    _plain_root: bytes

    def probe(self, token_ids: Ints, *, salt: Extra = None, extra_key: Extra = None) -> int:
        """How many of these tokens a sequence would find computed now. Pins nothing and counts nowhere.

        Args:
            token_ids: `[n]` ids.
            salt: as for `add_sequence`.
            extra_key: as for `add_sequence`.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, block_size=2, prefix_caching=True)
        >>> seq = cache.add_sequence(range(5)); cache.commit(cache.batch([seq]))
        >>> cache.probe([0, 1, 2, 7]), cache.probe([0, 1, 2, 7], salt="mine")
        (2, 0)
        """
        return self._settled_core().probe(host_ints(token_ids), self._root(salt, extra_key))

    def evict(self, num_blocks: int) -> int:
        """Give up the least recently used of the blocks that only the prefix cache keeps; how many it were.

        A prefix goes from its end. Blocks of sequences are not touched.

        Raises:
            ValueError: num_blocks is negative.

        >>> pagedkv.PagedKVCache(1, 1, 8, num_blocks=4).evict(3)
        0
        """
        return self._settled_core().evict(num_blocks)

    def swap_out_prefixes(self, num_blocks: int) -> int:
        """Move the blocks that `evict` would give up to the host, where `add_sequence` finds them; how many.

        Where the host is full, the least recently used of the prefixes there make room; fewer blocks are
        moved where swapped-out sequences use all of it. On CUDA the copy runs beside other work, and the
        blocks are free when it is done.

        Raises:
            ValueError: num_blocks is negative; the cache has no host blocks.

        >>> cache = pagedkv.PagedKVCache(
        ...     1, 1, 8, num_blocks=4, block_size=2, prefix_caching=True, num_host_blocks=4
        ... )
        >>> seq = cache.add_sequence(range(5)); cache.commit(cache.batch([seq])); seq.free()
        >>> cache.swap_out_prefixes(2), cache.stats().num_cached, cache.probe(range(5))
        (2, 0, 4)
        """
        if self._host is None:
            raise ValueError("the cache has no host blocks to swap to: make it with num_host_blocks")
        self._settled_core()
        return self._host.swap_out_prefixes(num_blocks)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, on the host too: after the model's weights have changed, say.

        Raises:
            ValueError: a sequence has blocks, which would be of the old state.

        >>> pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, prefix_caching=True).reset_prefix_cache()
        """
        core = self._settled_core()
        if self._host is not None:
            self._host.finish(wait=True)  # blocks of freed sequences that a copy still reads
        core.reset_prefix_cache()

    def can_allocate(
        self,
        num_tokens: int | Ints,
        *,
        salt: Extra = None,
        extra_key: Extra = None,
        num_spare_blocks: int = 0,
    ) -> bool:
        """Whether a new sequence would find the blocks for all its tokens now.

        It says what `add_sequence` and a batch of that sequence would do, exactly: blocks that would be found
        in the prefix cache are not counted twice, and limits are kept.

        Args:
            num_tokens: how many, or their ids, for which the prefix cache is looked at.
            salt: as for `add_sequence`.
            extra_key: as for `add_sequence`.
            num_spare_blocks: blocks that must be left over, for sequences that grow: a watermark.

        Raises:
            ValueError: a negative number.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=2, block_size=16)
        >>> cache.can_allocate(32), cache.can_allocate(range(33)), cache.can_allocate(9, num_spare_blocks=2)
        (True, False, False)
        """
        if num_spare_blocks < 0:
            raise ValueError(f"num_spare_blocks must not be negative, got {num_spare_blocks}")
        if isinstance(num_tokens, int | np.integer):
            if num_tokens < 0:
                raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
            count = int(num_tokens)
            return self._fits(lambda core: core.can_allocate(count, num_spare_blocks))
        token_ids, root = reusable_ints(num_tokens), self._root(salt, extra_key)
        return self._fits(lambda core: core.can_allocate_ids(token_ids, root, num_spare_blocks))

    def can_append(self, sequences: Iterable[Sequence], counts: Ints) -> bool:
        """Whether counts[i] more tokens of sequences[i] would find their blocks now.

        It says what a batch of all uncomputed tokens and those would do, exactly: copies of shared blocks are
        counted, the slack in last blocks is used, and limits are kept.

        Args:
            sequences: distinct sequences of this cache; of one in an open batch, what the next would find.
            counts: `[num_seqs]`.

        Raises:
            ValueError: a sequence was freed, is listed twice or belongs to another cache; a negative count.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=1, block_size=16)
        >>> seq = cache.add_sequence(num_tokens=15)
        >>> cache.can_append([seq], [1]), cache.can_append([seq], [2])
        (True, False)
        """
        ids = self._ids(tuple(sequences))
        numbers = reusable_ints(counts)
        return self._fits(lambda core: core.can_append(ids, numbers))

    def can_swap_in(self, sequence: Sequence) -> bool:
        """Whether a swapped-out sequence could be swapped in, and go on, now.

        That is: whether it finds blocks for its computed tokens, and then a batch of all that are not
        computed, or of one more token where all are.

        Raises:
            ValueError: the sequence was freed, is not swapped out or belongs to another cache.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=1, block_size=2, num_host_blocks=4)
        >>> seq = cache.add_sequence(num_tokens=2); cache.commit(cache.batch([seq])); seq.swap_out()
        >>> cache.can_swap_in(seq)  # one block for it, but none for a third token
        False
        """
        (sequence_id,) = self._ids((sequence,))
        return self._fits(lambda core: core.can_swap_in(sequence_id))

    def _root(self, salt: Extra, extra_key: Extra) -> bytes:
        """Where the keys of a sequence's blocks start."""
        if salt is None and extra_key is None:
            return self._plain_root
        return prefix_root(salt, extra_key, self.block_size)

    def _fits(self, question: Callable[[_core.Sequences], bool]) -> bool:
        """What the core answers, once more without copies in flight where it says no because of them."""
        answer = question(self._settled_core())
        if not answer and self._host is not None and self._host.finish(wait=True):
            return question(self._settled_core())
        return answer

    def _settled_core(self) -> _core.Sequences:
        """The C++ core, up to date."""
        raise NotImplementedError

    def _ids(self, sequences: tuple[Sequence, ...]) -> list[int]:
        """The core's ids of sequences of this cache."""
        raise NotImplementedError
