"""What good machine code of a kernel is: no local memory, whole packs, flags at system scope, and
no more instructions than recorded.

Knows nothing of how kernels are compiled, nor where tables lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .sass import Function, Instruction, Loop

__all__ = ["Row", "faults", "resource_faults", "row", "worse"]

Row = dict[str, Any]

BLOCK_THREADS = 512  # GAR_MAX_THREADS of kernels/platform_cuda.cuh
BLOCK_REGISTERS = 65536  # of a multiprocessor, on all architectures
TOLERANCE = 1.15


def row(function: Function) -> Row:
    """What a table says of a kernel. Of loops with the same accesses it has the longest."""
    longest: dict[tuple[int, int], int] = {}
    for loop in function.vector_loops():
        key = (loop.loads, loop.stores)
        longest[key] = max(longest.get(key, 0), len(loop.body))
    return {
        "registers": function.registers,
        "stack_bytes": function.stack_bytes,
        "instructions": len(function.code),
        "loops": [
            {
                "loads": loads,
                "stores": stores,
                "instructions": instructions,
                "per_16_bytes": round(instructions / (loads + stores), 2),
            }
            for (loads, stores), instructions in sorted(longest.items())
        ],
    }


def resource_faults(function: Function) -> list[str]:
    """Local memory, and more registers than a block can have."""
    found = []
    local = [one for one in function.code if one.stem in ("LDL", "STL")]
    if function.stack_bytes or function.local_bytes or local:
        found.append(
            f"uses local memory: {function.stack_bytes} bytes of stack, {len(local)} accesses"
        )
    if function.registers * BLOCK_THREADS > BLOCK_REGISTERS:
        found.append(f"{function.registers} registers are too many for {BLOCK_THREADS} threads")
    return found


def faults(function: Function) -> list[str]:
    """What must not be in a kernel of a collective, in words; empty for a good one."""
    found = resource_faults(function)
    if not any(one.stem == "LDC" and "[R" in one.operands for one in function.code):
        found.append("no address is read from the tables in constant memory")
    loops = function.vector_loops()
    if not any(loop.loads for loop in loops) or not any(loop.stores for loop in loops):
        found.append("no loop touches global memory in 16-byte accesses")
    found += [fault for loop in loops for fault in _loop_faults(loop)]
    return found + _flag_faults(function)


def _loop_faults(loop: Loop) -> list[str]:
    place = f"the loop at {loop.body[0].address:#x}"
    return [f"{place} has {one.opcode} {one.operands}" for one in loop.narrow]


def _flag_faults(function: Function) -> list[str]:
    """Flags: loads with acquire and stores with release, at system scope."""
    code, found = function.code, []
    strong = [i for i, one in enumerate(code) if ".STRONG" in one.opcode]
    for kind in ("LDG", "STG"):
        if not any(code[i].stem == kind for i in strong):
            found.append(f"no flag is touched by {kind}")
    for i in strong:
        one = code[i]
        if ".STRONG.SYS" not in one.opcode:
            found.append(f"{one.opcode} at {one.address:#x} is not at system scope")
        # Acquire: nothing is loaded before the caches are emptied. Release: the fence stands before
        # the store, and no data are stored in between.
        if one.stem in ("LDG", "ATOM", "ATOMG") and not _next_is(code[i + 1 :], "CCTL.IVALL"):
            found.append(f"{one.opcode} at {one.address:#x} acquires nothing")
        if one.stem in ("STG", "ATOM", "ATOMG") and not _next_is(code[i - 1 :: -1], "MEMBAR"):
            found.append(f"{one.opcode} at {one.address:#x} releases nothing")
    return found


def _next_is(code: Iterable[Instruction], opcode: str) -> bool:
    """True if this opcode comes before any access of memory or barrier."""
    for one in code:
        if one.opcode.startswith(opcode):
            return opcode != "MEMBAR" or one.opcode.endswith(".SYS")
        if one.is_global or ".STRONG" in one.opcode or one.stem in ("BAR", "EXIT"):
            return False
    return False


def worse(found: Row, recorded: Row) -> list[str]:
    """What is worse in a kernel than in the table, by more than the tolerance."""
    words = []
    if found["registers"] > recorded["registers"] * TOLERANCE:
        words.append(f"{found['registers']} registers, {recorded['registers']} recorded")
    now = {(loop["loads"], loop["stores"]): loop for loop in found["loops"]}
    for loop in recorded["loops"]:
        key = (loop["loads"], loop["stores"])
        name = f"the loop of {key[0]} loads and {key[1]} stores"
        if key not in now:
            words.append(f"{name} is gone")
        elif now[key]["per_16_bytes"] > loop["per_16_bytes"] * TOLERANCE:
            words.append(
                f"{name} takes {now[key]['per_16_bytes']} instructions for 16 bytes, "
                f"{loop['per_16_bytes']} recorded"
            )
    return words
