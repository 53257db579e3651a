"""Which layers share a block table, and which share a tensor: see `sliding_window` of `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Groups of the size of the largest window waste at most this share of the pool on layers that do not exist.
_MAX_PADDING = 0.25


@dataclass(frozen=True)
class LayerGroups:
    """Layers whose queries see equally far back, in groups that have one block table each.

    Layers of different groups never use the same block, so that they can share a tensor: layer i of each
    group lies in tensor i. A block then is as big as one group, whichever group it serves.
    """

    windows: tuple[int, ...]
    """`[num_groups]`, 0 where all keys are seen."""
    group_of_layer: tuple[int, ...]
    """`[num_layers]`"""
    tensor_of_layer: tuple[int, ...]
    """`[num_layers]`"""
    num_tensors: int
    """Tensors of keys, and as many of values."""

    def window_of_layer(self, layer: int) -> int | None:
        """The keys that a query of the layer sees, itself included; None: all."""
        return self.windows[self.group_of_layer[layer]] or None


def group_layers(num_layers: int, sliding_window: int | Sequence[int | None] | None) -> LayerGroups:
    """Group layers by window.

    Groups have one size, so that a block serves any of them. It is that of the rarest window, unless hardly
    any space is lost with that of the most common one.

    Args:
        num_layers: of the model.
        sliding_window: one for all layers, or `[num_layers]`; None: all keys are seen.

    Raises:
        ValueError: a window below 1, or not as many windows as layers.
        TypeError: a window that is no integer.

    >>> groups = group_layers(6, [4, 4, None, 4, 4, None])
    >>> groups.windows, groups.group_of_layer, groups.tensor_of_layer
    ((4, 0, 4), (0, 0, 1, 2, 2, 1), (0, 1, 0, 0, 1, 1))
    """
    if sliding_window is None or isinstance(sliding_window, int | np.integer):
        per_layer = [sliding_window] * num_layers
    else:
        per_layer = list(sliding_window)
    if len(per_layer) != num_layers:
        raise ValueError(f"sliding_window has {len(per_layer)} entries for {num_layers} layers")
    for layer, window in enumerate(per_layer):
        if window is not None and (not isinstance(window, int | np.integer) or isinstance(window, bool)):
            raise TypeError(f"sliding_window must be integers or None, got {window!r} for layer {layer}")
        if window is not None and window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {window} for layer {layer}")
    counts = [per_layer.count(window) for window in set(per_layer)]
    group_size = max(counts) if max(counts) <= (1 + _MAX_PADDING) * min(counts) else min(counts)
    windows: list[int] = []
    group_of_layer: list[int] = []
    tensor_of_layer: list[int] = []
    filling: dict[int, tuple[int, int]] = {}  # window: the group that its next layer joins, and its layers
    for window in (0 if window is None else int(window) for window in per_layer):
        group, num_members = filling.get(window, (0, group_size))
        if num_members == group_size:
            group, num_members = len(windows), 0
            windows.append(window)
        group_of_layer.append(group)
        tensor_of_layer.append(num_members)
        filling[window] = group, num_members + 1
    return LayerGroups(tuple(windows), tuple(group_of_layer), tuple(tensor_of_layer), group_size)
