"""Keeps requests of an engine moving while the caller's thread does something else.

Knows nothing of what is moved, nor of MPI: a request is whatever can be asked whether it is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from gpuallreduce.errors import Timeout

__all__ = ["Moving", "Pump"]

SHORTEST_NAP_S, LONGEST_NAP_S = 20e-6, 500e-6
LOOK_S = 0.02  # between two looks at what the caller wants to know while it waits


class Moving(Protocol):
    """An operation under way."""

    what: str

    def test(self) -> bool:
        """Whether it is complete; moves data meanwhile. Raises what went wrong."""


class Pump:
    """A thread that asks requests whether they are done, which is what lets an engine move data.

    Data move only inside calls to such an engine, so without it nothing would while the caller's
    thread is in a kernel. Every request is driven by this thread alone, which also listens
    for what may end a call, since the caller's thread cannot while it is in a kernel.
    """

    def __init__(self, listen: Callable[[], None]) -> None:
        """Starts nothing yet.

        Args:
            listen: called now and then between ``begin`` and ``end``, on the thread.
        """
        self._listen = listen
        self._listening = False
        self._changed = threading.Condition()
        self._moving: list[Moving] = []
        self._ended: dict[int, BaseException | None] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, request: Moving) -> None:
        """Takes charge of a request."""
        with self._changed:
            self._moving.append(request)
            self._changed.notify_all()

    def begin(self) -> None:
        """Starts to listen."""
        with self._changed:
            self._listening = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpuallreduce-pump")
                self._thread.daemon = True
                self._thread.start()
            self._changed.notify_all()

    def end(self) -> None:
        """Stops to listen."""
        self._listening = False

    def wait(self, request: Moving, timeout: float | None, look: Callable[[], None]) -> None:
        """Returns when a request is done.

        Args:
            request: one that is watched.
            timeout: seconds, None for no limit.
            look: called now and then; what it raises ends the wait.

        Raises:
            Timeout: it is not done; says what was waited for.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while id(request) not in self._ended:
                self._changed.wait(LOOK_S)
                if id(request) in self._ended:
                    break
                look()
                if end is not None and time.monotonic() >= end:
                    raise Timeout(f"waited {timeout:g} s for {request.what}")
            error = self._ended.pop(id(request))
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread; requests that are under way are left alone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        nap_s, next_look = SHORTEST_NAP_S, 0.0
        while True:
            with self._changed:
                while not (self._moving or self._closed):
                    if not self._changed.wait(LOOK_S if self._listening else None):
                        break
                if self._closed:
                    return
                moving = list(self._moving)
            if self._listening and time.monotonic() >= next_look:
                self._listen()
                next_look = time.monotonic() + LOOK_S
            ended: dict[int, BaseException | None] = {}
            for request in moving:
                try:
                    if request.test():
                        ended[id(request)] = None
                except BaseException as error:
                    ended[id(request)] = error
            if ended:
                with self._changed:
                    self._moving = [each for each in self._moving if id(each) not in ended]
                    self._ended.update(ended)
                    self._changed.notify_all()
                nap_s = SHORTEST_NAP_S
            elif moving:
                time.sleep(nap_s)
                nap_s = min(LONGEST_NAP_S, nap_s * 1.3)
