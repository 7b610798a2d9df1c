"""Memory for copies between GPUs and the host: allocated, filled with a pattern, checked for it.

Knows nothing of tests or time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuallreduce.args import GarPatternArgs, GarWrongWord
from gpuallreduce.devices.cuda import argument, load
from gpuallreduce.devices.cuda_memory import DeviceBlock
from gpuallreduce.devices.cuda_runtime import Gpu, cuda_errors, cupy_module, on_device
from gpuallreduce.errors import DeviceError, InvalidArgument
from gpuallreduce.jit import Kernel

from .bandwidth_tests import Copy

__all__ = ["Pattern", "PinnedBlock", "clamped", "copy_and_wait", "near", "parse_cpus"]

MIB = 1 << 20
BLOCK_THREADS = 512
HOST_FLAGS = 1 | 2  # cudaHostAllocPortable | cudaHostAllocMapped
COPY_DEFAULT = 4  # cudaMemcpyDefault
# Of what is free: the driver and kernels need some as well; of the host's memory others live too.
GPU_SHARE, HOST_SHARE = 0.9, 0.5
PCI_DEVICES = Path("/sys/bus/pci/devices")


def kernel_of(name: str, arguments: str) -> Kernel:
    """A kernel of ``kernels/copy.cuh``."""
    return Kernel(f"bandwidth_{name}", "copy.cuh", name, arguments=arguments)


WRITE_PATTERN = kernel_of("write_pattern", "GarPatternArgs")
CHECK_PATTERN = kernel_of("check_pattern", "GarPatternArgs")


class PinnedBlock:
    """Pinned host memory that all GPUs address where the host does."""

    def __init__(self, nbytes: int) -> None:
        """Allocates.

        Raises:
            DeviceError: there is not enough memory.
        """
        with cuda_errors(f"allocating {nbytes} bytes of pinned host memory"):
            self.address = int(cupy_module().cuda.runtime.hostAlloc(nbytes, HOST_FLAGS))
        self.nbytes = nbytes

    def free(self) -> None:
        """Frees it; nothing may use it any more."""
        with contextlib.suppress(DeviceError), cuda_errors("freeing"):
            cupy_module().cuda.runtime.freeHost(self.address)


def parse_cpus(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8 as the kernel writes it."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


@contextlib.contextmanager
def near(gpu: Gpu) -> Iterator[None]:
    """Runs on processors near a GPU for a while, so that host memory comes from their node."""
    before = os.sched_getaffinity(0)
    cpus: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        domain, _, rest = gpu.bus_id.lower().partition(":")
        text = (PCI_DEVICES / f"{domain[-4:]}:{rest}" / "local_cpulist").read_text()
        cpus = parse_cpus(text) & before
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            os.sched_setaffinity(0, before)


def gpu_free_bytes(ordinal: int) -> int:
    """Free memory of a GPU."""
    with on_device(ordinal), cuda_errors("asking for free memory"):
        return int(cupy_module().cuda.runtime.memGetInfo()[0])


def host_free_bytes() -> int:
    """Memory of the host that can be had without pushing others out."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30


def clamped(cells: Sequence[Sequence[Copy]], gpus: Sequence[Gpu], nbytes: int) -> tuple[int, str]:
    """The size of buffers with which each cell of a test fits the memory that is free.

    Returns:
        The size, whole MiB and at most ``nbytes``; and what to say if it is less, else nothing.

    Raises:
        InvalidArgument: not even 1 MiB fits.
    """
    needed: dict[int | None, int] = {}
    for copies in cells:
        shares: dict[int | None, int] = {}
        for copy in copies:
            for place in (copy.source, copy.target):
                shares[place] = shares.get(place, 0) + copy.share
        needed = {
            place: max(needed.get(place, 0), shares.get(place, 0)) for place in needed | shares
        }
    best, words = nbytes, ""
    for place, buffers in needed.items():
        if place is None:
            free, name = int(host_free_bytes() * HOST_SHARE), "half of the host's free memory"
        else:
            ordinal = gpus[place].ordinal
            free = int(gpu_free_bytes(ordinal) * GPU_SHARE)
            name = f"the free memory of GPU {ordinal}"
        if free // buffers < best:
            best = free // buffers // MIB * MIB
            words = (
                f"buffers of {best // MIB} MiB instead of {nbytes // MIB}: {buffers} of them must "
                f"fit {name}, {free // MIB} MiB"
            )
    if best < MIB:
        raise InvalidArgument(f"not even buffers of 1 MiB: asked for {words}; free memory first")
    return best, words


def copy_and_wait(ordinal: int, target: int, source: int, nbytes: int) -> None:
    """Copies, and returns when the bytes are there.

    cudaMemcpy would not do: from pageable host memory it may return while they are still on their
    way, and kernels on streams that do not block need not wait for them.

    Args:
        ordinal: the GPU whose stream copies.
        target, source: addresses, of host memory or of memory that the GPU reaches.
        nbytes: how much.

    Raises:
        DeviceError: CUDA failed.
    """
    cupy = cupy_module()
    with on_device(ordinal), cuda_errors("copying"):
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.memcpyAsync(target, source, nbytes, COPY_DEFAULT, stream.ptr)
        stream.synchronize()


class Pattern:
    """Writes words that say where they belong, and finds those that are not there."""

    def __init__(self, ordinals: Sequence[int]) -> None:
        """For memory that these GPUs address; loads the kernels."""
        self._cupy = cupy_module()
        self._wrong: dict[int, DeviceBlock] = {}
        self._streams: dict[int, Any] = {}
        nbytes = ctypes.sizeof(GarWrongWord)
        for ordinal in ordinals:
            self._wrong[ordinal] = DeviceBlock(ordinal, nbytes, zeros=nbytes)
            with on_device(ordinal):
                self._streams[ordinal] = self._cupy.cuda.Stream(non_blocking=True)
            load(WRITE_PATTERN, ordinal)
            load(CHECK_PATTERN, ordinal)

    def close(self) -> None:
        """Frees what it holds."""
        for block in self._wrong.values():
            block.free()

    def _run(self, kernel: Kernel, gpu: Gpu, args: GarPatternArgs) -> None:
        function, stream = load(kernel, gpu.ordinal), self._streams[gpu.ordinal]
        with on_device(gpu.ordinal), cuda_errors(f"running {kernel.symbol}"):
            shape = (gpu.multiprocessors,), (BLOCK_THREADS,)
            function(*shape, (argument(args),), stream=stream)
            stream.synchronize()

    def write(self, gpu: Gpu, address: int, nbytes: int, seed: int) -> None:
        """Fills memory that a GPU addresses, and waits for it."""
        args = GarPatternArgs(words=address, count=nbytes // 8, seed=seed)
        self._run(WRITE_PATTERN, gpu, args)

    def wrong_word(self, gpu: Gpu, address: int, nbytes: int, seed: int) -> str:
        """A word that is not as ``write`` with the same seed leaves it; empty if there is none."""
        block, report = self._wrong[gpu.ordinal], GarWrongWord()
        args = GarPatternArgs(words=address, count=nbytes // 8, seed=seed, wrong=block.address)
        self._copy(gpu, block.address, ctypes.addressof(report))
        self._run(CHECK_PATTERN, gpu, args)
        self._copy(gpu, ctypes.addressof(report), block.address)
        if not report.found:
            return ""
        return (
            f"8 bytes at offset {report.index * 8} of {nbytes} are {report.seen:#018x}, "
            f"expected {report.expected:#018x}"
        )

    def _copy(self, gpu: Gpu, target: int, source: int) -> None:
        copy_and_wait(gpu.ordinal, target, source, ctypes.sizeof(GarWrongWord))
