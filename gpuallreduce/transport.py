"""With what address does rank i touch rank j's memory? One answer per way of placing ranks.

Knows nothing of what the memory is for.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gpuallreduce.bootstrap.rendezvous import Rendezvous
from gpuallreduce.errors import MismatchError
from gpuallreduce.memory import PAGE_BYTES, SharedPages, SymmetricBuffer

__all__ = ["LocalTransport", "SharedMemoryTransport", "Transport"]


class Transport(Protocol):
    """Makes memory that all ranks can address."""

    name: str
    nranks: int
    ranks: tuple[int, ...]

    def allocate(
        self, nbytes: int, *, purpose: str, zeros: int | None = None, timeout: float | None = None
    ) -> SymmetricBuffer:
        """A symmetric buffer. A collective: every process calls it in the same order.

        Args:
            nbytes: of one rank.
            purpose: for messages.
            zeros: bytes at its beginning that must be zero; None: all of them.
            timeout: seconds until all ranks must have come.
        """

    def allocate_controls(self, nbytes: int) -> SymmetricBuffer | None:
        """Zeros that kernels and hosts of all ranks can read and write at any time; None: the host
        can reach every buffer. A collective.
        """

    def lost(self) -> Sequence[int]:
        """Ranks whose process is known to be gone."""

    def processes(self) -> Mapping[int, int]:
        """For other ranks a descriptor that is readable once the rank's process has ended."""

    def interrupt(self) -> None:
        """Makes another thread's ``allocate`` fail, now and from now on."""

    def let_go(self) -> None:
        """Gives up other ranks' memory, as far as they cannot free it before."""

    def close(self, departed: Callable[[], bool] = lambda: True) -> None:
        """Gives up connections to other processes; memory lives on while it is used.

        Args:
            departed: tells whether all ranks have stopped touching each other's memory.
        """


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES


class LocalTransport:
    """All ranks in this process: an address is an address."""

    name = "addresses of one process"

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self.ranks = tuple(range(nranks))
        self._made = 0

    def allocate(
        self, nbytes: int, *, purpose: str, zeros: int | None = None, timeout: float | None = None
    ) -> SymmetricBuffer:
        """See Transport; nobody is waited for."""
        mappings: list[SharedPages] = []
        for _ in range(self.nranks):
            fd = SharedPages.create_fd(_pages(nbytes))
            try:
                mappings.append(SharedPages(fd, _pages(nbytes)))
            finally:
                os.close(fd)
        self._made += 1
        addresses = tuple(mapping.address for mapping in mappings)
        return SymmetricBuffer(addresses, nbytes, self._made, tuple(mappings))

    def allocate_controls(self, nbytes: int) -> SymmetricBuffer | None:
        """See Transport."""
        return None

    def agree(self, stage: str, error: Exception | None, timeout: float | None) -> None:
        """Raises the error, if there is one."""
        if error is not None:
            raise error

    def lost(self) -> Sequence[int]:
        """Nobody: threads of this process."""
        return ()

    def processes(self) -> Mapping[int, int]:
        """None: there is one process."""
        return {}

    def interrupt(self) -> None:
        """Nothing waits."""

    def let_go(self) -> None:
        """Nothing to give up."""

    def close(self, departed: Callable[[], bool] = lambda: True) -> None:
        """Nothing to give up."""


class SharedMemoryTransport:
    """One rank per process on one machine: each rank's pages are a memfd that all ranks map."""

    name = "shared memory"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.nranks = rendezvous.nranks
        self.ranks: tuple[int, ...] = (rendezvous.rank,)
        self._made = 0
        self._processes = self._open_processes()

    def _open_processes(self) -> dict[int, int]:
        """A pidfd for every other rank that shares this process's numbering of processes."""
        space = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
        mine = {"pid": os.getpid(), "space": space}
        opened: dict[int, int] = {}
        for rank, part in enumerate(self.rendezvous.exchange("processes", mine)):
            if part.payload["space"] == space and rank not in self.ranks:
                with contextlib.suppress(OSError):
                    opened[rank] = os.pidfd_open(part.payload["pid"])
        weakref.finalize(self, _close_all, tuple(opened.values()))
        return opened

    def allocate(
        self, nbytes: int, *, purpose: str, zeros: int | None = None, timeout: float | None = None
    ) -> SymmetricBuffer:
        """See Transport.

        Raises:
            MismatchError: the ranks asked for different sizes.
            DeviceError: a rank could not; every rank raises and says which.
            Timeout: a rank did not come.
        """
        fd, error = -1, None
        self._made += 1
        try:
            fd = SharedPages.create_fd(_pages(nbytes))
        except Exception as problem:
            error = problem
        try:
            stage = f"{purpose} {self._made}"
            payload = {"nbytes": nbytes}
            parts = self.rendezvous.exchange(
                stage, payload, fds=(fd,) if fd >= 0 else (), error=error, timeout=timeout
            )
        finally:
            if fd >= 0:
                os.close(fd)
        try:
            sizes = [part.payload["nbytes"] for part in parts]
            if len(set(sizes)) > 1:
                raise MismatchError(
                    f"ranks asked for different sizes of {purpose}: bytes by rank "
                    f"{sizes}; ask for the same everywhere"
                )
            mappings = [SharedPages(part.fds[0], _pages(nbytes)) for part in parts]
        except Exception as problem:
            error = problem
        finally:
            for part in parts:
                for received in part.fds:
                    os.close(received)
        if isinstance(error, MismatchError):
            raise error  # every rank saw the same sizes
        self.rendezvous.exchange(f"{purpose} {self._made} mapped", error=error, timeout=timeout)
        addresses = tuple(mapping.address for mapping in mappings)
        return SymmetricBuffer(addresses, nbytes, self._made, tuple(mappings))

    def allocate_controls(self, nbytes: int) -> SymmetricBuffer | None:
        """See Transport."""
        return None

    def agree(self, stage: str, error: Exception | None, timeout: float | None) -> None:
        """Raises on every rank if one could not do its part of what they do together."""
        self.rendezvous.exchange(stage, error=error, timeout=timeout)

    def lost(self) -> Sequence[int]:
        """See Transport."""
        gone = select.poll()
        ranks = {fd: rank for rank, fd in self._processes.items()}
        for fd in ranks:
            gone.register(fd, select.POLLIN)
        return sorted(ranks[fd] for fd, _ in gone.poll(0))

    def processes(self) -> Mapping[int, int]:
        """See Transport."""
        return self._processes

    def interrupt(self) -> None:
        """See Transport."""
        self.rendezvous.interrupt()

    def let_go(self) -> None:
        """Nothing: the system counts who uses shared pages."""

    def close(self, departed: Callable[[], bool] = lambda: True) -> None:
        """See Transport; the system counts who uses shared pages."""
        self.rendezvous.close()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
