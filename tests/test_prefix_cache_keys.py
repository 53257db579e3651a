"""The keys that the prefix cache finds blocks by."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import added, prefix_cache

from pagedkv import _core
from pagedkv._prefix import prefix_root

INITIAL_STATE = bytes.fromhex("6a09e667bb67ae853c6ef372a54ff53a510e527f9b05688c1f83d9ab5be0cd19")
WAYS = [False, *([True] if _core.sha256_is_native() else [])]


@pytest.mark.parametrize("native", WAYS)
def test_sha256_against_hashlib(native: bool) -> None:
    """Known digests, and lengths around those where the padding takes another chunk."""
    generator = random.Random(0)
    messages = [
        b"",
        b"abc",
        b"a" * 1000,
        *(generator.randbytes(n) for n in (55, 56, 63, 64, 65, 119, 120, 128)),
    ]
    for message in messages:
        zeros = bytes(-(len(message) + 9) % 64)
        padded = message + b"\x80" + zeros + (8 * len(message)).to_bytes(8, "big")
        digest = _core.sha256_compress(INITIAL_STATE, padded, native)
        assert digest == hashlib.sha256(message).digest()


def test_a_key_is_the_state_of_sha256_after_the_tokens() -> None:
    root = prefix_root(None, None, 16)
    tokens = [3, -1, 2**31 - 1, -(2**31), *range(12)]
    message = np.array(tokens, dtype="<i4").tobytes()
    assert _core.extend_key(root, tokens) == _core.sha256_compress(root, message, False)
    short = message[:20] + bytes(44)
    assert _core.extend_key(root, tokens[:5]) == _core.sha256_compress(root, short, False)


def test_tokens_beyond_32_bits_have_keys_of_their_own() -> None:
    root = prefix_root(None, None, 4)
    blocks = [
        [1, 2, 3, 4],
        [1, 2, 3, 4 + 2**32],
        [1, 2, 3, 2**63 - 1],
        [1 - 2**63, 2, 3, 4],
        [2**32, 0, 1, 0],
    ]
    # The last one as 32-bit tokens, which lie in memory just so.
    keys = {_core.extend_key(root, block) for block in blocks} | {
        _core.extend_key(root, [0, 1, 0, 0, 1, 0, 0, 0])
    }
    assert len(keys) == len(blocks) + 1
    cache = prefix_cache()
    added(cache, [*blocks[1], *blocks[2]]).free()
    assert cache.probe([*blocks[1], *blocks[2], 1]) == 8
    assert cache.probe([*blocks[0], *blocks[2], 1]) == 0


def test_fault_hash_not_reproducible() -> None:
    """Equal tokens of any integer kind have equal keys, in every process."""
    ids = [5, 0, 127, 7, 1, 2]
    kinds: list[Any] = [ids, tuple(ids), np.array(ids), iter(ids), torch.tensor(ids)]
    kinds += [np.array(ids, dtype=dtype) for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint64)]
    kinds += [torch.tensor(ids, dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.int32)]
    kinds += [np.array([ids, ids]).T[:, 0], torch.tensor([ids, ids]).T[:, 1]]  # strided
    cache = prefix_cache()
    added(cache, ids)
    for tokens in kinds:
        assert cache.probe(tokens) == 4
    program = (
        "from pagedkv import _core; from pagedkv._prefix import prefix_root;"
        "print(_core.extend_key(prefix_root('salt', ('a', 1, b'x'), 4), [5, 0, 127, 7]).hex())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert keys == {"d3c9e852bc73cd0a9a24fe7ad4734bd02aa4ee2c8e3d344c5352c1fc3e2fe511"}


def test_negative_tokens_do_not_collide() -> None:
    cache = prefix_cache()
    added(cache, [-1] * 5)
    assert cache.probe([-2] * 5) == 0
    assert cache.probe([-1] * 5) == 4


def test_fault_extra_keys_missing() -> None:
    extras: list[Any] = [
        None,
        "a",
        "b",
        b"a",
        ("a",),
        ("a", "b"),
        ("ab",),
        (("a",), "b"),
        1,
        "1",
        10,
        "",
        (),
        "i1:1",
    ]
    roots = {prefix_root(extra, None, 4) for extra in extras}
    roots |= {prefix_root(None, extra, 4) for extra in extras}
    assert len(roots) == 2 * len(extras) - 1  # both None
    assert prefix_root("ab", "c", 4) != prefix_root("a", "bc", 4)
    assert prefix_root("a", "b", 4) != prefix_root("a", "b", 8)
    assert prefix_root(np.int32(1), None, 4) == prefix_root(1, None, 4)
    cache = prefix_cache(num_blocks=64)
    for extra in extras:
        assert added(cache, range(9), extra_key=extra).num_cached_tokens == 0
        assert cache.probe(range(9), extra_key=extra) == 8
        assert cache.probe(range(9), salt=("x", extra)) == 0
    wrong: Any
    for wrong in (1.5, [1], True, ("a", 2.0)):
        with pytest.raises(TypeError, match="salt must be a str, bytes, an int, None or a tuple"):
            cache.add_sequence([1], salt=wrong)
