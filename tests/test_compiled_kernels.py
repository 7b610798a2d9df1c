"""Tests the machine code of every kind of kernel: no local memory, whole packs, flags at system
scope, and no more instructions than the recorded tables say.

Knows nothing of what kernels do; needs no GPU. The tables are those of bench/results.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from gpuallreduce.bench import inspect_kernels as inspection
from gpuallreduce.bench.inspect_kernels import ARCHS, MOVED, PAIRS, RANKS, SHAPES, ask
from gpuallreduce.bench.machine_rules import faults, resource_faults, row, worse
from gpuallreduce.bench.sass import Function, Instruction, functions

from gpuallreduce.jit import Kernel

RESULTS = Path(__file__).parents[1] / "bench" / "results"
HOW_TO_RECORD = (
    "If this is meant: python -m gpuallreduce.bench.inspect_kernels --record bench/results, and "
    "commit the tables. Another NVRTC may differ too: see their versions"
)
SAMPLES = {arch: slice(i, None, len(ARCHS)) for i, arch in enumerate(ARCHS)}


def sample() -> list[Kernel]:
    """Every shape for every rank count, types and operators dealt out over them."""
    pairs = itertools.cycle(PAIRS)
    chosen = [ask(shape, *next(pairs), nranks) for shape in SHAPES for nranks in RANKS]
    chosen += [ask(SHAPES[4], *pair, 2) for pair in PAIRS[::2]]
    chosen += [ask(("one_shot", "all_gather", "rank", "staged"), MOVED[0], "sum", 2)]
    chosen += [ask(("one_shot", "broadcast", "rank", "staged"), MOVED[-1], "sum", 2)]
    return list({kernel.symbol: kernel for kernel in chosen}.values())


@cache
def compiled(arch: str) -> list[Function]:
    """This architecture's third of the sample, so that every kernel is read once. Skips where a
    tool is missing, except in CI: there it must not be.
    """
    present = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core")
    if not present or inspection.cuobjdump() is None:
        assert not os.environ.get("CI"), "cuda-core or cuobjdump is missing, and CI must have it"
        pytest.skip("cuda-core or cuobjdump is not installed")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(
            pool.map(lambda kernel: inspection.inspect(kernel, arch), sample()[SAMPLES[arch]])
        )


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_keep_to_registers_whole_packs_and_strong_flags(arch: str) -> None:
    found = {function.name: faults(function) for function in compiled(arch)}
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_take_no_more_instructions_than_recorded(arch: str) -> None:
    recorded = inspection.recorded(RESULTS, arch)
    for function in compiled(arch):
        assert function.name in recorded, f"{function.name} is in no table. {HOW_TO_RECORD}"
        words = worse(row(function), recorded[function.name])
        assert not words, f"{arch} {function.name}: {'; '.join(words)}. {HOW_TO_RECORD}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_without_flags_or_known_rank_counts_keep_to_registers(arch: str) -> None:
    compiled(arch)
    others = [ask(SHAPES[ARCHS.index(arch)], "bfloat16", "sum", 9)]
    others += [Kernel("strided", "strided.cuh", "strided_copy<uint16_t>", "", "GarStridedArgs")]
    others += [Kernel("probe", "probe.cuh", "probe", "", "GarProbeArgs")]
    for kernel in others:
        assert not resource_faults(inspection.inspect(kernel, arch)), kernel.symbol


@pytest.mark.parametrize("arch", ARCHS)
def test_the_tables_hold_every_kernel_and_no_fault(arch: str) -> None:
    recorded = inspection.recorded(RESULTS, arch)
    assert set(recorded) == {kernel.symbol for kernel in inspection.kernels()}
    for symbol, one in recorded.items():
        assert one["stack_bytes"] == 0, symbol
        assert one["registers"] <= 128, symbol
        assert any(loop["loads"] >= 4 for loop in one["loops"]), symbol


LISTING = """
Resource usage:
 Function small:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:3040 TEXTURE:0 SURFACE:0 SAMPLER:0
		Function : small
        /*0000*/                   LDC.64 R2, c[0x0][R4+0x210] ;  /* 0x1 */
        /*0010*/                   LDG.E.64.STRONG.SYS R4, desc[UR4][R2.64] ;  /* 0x1 */
        /*0020*/                   CCTL.IVALL ;  /* 0x1 */
        /*0030*/              @!P1 BRA 0x10 ;  /* 0x1 */
        /*0040*/                   MOV R9, RZ ;  /* 0x1 */
        /*0050*/                   LDG.E.128 R12, desc[UR4][R2.64] ;  /* 0x1 */
        /*0060*/               @P2 BRA 0x90 ;  /* 0x1 */
        /*0070*/                   STG.E.128 desc[UR4][R6.64], R12 ;  /* 0x1 */
        /*0080*/               @P0 BRA 0x50 ;  /* 0x1 */
        /*0090*/                   IADD3 R9, R9, 0x1, RZ ;  /* 0x1 */
        /*00a0*/               @P3 BRA 0x40 ;  /* 0x1 */
        /*00b0*/                   MEMBAR.ALL.SYS ;  /* 0x1 */
        /*00c0*/                   ERRBAR;  /* 0x1 */
        /*00d0*/                   STG.E.64.STRONG.SYS desc[UR4][R6.64], R4 ;  /* 0x1 */
        /*00e0*/                   EXIT ;  /* 0x1 */
"""


def altered(old: str, new: str) -> list[str]:
    assert old in LISTING
    (function,) = functions(LISTING.replace(old, new))
    return faults(function)


def test_the_innermost_loop_is_found_and_nothing_of_the_outer_one() -> None:
    (function,) = functions(LISTING)
    (loop,) = function.vector_loops()
    assert [one.address for one in loop.body] == [0x50, 0x60, 0x70, 0x80]
    assert row(function)["loops"] == [
        {"loads": 1, "stores": 1, "instructions": 4, "per_16_bytes": 2.0}
    ]
    assert not faults(function)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("STACK:0", "STACK:8", "local memory"),
        ("MOV R9, RZ", "STL [R1], R9", "local memory"),
        ("REG:40", "REG:129", "registers"),
        ("c[0x0][R4+0x210]", "c[0x0][0x210]", "tables"),
        ("@P2 BRA 0x90", "STG.E.U16 desc[UR4][R6.64], R12", "STG.E.U16"),
        ("LDG.E.128 R12", "LD.E.128 R12", "LD.E.128"),
        ("LDG.E.128 R12", "LDG.E.64 R12", "no loop"),
        ("64.STRONG.SYS R4", "64.STRONG.GPU R4", "system scope"),
        ("CCTL.IVALL ", "NOP ", "acquires nothing"),
        ("MEMBAR.ALL.SYS", "MEMBAR.ALL.GPU", "releases nothing"),
        ("ERRBAR;", "STG.E [R8], R9;", "releases nothing"),
        ("STG.E.64.STRONG.SYS", "STG.E.64", "no flag is touched by STG"),
    ],
)
def test_a_fault_in_machine_code_is_named(old: str, new: str, fault: str) -> None:
    assert fault in "; ".join(altered(old, new))


def test_more_instructions_or_registers_than_recorded_are_named() -> None:
    (function,) = functions(LISTING)
    recorded = row(function)
    more = replace(function, registers=47)
    assert worse(row(more), recorded) == ["47 registers, 40 recorded"]
    idle = Instruction(0x75, "", "NOP", "")
    longer = replace(function, code=(*function.code[:7], idle, *function.code[7:]))
    assert "takes 2.5 instructions for 16 bytes, 2.0 recorded" in worse(row(longer), recorded)[0]
    gone = {**recorded, "loops": []}
    assert worse(gone, recorded) == ["the loop of 1 loads and 1 stores is gone"]
