"""Pictures of a cache: the block map, in the terminal with colours and as a figure.

Each block is a cell. Its colour says which sequence it belongs to; shared blocks and those that only the
prefix cache keeps have colours of their own, free blocks none. In a figure a cell is filled as far as the
block is.
"""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkv.cache import PagedKVCache

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]

SHARED: Colour = (0.25, 0.25, 0.25)
CACHED: Colour = (0.72, 0.72, 0.72)
_FREE: Colour = (0.95, 0.95, 0.95)


class Block(NamedTuple):
    """What a block of the pool is."""

    kind: str
    """"free", "cached" (by the prefix cache alone), "shared" or "own" (of one sequence)."""
    colour: Colour | None
    """Red, green and blue, 0 to 1; None: free."""
    filled: float
    """The part of its slots that hold a token, 0 to 1."""


def block_map(cache: PagedKVCache) -> list[Block]:
    """Describe every block of the pool, in order.

    >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=3, block_size=4)
    >>> seq = cache.add_sequence(num_tokens=6); cache.commit(cache.batch([seq]))
    >>> [(block.kind, block.filled) for block in block_map(cache)]
    [('own', 1.0), ('own', 0.5), ('free', 0.0)]
    """
    blocks = []
    for owners, filled, label, cached in zip(*cache._settled_core().usage(), strict=True):
        part = float(filled) / cache.block_size
        if owners > 1:
            blocks.append(Block("shared", SHARED, part))
        elif owners == 1:
            blocks.append(Block("own", colour_of(int(label)), part))
        elif cached:
            blocks.append(Block("cached", CACHED, 1.0))
        else:
            blocks.append(Block("free", None, 0.0))
    return blocks


def colour_of(label: int) -> Colour:
    """A colour for a sequence; neighbouring labels differ most.

    >>> colour_of(0) == colour_of(1)
    False
    """
    # Steps of the golden ratio never come close to a hue that was there a few labels before.
    return colorsys.hsv_to_rgb(label * 0.618034 % 1.0, 0.65, 0.85)


def terminal(cache: PagedKVCache, width: int = 64) -> str:
    """`PagedKVCache.draw` in colours, for a terminal with 24-bit colour.

    Args:
        cache: whose pool.
        width: blocks a row.

    Raises:
        ValueError: width is below 1.

    >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=4)
    >>> print(terminal(cache))
    0  ....
    """
    blocks = block_map(cache)
    rows = []
    for row in cache.draw(width).splitlines():
        margin, _, symbols = row.strip().partition("  ")
        if symbols.startswith("("):  # a run of free rows, in words
            rows.append(row)
            continue
        begin = int(margin)
        cells = [_painted(symbol, blocks[begin + i].colour) for i, symbol in enumerate(symbols)]
        rows.append(row[: len(row) - len(symbols)] + "".join(cells))
    return "\n".join(rows)


def _painted(symbol: str, colour: Colour | None) -> str:
    if colour is None:
        return symbol
    red, green, blue = (round(255 * part) for part in colour)
    return f"\x1b[48;2;{red};{green};{blue}m{symbol}\x1b[0m"


def figure(cache: PagedKVCache, path: str | Path | None = None, *, width: int = 64) -> Figure:
    """Draw the block map with matplotlib.

    Args:
        cache: whose pool.
        path: where to save it, in a format that matplotlib knows by the suffix; None: nowhere.
        width: blocks a row.

    Raises:
        ValueError: width is below 1.
        ImportError: matplotlib is not installed.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install matplotlib") from error
    blocks = block_map(cache)
    num_rows = -(-len(blocks) // width)
    drawing = Figure(figsize=(width / 6 + 1, num_rows / 6 + 1), layout="tight")
    axes: Any = drawing.subplots()
    for i, block in enumerate(blocks):
        row, column = divmod(i, width)
        axes.add_patch(_cell(column, row, 1.0, _FREE))
        if block.colour is not None:
            axes.add_patch(_cell(column, row, block.filled, block.colour))
    axes.set(xlim=(0, width), ylim=(num_rows, 0), aspect="equal", xticks=[])
    axes.set_yticks([row + 0.5 for row in range(num_rows)], [str(row * width) for row in range(num_rows)])
    stats = cache.stats()
    axes.set_title(
        f"{stats.num_used} used, {stats.num_cached} cached, {stats.num_free} free", fontsize="small"
    )
    if path is not None:
        drawing.savefig(path, bbox_inches="tight")
    return drawing


def _cell(column: int, row: int, filled: float, colour: Colour) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column + 0.05, row + 0.05), 0.9 * filled, 0.9, color=colour, linewidth=0)
