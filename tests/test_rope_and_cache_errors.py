"""rope_and_cache: indices, user mistakes and autograd; nothing is written before an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import (
    Backend,
    bits,
)
from rope_inputs import Call, check_rope, rope_call

OPERATORS = ("rope_and_cache",)


def test_slot_minus_one_and_beyond(backend: Backend) -> None:
    arguments = rope_call(backend)
    arguments["slot_mapping"] = backend.slots([-1] * 7)
    check_rope(backend, arguments)
    before = {name: bits(arguments[name]) for name in ("query", "key_cache", "value_cache")}
    for slot in (12, 2**31, 2**40 + 17):
        arguments["slot_mapping"] = backend.slots([0, 1, 2, slot, 3, 4, 5])
        with (
            backend.index_checks(),
            pytest.raises(IndexError, match=rf"(?s)slot_mapping\[3\].*{slot}.*12 slots"),
        ):
            backend.ops.rope_and_cache(**arguments)
        for name, old in before.items():
            assert torch.equal(bits(arguments[name]), old), name


@pytest.mark.parametrize("position", [50, -1, 2**31, 2**40])
def test_positions_outside_the_tables(backend: Backend, position: int) -> None:
    arguments = rope_call(backend)
    arguments["positions"][4] = position
    before = {name: bits(arguments[name]) for name in ("query", "key_cache", "value_cache")}
    with backend.index_checks(), pytest.raises(IndexError, match=rf"(?s)positions\[4\].*{position}.*50"):
        backend.ops.rope_and_cache(**arguments)
    for name, old in before.items():
        assert torch.equal(bits(arguments[name]), old), name


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "query rank": (ValueError, "query.*num_tokens", lambda a: {"query": a["query"][0]}),
    "query tokens": (
        ValueError,
        "query.*num_tokens|positions.*num_tokens",
        lambda a: {"query": a["query"][1:]},
    ),
    "query head_dim": (ValueError, "query.*head_dim", lambda a: {"query": a["query"][..., :8]}),
    "query dtype": (TypeError, "query.*key", lambda a: {"query": a["query"].half()}),
    "query strided": (
        ValueError,
        "query.*contiguous",
        lambda a: {"query": a["query"].repeat(1, 1, 2)[..., ::2]},
    ),
    "key heads": (ValueError, "key.*num_kv_heads", lambda a: {"key": a["key"][:, :1]}),
    "value head_dim": (ValueError, "value.*head_dim", lambda a: {"value": a["value"][..., :8]}),
    "value dtype": (TypeError, "value.*key", lambda a: {"value": a["value"].half()}),
    "cos rank": (ValueError, "cos.*max_position", lambda a: {"cos": a["cos"][None]}),
    "sin shape": (ValueError, "sin.*", lambda a: {"sin": a["sin"][:, 1:]}),
    "sin rows": (ValueError, "sin.*max_position", lambda a: {"sin": a["sin"][1:]}),
    "cos dtype": (TypeError, "cos.*float32", lambda a: {"cos": a["cos"].double(), "sin": a["sin"].double()}),
    "cos other half type": (
        TypeError,
        "cos.*float32",
        lambda a: {"cos": a["cos"].half(), "sin": a["sin"].half()},
    ),
    "sin dtype": (TypeError, "sin.*cos", lambda a: {"sin": a["sin"].half()}),
    "rotary_dim too large": (
        ValueError,
        "rotary_dim.*head_dim",
        lambda a: {"cos": a["cos"].repeat(1, 2), "sin": a["sin"].repeat(1, 2)},
    ),
    "positions dtype": (
        TypeError,
        "(?i)positions.*(int64|long)",
        lambda a: {"positions": a["positions"].int()},
    ),
    "positions length": (ValueError, "positions.*num_tokens", lambda a: {"positions": a["positions"][1:]}),
    "slots too long": (
        ValueError,
        "slot_mapping.*8.*7",
        lambda a: {"slot_mapping": torch.cat([a["slot_mapping"], a["slot_mapping"][:1]])},
    ),
    "slots dtype": (
        TypeError,
        "(?i)slot_mapping.*(int64|long)",
        lambda a: {"slot_mapping": a["slot_mapping"].int()},
    ),
    "cache dtype": (
        TypeError,
        "key_cache.*key",
        lambda a: {"key_cache": a["key_cache"].half(), "value_cache": a["value_cache"].half()},
    ),
    "scale on float": (ValueError, "k_scale", lambda a: {"k_scale": 1.0}),
    "int8 needs scales": (
        ValueError,
        "k_scale",
        lambda a: {
            name: torch.zeros(a[name].shape, dtype=torch.int8, device=a[name].device)
            for name in ("key_cache", "value_cache")
        },
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_write_nothing(backend: Backend, mistake: str) -> None:
    exception, message, change = MISTAKES[mistake]
    arguments = rope_call(backend)
    arguments |= change(arguments)
    names = ("query", "key_cache", "value_cache")
    before = {name: bits(arguments[name]) for name in names}
    with pytest.raises(exception, match=f"(?s){message}"):
        backend.ops.rope_and_cache(**arguments)
    for name in names:
        assert torch.equal(bits(arguments[name]), before[name]), name


@pytest.mark.parametrize("name", ["query", "key", "value", "cos", "key_cache"])
def test_inference_only(backend: Backend, name: str) -> None:
    arguments = rope_call(backend)
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*torch\.no_grad\(\)"):
        backend.ops.rope_and_cache(**arguments)
    with torch.no_grad():
        backend.ops.rope_and_cache(**arguments)
