"""The operands of PTX instructions as C++ expressions.

A register is an unsigned integer of its width, a predicate a bool. How an instruction sees it is written out:
``r1``, ``int32_t(r1)``, ``uint8_t(r1)``, ``as_float(r1)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .parser import Function, Module, PtxError, type_bytes

CPP_TYPES = {
    "pred": "bool",
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3x2": "uint16_t",
    "e5m2x2": "uint16_t",
    "f16x2": "uint32_t",
    "bf16x2": "uint32_t",
}

_SPECIAL = {
    **{
        f"%{name}.{axis}": f"current_thread->{member}.{axis}"
        for name, member in [
            ("tid", "thread_idx"),
            ("ntid", "cta->cta_dim"),
            ("ctaid", "cta->block_idx"),
            ("nctaid", "cta->grid_dim"),
        ]
        for axis in "xyz"
    },
    "%laneid": "uint32_t(current_thread->lane_idx)",
    "%warpid": "uint32_t(current_thread->warp_idx)",
    "%lanemask_eq": "lane_bit()",
    "%lanemask_lt": "(lane_bit() - 1)",
    "%lanemask_le": "(lane_bit() * 2 - 1)",
    "%lanemask_gt": "(0u - lane_bit() * 2)",
    "%lanemask_ge": "(0u - lane_bit())",
    "%dynamic_smem_size": "uint32_t(current_thread->cta->shared_bytes)",
}

_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0|[1-9]\d*)U?$")
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")


def is_integer(ptx_type: str) -> bool:
    """Whether C++ has the type's arithmetic as an integer."""
    return ptx_type[0] in "bsu" and not ptx_type.startswith("bf")


def register_bytes(ptx_type: str) -> int | None:
    """The width of a register declared as such; None for a type that no register has."""
    if ptx_type == "pred":
        return 1
    return type_bytes(ptx_type) if re.fullmatch(r"[bsuf](16|32|64)|f16x2", ptx_type) else None


def unsigned(num_bytes: int) -> str:
    """The unsigned integer of a width."""
    return f"uint{8 * num_bytes}_t"


def register_type(num_bytes: int) -> str:
    """What a register is declared as in C++."""
    return "bool" if num_bytes == 1 else unsigned(num_bytes)


def register_name(name: str) -> str:
    """``%r1`` is ``r1``; ``p``, a name of inline assembly, is ``p_``, which no other can be."""
    return name[1:] if name.startswith("%") else f"{name}_"


def constant(bits: int, num_bytes: int) -> str:
    """A literal, unsigned unless its type is narrower than int."""
    return f"{bits & ((1 << 8 * num_bytes) - 1):#x}{'ull' if num_bytes == 8 else 'u'}"


def constant_of(operand: str, num_bytes: int) -> str | None:
    """The literal of an integer, or of a floating-point number given by its bits; None for anything else."""
    if integer := _INTEGER.match(operand):
        return constant(int("".join(integer.groups()), 0), num_bytes)
    if digits := _FLOAT_BITS.match(operand):
        bits = digits.group(1) or digits.group(2)
        if len(bits) != 2 * num_bytes:
            raise PtxError(f"'{operand}' is not a constant of {num_bytes} bytes")
        return constant(int(bits, 16), num_bytes)
    return None


@dataclass
class _Scope:
    """The names declared between two braces."""

    registers: dict[str, int]  # and their widths
    memory: set[str]


class Names:
    """What the names in a function mean, and how an operand is written with them."""

    def __init__(self, module: Module, function: Function) -> None:
        """The names that the function begins with."""
        memory = {variable.name for variable in module.variables if variable.space != "shared"}
        memory.update(parameter.name for parameter in (*function.results, *function.parameters))
        self._scopes = [_Scope({}, memory)]
        self._shared = {variable.name for variable in module.variables if variable.space == "shared"}
        self.functions = {other.name: other for other in module.functions if not other.is_entry}
        self.is_entry = function.is_entry

    def enter(self) -> None:
        """A scope opens."""
        self._scopes.append(_Scope({}, set()))

    def leave(self) -> None:
        """A scope closes, and its names with it."""
        self._scopes.pop()

    def declare_registers(self, names: list[str], num_bytes: int) -> None:
        """Registers of the innermost scope."""
        self._scopes[-1].registers.update(dict.fromkeys(names, num_bytes))

    def declare_memory(self, name: str) -> None:
        """An array of the innermost scope."""
        self._scopes[-1].memory.add(name)

    def is_memory(self, name: str) -> bool:
        """Whether the name is that of bytes: a parameter, a local array, a variable of the module."""
        return any(name in scope.memory for scope in self._scopes)

    def width(self, register: str) -> int | None:
        """The width of a register in bytes; None if the name is none's."""
        return next((s.registers[register] for s in reversed(self._scopes) if register in s.registers), None)

    def raw(self, operand: str, num_bytes: int) -> tuple[str, int]:
        """An operand's bits, and how many bytes of them there are; ``num_bytes`` for a constant."""
        if (width := self.width(operand)) is not None:
            return register_name(operand), width
        if operand in _SPECIAL:
            return _SPECIAL[operand], 4
        if (literal := constant_of(operand, num_bytes)) is not None:
            return literal, num_bytes
        if operand in self._shared:
            return ("SHARED_WINDOW" if num_bytes == 8 else "uint32_t(SHARED_WINDOW)"), num_bytes
        if self.is_memory(operand):
            return f"address_of({operand})", 8
        raise PtxError(f"the operand '{operand}' is not known")

    def read(self, operand: str, ptx_type: str) -> str:
        """An operand as a value of a type."""
        if ptx_type == "pred":
            return self.predicate(operand)
        num_bytes = type_bytes(ptx_type)
        bits, width = self.raw(operand, num_bytes)
        if width < num_bytes:
            raise PtxError(f"the operand '{operand}' is narrower than its use")
        if is_integer(ptx_type):
            is_plain = width == num_bytes >= 4 and ptx_type[0] != "s"
            return bits if is_plain else f"{CPP_TYPES[ptx_type]}({bits})"
        if width != num_bytes:
            raise PtxError(f"the operand '{operand}' is wider than its use")
        if ptx_type in ("f32", "f64"):
            return f"as_{CPP_TYPES[ptx_type]}({bits})"
        return f"{CPP_TYPES[ptx_type]}{{{bits}}}" if num_bytes == 2 and "x" not in ptx_type else bits

    def predicate(self, operand: str) -> str:
        """A predicate, negated or not, or a constant: nvcc writes true as -1."""
        if operand.startswith("!"):
            return f"!{self.predicate(operand[1:])}"
        if _INTEGER.match(operand):
            return "false" if operand == "0" else "true"
        if self.width(operand) != 1:
            raise PtxError(f"'{operand}' is not a predicate")
        return register_name(operand)

    def write(self, operand: str, ptx_type: str, value: str) -> str:
        """A statement that gives a register a value of a type. ``_`` takes anything."""
        if operand == "_":
            return f"static_cast<void>({value});"
        width, num_bytes = self.width(operand), 1 if ptx_type == "pred" else type_bytes(ptx_type)
        if width is None:
            raise PtxError(f"'{operand}' is not a register")
        if (ptx_type == "pred") != (width == 1) or width < num_bytes:
            raise PtxError(f"the register '{operand}' does not fit the type .{ptx_type}")
        if is_integer(ptx_type) or ptx_type == "pred" or "x" in ptx_type:
            return f"{register_name(operand)} = {value};"  # C++ extends a value by its own sign, as PTX does
        if width != num_bytes:
            raise PtxError(f"the register '{operand}' is wider than the type .{ptx_type}")
        return f"{register_name(operand)} = bits({value});"

    def address(self, operand: str) -> str:
        """``[%rd1+8]`` as an address."""
        inside = _ADDRESS.fullmatch(operand)
        if inside is None:
            raise PtxError(f"the address '{operand}' is not known")
        base, offset = inside.groups()
        bits, _ = self.raw(base, 8)
        return f"{bits} + ({offset})" if offset and int(offset) else bits
