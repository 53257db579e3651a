"""What threads do together, and where each goes on: matrices, shuffles, barriers, branches."""

from __future__ import annotations

from .handlers import handles, one_type, operands, take, vector
from .operands import Names
from .parser import Instruction, PtxError, split_operands

# ---- Matrices -------------------------------------------------------------------------------------------


@handles("ldmatrix")
def _load_matrices(instruction: Instruction, names: Names) -> str:
    types, words = take(
        instruction, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared__cta"
    )
    destination, address = operands(instruction, 2)
    registers = vector(destination)
    if types != ["b16"] or f"x{len(registers)}" not in words:
        raise PtxError("this ldmatrix is not known")
    transposed = "true" if "trans" in words else "false"
    writes = " ".join(names.write(register, "b32", f"rows[{i}]") for i, register in enumerate(registers))
    pointer = f"shared_pointer({names.address(address)})"
    load = f"ldmatrix<{len(registers)}, {transposed}>(rows, {pointer});"
    return f"{{ uint32_t rows[{len(registers)}]; {load} {writes} }}"


@handles("movmatrix")
def _move_matrix(instruction: Instruction, names: Names) -> str:
    take(instruction, "sync", "aligned", "m8n8", "trans")
    destination, source = operands(instruction, 2)
    return names.write(destination, "b32", f"movmatrix_transposed({names.read(source, 'b32')})")


@handles("mma")
def _multiply_matrices(instruction: Instruction, names: Names) -> str:
    types, words = take(instruction, "sync", "aligned", "m16n8k16", "row", "col")
    elements = {"f16": "float16", "bf16": "bfloat16"}
    if types not in (["f32", "f16", "f16", "f32"], ["f32", "bf16", "bf16", "f32"]) or "m16n8k16" not in words:
        raise PtxError("this mma is not known")
    d, a, b, c = (vector(operand) for operand in operands(instruction, 4))
    if (len(d), len(a), len(b), len(c)) != (4, 4, 2, 4):
        raise PtxError("registers {4}, {4}, {2}, {4} were expected")
    lists = [
        ", ".join(names.read(register, ptx_type) for register in registers)
        for registers, ptx_type in ((a, "b32"), (b, "b32"), (c, "f32"))
    ]
    writes = " ".join(names.write(register, "f32", f"d[{i}]") for i, register in enumerate(d))
    return (
        f"{{ float d[4]; const uint32_t a[4] = {{{lists[0]}}}, b[2] = {{{lists[1]}}}; "
        f"const float c[4] = {{{lists[2]}}}; "
        f"mma_m16n8k16(MmaElement::{elements[types[1]]}, d, a, b, c); {writes} }}"
    )


# ---- Warps and barriers ---------------------------------------------------------------------------------

SHUFFLE_MODES = {"idx": "index", "up": "up", "down": "down", "bfly": "exclusive_or"}


@handles("shfl")
def _shuffle(instruction: Instruction, names: Names) -> str:
    _, words = take(instruction, "sync", *SHUFFLE_MODES)
    destination, *sources = operands(instruction, 5)
    (mode,) = (SHUFFLE_MODES[word] for word in words if word in SHUFFLE_MODES)
    register, _, predicate = destination.partition("|")
    values = ", ".join(names.read(source, "u32") for source in sources)
    in_range = f"&{names.predicate(predicate)}" if predicate else "nullptr"
    return names.write(register, "b32", f"shfl(ShuffleMode::{mode}, {values}, {in_range})")


@handles("vote")
def _vote(instruction: Instruction, names: Names) -> str:
    _, words = take(instruction, "sync", "ballot", "any", "all")
    destination, predicate, mask = operands(instruction, 3)
    (kind,) = words - {"sync"}
    value = f"vote_{kind}({names.predicate(predicate)}, {names.read(mask, 'u32')})"
    return names.write(destination, "b32" if kind == "ballot" else "pred", value)


@handles("match")
def _match(instruction: Instruction, names: Names) -> str:
    types, _ = take(instruction, "any", "sync")
    destination, value, mask = operands(instruction, 3)
    bits = names.read(value, one_type(types))
    return names.write(destination, "b32", f"match({bits}, {names.read(mask, 'u32')})")


@handles("redux")
def _reduce(instruction: Instruction, names: Names) -> str:
    modes = {"add": "add", "min": "min", "max": "max", "and": "bit_and", "or": "bit_or", "xor": "bit_xor"}
    types, words = take(instruction, "sync", *modes)
    destination, value, mask = operands(instruction, 3)
    (mode,) = (modes[word] for word in words if word in modes)
    ptx_type = one_type(types)
    arguments = f"{names.read(value, ptx_type)}, {names.read(mask, 'u32')}"
    return names.write(destination, ptx_type, f"redux(ReduceMode::{mode}, {arguments})")


@handles("bar", "barrier")
def _barrier(instruction: Instruction, names: Names) -> str:
    _, words = take(instruction, "cta", "sync", "warp", "aligned", "red", "popc", "and", "or")
    if "warp" in words:
        return f"bar_warp({names.read(operands(instruction, 1)[0], 'u32')});"
    if "red" in words:
        destination, barrier, predicate = operands(instruction, 3)
        value, barrier = names.predicate(predicate), names.read(barrier, "u32")
        count = f"bar({barrier}, {f'!({value})' if 'and' in words else value})"
        if "popc" in words:
            return names.write(destination, "u32", count)
        return names.write(destination, "pred", f"{count} {'==' if 'and' in words else '!='} 0")
    if "sync" not in words:
        raise PtxError("this barrier is not known")
    # With a number of threads it would be a barrier of a part of the CTA, which the emulator does not have.
    (barrier,) = operands(instruction, 1)
    return f"bar({names.read(barrier, 'u32')}, false);"


@handles("griddepcontrol")
def _order_of_grids(instruction: Instruction, names: Names) -> str:
    """Nothing, since a grid starts when the one before has ended."""
    take(instruction, "wait", "launch_dependents")
    operands(instruction, 0)
    return ""


# ---- Control flow ---------------------------------------------------------------------------------------


@handles("bra")
def _branch(instruction: Instruction, names: Names) -> str:
    take(instruction, "uni")
    return f"goto {operands(instruction, 1)[0]};"


@handles("ret", "exit")
def _return(instruction: Instruction, names: Names) -> str:
    take(instruction, "uni")
    if instruction.opcode == "exit" and not names.is_entry:
        raise PtxError("exit within a device function is not known")
    return "return;"


@handles("trap")
def _trap(instruction: Instruction, names: Names) -> str:
    return "__trap();"


@handles("call")
def _call(instruction: Instruction, names: Names) -> str:
    take(instruction, "uni")
    lists = [operand for operand in instruction.operands if operand.startswith("(")]
    (name,) = (operand for operand in instruction.operands if not operand.startswith("("))
    function = names.functions.get(name)
    if function is None:
        raise PtxError(f"the function '{name}' has no body here")
    arguments = [argument for operand in lists for argument in split_operands(operand[1:-1])]
    if len(arguments) != len(function.results) + len(function.parameters) or not all(
        names.is_memory(argument) for argument in arguments
    ):
        raise PtxError("the arguments do not fit the function")
    return f"{name}({', '.join(arguments)});"
