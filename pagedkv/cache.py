"""`PagedKVCache`: key and value pools, the sequences in them, and the batches that an attention layer needs.

The bookkeeping is C++ (`pagedkv._core`); this module holds the tensors. Its calls hold the GIL, so threads
may share a cache as long as no two of them work on one batch at the same time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv import _core, _pool, ops
from pagedkv._buffers import BatchBuffers
from pagedkv._capacity import Capacity
from pagedkv._handles import Batch, Ints, Sequence, host_ints, reusable_ints
from pagedkv._layers import group_layers
from pagedkv._prefix import Extra, prefix_root
from pagedkv._stats import CacheStats, Observability
from pagedkv._swap import HostPool

__all__ = ["Batch", "BatchBuffers", "CacheStats", "PagedKVCache", "Sequence"]


class PagedKVCache(Capacity, Observability):
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
        memory: bytes for all tensors of the cache together, scales included: an int, text ("2GiB", "1.5GB"),
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
        num_host_blocks: blocks on the host for sequences that are swapped out, pinned where device is CUDA.
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
        num_host_blocks: int = 0,
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
        self._core = _core.Sequences(self.num_blocks, block_size, self._groups.windows, num_host_blocks)
        self._key_tensors = self._make_caches(self.head_dim)
        self._value_tensors = self._make_caches(self.value_head_dim)
        self.key_caches = [self._key_tensors[i] for i in self._groups.tensor_of_layer]
        self.value_caches = [self._value_tensors[i] for i in self._groups.tensor_of_layer]
        self.device = self.key_caches[0].device  # "cuda" has become "cuda:0"
        self.num_host_blocks = num_host_blocks
        self._host: HostPool | None = None
        if num_host_blocks > 0:
            tensors = [*self._key_tensors, *self._value_tensors]
            self._host = HostPool(self._core, tensors, num_host_blocks, self.device)
        # Weak: a batch that nobody has any more ends itself (Batch.__del__).
        self._open_batches: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
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
        at once: `num_cached_tokens` of the tokens are computed already, at most all but the last.

        Args:
            token_ids: `[n]` ids, any sequence, array or tensor of integers.
            num_tokens: how many tokens, where their ids do not matter; nothing of them is reused.
            salt: a secret that keeps prefixes apart from others': str, bytes, int, or a tuple of such.
            extra_key: what else keys and values depend on, such as the id of an adapter; of the same types.

        Raises:
            ValueError: token_ids and num_tokens are given; num_tokens is negative.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, block_size=2, prefix_caching=True)
        >>> seq = cache.add_sequence(range(5)); cache.commit(cache.batch([seq]))
        >>> cache.add_sequence(range(4)).num_cached_tokens, cache.add_sequence(num_tokens=2).num_tokens
        (3, 2)
        """
        if token_ids is None:
            return Sequence(self, self._settled_core().add(None, num_tokens))
        if num_tokens != 0:
            raise ValueError("add_sequence takes token_ids or num_tokens, not both")
        root = self._root(salt, extra_key) if self.prefix_caching else None
        return Sequence(self, self._settled_core().add(host_ints(token_ids), 0, root))

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
            sequences: of this cache.
            token_ids: `[num_seqs]`.

        Raises:
            ValueError: a sequence was freed or belongs to another cache; not one id a sequence.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4)
        >>> seqs = [cache.add_sequence([1, 2]), cache.add_sequence([3])]
        >>> cache.append(seqs, [7, 8]); [seq.token_ids for seq in seqs]
        [[1, 2, 7], [3, 8]]
        """
        ids = self._ids(tuple(sequences))
        self._settled_core().append_each(ids, None if token_ids is None else host_ints(token_ids))

    def make_buffers(self, max_seqs: int, max_tokens: int, max_tokens_per_seq: int) -> BatchBuffers:
        """Tensors for many batches, one after the other: fixed addresses, and only what changes is written.

        Args:
            max_seqs: sequences of a batch.
            max_tokens: query tokens of a batch, all sequences together.
            max_tokens_per_seq: context of a sequence.

        Raises:
            ValueError: a size below 1.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, block_size=2)
        >>> buffers = cache.make_buffers(max_seqs=2, max_tokens=8, max_tokens_per_seq=6)
        >>> seq = cache.add_sequence(range(3)); cache.batch([seq], buffers=buffers).block_tables
        tensor([[ 0,  1, -1]], dtype=torch.int32)
        """
        sizes = {"max_seqs": max_seqs, "max_tokens": max_tokens, "max_tokens_per_seq": max_tokens_per_seq}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        max_blocks = -(-max_tokens_per_seq // self.block_size)
        return BatchBuffers(len(self._groups.windows), max_seqs, max_tokens, max_blocks, self.device)

    def batch(
        self,
        sequences: Iterable[Sequence],
        query_lens: Ints | None = None,
        *,
        buffers: BatchBuffers | None = None,
    ) -> Batch:
        """Open a batch over the next uncomputed tokens of each sequence: take their blocks, all or nothing.

        Blocks that are shared with other sequences and written here are copied first.

        Args:
            sequences: distinct sequences of this cache; none of them in an open batch.
            query_lens: `[num_seqs]`, how many of the uncomputed tokens each computes, 0 allowed; None: all.
            buffers: from `make_buffers`: the batch's tensors are parts of them, until the next batch is.

        Raises:
            OutOfMemoryError: too few blocks are free; nothing was changed.
            ValueError: a sequence was freed, is listed twice, belongs to another cache, or is in a batch that
                was neither committed nor abandoned; more tokens than are uncomputed; buffers too small.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, block_size=2)
        >>> a, b = cache.add_sequence([1, 2, 3]), cache.add_sequence([4])
        >>> cache.batch([a, b]).block_tables.tolist()
        [[0, 1], [2, -1]]
        """
        handles = tuple(sequences)
        lens = None if query_lens is None else reusable_ints(query_lens)
        core_buffers = None if buffers is None else buffers._core
        core, ids = self._settled_core(), self._ids(handles)
        try:
            arrays = core.open_batch(ids, lens, core_buffers)
        except _core.OutOfMemoryError:
            if self._host is None or not self._host.finish(wait=True):
                raise
            arrays = core.open_batch(ids, lens, core_buffers)
        if self._host is not None:
            self._host.wait_for_arrivals()
        if len(arrays.copies) > 0:
            # Should this fail, the sequences stay in a batch that nobody has: they can be freed, but not
            # read.
            ops.copy_blocks(self._key_tensors, self._value_tensors, torch.from_numpy(arrays.copies))
        batch = Batch(self, handles, arrays, buffers)
        self._open_batches[batch._batch_id] = batch
        return batch

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Write the batch's keys and values of one layer, then attend.

        With the last layer the batch is committed. Can be traced by `torch.compile(fullgraph=True)`.

        Args:
            layer: 0 to num_layers - 1, in any order.
            q: `[num_tokens, num_heads, head_dim]` dtype, rows as in `batch.query_start_loc`.
            k: `[num_tokens, num_kv_heads, head_dim]` dtype.
            v: `[num_tokens, num_kv_heads, value_head_dim]` dtype.
            batch: an open batch of this cache.
            options: keywords of `pagedkv.paged_attention`: window, softcap, sinks, return_lse, ... A layer
                with a sliding window has it as its window, or a narrower one.

        Returns:
            `[num_tokens, num_heads, value_head_dim]` dtype, and the lse with return_lse=True.

        Raises:
            IndexError: there is no such layer.
            ValueError: the batch is another cache's, committed, abandoned, or has lost a sequence to `free`;
                a window that is wider than the layer's; q, k or v of another number of rows.
        """
        if batch._cache is not self:
            raise ValueError("the batch belongs to another cache")
        batch._require_open("attend")
        if batch._all_attended():
            raise ValueError("cannot attend the batch: it was committed when its last layer was attended")
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is outside 0 to {self.num_layers - 1}")
        group, sliding_window = self._groups.group_of_layer[layer], self._groups.window_of_layer(layer)
        if sliding_window is not None:
            window = options.setdefault("window", sliding_window)
            if window is None or window > sliding_window:
                raise ValueError(f"window is {window}, but layer {layer} keeps only {sliding_window} keys")
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.shape[0] != batch.num_tokens:
                raise ValueError(
                    f"{name} has {tensor.shape[0]} rows, but the batch has {batch.num_tokens} tokens"
                )
        key_cache, value_cache = self.key_caches[layer], self.value_caches[layer]
        k_scale = None if self.k_scales is None else self.k_scales[layer]
        v_scale = None if self.v_scales is None else self.v_scales[layer]
        ops.reshape_and_cache(
            k, v, key_cache, value_cache, batch._slot_mappings[group], k_scale=k_scale, v_scale=v_scale
        )
        out = ops.paged_attention(
            q,
            batch._block_tables[group],
            key_cache,
            value_cache,
            batch.context_lens,
            query_start_loc=batch.query_start_loc,
            max_query_len=batch.max_query_len,
            k_scale=k_scale,
            v_scale=v_scale,
            **options,
        )
        # The C++ core hears of it at the next call that asks (_settled_core): a call here would break a
        # traced graph.
        batch._attended.add(layer)
        return out

    def commit(self, batch: Batch) -> None:
        """Count the batch's tokens as computed. A second commit does nothing.

        `attend` does so by itself with the last layer.

        Raises:
            ValueError: the batch is another cache's, was abandoned, or has lost a sequence to `free`.
        """
        self._require_mine(batch)
        if batch._state != "committed":
            batch._require_open("commit")
            self._close(batch, "committed")

    def abandon(self, batch: Batch) -> None:
        """Undo a batch that failed midway: give back its blocks. Its tokens stay known, and uncomputed.

        A shared block that was copied for it stays copied. A second call does nothing.

        Raises:
            ValueError: the batch is another cache's or was committed.
        """
        self._require_mine(batch)
        if batch._state == "committed":
            raise ValueError("cannot abandon the batch: it was committed (truncate its sequences instead)")
        if batch._state != "abandoned":
            self._close(batch, "abandoned")

    def _make_caches(self, head_dim: int) -> list[torch.Tensor]:
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, head_dim)
        return [_pool.make_pool(shape, self.kv_dtype, self.device) for _ in range(self._groups.num_tensors)]

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        # torch does not hand out the pinned memory again before the copy out of it is done.
        return tensor.pin_memory().to(self.device, non_blocking=True)

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

    def _settled_core(self) -> _core.Sequences:
        """The C++ core, once it has heard of every batch whose last layer was attended."""
        if self._open_batches:
            # Without the lock a thread could go on while another one is about to commit its batch.
            with self._lock:
                for batch in list(self._open_batches.values()):
                    if batch._state == "open" and batch._all_attended():
                        self._close(batch, "committed")
        if self._host is not None:
            self._host.finish()
        return self._core

    def _close(self, batch: Batch, state: str) -> None:
        with self._lock:
            if state == "committed":
                self._core.commit(batch._batch_id)
            else:
                self._core.abandon(batch._batch_id)
            batch._state = state
            self._open_batches.pop(batch._batch_id, None)

    def _require_mine(self, batch: Batch) -> None:
        if batch._cache is not self:
            raise ValueError("the batch belongs to another cache")
        self._settled_core()

    def _free(self, sequence_id: int) -> None:
        stale = self._open_batches.get(self._settled_core().free(sequence_id))
        if stale is not None:
            stale._state = "stale"
