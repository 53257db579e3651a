"""Reads PTX text, as nvcc writes it, into functions of statements. Says nothing about what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class PtxError(Exception):
    """PTX that this translator does not know; the message begins with file and line."""


@dataclass(frozen=True)
class Location:
    """A line of the PTX text, and the line of the CUDA source that it was made from ("" if unknown)."""

    file: str
    line: int
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" (from {self.source})" if self.source else "")


@dataclass(frozen=True)
class Instruction:
    """``@!%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+8];``"""

    location: Location
    text: str
    predicate: str  # "%p1", "!%p1" or ""
    opcode: str  # "ld"
    modifiers: tuple[str, ...]  # ("global", "v2", "f32")
    operands: tuple[str, ...]  # ("{%f1, %f2}", "[%rd1+8]")


@dataclass(frozen=True)
class Label:
    """``$L__BB0_1:``"""

    location: Location
    name: str


@dataclass(frozen=True)
class Directive:
    """Any statement that begins with a dot, such as ``.reg .b32 %r<7>;``"""

    location: Location
    text: str


@dataclass(frozen=True)
class Scope:
    """An opening or a closing brace."""

    location: Location
    opens: bool


Statement = Instruction | Label | Directive | Scope


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, as bytes."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Function:
    """A kernel (``.entry``), which has no results, or a device function (``.func``)."""

    name: str
    is_entry: bool
    results: tuple[Parameter, ...]
    parameters: tuple[Parameter, ...]
    max_threads: int  # of .maxntid; 0 if the kernel does not say
    statements: tuple[Statement, ...]
    location: Location


@dataclass(frozen=True)
class Variable:
    """A variable of the module in the state space global, const or shared; dynamic if it has no bytes."""

    name: str
    space: str
    alignment: int
    num_bytes: int
    values: tuple[str, ...]  # of its elements, without trailing zeros
    element: str  # "b8", "f32", ...
    location: Location


@dataclass
class Module:
    """One PTX file."""

    target: str = ""  # "sm_80"
    functions: list[Function] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)

    @property
    def entries(self) -> list[Function]:
        """The kernels."""
        return [function for function in self.functions if function.is_entry]


_FUNCTION = re.compile(r"^\s*(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b", re.MULTILINE)
_VARIABLE = re.compile(
    r"^\s*(?:\.(?:visible|weak|extern)\s+)*\.(global|const|shared)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*\{?([^};]*)\}?)?;",
    re.MULTILINE,
)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_SOURCE_LINE = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*\binlined_at\s+(\d+)\s+(\d+))?")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")


def type_bytes(type_name: str) -> int:
    """The size of ``b32``, ``f64``, ``bf16x2`` and the like."""
    if type_name in ("e4m3x2", "e5m2x2"):
        return 2
    match = re.fullmatch(r"[a-z]+(\d+)(x2)?", type_name)
    if match is None:
        raise PtxError(f"the type '.{type_name}' is not known")
    return int(match.group(1)) // 8 * (2 if match.group(2) else 1)


def split_operands(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def parse(text: str, file: str, root: str = "") -> Module:
    """Parse the PTX file ``file``; source files below the folder ``root`` are named from there."""
    text = re.sub(r"//[^\n]*", "", text)
    sources = {
        int(number): path.removeprefix(root).lstrip("/") if root and path.startswith(root) else path
        for number, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.MULTILINE)
    }
    module = Module()
    target = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    module.target = target.group(1) if target else ""
    outside = []  # the text between function bodies
    end = 0
    for match in _FUNCTION.finditer(text):
        if match.start() < end:
            continue
        outside.append(text[end : match.start()])
        brace, semicolon = text.find("{", match.end()), text.find(";", match.end())
        if 0 <= semicolon < brace or brace < 0:  # a declaration
            end = semicolon + 1
            continue
        end = _closing_brace(text, brace) + 1
        line = text.count("\n", 0, match.end()) + 1
        header, body = text[match.end() : brace], text[brace + 1 : end - 1]
        statements = tuple(_statements(body, file, text.count("\n", 0, brace) + 1, sources))
        module.functions.append(
            _function(match.group(1) == "entry", header, statements, Location(file, line))
        )
    outside.append(text[end:])
    for match in _VARIABLE.finditer("".join(outside)):
        space, alignment, element, name, count, values = match.groups()
        num_bytes = type_bytes(element) * (1 if count is None else int(count or 0))
        elements = tuple(value.strip() for value in values.split(",")) if values else ()
        module.variables.append(
            Variable(name, space, int(alignment or type_bytes(element)), num_bytes, elements, element,
                     Location(file, 0))
        )  # fmt: skip
    return module


def _closing_brace(text: str, opening: int) -> int:
    depth = 0
    for match in re.finditer(r"[{}]", text[opening:]):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return opening + match.start()
    raise PtxError(f"line {text.count(chr(10), 0, opening) + 1}: a brace that is never closed")


def _function(is_entry: bool, header: str, statements: tuple[Statement, ...], location: Location) -> Function:
    """From ``(results) name (parameters) directives``."""
    lists = re.match(r"\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?(.*)$", header, re.DOTALL)
    if lists is None:
        raise PtxError(f"{location}: a function without a name")
    results, name, parameters, directives = lists.groups()
    max_threads = 0
    if bound := re.search(r"\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives):
        sizes = [int(size) for size in bound.groups() if size]
        max_threads = sizes[0] * (sizes[1] if len(sizes) > 1 else 1) * (sizes[2] if len(sizes) > 2 else 1)
    return Function(
        name, is_entry, _parameters(results), _parameters(parameters), max_threads, statements, location
    )


def _parameters(text: str | None) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(name, type_bytes(element) * int(count or 1))
        for element, name, count in _PARAMETER.findall(text or "")
    )


def _statements(body: str, file: str, first_line: int, sources: dict[int, str]) -> Iterator[Statement]:
    source = ""
    pending = ""  # the statement that has begun, and the line it began in
    pending_line = 0
    for line_idx, line in enumerate(body.split("\n")):
        if position := _SOURCE_LINE.match(line.strip()):
            source = _source_line(position, sources)
            continue
        for piece in re.findall(r"[^;{}]+|[;{}]", line):
            if not pending.strip():
                pending, pending_line = "", first_line + line_idx
            location = Location(file, pending_line, source)
            # A brace within a statement encloses a list of operands, one between statements a scope.
            if piece in "{}" and not pending.strip():
                yield Scope(location, piece == "{")
                continue
            if piece != ";":
                pending += piece
                while (label := _LABEL.match(pending.strip())) is not None:
                    yield Label(location, label.group(1))
                    pending = pending.strip()[label.end() :]
                continue
            if pending.strip():
                yield _statement(" ".join(pending.split()), location)
            pending = ""
        pending += " " if pending else ""
    if pending.strip():
        raise PtxError(f"{file}:{pending_line}: a statement without its semicolon: {pending.strip()}")


def _source_line(position: re.Match[str], sources: dict[int, str]) -> str:
    """The innermost line; for a function of the toolkit or of the C++ library, the line that called it."""
    file, line, outer_file, outer_line = position.groups()
    name, outer_name = sources.get(int(file), ""), sources.get(int(outer_file or -1), "/")
    if name.startswith("/") and not outer_name.startswith("/"):
        name, line = outer_name, outer_line
    return f"{name}:{line}" if name and line != "0" else ""


def _statement(text: str, location: Location) -> Statement:
    if text.startswith("."):
        return Directive(location, text)
    predicate = ""
    rest = text
    if text.startswith("@"):
        predicate, _, rest = text[1:].partition(" ")
    name, _, operands = rest.strip().partition(" ")
    opcode, *modifiers = name.replace("::", "__").split(".")
    return Instruction(location, text, predicate, opcode, tuple(modifiers), tuple(split_operands(operands)))
