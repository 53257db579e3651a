"""Pictures of the block map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cache_helpers import compute, make_cache

from pagedkv import PagedKVCache, viz


def a_bit_of_everything() -> PagedKVCache:
    """Blocks 0 and 1 shared, 2 and 3 own, 4 cached, the rest free."""
    cache = make_cache(num_blocks=80, prefix_caching=True)
    seq = cache.add_sequence(range(10))
    compute(cache, seq)
    fork = seq.fork()
    fork.append([1])
    compute(cache, fork)
    other = cache.add_sequence(range(50, 54))
    compute(cache, other)
    other.free()
    cache.kept = [seq, fork]  # type: ignore[attr-defined]
    return cache


def test_block_map() -> None:
    blocks = viz.block_map(a_bit_of_everything())
    kinds = [block.kind for block in blocks]
    assert kinds == ["shared", "shared", "own", "own", "cached", *["free"] * 75]
    assert [block.filled for block in blocks[:6]] == [1.0, 1.0, 0.5, 0.75, 1.0, 0.0]
    assert blocks[2].colour != blocks[3].colour
    assert len({viz.colour_of(label) for label in range(20)}) == 20


def test_terminal_is_the_picture_in_colours() -> None:
    cache = a_bit_of_everything()
    painted = viz.terminal(cache, width=16)
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == cache.draw(width=16)
    assert painted.count("\x1b[0m") == 5
    with pytest.raises(ValueError, match="width"):
        viz.terminal(cache, 0)


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "blocks.png"
    drawing = viz.figure(a_bit_of_everything(), path, width=16)
    assert path.stat().st_size > 1000
    assert len(drawing.axes[0].patches) == 80 + 5
    with pytest.raises(ValueError, match="width"):
        viz.figure(a_bit_of_everything(), width=0)
