"""How NCCL communicators are ended: told first, waited for afterwards, and not for ever.

Knows nothing of what they carried.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from gpuallreduce.fabric.nccl_library import nccl_module

__all__ = ["Endable", "abort_together", "in_time"]

TOLD_S = 5.0  # until NCCL has been told; it only sets flags
ENDED_S = 10.0  # for what NCCL then waits for


class Endable(Protocol):
    """What has NCCL communicators."""

    def tell_abort(self) -> None:
        """Calls ncclCommAbort on each, inside a group."""


def abort_together(connections: Sequence[Endable], then: Callable[[], None]) -> None:
    """Aborts communicators. From any thread; raises only what ``then`` raises.

    NOTE aborts of NCCL. ncclCommAbort tells the communicator's kernels to end, and then waits for
    its streams. These may hold what waits for another communicator, or for the host. So all are
    told before any is waited for, which is what a group of NCCL calls does, and ``then`` lets
    streams go on before that. NCCL also waits for graphs that hold its work, for as long as the
    program keeps them: so it waits on a thread that is left behind at a limit.

    Args:
        connections: what is aborted.
        then: called once nothing of theirs can be sent any more.
    """
    told, waits = threading.Event(), threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            nccl = nccl_module()
            nccl.groupStart()
            try:
                for each in connections:
                    with contextlib.suppress(Exception):
                        each.tell_abort()
            finally:
                told.set()
                waits.wait()
                nccl.groupEnd()
        told.set()

    thread = threading.Thread(target=run, name="gpuallreduce-abort", daemon=True)
    thread.start()
    told.wait(TOLD_S)
    try:
        then()
    finally:
        waits.set()
    thread.join(ENDED_S)


def in_time(end: Callable[[], None]) -> None:
    """Runs what may wait for graphs that the program keeps, on a thread that is left behind at a
    limit; see NOTE aborts of NCCL.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            end()

    thread = threading.Thread(target=run, name="gpuallreduce-end", daemon=True)
    thread.start()
    thread.join(ENDED_S)
