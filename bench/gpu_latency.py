"""How long a GPU waits for one load from another GPU's memory, or the host's: a chain of addresses.

Knows nothing of tests or matrices.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gpuallreduce.args import GarChaseArgs
from gpuallreduce.devices.cuda import argument, load
from gpuallreduce.devices.cuda_memory import DeviceBlock
from gpuallreduce.devices.cuda_runtime import Gpu, cuda_errors, cupy_module, on_device
from gpuallreduce.errors import DeviceError

from .gpu_buffers import PinnedBlock, copy_and_wait, kernel_of

__all__ = ["ACCESSES", "RING_BYTES", "chase_ns"]

RING_BYTES = 2 << 20  # nvbandwidth's
LINE_BYTES = 128
ACCESSES = 1 << 17
CHASE = kernel_of("chase", "GarChaseArgs")


def ring(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    """The words of memory at an address in which every line leads to the next, the last to the
    first.
    """
    words = np.zeros(nbytes // 8, np.uint64)
    lines = np.arange(nbytes // LINE_BYTES, dtype=np.uint64) + np.uint64(1)
    lines[-1] = 0
    words[:: LINE_BYTES // 8] = np.uint64(address) + lines * np.uint64(LINE_BYTES)
    return words


def chase_ns(gpu: Gpu, place: int | None, *, samples: int, accesses: int = ACCESSES) -> list[float]:
    """Nanoseconds of one load, for each sample.

    Args:
        gpu: whose thread loads.
        place: the number of the GPU whose memory it is, which ``gpu`` must address; None: the
            host's.
        samples: how often.
        accesses: loads of a sample.

    Raises:
        DeviceError: a GPU failed, or the chain led elsewhere: it read wrong addresses.
    """
    memory: DeviceBlock | PinnedBlock
    memory = PinnedBlock(RING_BYTES) if place is None else DeviceBlock(place, RING_BYTES, zeros=0)
    result = DeviceBlock(gpu.ordinal, 8, zeros=8)
    try:
        words, last = ring(memory.address, RING_BYTES), ctypes.c_uint64()
        owner = gpu.ordinal if place is None else place
        copy_and_wait(owner, memory.address, words.ctypes.data, RING_BYTES)
        times = []
        for _ in range(samples):
            args = GarChaseArgs(memory.address, result.address, accesses)
            times.append(_run(gpu, args) * 1e6 / accesses)
            copy_and_wait(gpu.ordinal, ctypes.addressof(last), result.address, 8)
            expected = memory.address + accesses * LINE_BYTES % RING_BYTES
            if last.value != expected:
                raise DeviceError(
                    f"a chain of {accesses} loads by cuda:{gpu.ordinal} led to {last.value:#x} "
                    f"instead of {expected:#x}: it read what was not there"
                )
        return times
    finally:
        result.free()
        memory.free()


def _run(gpu: Gpu, args: GarChaseArgs) -> float:
    """Milliseconds of the kernel; a warm-up of one ring comes first."""
    cupy, function = cupy_module(), load(CHASE, gpu.ordinal)
    warm = GarChaseArgs(args.first, args.last, RING_BYTES // LINE_BYTES)
    with on_device(gpu.ordinal), cuda_errors("chasing pointers"):
        stream = cupy.cuda.Stream(non_blocking=True)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        function((1,), (1,), (argument(warm),), stream=stream)
        start.record(stream)
        function((1,), (1,), (argument(args),), stream=stream)
        end.record(stream)
        stream.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end))
