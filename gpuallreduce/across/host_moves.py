"""Broadcast and all-gather of host ranks on several nodes: MPI's own over all ranks, part by part.

Knows nothing of how ranks agree on a call, nor of how messages are driven.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gpuallreduce.across.chunks import parts_of
from gpuallreduce.arrays import Bound
from gpuallreduce.fabric.mpi import Mpi
from gpuallreduce.fabric.mpi import Request as Message

__all__ = ["HostMoves", "address_of", "aligned"]

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
PART_BYTES = 4 << 20  # that one message brings a rank: fixed costs are small beside it
LEAST_BLOCK_BYTES = 64 << 10  # of an all-gather's part, however many ranks there are
DEPTH = 3  # parts under way at once, so that copying one overlaps with moving others


class Watch(Protocol):
    """Takes charge of a message."""

    def __call__(self, message: Message, name: str, **values: int) -> Message:
        """Returns the message."""


class Wait(Protocol):
    """Returns when a message is done, or raises why not."""

    def __call__(self, message: Message, limit: float | None = None) -> None:
        """Waits so many seconds; None: as long as for any message."""


class HostMoves:
    """All ranks of a job as one rank sees them.

    NOTE parts. Data come through buffers of this class, a part at a time, for two reasons. A limit
    is for a part, so long arrays need no longer one. And MPI may still write what it was to
    receive after a call has failed; the caller's array is the caller's again by then.
    """

    def __init__(self, mpi: Mpi, watch: Watch, wait: Wait) -> None:
        """For the ranks that MPI has connected.

        Args:
            mpi: all ranks of the job; closed by ``close``.
            watch: is given every message that is started.
            wait: is called for each of them.
        """
        self._mpi, self._watch, self._wait = mpi, watch, wait
        self._buffers: list[Array] = []

    def meet(self, limit: float | None) -> None:
        """Waits until all ranks have come here; so many seconds, as those who wait for a
        neighbour's call give up first.
        """
        self._wait(self._watch(self._mpi.ibarrier(), "meet"), limit)

    def broadcast(self, bound: Bound, nbytes: int, root: int) -> None:
        """Brings the root's array to all ranks.

        Args:
            bound: this rank's array.
            nbytes: its bytes.
            root: a rank.
        """
        sends = self._mpi.rank == root

        def start(first: int, length: int, buffer: Array) -> Message:
            at = (bound.input + first, length) if sends else buffer[:length]
            message = self._mpi.ibroadcast(at, root)
            return self._watch(message, "broadcast", root=root, bytes=length)

        def finish(first: int, length: int, buffer: Array) -> None:
            if not sends:
                ctypes.memmove(bound.output + first, address_of(buffer), length)

        self._run(bound, nbytes, PART_BYTES, 0 if sends else 1, start, finish)

    def all_gather(self, bound: Bound, nbytes: int) -> None:
        """Brings all ranks' arrays to all ranks, one behind the other.

        Args:
            bound: this rank's array, and where all of them are to be.
            nbytes: of one of them.
        """
        nranks = self._mpi.nranks

        def start(first: int, length: int, buffer: Array) -> Message:
            source = (bound.input + first, length)
            message = self._mpi.iall_gather(source, buffer[: nranks * length])
            return self._watch(message, "all_gather", bytes=length)

        def finish(first: int, length: int, buffer: Array) -> None:
            target, source = bound.output + first, address_of(buffer)
            for rank in range(nranks):
                ctypes.memmove(target + rank * nbytes, source + rank * length, length)

        step = max(LEAST_BLOCK_BYTES, PART_BYTES // nranks)
        self._run(bound, nbytes, step, nranks, start, finish)

    def abort(self) -> None:
        """Ends what is under way as far as MPI can."""
        self._mpi.abort()

    def close(self) -> None:
        """Gives the ranks' connection back."""
        self._mpi.close()

    def _run(
        self,
        bound: Bound,
        nbytes: int,
        step: int,
        blocks: int,
        start: Callable[[int, int, Array], Message],
        finish: Callable[[int, int, Array], None],
    ) -> None:
        """Moves part by part, each through a buffer of as many blocks."""
        parts = parts_of(nbytes, step)
        buffers = self._room(min(DEPTH, len(parts)), blocks * min(step, nbytes))
        under_way: deque[tuple[Message, tuple[int, int, Array]]] = deque()
        for turn, (first, length) in enumerate(parts):
            if len(under_way) == DEPTH:
                self._finish(*under_way.popleft(), finish)
            part = (first, length, buffers[turn % DEPTH])
            message = start(*part)
            message.keep = (message.keep, bound.keep)  # MPI may read it after a failure
            under_way.append((message, part))
        while under_way:
            self._finish(*under_way.popleft(), finish)

    def _finish(
        self,
        message: Message,
        part: tuple[int, int, Array],
        finish: Callable[[int, int, Array], None],
    ) -> None:
        self._wait(message)
        finish(*part)

    def _room(self, count: int, nbytes: int) -> list[Array]:
        """So many buffers, kept for the next call."""
        for number in range(count):
            if number == len(self._buffers):
                self._buffers.append(aligned(0, np.dtype(np.uint8)))
            if len(self._buffers[number]) < nbytes:
                self._buffers[number] = aligned(nbytes, np.dtype(np.uint8))
        return self._buffers


def aligned(count: int, dtype: np.dtype[Any]) -> Array:
    """An array whose first element lies where kernels may use whole vectors."""
    raw = np.empty(count * dtype.itemsize + ALIGNMENT, np.uint8)
    skip = -address_of(raw) % ALIGNMENT
    return raw[skip : skip + count * dtype.itemsize].view(dtype)


def address_of(array: Array) -> int:
    """Where its first element lies."""
    return int(array.__array_interface__["data"][0])
