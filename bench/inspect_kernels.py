"""Compiles the kernels for GPU architectures and reads the machine code: what each uses, faults.

Needs no GPU, and knows nothing of speed: a table of instructions shows when a kernel got worse.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.errors import CompileError
from gpuallreduce.jit import Kernel
from gpuallreduce.jit_cuda import compile_cubin
from gpuallreduce.plan import Request, Shards
from gpuallreduce.types import DTYPES, OPS

from .machine_rules import Row, faults, row
from .sass import Function, functions

__all__ = ["ARCHS", "SHAPES", "Shape", "ask", "cuobjdump", "inspect", "kernels", "recorded"]

Shape = tuple[str, str, str, str]  # algorithm, collective (and a node's place), order, access

ARCHS = ("sm_80", "sm_90", "sm_100")
RANKS = (2, 4, 8)
# Every kernel that reduces.
SHAPES: tuple[Shape, ...] = (
    ("one_shot", "allreduce", "rank", "staged"),
    ("one_shot", "reduce", "rank", "staged"),
    ("one_shot", "reduce_scatter", "rank", "staged"),
    ("one_shot", "shard_reduce first", "rank", "staged"),
    ("one_shot", "shard_reduce between", "rank", "staged"),
    ("one_shot", "shard_reduce last", "rank", "staged"),
    ("two_shot", "allreduce", "rank", "staged"),
    ("two_shot", "allreduce", "rank", "direct"),
    ("ring", "allreduce", "any", "staged"),
    ("ring", "allreduce", "rank", "staged"),
)
# Every size of element, every conversion, and what costs most.
PAIRS = (
    *(("float32", "sum"), ("float32", "max"), ("float16", "sum"), ("bfloat16", "sum")),
    *(("bfloat16", "avg"), ("float64", "sum"), ("float8_e4m3fn", "sum"), ("complex64", "prod")),
    *(("complex128", "prod"), ("int64", "prod"), ("uint8", "max")),
)
MOVED = ("uint8", "float16", "float32", "float64", "complex128")
MOVING = ("all_gather", "broadcast", "shard_gather")
# Of a node among those that fold one after the other.
PLACES = {
    "first": Shards(1, seeded=False, rounded=False),
    "between": Shards(1, seeded=True, rounded=False),
    "last": Shards(1, seeded=True, rounded=True),
    "only": Shards(1, seeded=False, rounded=True),
}
INSTALL = "pip install nvidia-cuda-cuobjdump, or put cuobjdump of a CUDA toolkit on PATH"


def ask(shape: Shape, dtype: str, op: str, nranks: int) -> Kernel:
    """The kernel of one algorithm for one request."""
    algorithm, what, order, access = shape
    collective, _, place = what.partition(" ")
    request = Request(
        collective,
        DTYPES[dtype],
        OPS[op],
        1000,
        nranks,
        order=order,
        direct=access == "direct",
        shards=PLACES[place or "only"] if collective.startswith("shard_") else None,
    )
    return ALGORITHMS[algorithm].kernel(request, access)


def kernels() -> list[Kernel]:
    """Those of the tables: every shape for every pair of type and operator, for 2, 4 and 8 ranks;
    and those that only move.
    """
    every = [ask(shape, *pair, p) for shape in SHAPES for pair in PAIRS for p in RANKS]
    for collective in MOVING:
        shape = ("one_shot", collective, "rank", "staged")
        every += [ask(shape, dtype, "sum", 2) for dtype in MOVED]
    return list({kernel.symbol: kernel for kernel in every}.values())


@functools.cache
def cuobjdump() -> str | None:
    """The disassembler: of the wheel, else on PATH, else of a toolkit; None where there is none."""
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        files = []
    places = [str(file.locate()) for file in files if file.name in ("cuobjdump", "cuobjdump.exe")]
    places += [shutil.which("cuobjdump") or "", "/usr/local/cuda/bin/cuobjdump"]
    return next((place for place in places if os.access(place, os.X_OK)), None)


def inspect(kernel: Kernel, arch: str) -> Function:
    """The machine code of a kernel.

    Raises:
        CompileError: NVRTC or cuobjdump is missing, or the compiler refused.
    """
    tool = cuobjdump()
    if tool is None:
        raise CompileError(f"reading device code needs cuobjdump and there is none: {INSTALL}")
    with tempfile.TemporaryDirectory(prefix="gpuallreduce-") as work:
        cubin = Path(work) / "kernel.cubin"
        cubin.write_bytes(compile_cubin(kernel, arch))
        command = [tool, "-sass", "-res-usage", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {function.name: function for function in functions(done.stdout)}
    if done.returncode != 0 or kernel.symbol not in found:
        raise CompileError(
            f"cuobjdump did not show {kernel.symbol} for {arch}: {done.stdout[:200]} {done.stderr}"
        )
    return found[kernel.symbol]


def _read(kernel: Kernel, arch: str) -> tuple[str, Row, list[str]]:
    """A kernel's name, its row of the table, and its faults."""
    function = inspect(kernel, arch)
    return function.name, row(function), faults(function)


def recorded(folder: Path, arch: str) -> dict[str, Row]:
    """The recorded rows of an architecture by kernel."""
    text = (folder / f"kernels-{arch}.json").read_text(encoding="utf-8")
    rows: dict[str, Row] = json.loads(text)["kernels"]
    return rows


def _write(folder: Path, arch: str, rows: dict[str, Row]) -> Path:
    """One kernel a line, so that differences can be read."""
    versions = {name: metadata.version(name) for name in ("cuda-core", "nvidia-cuda-nvrtc")}
    head = json.dumps({"arch": arch, "versions": versions}, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
    path = folder / f"kernels-{arch}.json"
    path.write_text(f'{head},\n "kernels": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
    return path


def _show(console: Console, arch: str, rows: dict[str, Row], wrong: dict[str, list[str]]) -> None:
    table = Table(title=f"{arch}: instructions for 16 bytes loaded or stored, of each inner loop")
    for name in ("kernel", "registers", "stack", "instructions", "loads+stores: instructions"):
        table.add_column(name)
    for symbol, one in rows.items():
        loops = [f"{k['loads']}+{k['stores']}: {k['per_16_bytes']}" for k in one["loops"]]
        numbers = (one["registers"], one["stack_bytes"], one["instructions"])
        table.add_row(symbol, *map(str, numbers), "  ".join(loops))
    console.print(table)
    for symbol, words in wrong.items():
        console.print(f"{symbol}: {'; '.join(words)}", style="red", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a kernel has a fault."""
    parser = argparse.ArgumentParser(prog="python -m gpuallreduce.bench.inspect_kernels")
    parser.description = __doc__
    parser.add_argument("--arch", action="append", choices=ARCHS, help="default: all of them")
    parser.add_argument("--match", default="", help="only kernels with this in their name")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write tables: bench/results")
    options = parser.parse_args(argv)
    if options.record and options.match:
        parser.error("--record takes all kernels: leave out --match")
    chosen = [kernel for kernel in kernels() if options.match in kernel.symbol]
    if not chosen:
        parser.error(f"no kernel has {options.match!r} in its name")
    console, bad = Console(), False
    for arch in options.arch or ARCHS:
        read = functools.partial(_read, arch=arch)
        # Processes: the compiler's threads would wait for each other.
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            found = list(pool.map(read, chosen))
        rows = {symbol: what for symbol, what, _ in found}
        wrong = {symbol: words for symbol, _, words in found if words}
        bad = bad or bool(wrong)
        _show(console, arch, rows, wrong)
        if options.record:
            console.print(f"written: {_write(options.record, arch, rows)}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
