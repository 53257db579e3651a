"""Reads nvdisasm's listing of a cubin: the instructions of each function, and those of its main loop."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

FUNCTION = re.compile(r"^\.text\.(\S+):")
LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
# What the main loop of an attention kernel is known by: it copies keys or values, loads and multiplies them.
MAIN_LOOP_NEEDS = {"HMMA", "LDSM", "LDGSTS"}


@dataclass
class Block:
    """Instructions that run one after another, and the numbers of the blocks that may follow."""

    opcodes: list[str] = field(default_factory=list)
    successors: set[int] = field(default_factory=set)


def functions(listing: str) -> dict[str, list[str]]:
    """The lines of each function, by mangled name."""
    result: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        match = FUNCTION.match(line)
        if match:
            lines = result.setdefault(match.group(1), [])
        lines.append(line)
    return result


def control_flow(lines: list[str]) -> list[Block]:
    """The function's basic blocks."""
    blocks = [Block()]
    number_of_label: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    falls_through = True

    def begin_block() -> None:
        if falls_through:
            blocks[-1].successors.add(len(blocks))
        blocks.append(Block())

    for line in lines:
        label, instruction = LABEL.match(line), INSTRUCTION.match(line)
        if label:
            begin_block()
            number_of_label[label.group(1)] = len(blocks) - 1
            falls_through = True
        elif instruction:
            predicate, opcode, operands = instruction.groups()
            blocks[-1].opcodes.append(opcode)
            if opcode.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "CALL", "BREAK", "BSYNC"):
                target = re.search(r"\.L_x_\d+", operands)
                if target:
                    jumps.append((len(blocks) - 1, target.group()))
                ends = opcode.split(".")[0] in ("BRA", "EXIT", "RET", "BRX")
                # A branch may carry its predicate as an operand too: BRA P0, `(.L_x_1).
                falls_through = not ends or predicate is not None or bool(re.match(r"\s*!?U?P\d", operands))
                begin_block()
                falls_through = True
    for number, target_label in jumps:
        blocks[number].successors.add(number_of_label[target_label])
    return blocks


def components(blocks: list[Block], members: set[int]) -> list[set[int]]:
    """The strongly connected components, cycles alone (Tarjan 1972), of the graph among `members`."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[set[int]] = []
    for root in members:
        if root in index:
            continue
        work = [(root, iter(sorted(blocks[root].successors & members)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, successors = work[-1]
            child = next(successors, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    component = set(stack[at:])
                    del stack[at:]
                    if len(component) > 1 or node in blocks[node].successors:
                        found.append(component)
            elif child not in index:
                index[child] = low[child] = len(index)
                stack.append(child)
                work.append((child, iter(sorted(blocks[child].successors & members))))
            elif child in stack:
                low[node] = min(low[node], index[child])
    return found


def main_loop(blocks: list[Block]) -> set[int]:
    """The innermost loop that has all of MAIN_LOOP_NEEDS; empty where none has."""

    def has_all(component: set[int]) -> bool:
        return {
            opcode.split(".")[0] for number in component for opcode in blocks[number].opcodes
        } >= MAIN_LOOP_NEEDS

    loop: set[int] = set()
    members = set(range(len(blocks)))
    while candidates := [component for component in components(blocks, members) if has_all(component)]:
        loop = max(candidates, key=len)
        # Without the blocks by which it is entered, what is left of the loop is the loops inside it.
        entries = {
            successor
            for number, block in enumerate(blocks)
            if number not in loop
            for successor in block.successors & loop
        }
        if not entries:
            break
        members = loop - entries
    return loop


def kind_of(opcode: str) -> str:
    """The name under which an opcode is counted."""
    name = opcode.split(".")[0]
    return f"{name}.128" if name == "LDGSTS" and opcode.endswith(".128") else name


def count(blocks: list[Block], members: set[int]) -> Counter[str]:
    """Instructions by kind."""
    return Counter(kind_of(opcode) for number in members for opcode in blocks[number].opcodes)
