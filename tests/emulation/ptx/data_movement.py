"""Moves, conversions and memory: PTX ISA, "Data Movement and Conversion Instructions"."""

from __future__ import annotations

import re

from .handlers import PACKED, handles, one_type, operands, take, vector
from .operands import CPP_TYPES, Names, is_integer
from .parser import Instruction, PtxError, type_bytes

# ---- Moves and conversions ------------------------------------------------------------------------------


@handles("mov")
def _move(instruction: Instruction, names: Names) -> str:
    types, _ = take(instruction)
    ptx_type = one_type(types)
    destination, source = operands(instruction, 2)
    if ptx_type == "pred":
        return names.write(destination, "pred", names.predicate(source))
    num_bytes = type_bytes(ptx_type)
    bits = f"b{8 * num_bytes}"
    to, parts = vector(destination), vector(source)
    if len(to) == len(parts) == 1:
        return names.write(destination, bits, names.read(source, bits))
    part_bits = 8 * num_bytes // max(len(to), len(parts))
    if len(to) > 1:
        pieces = [
            names.write(register, f"b{part_bits}", f"{CPP_TYPES[f'b{part_bits}']}(whole >> {part_bits * i})")
            for i, register in enumerate(to)
        ]
        return f"{{ const {CPP_TYPES[bits]} whole = {names.read(source, bits)}; {' '.join(pieces)} }}"
    joined = [
        f"{CPP_TYPES[bits]}({names.read(register, f'b{part_bits}')}) << {part_bits * i}"
        for i, register in enumerate(parts)
    ]
    return names.write(destination, bits, " | ".join(joined))


@handles("cvta")
def _convert_address(instruction: Instruction, names: Names) -> str:
    _, words = take(instruction, "to", "shared", "shared__cta", "global", "local", "param", "const")
    destination, source = operands(instruction, 2)
    address = names.read(source, "u64")
    if words & {"shared", "shared__cta"}:
        address = f"{'generic_to_shared' if 'to' in words else 'shared_to_generic'}({address})"
    return names.write(destination, "u64", address)


ROUND_TO_INTEGER = {"rni": "std::rint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
FLOAT8 = {"e4m3x2": "float8_e4m3fn", "e5m2x2": "float8_e5m2"}


@handles("cvt")
def _convert(instruction: Instruction, names: Names) -> str:
    types, words = take(instruction, *ROUND_TO_INTEGER, "rn", "ftz", "sat", "satfinite")
    if len(types) != 2:
        raise PtxError("two types were expected")
    to, source_type = types
    destination, *sources = operands(instruction, 2, 3)
    if to in PACKED or to in FLOAT8:
        return names.write(destination, to, _convert_packed(to, source_type, sources, names))
    if len(sources) != 1 or "satfinite" in words:
        raise PtxError("this conversion is not known")
    value = names.read(sources[0], source_type)
    to_integer, from_integer = is_integer(to), is_integer(source_type)
    if to_integer and from_integer:
        if "sat" in words:
            value = f"convert_saturated<{CPP_TYPES[to]}>({value})"
        return names.write(destination, to, f"{CPP_TYPES[to]}({value})")
    if "ftz" in words and source_type == "f32":
        value = f"ftz({value})"
    roundings = words & set(ROUND_TO_INTEGER)
    if to_integer and not roundings:
        raise PtxError("a rounding to integer was expected")
    for word in roundings:
        value = f"{ROUND_TO_INTEGER[word]}({value})"
    if to != source_type:
        value = f"convert<{CPP_TYPES[to]}>({value})"
    if "sat" in words and not to_integer:
        if to != "f32":
            raise PtxError("cvt.sat is known for f32 and integers only")
        value = f"saturate({value})"
    return names.write(destination, to, f"ftz({value})" if "ftz" in words and to == "f32" else value)


def _convert_packed(to: str, source_type: str, sources: list[str], names: Names) -> str:
    """Two numbers to or from one register."""
    if source_type == "f32" and len(sources) == 2:
        high, low = (names.read(source, "f32") for source in sources)
        if to in PACKED:
            return f"pack<{PACKED[to]}>({high}, {low})"
        return f"pack_float8<{FLOAT8[to]}>({high}, {low})"
    if to in PACKED and source_type in FLOAT8 and len(sources) == 1:
        return f"widen_float8<{FLOAT8[source_type]}, {PACKED[to]}>({names.read(sources[0], 'b16')})"
    if to in FLOAT8 and source_type in PACKED and len(sources) == 1:
        return f"narrow_halves<{FLOAT8[to]}, {PACKED[source_type]}>({names.read(sources[0], 'b32')})"
    raise PtxError(f"a conversion from .{source_type} to .{to} is not known")


# ---- Memory ---------------------------------------------------------------------------------------------

SPACES = {
    "global": "global",
    "shared": "shared",
    "shared__cta": "shared",
    "local": "local",
    "const": "constant",
    "param": "param",
}
# The emulator has no caches, and runs the threads of a CTA one at a time.
CACHING = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}
ORDERING = {"volatile", "relaxed", "acquire", "release", "weak", "cta", "gpu", "sys"}


def take_memory(instruction: Instruction, *known: str) -> tuple[str, str, set[str]]:
    """The type of an access, its state space and the words of ``known`` that it has."""
    # L2__cache_hint is no hint in this sense: it brings an operand more.
    hints = [word for word in instruction.modifiers if re.match(r"L[12]__(?!cache_hint)", word)]
    types, words = take(instruction, *SPACES, *CACHING, *ORDERING, *hints, *known)
    space = next((SPACES[word] for word in instruction.modifiers if word in SPACES), "generic")
    return one_type(types), f"Space::{space}", words & set(known)


@handles("ld", "ldu")
def _load(instruction: Instruction, names: Names) -> str:
    ptx_type, space, words = take_memory(instruction, "v2", "v4", "v8")
    destination, address = operands(instruction, 2)
    registers = vector(destination)
    _check_count(registers, words)
    access = f"load<{space}, {CPP_TYPES[ptx_type]}, {len(registers)}>({names.address(address)})"
    if len(registers) == 1:
        return names.write(registers[0], ptx_type, f"{access}[0]")
    writes = " ".join(names.write(register, ptx_type, f"values[{i}]") for i, register in enumerate(registers))
    return f"{{ const auto values = {access}; {writes} }}"


@handles("st")
def _store(instruction: Instruction, names: Names) -> str:
    ptx_type, space, words = take_memory(instruction, "v2", "v4", "v8")
    address, source = operands(instruction, 2)
    sources = vector(source)
    _check_count(sources, words)
    values = ", ".join(names.read(operand, ptx_type) for operand in sources)
    return f"store<{space}, {CPP_TYPES[ptx_type]}, {len(sources)}>({names.address(address)}, {{{values}}});"


def _check_count(registers: list[str], words: set[str]) -> None:
    expected = int(next(iter(words), "v1")[1:])
    if len(registers) != expected:
        raise PtxError(f"{expected} registers were expected")


ATOMIC_UPDATES = {
    "add": "before + operand",
    "min": "min(before, operand)",
    "max": "max(before, operand)",
    "and": "before & operand",
    "or": "before | operand",
    "xor": "before ^ operand",
    "exch": "operand",
    "cas": "before == operand ? other : before",
}


@handles("atom", "red")
def _atomic(instruction: Instruction, names: Names) -> str:
    ptx_type, space, words = take_memory(instruction, *ATOMIC_UPDATES)
    if len(words) != 1 or ptx_type in ("f16", "bf16", *PACKED):
        raise PtxError("this atomic operation is not known")
    (operation,) = words
    if instruction.opcode == "red":
        destination, (address, *values) = "_", operands(instruction, 2)
    else:
        destination, address, *values = operands(instruction, 4 if operation == "cas" else 3)
    cpp_type = CPP_TYPES[ptx_type]
    arguments = ("operand", "other")[: len(values)]
    captured = [
        f"{name} = {names.read(value, ptx_type)}" for name, value in zip(arguments, values, strict=True)
    ]
    update = (
        f"[{', '.join(captured)}]([[maybe_unused]] {cpp_type} before) "
        f"{{ return static_cast<{cpp_type}>({ATOMIC_UPDATES[operation]}); }}"
    )
    result = f"atomic<{space}, {cpp_type}>({names.address(address)}, {update})"
    return names.write(destination, ptx_type, result)


@handles("membar", "fence")
def _fence(instruction: Instruction, names: Names) -> str:
    take(instruction, "cta", "gl", "gpu", "sys", "sc", "acq_rel")
    return "preempt();"


@handles("cp")
def _async_copy(instruction: Instruction, names: Names) -> str:
    words = instruction.modifiers
    if words == ("async", "commit_group"):
        return "async_copy_commit();"
    if words == ("async", "wait_all"):
        return "async_copy_wait_all();"
    if words == ("async", "wait_group"):
        return f"async_copy_wait({int(operands(instruction, 1)[0])});"
    hints = {word for word in words[1:] if re.fullmatch(r"L2__(64|128|256)B", word)}
    kind = [word.removesuffix("__cta") for word in words if word not in hints]
    if kind not in (["async", "ca", "shared", "global"], ["async", "cg", "shared", "global"]):
        raise PtxError("this copy is not known")
    destination, source, num_bytes, *source_bytes = operands(instruction, 3, 4)
    read = names.read(source_bytes[0], "s32") if source_bytes else num_bytes
    return (
        f"async_copy<{int(num_bytes)}>(shared_pointer({names.address(destination)}), "
        f"reinterpret_cast<const void*>({names.address(source)}), {read});"
    )
