"""Arrays and streams of the ranks of one process, for tests of NCCL on emulated GPUs.

Knows nothing of what is tested. Any dtype goes through as bytes: CuPy has not all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

__all__ = ["GUARD_BYTES", "Array", "Ranks"]

GUARD_BYTES = 64
GUARD = 0xA5


class Array:
    """A NumPy array's copy on a GPU, between guard bytes."""

    def __init__(self, device: int, host: np.ndarray) -> None:
        self.dtype, self.shape, self.nbytes = host.dtype, host.shape, host.nbytes
        guard = np.full(GUARD_BYTES, GUARD, np.uint8)
        raw = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        with cupy.cuda.Device(device):
            self.memory = cupy.asarray(np.concatenate([guard, raw, guard]))
            cupy.cuda.get_current_stream().synchronize()  # the ranks' streams do not wait for it
        self.ptr: int = self.memory.data.ptr + GUARD_BYTES

    def get(self) -> np.ndarray:
        """What it holds; fails if anything was written beside it."""
        with self.memory.device:
            raw = self.memory.get()
        for guard in (raw[:GUARD_BYTES], raw[GUARD_BYTES + self.nbytes :]):
            assert (guard == GUARD).all(), "written outside the array"
        return raw[GUARD_BYTES : GUARD_BYTES + self.nbytes].view(self.dtype).reshape(self.shape)


class Ranks:
    """A stream on each of some devices."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = list(devices)
        self.streams: list[Any] = []
        for device in self.devices:
            with cupy.cuda.Device(device):
                self.streams.append(cupy.cuda.Stream(non_blocking=True))
        self.pointers = [stream.ptr for stream in self.streams]

    def put(self, hosts: Sequence[np.ndarray]) -> list[Array]:
        """One array for each rank."""
        return [Array(device, host) for device, host in zip(self.devices, hosts, strict=True)]

    def synchronize(self) -> None:
        """Waits for all streams."""
        for device, stream in zip(self.devices, self.streams, strict=True):
            with cupy.cuda.Device(device):
                stream.synchronize()
