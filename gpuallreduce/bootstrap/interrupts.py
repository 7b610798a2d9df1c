"""Signals to this process as events of a selector, so that no wait is missed and none is cut short.

Knows nothing of what they are passed on to.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Catches SIGINT, SIGTERM and SIGHUP inside a ``with`` block.

    Outside the main thread Python allows no handlers: then it catches nothing and its descriptor
    is never ready.
    """

    def __init__(self) -> None:
        """Catches nothing yet."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._pending: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wakeup = -1

    def fileno(self) -> int:
        """Ready to be read when a signal has come."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """The signals that came since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        taken, self._pending = self._pending, []
        return taken

    def __enter__(self) -> Interrupts:
        """Installs the handlers; a signal that is ignored (nohup) stays so."""
        if threading.current_thread() is threading.main_thread():
            self._previous_wakeup = signal.set_wakeup_fd(
                self._writer.fileno(), warn_on_full_buffer=False
            )
            for number in _CAUGHT:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        """Puts the handlers back that were there."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_wakeup)
        self._reader.close()
        self._writer.close()

    def _catch(self, number: int, _: FrameType | None) -> None:
        self._pending.append(number)
