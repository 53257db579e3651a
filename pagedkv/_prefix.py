"""What must agree, besides the tokens, before one sequence may use the blocks of another."""

from __future__ import annotations

import hashlib
import operator
from typing import Any, TypeAlias

import numpy as np

Extra: TypeAlias = "str | bytes | int | np.integer[Any] | tuple[Extra, ...] | None"

# The C++ core hashes on from the root's digest, and relies on no other message of it starting with this tag.
_TAG = b"pagedkv prefix cache: root"


def prefix_root(salt: Extra, extra_key: Extra, block_size: int) -> bytes:
    """The 32-byte key that the block keys of a sequence start from; the same in every process.

    Args:
        salt: what keeps tenants apart: only who knows it can hit a block, or tell that it is cached.
        extra_key: what else the keys and values depend on, such as the id of an adapter or the hash of an
            image.
        block_size: of the cache.

    Raises:
        TypeError: neither a str, bytes, int, None nor a tuple of such.

    >>> prefix_root(None, "adapter", 16).hex()[:16]
    'f2acca0b3adcc290'
    """
    message = (
        _TAG + _encode("salt", salt) + _encode("extra_key", extra_key) + _encode("block_size", block_size)
    )
    return hashlib.sha256(message).digest()


def _encode(name: str, value: Extra) -> bytes:
    """Bytes that no other value has: each value says of what type and how long it is."""
    if value is None:
        return b"n"
    if isinstance(value, tuple):
        return b"t%d:" % len(value) + b"".join(_encode(name, item) for item in value)
    if isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, content = b"b", value
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        kind, content = b"i", b"%d" % operator.index(value)
    else:
        raise TypeError(
            f"{name} must be a str, bytes, an int, None or a tuple of such, got {type(value).__name__}"
        )
    return kind + b"%d:" % len(content) + content
