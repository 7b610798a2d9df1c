"""Where the ranks of a benchmark live: how their arrays are made, filled, looked at and waited for.

Knows nothing of what is measured. Each kind of device has a place of its own.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from gpuallreduce.communicator import Communicator
from gpuallreduce.errors import NotSupported

__all__ = [
    "Array",
    "HostPlace",
    "Place",
    "available_bytes",
    "pieces",
    "place_of",
    "processor",
    "row_among",
]

Array = Any  # NumPy's, or CuPy's on GPUs
PAGE_BYTES = 4096


class Place(Protocol):
    """The local ranks' devices.

    Attributes:
        kind: of the devices.
        keywords: what calls are given beside arrays and options.
    """

    kind: str
    keywords: Mapping[str, Any]

    def check_memory(self, nbytes: int) -> None:
        """Raises NotSupported if a local rank cannot have so many bytes. Before anyone allocates.

        Args:
            nbytes: bytes of one rank.
        """

    def make(self, nbytes: int) -> list[Array]:
        """Ordinary memory for each local rank: bytes of any content."""

    def view(self, array: Array, count: int, dtype: np.dtype[Any]) -> Array:
        """The beginning of an array of bytes as ``count`` elements."""

    def write(self, array: Array, values: np.ndarray[Any, Any]) -> None:
        """Fills an array with values, repeated as often as it takes. No call may be running."""

    def read(self, array: Array, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Part of an array as NumPy has it. No call may be running."""

    def wait(self) -> None:
        """Returns once all calls of this process have ended.

        Raises:
            Error: one of them failed.
        """

    def gather(self, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows of all processes, one after the other. A collective of one rank a process."""

    def describe(self) -> list[dict[str, Any]]:
        """For each local rank its device: ``number``, ``bus`` and ``info``."""


def place_of(comm: Communicator) -> Place:
    """The place of a communicator's ranks. A collective."""
    if comm.topology.device_kind == "host":
        return HostPlace(comm)
    module = import_module("gpuallreduce.bench.cuda_place")
    return cast(Place, module.CudaPlace(comm))


def pieces(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Where pieces of ``step`` elements begin and end."""
    for begin in range(0, count, step):
        yield begin, min(count, begin + step)


class HostPlace:
    """Processor cores and NumPy arrays. Calls are complete on return."""

    kind = "host"
    keywords: Mapping[str, Any] = {}

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def check_memory(self, nbytes: int) -> None:
        """The ranks of a node share its memory."""
        needed, available = nbytes * self._comm.topology.nranks, available_bytes()
        if available is not None and needed > available:
            raise NotSupported(
                f"the arrays of all ranks here need {needed / 1e9:.1f} GB, and "
                f"{available / 1e9:.1f} GB of memory are available; lower -e or the number of ranks"
            )

    def make(self, nbytes: int) -> list[Array]:
        """Page-aligned."""
        return [_aligned(nbytes) for _ in self._comm.ranks]

    def view(self, array: Array, count: int, dtype: np.dtype[Any]) -> Array:
        """See Place."""
        return array[: count * dtype.itemsize].view(dtype)

    def write(self, array: Array, values: np.ndarray[Any, Any]) -> None:
        """See Place."""
        if values.size == 1:
            array.fill(values[0])
            return
        for begin, end in pieces(array.size, max(1, values.size)):
            array[begin:end] = values[: end - begin]

    def read(self, array: Array, begin: int, end: int) -> np.ndarray[Any, Any]:
        """The array itself."""
        return cast("np.ndarray[Any, Any]", array[begin:end])

    def wait(self) -> None:
        """Calls are complete on return."""

    def gather(self, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """See Place."""
        if len(self._comm.layout) == 1:
            return cast("np.ndarray[Any, Any]", self._comm.all_gather(row))
        rows = self._comm.allreduce(row_among(self._comm, row))
        return cast("np.ndarray[Any, Any]", rows.view(row.dtype))

    def describe(self) -> list[dict[str, Any]]:
        """The processor, and the core if this process is bound to one."""
        cores = os.sched_getaffinity(0)
        bound = f" core {min(cores)}" if len(cores) == 1 else ""
        info = f"host {processor()}{bound}"
        return [{"number": rank, "bus": "0000:00:00", "info": info} for rank in self._comm.ranks]


def row_among(comm: Communicator, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """This rank's row among empty ones, as bytes: summed over all ranks they are every row. Between
    nodes there is all-reduce only.
    """
    rows = np.zeros((comm.nranks, row.nbytes), np.uint8)
    rows[comm.rank] = np.ascontiguousarray(row).view(np.uint8)
    return rows.reshape(-1)


def processor() -> str:
    """The machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_bytes() -> int | None:
    """Memory that the machine has free; None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _aligned(nbytes: int) -> Array:
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    shift = -memory.ctypes.data % PAGE_BYTES
    return memory[shift : shift + nbytes]
