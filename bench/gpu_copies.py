"""Copies by copy engines and by kernels, and the streams that they run on, held back until all of
them are enqueued.

Knows nothing of tests, matrices or what the figures are for.

One sample, as nvbandwidth takes it: every stream first waits in a kernel for a word in host memory.
Behind it come untimed copies, an event, the copies and an event; the other streams wait for the
first one's event, so that all begin together. Then the word is set. So the time has no enqueuing in
it. See NOTE holding in gpu_gate.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpuallreduce.args import GarCopyArgs
from gpuallreduce.devices.cuda import argument, load
from gpuallreduce.devices.cuda_runtime import Gpu, cuda_errors, cupy_module, on_device

from .gpu_buffers import BLOCK_THREADS, COPY_DEFAULT, kernel_of
from .gpu_gate import Gate
from .numba_copy import NumbaCopy

__all__ = ["CopyEngine", "Engine", "Kernels", "NumbaKernels", "Times", "Transfer", "timed"]

COPY = kernel_of("copy_bytes", "GarCopyArgs")
WARMUP = 4  # copies; nvbandwidth's number
LEAST_MS = 5e-4  # what events can tell apart


@dataclass(frozen=True)
class Transfer:
    """A copy with its memory.

    Attributes:
        runner: the GPU that copies.
        source, target: addresses.
        ends: numbers of the GPUs whose memory they are, -1 for the host's.
        nbytes: of one copy, a multiple of 16.
        blocks: of a kernel. Kernels that one GPU runs at the same time share its multiprocessors:
            else those of the first would fill it, and the others come after.
    """

    runner: Gpu
    source: int
    target: int
    ends: tuple[int, int]
    nbytes: int
    blocks: int


class Engine(Protocol):
    """What copies."""

    def prepare(self, ordinal: int) -> None:
        """Loads what it needs on a GPU, before streams are held."""

    def copy(self, transfer: Transfer, stream: Any) -> None:
        """Enqueues one copy; the runner is the current GPU."""


class CopyEngine:
    """cudaMemcpyAsync and cudaMemcpyPeerAsync."""

    def __init__(self) -> None:
        self._runtime = cupy_module().cuda.runtime

    def prepare(self, ordinal: int) -> None:
        """See Engine."""

    def copy(self, transfer: Transfer, stream: Any) -> None:
        """See Engine."""
        (source_gpu, target_gpu), nbytes = transfer.ends, transfer.nbytes
        if source_gpu != target_gpu and min(source_gpu, target_gpu) >= 0:
            to, origin = (transfer.target, target_gpu), (transfer.source, source_gpu)
            self._runtime.memcpyPeerAsync(*to, *origin, nbytes, stream.ptr)
        else:
            both = transfer.target, transfer.source
            self._runtime.memcpyAsync(*both, nbytes, COPY_DEFAULT, stream.ptr)


class Kernels:
    """kernels/copy.cuh, in blocks of 512 threads."""

    def prepare(self, ordinal: int) -> None:
        """See Engine and NOTE loading."""
        with on_device(ordinal), cuda_errors("loading the copy kernel"):
            stream = cupy_module().cuda.Stream(non_blocking=True)
            load(COPY, ordinal)((1,), (1,), (argument(GarCopyArgs()),), stream=stream)
            stream.synchronize()

    def copy(self, transfer: Transfer, stream: Any) -> None:
        """See Engine."""
        args = GarCopyArgs(transfer.target, transfer.source, transfer.nbytes)
        shape = (transfer.blocks,), (BLOCK_THREADS,)
        load(COPY, transfer.runner.ordinal)(*shape, (argument(args),), stream=stream)


class NumbaKernels:
    """bench/numba_copy.py, in the same shape."""

    def __init__(self) -> None:
        self._copy = NumbaCopy()

    def prepare(self, ordinal: int) -> None:
        """See Engine and NOTE loading."""
        with on_device(ordinal):
            stream = cupy_module().cuda.Stream(non_blocking=True)
            self._copy.launch((1, 1), stream.ptr, (0, 0, 0))
            stream.synchronize()

    def copy(self, transfer: Transfer, stream: Any) -> None:
        """See Engine."""
        shape = transfer.blocks, BLOCK_THREADS
        self._copy.launch(shape, stream.ptr, (transfer.target, transfer.source, transfer.nbytes))


@dataclass(frozen=True)
class Times:
    """Milliseconds of one sample: of each copy's stream, and from the begin to the last end."""

    each: tuple[float, ...]
    together: float


class _Lane:
    """A stream of one transfer with its events."""

    def __init__(self, transfer: Transfer) -> None:
        cupy = cupy_module()
        self.transfer, self.ordinal = transfer, transfer.runner.ordinal
        with on_device(self.ordinal):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.start, self.end = cupy.cuda.Event(), cupy.cuda.Event()


@contextlib.contextmanager
def _held(lanes: Sequence[Any], gate: Gate | None) -> Iterator[None]:
    """Whatever happens, all streams have ended afterwards: memory may be freed then."""
    try:
        if gate is not None:
            gate.shut()
            for lane in lanes:
                with on_device(lane.ordinal):
                    gate.hold(lane.ordinal, lane.stream)
        yield
    finally:
        if gate is not None:
            gate.open()
        for lane in lanes:
            with on_device(lane.ordinal):
                lane.stream.synchronize()


def timed(
    engine: Engine, transfers: Sequence[Transfer], *, copies: int, gate: Gate | None
) -> Times:
    """Runs transfers at the same time, each ``copies`` times; see the module.

    Args:
        engine: what copies.
        transfers: they begin together.
        copies: timed ones of each transfer.
        gate: None: streams are not held.

    Raises:
        DeviceError: a copy failed, or enqueuing took too long.
    """
    cupy = cupy_module()
    with cuda_errors("copying"):
        lanes = [_Lane(transfer) for transfer in transfers]
        first = lanes[0]
        with on_device(first.ordinal):
            last = cupy.cuda.Event()
        with _held(lanes, gate):
            _enqueue(engine, lanes, copies, last)
    if gate is not None:
        gate.check()
    elapsed: Callable[[Any, Any], float] = cupy.cuda.get_elapsed_time
    each = [max(LEAST_MS, elapsed(lane.start, lane.end)) for lane in lanes]
    return Times(tuple(each), max(LEAST_MS, elapsed(first.start, last)))


def _enqueue(engine: Engine, lanes: Sequence[_Lane], copies: int, last: Any) -> None:
    first, *others = lanes
    for lane in lanes:
        with on_device(lane.ordinal):
            for _ in range(min(WARMUP, copies)):
                engine.copy(lane.transfer, lane.stream)
    with on_device(first.ordinal):
        first.start.record(first.stream)
    for lane in others:
        with on_device(lane.ordinal):
            lane.stream.wait_event(first.start)
            lane.start.record(lane.stream)
    for lane in lanes:
        with on_device(lane.ordinal):
            for _ in range(copies):
                engine.copy(lane.transfer, lane.stream)
            lane.end.record(lane.stream)
    with on_device(first.ordinal):
        for lane in others:
            first.stream.wait_event(lane.end)
        last.record(first.stream)
