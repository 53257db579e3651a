"""A progress bar, where one is wanted."""

from __future__ import annotations

from typing import Any


class NoBar:
    """Stands in for a progress bar that nobody wants."""

    total = 0

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, count: int) -> None:
        pass

    def set_postfix(self, **values: object) -> None:
        pass


def progress_bar(total: int, wanted: bool) -> Any:
    """A bar of tqdm, or something that takes the same calls."""
    if not wanted:
        return NoBar()
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    return tqdm(total=total, unit="token")
