"""Builds and runs the C++ race driver, and tells how a run went.

Knows nothing of which faults are looked for. Layouts come from gpuallreduce.memory, regions from
the algorithms.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from gpuallreduce import jit
from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.memory import SegmentLayout, layout_segment
from gpuallreduce.plan import Region

FOLDER = Path(__file__).parent
KERNELS = (
    *("one_shot", "reduce", "reduce_scatter", "all_gather", "broadcast"),
    *("shard_first", "shard_between", "shard_last", "shard_only", "shard_gather"),
    *("two_shot", "two_shot_direct", "ring", "ring_in_rank_order"),
)
# The fewest slots that each family's NOTE allows.
FEWEST_SLOTS = {"exchange": 4, "two_shot": 4, "ring": 2, "ring_in_rank_order": 2}
SLOT_BYTES = 1024
ENDINGS = ("none", "absent", "stalls", "differs", "closes", "aborts")
_OUTCOMES = {0: "ok", 2: "gave up", 3: "wrong", 66: "race"}


@dataclass(frozen=True)
class Build:
    """How the driver is compiled.

    Attributes:
        sanitizer: value of -fsanitize, or nothing.
        block_threads: threads of a block.
        element, operator: C++ names of ``kernels/dtypes.cuh`` and ``ops.cuh``.
        ranks: rank count that the kernels are unrolled for; 0: none.
        compiler: a command; None: that of the product.
        march: instruction set; None: the compiler's default.
        kernels: folder of the kernel sources; None: the product's.
    """

    sanitizer: str = "thread"
    block_threads: int = 1
    element: str = "uint32_t"
    operator: str = "Sum"
    ranks: int = 0
    compiler: str | None = None
    march: str | None = None
    kernels: Path | None = None

    def command(self, output: Path) -> list[str]:
        """The compiler's command line: the product's flags, less what makes a shared object."""
        product = [flag for flag in jit.COMMON_FLAGS if flag not in ("-shared", "-O2")]
        compiler = [self.compiler] if self.compiler else list(jit.host_compiler().command)
        sanitize = [f"-fsanitize={self.sanitizer}", "-fno-sanitize-recover=all"]
        return [
            *compiler,
            *product,
            *jit.KERNEL_FLAGS,
            *("-O1", "-g1", "-pthread"),
            *(sanitize if self.sanitizer else []),
            *([f"-march={self.march}"] if self.march else []),
            f"-DGAR_BLOCK_THREADS={self.block_threads}",
            f"-DRACE_ELEMENT={self.element}",
            f"-DRACE_OPERATOR={self.operator}",
            f"-DRACE_RANKS={self.ranks}",
            f"-I{self.kernels or jit.kernels_folder()}",
            *(str(FOLDER / "driver.cpp"), "-o", str(output)),
        ]


_drivers = tempfile.TemporaryDirectory(prefix="gpuallreduce-races-")  # removed at exit


@functools.cache
def build(how: Build) -> Path:
    """The driver, compiled once for every way of building it."""
    output = Path(tempfile.mkdtemp(dir=_drivers.name)) / "driver"
    done = subprocess.run(how.command(output), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


@dataclass(frozen=True)
class Scenario:
    """What a run of the driver does.

    Attributes:
        kernels: which kernels the calls are drawn from.
        counts: element counts that they are drawn from.
        push: 0, 1, or 2 for both in turn.
        fewest_slots: slots as few as the NOTEs allow, else as many as the product has.
        preset: value of every counter and word at the start.
        ending: how the last rank behaves in an extra last call.
        workers: ranks run as in a communicator of one process, else each on threads of its own.
        shake: one flag access in so many yields; 0: none.
    """

    nranks: int = 2
    ncalls: int = 30
    kernels: tuple[str, ...] = KERNELS
    counts: tuple[int, ...] = (0, 1, 7, 63, 257, 1001)
    max_channels: int = 2
    push: int = 2
    fewest_slots: bool = True
    preset: int = 0
    ending: str = "none"
    workers: bool = False
    seed: int = 1
    shake: int = 8
    timeout_ms: int = 20000

    def regions(self) -> list[Region]:
        """The algorithms' regions with small slots."""
        found = [region for each in ALGORITHMS.values() for region in each.regions()]
        small = [replace(region, slot_bytes=SLOT_BYTES) for region in found]
        if not self.fewest_slots:
            return small
        return [replace(region, nslots=FEWEST_SLOTS[region.name]) for region in small]

    def arguments(self) -> list[str]:
        """The driver's arguments, layout included."""
        layout = layout_segment(self.nranks, self.max_channels, self.regions())
        return [
            *layout_arguments(layout),
            f"ncalls={self.ncalls}",
            f"kernels={','.join(self.kernels)}",
            f"counts={','.join(map(str, self.counts))}",
            f"push={self.push}",
            f"preset={self.preset}",
            f"ending={ENDINGS.index(self.ending)}",
            f"workers={int(self.workers)}",
            f"seed={self.seed}",
            f"shake={self.shake}",
            f"timeout_ms={self.timeout_ms}",
        ]


def layout_arguments(layout: SegmentLayout) -> list[str]:
    """A layout as arguments of the driver."""
    names = ("nranks", "max_channels", "abort", "reports", "sequence", "calls", "nbytes")
    arguments = [f"{name}={getattr(layout, name)}" for name in names]
    for name, laid in layout.regions.items():
        offsets = {
            key: getattr(laid, key) for key in ("steps", "ready", "credit", "slots", "nlinks")
        }
        sizes = {key: getattr(laid.region, key) for key in ("nsets", "nslots", "slot_bytes")}
        arguments += [f"{name}.{key}={value}" for key, value in {**offsets, **sizes}.items()]
    return arguments


@dataclass(frozen=True)
class Result:
    """How a run went: ok, wrong, gave up, race, hang, or crash; and what it printed."""

    outcome: str
    text: str


def run(driver: Path, scenario: Scenario, *, limit_s: float = 120) -> Result:
    """Runs the driver to its end, or to the limit."""
    # Without address randomisation: ThreadSanitizer's fixed mappings may collide with it.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    command = [*fixed, str(driver), *scenario.arguments()]
    environment = {
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 report_thread_leaks=0",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment
        )
    except subprocess.TimeoutExpired as late:
        return Result("hang", str(late.stderr))
    return Result(_OUTCOMES.get(done.returncode, "crash"), done.stdout + done.stderr)
