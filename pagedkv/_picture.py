"""A cache's pool as text: see `PagedKVCache.draw`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def draw_pool(
    owners: npt.NDArray[np.integer[Any]],
    filled: npt.NDArray[np.integer[Any]],
    labels: npt.NDArray[np.integer[Any]],
    cached: npt.NDArray[np.integer[Any]],
    block_size: int,
    width: int,
) -> str:
    """One character a block, `width` blocks a row, each row after the id of its first block.

    Args:
        owners: `[num_blocks]` sequences that map the block.
        filled: `[num_blocks]` its filled slots.
        labels: `[num_blocks]` a number for the first of these sequences.
        cached: `[num_blocks]` whether the prefix cache knows the block.
        block_size: slots of a block.
        width: blocks a row.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    num_blocks = len(owners)
    margin = len(str(num_blocks - 1))
    rows: list[str] = []
    free_begin: int | None = None  # first block of a run of free rows
    for begin in range(0, num_blocks, width):
        end = min(begin + width, num_blocks)
        if not (owners[begin:end].any() or cached[begin:end].any()):
            free_begin = begin if free_begin is None else free_begin
            continue
        rows += _free_rows(free_begin, begin, width, margin)
        free_begin = None
        row = "".join(
            _symbol(owners[i], filled[i], labels[i], cached[i], block_size) for i in range(begin, end)
        )
        rows.append(f"{begin:>{margin}}  {row}")
    rows += _free_rows(free_begin, num_blocks, width, margin)
    return "\n".join(rows)


def _free_rows(begin: int | None, end: int, width: int, margin: int) -> list[str]:
    """The rows of a run of free blocks: one as it is, more in words."""
    if begin is None:
        return []
    content = "." * (end - begin) if end - begin <= width else f"({end - begin} free blocks)"
    return [f"{begin:>{margin}}  {content}"]


def _symbol(owners: int, filled: int, label: int, cached: int, block_size: int) -> str:
    if owners == 0:
        return "-" if cached else "."
    full = filled == block_size
    if owners > 1:
        return "#" if full else "+"
    letter = _LETTERS[label % len(_LETTERS)]
    return letter if full else letter.lower()
