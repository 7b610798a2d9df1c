"""What ends communicators that nobody closes: dropped ones, and those that are open at the end.

Knows nothing of what a communicator does but how it ends.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from contextlib import suppress
from typing import Any, Protocol

from gpuallreduce.calls import Calls
from gpuallreduce.devices.base import Device
from gpuallreduce.errors import Error

__all__ = ["end_dropped", "lay_aside", "lay_aside_when_dropped", "remember"]


class Closable(Protocol):
    """An open communicator."""

    def close(self) -> None:
        """Ends it."""


# NOTE dropped communicators. Who drops one without closing it may have calls on GPUs that run, and
# its finalizer may run anywhere, where nothing may be waited for. So what it is made of is laid
# aside, and ended when another communicator is made or closed, or with the interpreter.
_dropped: list[tuple[Device, Calls]] = []


def lay_aside(device: Device, calls: Calls) -> None:
    """Leaves the end of a communicator to ``end_dropped``."""
    _dropped.append((device, calls))


def lay_aside_when_dropped(communicator: object, device: Device, calls: Calls) -> Any:
    """Sees to it that a communicator is ended even if nobody closes it.

    Returns:
        What to ``detach`` once it has been closed.
    """
    finalizer = weakref.finalize(communicator, lay_aside, device, calls)
    finalizer.atexit = False
    return finalizer


def end_dropped() -> None:
    """Ends communicators that were dropped; see NOTE dropped communicators."""
    while _dropped:
        device, calls = _dropped.pop()
        if not device.forked:
            device.close()
            device.drain(calls.look_out, calls.orchestrator.abort)
            with suppress(Error):  # nobody is left to catch it
                calls.end()


_open: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(communicator: Closable) -> None:
    """Closes a communicator at the end of the interpreter, if it is open then."""
    _open.add(communicator)


@atexit.register
def _close_all() -> None:
    end_dropped()
    for communicator in list(_open):
        try:
            communicator.close()
        except Error as error:  # nobody is left to catch it
            print(f"gpuallreduce: a call failed: {type(error).__name__}: {error}", file=sys.stderr)
