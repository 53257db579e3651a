"""`PagedKVCache`: key and value pools, the sequences in them, and the batches that an attention layer needs.

The bookkeeping is C++ (`pagedkv._core`); this module holds the tensors. Threads may share a cache as long as
no two of them work on one sequence or one batch at the same time: calls of the C++ core exclude each other,
and what takes a call and copies of blocks is done under the cache's lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from pagedkv import _core, _pool
from pagedkv._batching import Batching
from pagedkv._buffers import BatchBuffers
from pagedkv._capacity import Capacity
from pagedkv._handles import Batch, Ints, Sequence, host_ints
from pagedkv._layers import group_layers
from pagedkv._prefix import Extra, prefix_root
from pagedkv._staging import PinnedStaging
from pagedkv._stats import CacheStats, Observability
from pagedkv._swap import HostPool

__all__ = ["Batch", "BatchBuffers", "CacheStats", "PagedKVCache", "Sequence"]


class PagedKVCache(Batching, Capacity, Observability):
    """A paged key-value cache for all layers of a model.

    One key and one value tensor a layer, `key_caches[layer]` and `value_caches[layer]`, each
    `[num_blocks, block_size, num_kv_heads, head_dim]`. They start uninitialised: slots that no token was
    written to are never visible in a result.

    Where only some layers have a sliding window, the layers form groups of one size, each with block tables
    of its own. One pool serves them all: a block holds the keys and values of the layers of one group, and
    layers of different groups share a tensor.

    Args:
        num_layers: attention layers.
        num_kv_heads: key-value heads of a layer.
        head_dim: of keys, and of values too unless value_head_dim says otherwise.
        value_head_dim: of values.
        num_blocks: blocks in the pool. Exactly one of num_blocks and memory is given.
        memory: bytes for all tensors on the device together, scales included: an int, text ("2GiB", "1.5GB"),
            or a fraction (float) of the device's free memory, container limits included.
        block_size: tokens in a block, any integer of at least 1.
        dtype: of queries, keys and values; float16, bfloat16 or float32. Default: torch's.
        kv_dtype: what the cache stores; dtype (the default), float8_e4m3fn, float8_e5m2 or int8.
        device: "cpu" or a CUDA device.
        k_scales: value = stored * scale, `[num_layers, num_kv_heads]` float32 or one float for all; int8
            needs them, for float8 they default to 1, other caches take none.
        v_scales: the same for values.
        prefix_caching: keep the full blocks of computed prompts, and reuse them for sequences that start with
            the same tokens. Blocks are found by a SHA-256 of all tokens up to their end, which is taken to
            differ where tokens do.
        compare_tokens: keep the ids of these tokens too (8 bytes each), and compare them at each hit, instead
            of relying on the hash. The block where a prompt leaves the known ones is reused then as well, by
            copy, up to the token where they differ.
        num_host_blocks: blocks on the host for sequences and prefixes that are swapped out, pinned where
            device is CUDA.
        max_used_blocks: how many blocks sequences may use at a time; the others keep prefixes.
        max_tokens_per_seq: how long a sequence can become.
        sliding_window: how many keys a query sees, itself included: one for all layers, or one (or None) a
            layer. Blocks behind it are given back, and `attend` gets it as its window.

    Raises:
        ValueError: sizes below 1, both or neither of num_blocks and memory, memory for less than one block,
            scales that do not fit the dtype.
        TypeError: an unsupported dtype.

    >>> cache = pagedkv.PagedKVCache(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=4)
    >>> seq = cache.add_sequence([11, 12, 13]); batch = cache.batch([seq]); q = torch.ones(3, 2, 8)
    >>> cache.attend(0, q, torch.ones(3, 1, 8), torch.ones(3, 1, 8), batch).shape, seq.num_computed_tokens
    (torch.Size([3, 2, 8]), 3)
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        num_blocks: int | None = None,
        memory: int | float | str | None = None,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        k_scales: torch.Tensor | float | None = None,
        v_scales: torch.Tensor | float | None = None,
        prefix_caching: bool = False,
        compare_tokens: bool = False,
        num_host_blocks: int = 0,
        max_used_blocks: int | None = None,
        max_tokens_per_seq: int | None = None,
        sliding_window: int | Iterable[int | None] | None = None,
    ) -> None:
        """Allocate the pool; see the class."""
        sizes = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "block_size": block_size,
        }
        if value_head_dim is not None:
            sizes["value_head_dim"] = value_head_dim
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_head_dim = head_dim if value_head_dim is None else value_head_dim
        self.block_size = block_size
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.kv_dtype = self.dtype if kv_dtype is None else kv_dtype
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device}")
        if sliding_window is not None and not isinstance(sliding_window, int | np.integer):
            sliding_window = list(sliding_window)
        self._groups = group_layers(num_layers, sliding_window)
        _pool.check_dtypes(self.dtype, self.kv_dtype, k_scales, v_scales)
        scales_shape = (num_layers, num_kv_heads)
        self.k_scales = _pool.make_scales("k_scales", k_scales, scales_shape, self.device)
        self.v_scales = _pool.make_scales("v_scales", v_scales, scales_shape, self.device)
        scales_bytes = sum(scales.nbytes for scales in (self.k_scales, self.v_scales) if scales is not None)
        self.num_blocks = _pool.choose_num_blocks(
            num_blocks, memory, self.bytes_per_block, scales_bytes, self.device
        )
        if compare_tokens and not prefix_caching:
            raise ValueError("compare_tokens is for caches with prefix_caching=True")
        self._core = _core.Sequences(
            self.num_blocks,
            block_size,
            self._groups.windows,
            num_host_blocks,
            max_used_blocks=max_used_blocks,
            max_tokens_per_seq=max_tokens_per_seq,
            compare_tokens=compare_tokens,
        )
        self._key_tensors = self._make_caches(self.head_dim)
        self._value_tensors = self._make_caches(self.value_head_dim)
        self.key_caches = [self._key_tensors[i] for i in self._groups.tensor_of_layer]
        self.value_caches = [self._value_tensors[i] for i in self._groups.tensor_of_layer]
        self.device = self.key_caches[0].device  # "cuda" has become "cuda:0"
        self.num_host_blocks = num_host_blocks
        self._lock = threading.RLock()
        self._staging = PinnedStaging(self.device) if self.device.type == "cuda" else None
        self._host: HostPool | None = None
        if num_host_blocks > 0:
            tensors = [*self._key_tensors, *self._value_tensors]
            self._host = HostPool(self._core, tensors, num_host_blocks, self.device, self._lock)
        # Weak: a batch that nobody has any more ends itself (Batch.__del__).
        self._open_batches: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
        self.prefix_caching = prefix_caching
        self._plain_root = prefix_root(None, None, block_size)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of all layers (of a group), without the scales."""
        elements_per_token = (
            self._groups.num_tensors * self.num_kv_heads * (self.head_dim + self.value_head_dim)
        )
        return self.block_size * elements_per_token * self.kv_dtype.itemsize

    def add_sequence(
        self,
        token_ids: Ints | None = None,
        *,
        num_tokens: int = 0,
        salt: Extra = None,
        extra_key: Extra = None,
    ) -> Sequence:
        """Make a sequence of these tokens; blocks are taken by the batches that compute them.

        With prefix_caching the blocks that hold the longest known prefix are reused, and kept from eviction,
        at once: `num_cached_tokens` of the tokens are computed already, at most all but the last. What of
        them is on the host is brought back, as far as there are free blocks for it.

        Args:
            token_ids: `[n]` ids, any sequence, array or tensor of integers.
            num_tokens: how many tokens, where their ids do not matter; nothing of them is reused.
            salt: a secret that keeps prefixes apart from others': str, bytes, int, or a tuple of such.
            extra_key: what else keys and values depend on, such as the id of an adapter; of the same types.

        Raises:
            ValueError: token_ids and num_tokens are given; num_tokens is negative; more than
                max_tokens_per_seq.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, block_size=2, prefix_caching=True)
        >>> seq = cache.add_sequence(range(5)); cache.commit(cache.batch([seq]))
        >>> cache.add_sequence(range(4)).num_cached_tokens, cache.add_sequence(num_tokens=2).num_tokens
        (3, 2)
        """
        if token_ids is None:
            return Sequence(self, self._settled_core().add(None, num_tokens))
        if num_tokens != 0:
            raise ValueError("add_sequence takes token_ids or num_tokens, not both")
        core, ids = self._settled_core(), host_ints(token_ids)
        if not self.prefix_caching:
            return Sequence(self, core.add(ids, 0))
        root = self._root(salt, extra_key)
        return Sequence(self, core.add(ids, 0, root) if self._host is None else self._host.add(ids, root))

    def reorder(self, sequences: Iterable[Sequence], parents: Ints) -> None:
        """Make sequences[i] what sequences[parents[i]] was: the step of a beam search.

        Only tables move. Blocks that several sequences have then are copied when one of them writes there.

        Args:
            sequences: distinct sequences of this cache, none in an open batch.
            parents: `[num_seqs]`, each an index of sequences.

        Raises:
            ValueError: a sequence was freed, is listed twice, in an open batch or of another cache; an index
                that is none. Nothing was changed.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4)
        >>> a, b = cache.add_sequence([1, 2]), cache.add_sequence([3])
        >>> cache.reorder([a, b], [1, 0]); a.token_ids, b.token_ids
        ([3], [1, 2])
        """
        self._settled_core().reorder(self._ids(tuple(sequences)), host_ints(parents))

    def append(self, sequences: Iterable[Sequence], token_ids: Ints | None = None) -> None:
        """Append token_ids[i] to sequences[i], or a token without an id to each: a decode step in one call.

        Args:
            sequences: distinct sequences of this cache.
            token_ids: `[num_seqs]`.

        Raises:
            ValueError: a sequence was freed, is listed twice, belongs to another cache, or would have more
                than max_tokens_per_seq tokens; not one id a sequence. Nothing was changed.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4)
        >>> seqs = [cache.add_sequence([1, 2]), cache.add_sequence([3])]
        >>> cache.append(seqs, [7, 8]); [seq.token_ids for seq in seqs]
        [[1, 2, 7], [3, 8]]
        """
        ids = self._ids(tuple(sequences))
        self._settled_core().append_each(ids, None if token_ids is None else host_ints(token_ids))

    def _make_caches(self, head_dim: int) -> list[torch.Tensor]:
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, head_dim)
        return [_pool.make_pool(shape, self.kv_dtype, self.device) for _ in range(self._groups.num_tensors)]

    def _ids(self, sequences: tuple[Sequence, ...]) -> list[int]:
        ids = [
            sequence._id
            for sequence in sequences
            if isinstance(sequence, Sequence) and sequence._cache is self
        ]
        if len(ids) == len(sequences):
            return ids
        for i, sequence in enumerate(sequences):
            if not isinstance(sequence, Sequence):
                raise TypeError(f"sequences[{i}] must be a Sequence, got {type(sequence).__name__}")
            if sequence._cache is not self:
                raise ValueError(f"sequences[{i}] belongs to another cache")
        raise AssertionError("unreachable")

    def _free(self, sequence_id: int) -> None:
        stale = self._open_batches.get(self._settled_core().free(sequence_id))
        if stale is not None:
            stale._state = "stale"
