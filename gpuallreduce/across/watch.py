"""Looks after work that nobody may be waiting for.

Knows nothing of what it looks at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Watch"]

LOOK_S = 0.02  # between two looks; a look takes microseconds


class Watch:
    """A thread that looks, now and then, until it is told to stop or has seen enough."""

    def __init__(self, look: Callable[[], bool]) -> None:
        """Starts nothing yet.

        Args:
            look: called on the thread; False: there is nothing more to look for.
        """
        self._look = look
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to look. Idempotent."""
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="gpuallreduce-watch")
            self._thread.daemon = True
            self._thread.start()

    def stop(self) -> None:
        """Ends it; returns once the last look is over. Not from the thread itself."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            if not self._look():
                return
