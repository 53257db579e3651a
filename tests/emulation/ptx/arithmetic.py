"""Arithmetic, logic, comparison and selection: PTX ISA, "Integer Arithmetic Instructions" and the like."""

from __future__ import annotations

from collections.abc import Sequence

from .handlers import HANDLERS, PACKED, Handler, handles, one_type, operands, take
from .operands import Names, is_integer
from .parser import Instruction, PtxError, type_bytes

# On unsigned registers these give the same bits as on signed ones, so an integer's sign does not matter.
INFIX = {"add": "+", "sub": "-", "mul": "*", "mul_lo": "*", "and": "&", "or": "|", "xor": "^"}


def compute(
    instruction: Instruction,
    names: Names,
    function: str,
    types: Sequence[str],
    result_type: str = "",
    flush: bool = False,
) -> str:
    """``destination = function(sources)`` with a type for each source; the result has the first one's."""
    destination, *sources = operands(instruction, len(types) + 1)
    result_type = result_type or types[0]
    if flush and types[0] != "f32":
        raise PtxError("the modifier '.ftz' is known for f32 only")
    infix = INFIX.get(function) if types[0] not in {"f16", "bf16", *PACKED} else None
    if infix and is_integer(types[0]):
        types = [f"u{8 * type_bytes(types[0])}"] * 2
    values = [names.read(source, ptx_type) for source, ptx_type in zip(sources, types, strict=True)]
    if types[0] in PACKED:
        half = PACKED[types[0]]
        letters = "abc"[: len(sources)]
        declared = ", ".join(f"{half} {letter}" for letter in letters)
        of_one = f"[]({declared}) {{ return {function}({', '.join(letters)}); }}"
        return names.write(destination, result_type, f"per_half<{half}>({of_one}, {', '.join(values)})")
    if flush:
        values = [f"ftz({value})" for value in values]
    result = f"{values[0]} {infix} {values[1]}" if infix else f"{function}({', '.join(values)})"
    return names.write(destination, result_type, f"ftz({result})" if flush else result)


def arithmetic(
    function: str, num_sources: int, *known: str, only: Sequence[str] = (), result_type: str = ""
) -> Handler:
    """An instruction whose sources have one type, of ``only`` these. ``rn`` is how everything is rounded."""

    def handler(instruction: Instruction, names: Names) -> str:
        types, words = take(instruction, *known)
        ptx_type = one_type(types)
        if only and ptx_type not in only:
            raise PtxError(f"this instruction is not known for the type .{ptx_type}")
        return compute(instruction, names, function, [ptx_type] * num_sources, result_type, "ftz" in words)

    return handler


FLOAT = ("f32",)
FLOAT_OR_HALF = ("f32", "f16", "bf16", *PACKED)

HANDLERS |= {
    "add": arithmetic("add", 2, "rn", "ftz"),
    "sub": arithmetic("sub", 2, "rn", "ftz"),
    "div": arithmetic("div", 2, "rn", "ftz", "full", "approx"),
    "rem": arithmetic("rem", 2),
    "abs": arithmetic("abs", 1, "ftz"),
    "neg": arithmetic("neg", 1, "ftz"),
    "copysign": arithmetic("copysign", 2, only=("f32", "f64")),
    "and": arithmetic("and", 2),
    "or": arithmetic("or", 2),
    "xor": arithmetic("xor", 2),
    "not": arithmetic("bit_not", 1),
    "popc": arithmetic("popc", 1, result_type="u32"),
    "clz": arithmetic("clz", 1, result_type="u32"),
    "brev": arithmetic("brev", 1),
    "rcp": arithmetic("rcp", 1, "rn", "approx", "ftz", only=FLOAT),
    "sqrt": arithmetic("sqrt", 1, "rn", "approx", "ftz", only=FLOAT),
    "rsqrt": arithmetic("rsqrt", 1, "approx", "ftz", only=FLOAT),
    "ex2": arithmetic("ex2", 1, "approx", "ftz", only=FLOAT_OR_HALF),
    "lg2": arithmetic("lg2", 1, "approx", "ftz", only=FLOAT),
    "sin": arithmetic("sin", 1, "approx", "ftz", only=FLOAT),
    "cos": arithmetic("cos", 1, "approx", "ftz", only=FLOAT),
    "tanh": arithmetic("tanh", 1, "approx", only=FLOAT_OR_HALF),
}


@handles("mul", "mad")
def _multiply(instruction: Instruction, names: Names) -> str:
    types, words = take(instruction, "lo", "hi", "wide", "rn", "ftz")
    ptx_type = one_type(types)
    part = next((word for word in ("lo", "hi", "wide") if word in words), "")
    if not part:
        if instruction.opcode == "mad" or is_integer(ptx_type):
            raise PtxError(
                "mul and mad of integers, with .lo, .hi or .wide, and mul of other numbers are known"
            )
        return compute(instruction, names, "mul", [ptx_type] * 2, flush="ftz" in words)
    result_type = f"{ptx_type[0]}{2 * int(ptx_type[1:])}" if part == "wide" else ptx_type
    source_types = [ptx_type] * 2 + [result_type] * (instruction.opcode == "mad")
    return compute(instruction, names, f"{instruction.opcode}_{part}", source_types, result_type)


@handles("fma")
def _fma(instruction: Instruction, names: Names) -> str:
    types, words = take(instruction, "rn", "rm", "ftz")
    if "rm" in words and types != ["f32"]:
        raise PtxError("fma.rm is known for f32 only")
    function = "fma_down" if "rm" in words else "fma"
    return compute(instruction, names, function, [one_type(types)] * 3, flush="ftz" in words)


@handles("min", "max")
def _extreme(instruction: Instruction, names: Names) -> str:
    types, words = take(instruction, "ftz", "NaN")
    function = instruction.opcode + ("_nan" if "NaN" in words else "")
    return compute(instruction, names, function, [one_type(types)] * 2, flush="ftz" in words)


@handles("shl", "shr")
def _shift(instruction: Instruction, names: Names) -> str:
    types, _ = take(instruction)
    ptx_type = one_type(types)
    destination, value, count = operands(instruction, 3)
    if count.isdecimal() and int(count) < 8 * type_bytes(ptx_type):
        symbol = "<<" if instruction.opcode == "shl" else ">>"
        return names.write(destination, ptx_type, f"{names.read(value, ptx_type)} {symbol} {count}")
    return compute(instruction, names, instruction.opcode, [ptx_type, "u32"])


@handles("shf")
def _funnel_shift(instruction: Instruction, names: Names) -> str:
    types, words = take(instruction, "l", "r", "wrap", "clamp")
    destination, low, high, count = operands(instruction, 4)
    limit = "wrapped" if "wrap" in words else "clamped"
    function = "shf_left" if "l" in words else "shf_right"
    arguments = f"{names.read(low, 'u32')}, {names.read(high, 'u32')}, {limit}({names.read(count, 'u32')})"
    return names.write(destination, one_type(types), f"{function}({arguments})")


@handles("bfe")
def _bit_field_extract(instruction: Instruction, names: Names) -> str:
    types, _ = take(instruction)
    return compute(instruction, names, "bfe", [one_type(types), "u32", "u32"])


@handles("bfi")
def _bit_field_insert(instruction: Instruction, names: Names) -> str:
    types, _ = take(instruction)
    return compute(instruction, names, "bfi", [one_type(types)] * 2 + ["u32", "u32"])


@handles("prmt")
def _permute(instruction: Instruction, names: Names) -> str:
    take(instruction)
    return compute(instruction, names, "prmt", ["u32"] * 3)


@handles("lop3")
def _logic3(instruction: Instruction, names: Names) -> str:
    take(instruction)
    return compute(instruction, names, "lop3", ["u32"] * 4)


# ---- Comparison and selection ---------------------------------------------------------------------------

# In C++, of two integers or two floating-point numbers a and b; the "unordered" ones hold for NaN.
COMPARISONS = {
    "eq": "{a} == {b}",
    "ne": "({a} < {b} || {a} > {b})",
    "lt": "{a} < {b}",
    "le": "{a} <= {b}",
    "gt": "{a} > {b}",
    "ge": "{a} >= {b}",
    "lo": "{a} < {b}",
    "ls": "{a} <= {b}",
    "hi": "{a} > {b}",
    "hs": "{a} >= {b}",
    "equ": "!({a} < {b} || {a} > {b})",
    "neu": "{a} != {b}",
    "ltu": "!({a} >= {b})",
    "leu": "!({a} > {b})",
    "gtu": "!({a} <= {b})",
    "geu": "!({a} < {b})",
    "num": "({a} == {a} && {b} == {b})",
    "nan": "({a} != {a} || {b} != {b})",
}


@handles("setp")
def _set_predicate(instruction: Instruction, names: Names) -> str:
    types, words = take(instruction, *COMPARISONS, "and", "or", "xor", "ftz")
    ptx_type = one_type(types)
    comparison = instruction.modifiers[0]
    if comparison not in COMPARISONS or ptx_type in PACKED:
        raise PtxError("this comparison is not known")
    combination = next((word for word in ("and", "or", "xor") if word in words), None)
    destination, *sources = operands(instruction, 4 if combination else 3)
    a, b = (names.read(operand, ptx_type) for operand in sources[:2])
    if ptx_type in ("f16", "bf16"):
        a, b = f"to_float({a})", f"to_float({b})"
    if "ftz" in words:
        a, b = f"ftz({a})", f"ftz({b})"
    if comparison == "ne" and is_integer(ptx_type):
        comparison = "neu"
    result = COMPARISONS[comparison].format(a=a, b=b)
    texts = [result, f"!({result})"]
    if combination:
        other = names.predicate(sources[2])
        texts = [f"({text}) {INFIX[combination]} ({other})" for text in texts]
    return " ".join(
        names.write(register, "pred", text)
        for register, text in zip(destination.split("|"), texts, strict=False)
    )


@handles("selp")
def _select(instruction: Instruction, names: Names) -> str:
    types, _ = take(instruction)
    destination, a, b, predicate = operands(instruction, 4)
    bits = f"b{8 * type_bytes(one_type(types))}"
    chosen = f"{names.predicate(predicate)} ? {names.read(a, bits)} : {names.read(b, bits)}"
    return names.write(destination, bits, chosen)
