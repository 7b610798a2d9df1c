"""All-reduce of several ranks on one GPU against a copy in that GPU's memory: what fusing costs.

Knows nothing of links: all bytes stay in one memory, so the figure is that of the kernel's loop.

With p ranks of n bytes each a two-shot all-reduce reads p n bytes and writes p n bytes, each once.
A copy of n bytes reads and writes 2 n. Both rates count what is read and what is written. While all
arrays together fit the GPU's cache, a rate above the copy's (of large buffers) is no mistake.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gpuallreduce.communicator import Communicator
from gpuallreduce.devices.cuda_memory import DeviceBlock
from gpuallreduce.devices.cuda_runtime import Gpu, cuda_errors, cupy_module, on_device
from gpuallreduce.errors import DeviceError

from .bandwidth_run import Settings
from .gpu_buffers import MIB
from .gpu_copies import LEAST_MS, CopyEngine, Transfer, timed
from .gpu_gate import Gate

__all__ = ["NRANKS", "SIZES", "Row", "as_data", "lines_of", "local_copy_gbps", "measure", "on_gpu"]

NRANKS = (2, 4, 8)
SIZES = tuple(MIB << shift for shift in range(0, 9, 2))  # 1 MiB to 256 MiB of one rank's array
PERIOD = 251  # of the inputs: a prime, so that no tile of a kernel repeats them
WARMUP = 2


@dataclass(frozen=True)
class Row:
    """One size with one number of ranks.

    Attributes:
        nranks: ranks on the GPU.
        nbytes: of one rank's array.
        time_us: of one call.
        moved_gbps: 2 nranks nbytes over that time.
        fraction: of what a copy in the same memory moves.
        channels: blocks of each rank.
    """

    nranks: int
    nbytes: int
    time_us: float
    moved_gbps: float
    fraction: float
    channels: int


def local_copy_gbps(gpu: Gpu, nbytes: int, *, samples: int, copies: int, gate: Gate) -> float:
    """What a copy by device_local_copy's engine reads and writes."""
    blocks = [DeviceBlock(gpu.ordinal, nbytes, zeros=0) for _ in range(2)]
    try:
        ends = (gpu.ordinal, gpu.ordinal)
        addresses = blocks[0].address, blocks[1].address
        transfer = Transfer(gpu, *addresses, ends, nbytes, gpu.multiprocessors)
        times = [
            timed(CopyEngine(), [transfer], copies=copies, gate=gate).each[0]
            for _ in range(samples)
        ]
    finally:
        for block in blocks:
            block.free()
    return 2 * nbytes * copies / 1e6 / statistics.median(times)


def on_gpu(gpu: Gpu, settings: Settings, gate: Gate) -> tuple[float, list[Row]]:
    """The copy's rate, and rows for all ranks and sizes up to the buffers' size."""
    sizes = [size for size in SIZES if size <= settings.nbytes]
    how_often = {"samples": settings.samples, "copies": settings.copies}
    copy = local_copy_gbps(gpu, settings.nbytes, gate=gate, **how_often)
    counts = [count for count in NRANKS if count <= gpu.multiprocessors]  # each needs a block
    rows = measure(gpu, copy, gate=gate, nranks=counts, sizes=sizes, samples=settings.samples)
    return copy, list(rows)


def measure(
    gpu: Gpu,
    copy_gbps: float,
    *,
    gate: Gate,
    nranks: Sequence[int] = NRANKS,
    sizes: Sequence[int] = SIZES,
    samples: int = 3,
    calls: int = 8,
) -> Iterator[Row]:
    """Rows as they are measured.

    Args:
        gpu: where all ranks are.
        copy_gbps: see ``local_copy_gbps``.
        gate: holds the stream until all calls are enqueued.
        nranks: numbers of ranks.
        sizes: bytes of one rank's array, multiples of 4.
        samples: their median counts.
        calls: timed calls of a sample.

    Raises:
        DeviceError: a GPU failed, or the result was wrong.
    """
    for count in nranks:
        with Communicator([f"cuda:{gpu.ordinal}"] * count) as comm:
            for nbytes in sizes:
                time_us, channels = _calls_us(comm, gpu, nbytes, gate, (samples, calls))
                rate = 2 * count * nbytes / 1e3 / time_us
                yield Row(count, nbytes, time_us, rate, rate / copy_gbps, channels)


def _calls_us(
    comm: Communicator, gpu: Gpu, nbytes: int, gate: Gate, how_often: tuple[int, int]
) -> tuple[float, int]:
    """Microseconds of one call, the median of samples, and the channels it ran on."""
    cupy, (samples, calls) = cupy_module(), how_often
    count = nbytes // 4
    inputs, outputs = (_arrays(comm, gpu, count) for _ in range(2))
    values = [np.arange(PERIOD) * (rank + 1) % PERIOD for rank in range(len(inputs))]
    for array, each in zip(inputs, values, strict=True):
        array.set(np.resize(each.astype(np.float32), count))
    how: dict[str, Any] = {"algorithm": "two_shot", "access": "direct"}
    with on_device(gpu.ordinal), cuda_errors("an all-reduce on one GPU"):
        stream = cupy.cuda.Stream(non_blocking=True)
        streams = [stream] * len(inputs)

        def call() -> None:
            comm.allreduce(inputs, out=outputs, stream=streams, **how)

        channels = comm.plan(inputs, out=outputs, **how).config.nchannels
        for _ in range(WARMUP):
            call()
        comm.synchronize()
        times = [_sample(call, gpu, stream, gate, calls) for _ in range(samples)]
        comm.synchronize()
    expected = np.resize(np.sum(values, axis=0).astype(np.float32), count)
    for rank, array in enumerate(outputs):
        if not np.array_equal(array.get(), expected):
            raise DeviceError(
                f"all-reduce of {len(inputs)} ranks on cuda:{gpu.ordinal} with {nbytes} bytes gave "
                f"rank {rank} a wrong result; gpuallreduce validate looks closer"
            )
    return statistics.median(times) * 1e3 / calls, channels


def _arrays(comm: Communicator, gpu: Gpu, count: int) -> list[Any]:
    """Arrays from cudaMalloc, which all ranks of the GPU address."""
    with on_device(gpu.ordinal):
        return list(comm.empty(count, np.float32))


def _sample(call: Any, gpu: Gpu, stream: Any, gate: Gate, calls: int) -> float:
    """Milliseconds of some calls in a row."""
    cupy = cupy_module()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    gate.shut()
    try:
        gate.hold(gpu.ordinal, stream)
        start.record(stream)
        for _ in range(calls):
            call()
        end.record(stream)
    finally:
        gate.open()
        stream.synchronize()
    gate.check()
    return max(LEAST_MS, float(cupy.cuda.get_elapsed_time(start, end)))


def lines_of(rows: Sequence[Row], copy_gbps: float, gpu: Gpu) -> list[str]:
    """The rows for people."""
    lines = [
        f"fused reduce and copy, ranks on GPU {gpu.ordinal}: bytes read and written, against "
        f"device_local_copy's {copy_gbps:.2f} GB/s",
        f"{'ranks':>6}{'bytes':>12}{'channels':>10}{'time (us)':>12}{'GB/s':>10}{'fraction':>10}",
    ]
    for row in rows:
        lines.append(
            f"{row.nranks:>6}{row.nbytes:>12}{row.channels:>10}{row.time_us:>12.2f}"
            f"{row.moved_gbps:>10.2f}{row.fraction:>10.2f}"
        )
    return [*lines, ""]


def as_data(rows: Sequence[Row], copy_gbps: float) -> dict[str, Any]:
    """The rows as plain data."""
    return {"device_local_copy_gbps": copy_gbps, "rows": [asdict(row) for row in rows]}
