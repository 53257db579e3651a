"""The table from opcodes to translations, and what translations are written with.

A handler takes an instruction and the names in scope and returns C++ statements. `take` sorts modifiers into
types and known words; a word that the handler does not name is an error, so that no meaning is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .operands import CPP_TYPES, Names
from .parser import Instruction, PtxError, split_operands

Handler = Callable[[Instruction, Names], str]
HANDLERS: dict[str, Handler] = {}


def handles(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a handler."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(opcodes, handler))
        return handler

    return register


def take(instruction: Instruction, *known: str) -> tuple[list[str], set[str]]:
    """The types among the modifiers, in order, and the other ones, all of which must be known."""
    types = [modifier for modifier in instruction.modifiers if modifier in CPP_TYPES]
    words = {modifier for modifier in instruction.modifiers if modifier not in CPP_TYPES}
    if unknown := words - set(known):
        raise PtxError(f"the modifier '.{sorted(unknown)[0]}' is not known")
    return types, words


def one_type(types: Sequence[str]) -> str:
    """The only type of an instruction."""
    if len(types) != 1:
        raise PtxError("one type was expected")
    return types[0]


def operands(instruction: Instruction, *counts: int) -> tuple[str, ...]:
    """The operands, as many as one of ``counts``."""
    if len(instruction.operands) not in counts:
        raise PtxError(f"{' or '.join(map(str, counts))} operands were expected")
    return instruction.operands


def vector(operand: str) -> list[str]:
    """``{%r1, %r2}`` as a list; a single operand as a list of one."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]


PACKED = {"f16x2": "float16", "bf16x2": "bfloat16"}  # two numbers in a register
