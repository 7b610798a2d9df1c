"""Holds streams until everything that is to be timed is enqueued on them.

Knows nothing of what that is.

NOTE holding. The kernel gives up at its limit, and says so: nothing can hang, and no time that has
enqueuing in it goes for a result. Copies without peer access may make the host wait for the stream,
so those are not held; they are long enough.

NOTE loading. CUDA may load a kernel only when it is first launched, and may wait for the GPU then.
So whatever is launched behind a gate was launched once before, on nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from gpuallreduce.args import GarHoldArgs
from gpuallreduce.devices.cuda import argument, load
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, on_device
from gpuallreduce.errors import DeviceError

from .gpu_buffers import PinnedBlock, kernel_of

__all__ = ["Gate"]

HOLD = kernel_of("hold", "GarHoldArgs")
WORD_BYTES = 128  # a line for each word


class Gate:
    """Holds streams until it is opened; see NOTE holding."""

    def __init__(self, ordinals: Sequence[int], *, limit_s: float) -> None:
        """For streams of these GPUs.

        Args:
            ordinals: the GPUs.
            limit_s: how long a stream can be held.
        """
        self._page = PinnedBlock(4096)
        self._limit_ns = int(limit_s * 1e9)
        self._released, self._expired = (
            ctypes.c_uint64.from_address(self._page.address + WORD_BYTES * i) for i in range(2)
        )
        self.open()
        for ordinal in ordinals:  # see NOTE loading
            with on_device(ordinal), cuda_errors("loading the kernel that holds streams"):
                stream = cupy_module().cuda.Stream(non_blocking=True)
                self.hold(ordinal, stream)
                stream.synchronize()

    def close(self) -> None:
        """Frees its words; no stream is held any more."""
        self._page.free()

    def shut(self) -> None:
        """Before streams are held."""
        self._released.value = self._expired.value = 0

    def hold(self, ordinal: int, stream: Any) -> None:
        """Enqueues the kernel that waits."""
        at = self._page.address
        args = GarHoldArgs(released=at, expired=at + WORD_BYTES, limit_ns=self._limit_ns)
        load(HOLD, ordinal)((1,), (1,), (argument(args),), stream=stream)

    def open(self) -> None:
        """Lets all streams go on."""
        self._released.value = 1

    def check(self) -> None:
        """After the streams have ended.

        Raises:
            DeviceError: one went on before the gate was opened.
        """
        if self._expired.value:
            raise DeviceError(
                f"work could not be enqueued within {self._limit_ns / 1e9:g} s while a kernel held "
                "the stream, so no time was measured; CUDA_LAUNCH_BLOCKING=1, a debugger or a "
                "profiler makes the host wait for each launch: run without"
            )
