"""Runs bandwidth tests on GPUs: memory for the copies of each cell, samples, verification, matrix.

Knows nothing of the command line, nor how results are shown.
"""

from __future__ import annotations

import statistics
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from gpuallreduce.devices import nvml
from gpuallreduce.devices.cuda_memory import DeviceBlock
from gpuallreduce.devices.cuda_runtime import Gpu, cuda_errors, cupy_module, on_device
from gpuallreduce.errors import DeviceError

from .bandwidth_limits import Limits
from .bandwidth_report import Matrix, Outcome
from .bandwidth_tests import TESTS, Copy, Test, possible
from .gpu_buffers import MIB, Pattern, PinnedBlock, clamped, near
from .gpu_copies import CopyEngine, Engine, Kernels, NumbaKernels, Transfer, timed
from .gpu_gate import Gate
from .gpu_latency import chase_ns

__all__ = ["Bench", "Settings", "WrongData", "memory_gbps"]

HOST = -1  # in Transfer.ends
MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS = 36, 37  # cudaDeviceAttr


@dataclass(frozen=True)
class Settings:
    """How tests are run.

    Attributes:
        nbytes: of a buffer.
        samples: of each cell; their median counts.
        copies: timed copies of a sample.
        verify: whether to check what arrives.
        instrument: whose kernels copy: ``kernels`` (ours) or ``numba``.
        hold_limit_s: how long a stream may be held.
    """

    nbytes: int = 512 * MIB
    samples: int = 3
    copies: int = 16
    verify: bool = True
    instrument: str = "kernels"
    hold_limit_s: float = 10.0


class WrongData(DeviceError):
    """A copy did not bring what it should."""


class Bench:
    """Some GPUs, and what tests on them share."""

    def __init__(self, gpus: Sequence[Gpu], settings: Settings) -> None:
        """Enables peer access where there is any, and loads the kernels.

        Raises:
            NotSupported: the instrument is not installed.
            CompileError: a kernel does not compile.
        """
        self.gpus, self.settings = list(gpus), settings
        ordinals = [gpu.ordinal for gpu in gpus]
        self.peers = peer_access(ordinals)
        sm: Engine = NumbaKernels() if settings.instrument == "numba" else Kernels()
        self.engines: dict[str, Engine] = {"ce": CopyEngine(), "sm": sm}
        for engine in self.engines.values():
            for ordinal in ordinals:
                engine.prepare(ordinal)
        machine = nvml.machine(tuple(gpu.uuid for gpu in gpus))
        self.limits = Limits(machine, [memory_gbps(gpu) for gpu in gpus])
        self.driver = machine.driver if machine else None
        self.gate = Gate(ordinals, limit_s=settings.hold_limit_s)
        self.pattern = Pattern(ordinals)

    def close(self) -> None:
        """Frees what it holds."""
        self.pattern.close()
        self.gate.close()

    def cells(self, test: Test) -> list[list[Sequence[Copy]]]:
        """By row and column, the copies that can run."""
        count = len(self.gpus)
        rows = range(count if test.rows == "gpus" else 1)
        return [
            [possible(test, row, column, count, self.peers) for column in range(count)]
            for row in rows
        ]

    def plan(self, name: str) -> tuple[int, tuple[str, ...], str]:
        """The size of a test's buffers, notes about it, and why it cannot run, if it cannot.

        Raises:
            InvalidArgument: there is no memory for it.
        """
        test = TESTS[name]
        cells = [copies for row in self.cells(test) for copies in row if copies]
        if not cells:
            single = len(self.gpus) == 1
            why = "one GPU has no peer" if single else "no two of these GPUs have peer access"
            return 0, (), f"{why}; this test needs two GPUs that have"
        if test.engine == "latency":
            return 0, (), ""
        nbytes, words = clamped(cells, self.gpus, self.settings.nbytes)
        return nbytes, (words,) if words else (), ""

    def run(self, name: str, nbytes: int, notes: tuple[str, ...] = ()) -> Outcome:
        """Runs one test with buffers of this size.

        Raises:
            WrongData: a copy brought something else.
            DeviceError: a GPU failed.
        """
        test, cells = TESTS[name], self.cells(TESTS[name])
        figures = [
            [self._cell(test, (i, j), copies, nbytes) for j, copies in enumerate(row)]
            for i, row in enumerate(cells)
        ]
        matrices = [self._matrix(test, k, cells, figures) for k in range(len(test.parts))]
        facts = {"buffer_bytes": nbytes or None, "engine": test.engine}
        return Outcome(name, "Passed", "", tuple(matrices), notes, facts)

    def _matrix(self, test: Test, index: int, cells: Any, figures: Any) -> Matrix:
        part = test.parts[index]
        labels = tuple(str(gpu.ordinal) for gpu in self.gpus)
        words = self.limits.words(test, part)
        return Matrix(
            key=test.name + (f"_{part}" if part else ""),
            title=test.title.format(part=part.capitalize()),
            columns=labels,
            rows=labels if test.rows == "gpus" else ("0",),
            cells=tuple(tuple(cell[index] if cell else None for cell in row) for row in figures),
            limits=tuple(
                tuple(self.limits.of(test, part, copies) for copies in row) for row in cells
            )
            if words
            else (),
            limits_of=words,
        )

    def _cell(
        self, test: Test, place: tuple[int, int], copies: Sequence[Copy], nbytes: int
    ) -> list[float]:
        """A figure for each of the test's matrices; none if the cell cannot be measured."""
        if not copies:
            return []
        if test.engine == "latency":
            source = copies[0].source
            ordinal = None if source is None else self.gpus[source].ordinal
            gpu = self.gpus[copies[0].runner]
            return [statistics.median(chase_ns(gpu, ordinal, samples=self.settings.samples))]
        with self._transfers(copies, nbytes) as transfers:
            taken = [
                self._sample(test, transfers, seed=zlib.crc32(f"{test.name}{place}{k}".encode()))
                for k in range(self.settings.samples)
            ]
        return [statistics.median(each) for each in zip(*taken, strict=True)]

    def _sample(self, test: Test, transfers: Sequence[Transfer], seed: int) -> list[float]:
        settings, verify = self.settings, self.settings.verify
        if verify:
            for i, each in enumerate(transfers):
                owner = self._owner(each, each.ends[0])
                self.pattern.write(owner, each.source, each.nbytes, seed + i)
        staged = any(not self._reached(each) for each in transfers)
        gate = None if staged else self.gate
        engine = self.engines[test.engine]
        times = timed(engine, transfers, copies=settings.copies, gate=gate)
        if verify:
            for i, each in enumerate(transfers):
                self._check(test, each, seed + i)
        moved = [each.nbytes * settings.copies / 1e6 for each in transfers]
        if test.counts == "all":
            return [sum(moved) / times.together]
        rates = [one / ms for one, ms in zip(moved, times.each, strict=True)]
        return rates[:1] if test.counts == "first" else [*rates, sum(rates)]

    def _check(self, test: Test, transfer: Transfer, seed: int) -> None:
        owner = self._owner(transfer, transfer.ends[1])
        wrong = self.pattern.wrong_word(owner, transfer.target, transfer.nbytes, seed)
        if wrong:
            names = ["host memory" if end == HOST else f"GPU {end}" for end in transfer.ends]
            raise WrongData(
                f"{test.name} from {names[0]} to {names[1]}, run by GPU {transfer.runner.ordinal}: "
                f"{wrong}. Copies on this machine cannot be trusted; where a GPU has ECC errors or "
                "an IOMMU stands between GPUs, nvidia-smi -q and dmesg say so"
            )

    def _owner(self, transfer: Transfer, end: int) -> Gpu:
        """Who fills and checks memory: its own GPU, so that it does not go the way it came."""
        return next((gpu for gpu in self.gpus if gpu.ordinal == end), transfer.runner)

    def _reached(self, transfer: Transfer) -> bool:
        places = [gpu.ordinal for gpu in self.gpus]
        a, b = transfer.ends
        return HOST in (a, b) or a == b or (places.index(a), places.index(b)) in self.peers

    @contextmanager
    def _transfers(self, copies: Sequence[Copy], nbytes: int) -> Iterator[list[Transfer]]:
        """Memory for copies that run at the same time, for a while."""
        with ExitStack() as stack:

            def memory(place: int | None, runner: Gpu, size: int) -> tuple[int, int]:
                block: DeviceBlock | PinnedBlock
                if place is None:
                    with near(runner):
                        block = PinnedBlock(size)
                else:
                    block = DeviceBlock(self.gpus[place].ordinal, size, zeros=0)
                stack.callback(block.free)
                return block.address, HOST if place is None else self.gpus[place].ordinal

            transfers, busy = [], Counter(copy.runner for copy in copies)
            for copy in copies:
                runner, size = self.gpus[copy.runner], nbytes * copy.share
                blocks = max(1, runner.multiprocessors // busy[copy.runner])
                source, source_end = memory(copy.source, runner, size)
                target, target_end = memory(copy.target, runner, size)
                ends = source_end, target_end
                transfers.append(Transfer(runner, source, target, ends, size, blocks))
            yield transfers


def peer_access(ordinals: Sequence[int]) -> set[tuple[int, int]]:
    """The places of GPUs that address each other's memory, both ways; enables it."""
    runtime = cupy_module().cuda.runtime
    count = range(len(ordinals))
    reached = set()
    for a, b in ((a, b) for a in count for b in count if a != b):
        if not runtime.deviceCanAccessPeer(ordinals[a], ordinals[b]):
            continue
        try:
            with on_device(ordinals[a]):
                runtime.deviceEnablePeerAccess(ordinals[b])
        except runtime.CUDARuntimeError as error:
            if "PeerAccessAlreadyEnabled" not in str(error):
                continue
        reached.add((a, b))
    return {(a, b) for a, b in reached if (b, a) in reached}


def memory_gbps(gpu: Gpu) -> float | None:
    """What a GPU's memory can read and write together, by its clock and width: two transfers a
    clock.
    """
    with cuda_errors("asking for a GPU's memory"):
        ask = cupy_module().cuda.runtime.deviceGetAttribute
        clock, bits = (ask(each, gpu.ordinal) for each in (MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS))
    return 2 * clock * 1e3 * bits / 8 / 1e9 if clock > 0 and bits > 0 else None
