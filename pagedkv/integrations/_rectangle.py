"""A rectangular batch with padding, as models see it, over the ragged sequences of a `PagedKVCache`.

A model counts columns: every row of its batch has the same number of them, and a mask says which are padding.
The cache holds one sequence a row, with only the tokens that are not padding. `Rectangle` keeps the two in
step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagedkv import ops
from pagedkv._core import OutOfMemoryError
from pagedkv.cache import Batch, PagedKVCache, Sequence

__all__ = ["Rectangle", "attend_dense"]


@dataclass
class _Step:
    """One forward pass: the columns that it adds.

    Attributes:
        batch: what the pool takes the new tokens from.
        num_columns: new ones.
        stored: `[batch_size, past columns + num_columns]` bool, on the CPU: the tokens that the pool then
            holds.
        token_idxs: `[batch.num_tokens]` int64, which of the `batch_size * num_columns` new tokens are stored;
            None: all.
        layers_done: layers whose keys and values were written.
    """

    batch: Batch
    num_columns: int
    stored: Tensor
    token_idxs: Tensor | None
    layers_done: set[int] = field(default_factory=set)

    @functools.cached_property
    def has_gaps(self) -> bool:
        """Whether a row has padding between its tokens, so that distances in columns and in tokens differ."""
        num_columns = self.stored.shape[1]
        columns = torch.arange(num_columns)
        first = columns.where(self.stored, num_columns).amin(1)
        last = columns.where(self.stored, -1).amax(1)
        return bool((last - first + 1 > self.stored.sum(1)).any())

    def pack(self, states: Tensor) -> Tensor:
        """`[batch_size, num_heads, num_columns, head_dim]` -> `[batch.num_tokens, num_heads, head_dim]`."""
        tokens = states.transpose(1, 2).flatten(0, 1)
        return tokens if self.token_idxs is None else tokens.index_select(0, self.token_idxs)

    def unpack(self, tokens: Tensor) -> Tensor:
        """`[batch.num_tokens, ...]` -> `[batch_size, num_columns, ...]`, 0 where there is padding."""
        batch_size, shape = self.stored.shape[0], tokens.shape[1:]
        if self.token_idxs is not None:
            padded = tokens.new_zeros(batch_size * self.num_columns, *shape)
            tokens = padded.index_copy_(0, self.token_idxs, tokens)
        return tokens.view(batch_size, self.num_columns, *shape)

    def spread(self, tokens: Tensor) -> Tensor:
        """`[num_stored, num_heads, head_dim]` -> `[batch_size, num_heads, all columns, head_dim]`."""
        shape = (*self.stored.shape, *tokens.shape[1:])
        if bool(self.stored.all()):
            return tokens.view(shape).transpose(1, 2)
        dense = tokens.new_zeros(shape)
        dense[self.stored.to(tokens.device)] = tokens
        return dense.transpose(1, 2)


class Rectangle:
    """The rows of a batch, which of their tokens the pool stores, and the forward pass that is under way.

    Args:
        pool: the cache that holds the sequences.

    Attributes:
        rows: one sequence a row.
        stored: `[batch_size, num_columns]` bool, on the CPU: False where a token is padding.
    """

    def __init__(self, pool: PagedKVCache) -> None:
        """Start without rows."""
        self.pool = pool
        self.rows: list[Sequence] = []
        self.stored = torch.ones(0, 0, dtype=torch.bool)
        self._step: _Step | None = None

    @property
    def num_columns(self) -> int:
        """Columns that complete forward passes have filled."""
        return self.stored.shape[1]

    def check_states(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError where a layer's keys and values do not fit."""
        pool = self.pool
        if not 0 <= layer_idx < pool.num_layers:
            raise ValueError(f"layer_idx {layer_idx} is outside the cache's 0 to {pool.num_layers - 1}")
        expected = (key.shape[0], pool.num_kv_heads, key.shape[2], pool.head_dim)
        if not key.shape == value.shape == expected:
            raise ValueError(
                f"layer {layer_idx} has keys {list(key.shape)} and values {list(value.shape)}, but by the "
                f"config both are [batch_size, {pool.num_kv_heads}, num_tokens, {pool.head_dim}]; this model "
                "is not supported"
            )
        if self.num_columns > 0 and key.shape[0] != len(self.rows):
            raise ValueError(
                f"the cache holds a batch of {len(self.rows)}, this one has {key.shape[0]} rows; reset() it "
                "first"
            )

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Store the new tokens of a layer that are not padding, and attend from them.

        Args:
            layer_idx: 0 to num_layers - 1.
            query: `[batch_size, num_heads, new columns, head_dim]`.
            key: `[batch_size, num_kv_heads, new columns, head_dim]`.
            value: the same.
            visible: `[batch_size, all columns]` bool, False where a token is padding; None: none is.
            options: keywords of `pagedkv.paged_attention`.

        Returns:
            `[batch_size, new columns, num_heads, head_dim]`, 0 for padding.

        Raises:
            OutOfMemoryError: too few blocks are free; nothing was changed.
            ValueError: sizes do not fit; `visible` shows a token that was hidden when it was new.
            NotImplementedError: `visible` hides a stored token before a visible one; padding in a window.
        """
        batch_size, _, num_columns, _ = key.shape
        if visible is None:
            visible = torch.ones(batch_size, self.num_columns + num_columns, dtype=torch.bool)
        step = self._step_of(layer_idx, visible, num_columns)
        if options.get("window") is not None and options["window"] < visible.shape[1] and step.has_gaps:
            raise NotImplementedError("a sliding window over padding between tokens is not supported")
        q, k, v = (step.pack(states) for states in (query, key, value))
        out = self.pool.attend(layer_idx, q, k, v, step.batch, **options)
        assert isinstance(out, Tensor)
        self._finish_layer(step, layer_idx)
        return step.unpack(out)

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store all new tokens of a layer, whether padding or not, and return the layer's whole rectangle.

        Returns:
            keys and values, `[batch_size, num_kv_heads, all columns, head_dim]`, 0 where nothing was stored.
        """
        batch_size, _, num_columns, _ = key.shape
        past = self.stored if self.num_columns > 0 else self.stored.new_ones(batch_size, 0)
        visible = torch.cat([past, past.new_ones(batch_size, num_columns)], dim=1)
        step = self._step_of(layer_idx, visible, num_columns)
        batch, pool = step.batch, self.pool
        caches = (pool.key_caches[layer_idx], pool.value_caches[layer_idx])
        k_scale = None if pool.k_scales is None else pool.k_scales[layer_idx]
        v_scale = None if pool.v_scales is None else pool.v_scales[layer_idx]
        ops.reshape_and_cache(
            step.pack(key), step.pack(value), *caches, batch.slot_mapping, k_scale=k_scale, v_scale=v_scale
        )
        keys, values = ops.gather_kv(
            *caches,
            batch.block_tables,
            batch.context_lens,
            total_tokens=int(step.stored.sum()),
            k_scale=k_scale,
            v_scale=v_scale,
            dtype=key.dtype,
        )
        self._finish_layer(step, layer_idx)
        return step.spread(keys), step.spread(values)

    def truncate(self, num_columns: int) -> None:
        """Keep the first num_columns columns."""
        self._abandon_step()
        self._keep(self.stored[:, :num_columns])

    def select(self, row_idxs: list[int]) -> None:
        """Make row i what row `row_idxs[i]` was. Rows of one parent share its blocks."""
        self._abandon_step()
        rows: list[Sequence] = []
        taken: set[int] = set()
        for row_idx in row_idxs:
            rows.append(self.rows[row_idx].fork() if row_idx in taken else self.rows[row_idx])
            taken.add(row_idx)
        for row_idx in set(range(len(self.rows))) - taken:
            self.rows[row_idx].free()
        self.rows, self.stored = rows, self.stored[row_idxs]

    def clear(self) -> None:
        """Give back every block and forget the rows."""
        self._abandon_step()
        for row in self.rows:
            row.free()
        self.rows, self.stored = [], self.stored.new_ones(0, 0)

    def _step_of(self, layer_idx: int, visible: Tensor, num_columns: int) -> _Step:
        """The forward pass that is under way, or a new one where this layer starts it."""
        step = self._step
        # A pass that broke off left a step in which no layer is done, or one in which this layer is.
        if step is None or len(step.layers_done) == 0 or layer_idx in step.layers_done:
            self._abandon_step()
            step = self._step = self._begin_step(visible.cpu(), num_columns)
        elif visible.shape != step.stored.shape or num_columns != step.num_columns:
            raise ValueError(
                f"layer {layer_idx} got {num_columns} new of {list(visible.shape)} tokens, the layers before "
                f"{step.num_columns} of {list(step.stored.shape)}"
            )
        return step

    def _begin_step(self, visible: Tensor, num_columns: int) -> _Step:
        batch_size, num_past = visible.shape[0], self.num_columns
        if visible.shape[1] != num_past + num_columns:
            raise ValueError(
                f"attention_mask has {visible.shape[1]} columns, but {num_past} tokens are in the cache and "
                f"{num_columns} are new"
            )
        if num_past == 0:
            self.rows = [self.pool.add_sequence() for _ in range(batch_size)]
            self.stored = visible[:, :0]
        self._hide(visible[:, :num_past])
        new = visible[:, num_past:]
        counts = new.sum(1).tolist()
        if not self.pool.can_append(self.rows, counts):
            stats = self.pool.stats()
            raise OutOfMemoryError(
                f"{stats.num_free} of {stats.num_blocks} blocks of {self.pool.block_size} tokens are free, "
                f"too few for {sum(counts)} more tokens of {batch_size} sequences; make the cache with more "
                "num_blocks or memory"
            )
        for row, count in zip(self.rows, counts, strict=True):
            row.append(count)
        token_idxs = None if bool(new.all()) else new.flatten().nonzero().squeeze(1).to(self.pool.device)
        return _Step(self.pool.batch(self.rows), num_columns, visible, token_idxs)

    def _hide(self, visible: Tensor) -> None:
        """Drop stored tokens that are padding now, like those that `generate` appends to ended rows."""
        if bool((visible & ~self.stored).any()):
            raise ValueError(
                "attention_mask shows tokens that it hid in an earlier forward pass, so that their keys were "
                "not stored; pass the mask of the whole batch, padding included, to every call"
            )
        hidden = self.stored & ~visible
        if bool(((hidden.cumsum(1) > 0) & visible).any()):
            raise NotImplementedError("attention_mask hides stored tokens that are followed by visible ones")
        if bool(hidden.any()):
            self._keep(visible)

    def _keep(self, stored: Tensor) -> None:
        """Truncate each row to the tokens that `stored` still has."""
        for row, num_tokens in zip(self.rows, stored.sum(1).tolist(), strict=True):
            row.truncate(num_tokens)
        self.stored = stored

    def _finish_layer(self, step: _Step, layer_idx: int) -> None:
        step.layers_done.add(layer_idx)
        if len(step.layers_done) == self.pool.num_layers:
            self.pool.commit(step.batch)
            self.stored, self._step = step.stored, None

    def _abandon_step(self) -> None:
        """Forget a forward pass that broke off."""
        if self._step is not None:
            self.pool.abandon(self._step.batch)
            for row in self.rows:
                row.truncate(row.num_computed_tokens)
            self._step = None


def attend_dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, **options: Any) -> Tensor:
    """Attend to dense keys and values where they lie: each row is one cache block of num_keys tokens.

    Args:
        query: `[batch_size, num_heads, num_queries, head_dim]`, the last of the keys' tokens.
        key: `[batch_size, num_kv_heads, num_keys, head_dim]`.
        value: the same.
        visible: `[batch_size, num_keys]` bool, False where a token is padding; None: none is.
        options: keywords of `pagedkv.paged_attention`.

    Returns:
        `[batch_size, num_queries, num_heads, head_dim]`.

    Raises:
        NotImplementedError: there is padding between tokens.
    """
    (batch_size, _, num_keys, _), num_queries, device = key.shape, query.shape[2], query.device
    kv_starts = None
    if visible is not None:
        columns, num_tokens = torch.arange(num_keys, device=device), visible.sum(1, keepdim=True)
        is_left = (visible == (columns >= num_keys - num_tokens)).all(1)
        # Padding on the right lies behind every query that counts.
        is_right = (visible == (columns < num_tokens)).all(1)
        if not bool((is_left | is_right).all()):
            raise NotImplementedError("padding between tokens is not supported without a PagedCache")
        kv_starts = torch.where(is_left, num_keys - num_tokens.squeeze(1), 0).int()
    row_idxs = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
    out = ops.paged_attention(
        query.transpose(1, 2).flatten(0, 1),
        row_idxs[:-1].unsqueeze(1),
        key.transpose(1, 2),
        value.transpose(1, 2),
        torch.full_like(row_idxs[:-1], num_keys),
        query_start_loc=row_idxs * num_queries,
        max_query_len=num_queries,
        kv_starts=kv_starts,
        **options,
    )
    assert isinstance(out, Tensor)
    return out.view(batch_size, num_queries, *out.shape[1:])
