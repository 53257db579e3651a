"""Batches of a `PagedKVCache`: opening, attending, ending them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from pagedkv import ops
from pagedkv._buffers import BatchBuffers
from pagedkv._core import Batch as BatchArrays
from pagedkv._core import OutOfMemoryError
from pagedkv._core import Sequences as Core
from pagedkv._handles import Batch, Ints, Sequence, reusable_ints
from pagedkv._layers import LayerGroups
from pagedkv._staging import PinnedStaging
from pagedkv._swap import HostPool


class Batching:
    """The part of `PagedKVCache` that makes batches of sequences, and knows which are open."""

    num_layers: int
    block_size: int
    device: torch.device
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    _core: Core
    _groups: LayerGroups
    _key_tensors: list[torch.Tensor]
    _value_tensors: list[torch.Tensor]
    _host: HostPool | None
    _staging: PinnedStaging | None
    _lock: threading.RLock
    _open_batches: weakref.WeakValueDictionary[int, Batch]

    def _ids(self, sequences: tuple[Sequence, ...]) -> list[int]:
        """The core's ids of sequences of this cache."""
        raise NotImplementedError

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
        return BatchBuffers(
            self._core,
            len(self._groups.windows),
            max_seqs,
            max_tokens,
            max_blocks,
            self.device,
            self._staging,
        )

    def batch(
        self,
        sequences: Iterable[Sequence],
        query_lens: Ints | None = None,
        *,
        buffers: BatchBuffers | None = None,
    ) -> Batch:
        """Open a batch over the next uncomputed tokens of each sequence: take their blocks, all or nothing.

        Blocks that are shared with other sequences and written here are copied first. A batch that is dropped
        while it is open is abandoned.

        Args:
            sequences: distinct sequences of this cache; none of them in an open batch.
            query_lens: `[num_seqs]`, how many of the uncomputed tokens each computes, 0 allowed; None: all.
            buffers: from `make_buffers` of this cache: the batch's tensors are parts of them, until the next
                batch is, which may be opened when this one was committed or abandoned.

        Raises:
            OutOfMemoryError: too few blocks are free; nothing was changed.
            ValueError: a sequence was freed, is listed twice, belongs to another cache, or is in a batch that
                was neither committed nor abandoned; more tokens than are uncomputed; buffers that are too
                small, another cache's, or an open batch's.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4, block_size=2)
        >>> a, b = cache.add_sequence([1, 2, 3]), cache.add_sequence([4])
        >>> cache.batch([a, b]).block_tables.tolist()
        [[0, 1], [2, -1]]
        """
        handles = tuple(sequences)
        lens = None if query_lens is None else reusable_ints(query_lens)
        core_buffers = None if buffers is None else buffers._core
        core, ids = self._settled_core(), self._ids(handles)
        if buffers is not None:
            buffers._require_free(core)
        # With the lock until the copies are queued: nobody else is given a block before it was copied from.
        with self._lock:
            try:
                arrays = core.open_batch(ids, lens, core_buffers)
            except OutOfMemoryError:
                if self._host is None or not self._host.finish(wait=True):
                    raise
                arrays = core.open_batch(ids, lens, core_buffers)
            if self._host is not None:
                self._host.wait_for_arrivals()
            if len(arrays.copies) > 0:
                # Should this fail, the sequences stay in a batch that nobody has: they can be freed, but not
                # read.
                ops.copy_blocks(self._key_tensors, self._value_tensors, torch.from_numpy(arrays.copies))
            batch = Batch(handles, arrays, self._batch_tensors(handles, arrays, buffers), self)
            self._open_batches[batch._batch_id] = batch
            if buffers is not None:
                buffers._batch = weakref.ref(batch)
        return batch

    def _batch_tensors(
        self, sequences: tuple[Sequence, ...], arrays: BatchArrays, buffers: BatchBuffers | None
    ) -> list[torch.Tensor]:
        """block_tables, context_lens, query_start_loc and slot_mapping of all groups, on the device."""
        if buffers is not None:
            return buffers.tensors(len(sequences), arrays.num_tokens)
        parts = (arrays.block_tables, arrays.context_lens, arrays.query_start_loc, arrays.slot_mapping)
        if self._staging is not None:
            return self._staging.send(parts)
        return [torch.from_numpy(part) for part in parts]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Write the batch's keys and values of one layer, then attend.

        Once every layer was attended the batch is committed. Can be traced by
        `torch.compile(fullgraph=True)`.

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

    def _settled_core(self) -> Core:
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

    def _end_lost(self, batch: Batch) -> None:
        """End a batch that nobody has any more."""
        with self._lock:  # until then another thread may find it in _open_batches
            if batch._state == "open" and batch._all_attended():
                self._close(batch, "committed")
            elif batch._state in ("open", "stale"):
                self._close(batch, "abandoned")

    def _require_mine(self, batch: Batch) -> None:
        if batch._cache is not self:
            raise ValueError("the batch belongs to another cache")
        self._settled_core()
