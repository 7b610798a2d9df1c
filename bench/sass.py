"""Reads the machine code of GPU kernels: instructions, loops, registers, as cuobjdump prints them.

Knows nothing of what kernels do, nor how they were compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Function", "Instruction", "Loop", "functions"]

_RESOURCES = re.compile(
    r"^ Function (\w+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", re.M
)
_FUNCTION = re.compile(r"^\s*Function : (\w+)$", re.M)
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_ENDS = ("EXIT", "RET", "BRX", "JMX")
_JUMPS = ("BRA", "JMP")
_GLOBAL = ("LDG", "STG", "LD", "ST")  # LD and ST: the compiler did not see that it is global memory


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def stem(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def is_global(self) -> bool:
        """True for a plain access to global memory: not a flag's, which has a scope."""
        return self.stem in _GLOBAL and ".STRONG" not in self.opcode

    @property
    def is_vector(self) -> bool:
        """True if it moves 16 bytes."""
        return ".128" in self.opcode


@dataclass(frozen=True)
class Loop:
    """An innermost loop: the instructions of its body."""

    body: tuple[Instruction, ...]

    def count(self, stems: Sequence[str]) -> int:
        """How many vector accesses have one of these opcodes."""
        return sum(one.is_vector and one.is_global and one.stem in stems for one in self.body)

    @property
    def loads(self) -> int:
        """16-byte loads of global memory."""
        return self.count(("LDG", "LD"))

    @property
    def stores(self) -> int:
        """16-byte stores to global memory."""
        return self.count(("STG", "ST"))

    @property
    def narrow(self) -> tuple[Instruction, ...]:
        """Accesses of global memory that move less than 16 bytes, or are not known as global."""
        return tuple(
            one
            for one in self.body
            if one.is_global and not (one.is_vector and one.stem in ("LDG", "STG"))
        )


@dataclass(frozen=True)
class Function:
    """A kernel with all that it calls."""

    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    code: tuple[Instruction, ...]

    def vector_loops(self) -> list[Loop]:
        """Innermost loops that touch global memory 16 bytes at a time, in the order of the code."""
        loops = [Loop(tuple(self.code[i] for i in body)) for body in _innermost(_edges(self.code))]
        return [loop for loop in loops if loop.loads or loop.stores]


def functions(listing: str) -> list[Function]:
    """The kernels in what ``cuobjdump -sass -res-usage`` printed."""
    resources = {name: [int(n) for n in rest] for name, *rest in _RESOURCES.findall(listing)}
    _, *parts = _FUNCTION.split(listing)
    found = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        code = tuple(
            Instruction(int(address, 16), predicate, opcode, operands.strip())
            for address, predicate, opcode, operands in _LINE.findall(text)
        )
        registers, stack_bytes, local_bytes = resources[name]
        found.append(Function(name, registers, stack_bytes, local_bytes, code))
    return found


def _edges(code: Sequence[Instruction]) -> dict[int, list[int]]:
    """Which instructions may run next, by index. Calls come back; what they run has no caller."""
    index = {one.address: i for i, one in enumerate(code)}
    meeting: dict[str, int] = {}  # where threads go on that meet at a barrier register
    edges: dict[int, list[int]] = {}
    for i, one in enumerate(code):
        numbers = re.findall(r"0x[0-9a-f]+", one.operands)
        target = index.get(int(numbers[-1], 16)) if numbers else None
        barrier = one.operands.partition(",")[0]
        following = [i + 1] if i + 1 < len(code) else []
        if one.stem == "BSSY" and target is not None:
            meeting[barrier] = target
        elif one.stem in _JUMPS and target is not None:
            # "BRA P2, 0xb40" and "BRA.DIV UR4, 0xb40" have a condition among their operands.
            always = not one.predicate and "," not in one.operands
            following = [target] if always else [target, *following]
        elif one.stem == "BSYNC":
            following = [meeting[barrier]] if barrier in meeting else following
        elif one.stem in _ENDS and not one.predicate:
            following = []
        edges[i] = following
    return edges


def _innermost(edges: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Bodies of the loops that hold no other loop: cycles, opened at their heads until none is left
    inside.
    """
    found: list[list[int]] = []
    pending: list[Mapping[int, Sequence[int]]] = [edges]
    while pending:
        graph = pending.pop()
        for cycle in _cycles(graph):
            inside = set(cycle)
            outside = {v for u, to in edges.items() if u not in inside for v in to}
            heads = [u for u in cycle if u in outside] or [min(cycle)]
            head = min(heads)
            opened = {u: [v for v in graph[u] if v in inside and v != head] for u in sorted(inside)}
            if _cycles(opened):
                pending.append(opened)
            else:
                found.append(sorted(inside))
    return sorted(found)


def _cycles(graph: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Strongly connected parts that hold a cycle (Tarjan 1972, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in graph:
        work = [] if root in order else [(root, iter(graph[root]))]
        while work:
            node, successors = work[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                stack.append(node)
                on_stack.add(node)
            for successor in successors:
                if successor not in order:
                    work.append((successor, iter(graph.get(successor, ()))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], order[successor])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == order[node]:
                    part = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    on_stack.difference_update(part)
                    if len(part) > 1 or node in graph.get(node, ()):
                        found.append(part)
    return found
