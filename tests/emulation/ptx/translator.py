"""Translates a PTX function into a C++ function, statement by statement, on the functions of ``machine.h``.

An instruction, a modifier or an operand that is not known here is a `PtxError` that names the line: nothing
is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from . import arithmetic, data_movement, threads  # noqa: F401 - they fill HANDLERS
from .handlers import HANDLERS
from .operands import Names, constant, constant_of, register_bytes, register_name, register_type, unsigned
from .parser import Directive, Function, Instruction, Label, Module, PtxError, Scope, Variable, type_bytes

HEADER = """\
// Translated from {file} by tests/emulation/ptx.
#include "machine.h"

namespace pagedkv::emulator::ptx {{
"""
FOOTER = "}  // namespace pagedkv::emulator::ptx\n"


def signature(function: Function, cpp_name: str) -> str:
    """The declaration of a function's translation: a pointer to the bytes of each result and parameter."""
    arguments = [f"unsigned char* {result.name}" for result in function.results]
    arguments += [f"const unsigned char* {parameter.name}" for parameter in function.parameters]
    return f"void {cpp_name}({', '.join(arguments)})"


def translate(module: Module, entries: Mapping[str, Function], file: str) -> str:
    """A C++ file of kernels, by the names to give them, with tables and device functions of their module."""
    for variable in module.variables:
        if variable.space == "shared" and variable.num_bytes:
            raise PtxError(f"{file}: static shared memory ({variable.name}); supported: PAGEDKV_SHARED")
    device_functions = [function for function in module.functions if not function.is_entry]
    parts = [HEADER.format(file=file), "namespace {"]
    parts += [_variable(variable) for variable in module.variables if variable.space != "shared"]
    parts += [f"[[maybe_unused]] {signature(function, function.name)};" for function in device_functions]
    parts += [translate_function(module, function, function.name) for function in device_functions]
    parts.append("}  // namespace")
    parts += [translate_function(module, entry, name) for name, entry in entries.items()]
    return "\n".join([*parts, FOOTER])


def translate_function(module: Module, function: Function, cpp_name: str) -> str:
    """The C++ function of one PTX function."""
    names = Names(module, function)
    lines = [signature(function, cpp_name) + " {"]
    place = ""  # of the line before, so that neighbouring lines need no #line
    for statement in function.statements:
        if isinstance(statement, Scope):
            text = "{" if statement.opens else "}"
            names.enter() if statement.opens else names.leave()
        elif isinstance(statement, Label):
            text = f"{statement.name}:;"
        elif isinstance(statement, Directive):
            text = _directive(statement, names)
        else:
            text = _instruction(statement, names)
        if not text:
            continue
        # Reports point at the PTX, and in its file's name at the source.
        location = statement.location
        file = f"{location.source}, {location.file}" if location.source else location.file
        if place != f"{location.line} {file}":
            lines.append(f'#line {location.line} "{file}"')
        lines.append(text)
        place = f"{location.line + 1} {file}"
    return "\n".join([*lines, "}"])


def _variable(variable: Variable) -> str:
    """A table of the module. Constant: a kernel that writes to it ends with a crash."""
    num_bytes = type_bytes(variable.element)
    values = [constant_of(value, num_bytes) for value in variable.values]
    if None in values:
        raise PtxError(f"{variable.location.file}: the values of {variable.name} are not known")
    return (
        f"[[maybe_unused]] alignas({variable.alignment}) const {unsigned(num_bytes)} "
        f"{variable.name}[{variable.num_bytes // num_bytes}] = {{{', '.join(filter(None, values))}}};"
    )


_BYTES = re.compile(r"\.(local|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")


def _directive(directive: Directive, names: Names) -> str:
    """Declarations inside a function: registers, local arrays, the parameters of a call."""
    if directive.text.startswith(".pragma"):
        return ""
    if declared := re.match(r"\.reg\s+\.(\w+)\s+(.+)$", directive.text):
        element, registers = declared.groups()
        num_bytes = register_bytes(element)
        if num_bytes is None:
            raise PtxError(f"{directive.location}: registers of type .{element} are not known")
        declared_names: list[str] = []
        for register in re.split(r"\s*,\s*", registers):
            family = re.match(r"([%\w$]+)<(\d+)>$", register)
            declared_names += (
                [f"{family.group(1)}{i}" for i in range(int(family.group(2)))] if family else [register]
            )
        names.declare_registers(declared_names, num_bytes)
        # Not initialised in PTX: here all bits are set, NaN in every floating-point format.
        poison = "true" if element == "pred" else constant(-1, num_bytes)
        initialised = ", ".join(f"{register_name(name)} = {poison}" for name in declared_names)
        return f"{register_type(num_bytes)} {initialised};"
    if memory := _BYTES.match(directive.text):
        _, alignment, element, name, count = memory.groups()
        num_bytes = type_bytes(element) * int(count or 1)
        names.declare_memory(name)
        return f"alignas({alignment or type_bytes(element)}) unsigned char {name}[{num_bytes}];"
    raise PtxError(f"{directive.location}: the directive '{directive.text}' is not known")


def _instruction(instruction: Instruction, names: Names) -> str:
    handler = HANDLERS.get(instruction.opcode)
    try:
        if handler is None:
            raise PtxError(f"the instruction '{instruction.opcode}' is not known")
        text = handler(instruction, names)
        if not instruction.predicate:
            return text
        return f"if ({names.predicate(instruction.predicate)}) {{ {text} }}"
    except PtxError as error:
        raise PtxError(f"{instruction.location}: {error}: {instruction.text}") from None
