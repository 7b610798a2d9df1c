"""Control blocks as the host sees them while kernels run: words, and the mark of a rank whose
process has ended.

Knows nothing of CUDA: the blocks lie in host memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from gpuallreduce.args import LOST, GarReport
from gpuallreduce.memory import REPORT_BYTES

__all__ = ["ControlWords", "LostWatch"]

_fence = threading.Lock()


class ControlWords:
    """What devices.base.Device says of words in control blocks.

    Words are aligned, so that the interpreter's copy of 8 bytes is one access; the lock orders it
    among others on machines that reorder loads and stores.
    """

    def load_acquire(self, address: int) -> int:
        """See Device."""
        value = ctypes.c_uint64.from_address(address).value
        with _fence:
            return value

    def store_release(self, address: int, value: int) -> None:
        """See Device."""
        with _fence:
            ctypes.c_uint64.from_address(address).value = value

    def claim(self, address: int) -> bool:
        """See Device. A kernel of this rank may claim the word at the same time; then the host's
        mere code and the kernel's report go to the same place, and either tells the truth.
        """
        word = ctypes.c_uint64.from_address(address)
        with _fence:
            mine, word.value = word.value == 0, 1
        return mine


class LostWatch:
    """A thread that leaves LOST in the name of each rank whose process ends, for waiting kernels to
    see; see NOTE aborts in primitives.cuh.
    """

    def __init__(self, args: Any, processes: Mapping[int, int], keep: Any) -> None:
        """Starts it.

        Args:
            args: any launch's arguments, for where reports lie.
            processes: for each rank a descriptor that is readable once its process has ended.
            keep: the control blocks, which the thread may write to until it has ended.
        """
        self._stop_fd = os.eventfd(0)
        # Neither an unclosed communicator nor the interpreter's end may depend on the thread.
        self._end = weakref.finalize(self, _stop, self._stop_fd, os.getpid())
        self._end.atexit = False
        threading.Thread(
            target=_mark_lost,
            args=(args, {rank: os.dup(fd) for rank, fd in processes.items()}, self._stop_fd, keep),
            daemon=True,
            name="gpuallreduce-watch",
        ).start()

    def stop(self) -> None:
        """Ends it; idempotent."""
        self._end()


def _stop(fd: int, process: int) -> None:
    """Not from a forked child, whose copy of the descriptor means the parent's thread."""
    if os.getpid() == process:
        os.eventfd_write(fd, 1)


def _mark_lost(args: Any, processes: dict[int, int], stop: int, keep: Any) -> None:
    """The thread; the descriptors are its own."""
    ready = select.poll()
    ranks = {fd: rank for rank, fd in processes.items()}
    for fd in (*ranks, stop):
        ready.register(fd, select.POLLIN)
    while True:
        fds = [fd for fd, _ in ready.poll()]
        if stop in fds:
            for fd in (*ranks, stop):
                os.close(fd)
            return
        for fd in fds:
            ready.unregister(fd)
            rank = ranks.pop(fd)
            os.close(fd)
            for owner in range(args.nranks):
                at = args.controls[owner] + args.reports_offset + rank * REPORT_BYTES
                report = GarReport.from_address(at)
                if report.code == 0:
                    report.code = LOST
