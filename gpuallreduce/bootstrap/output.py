"""Passes on what the ranks print: whole lines, each with its rank in front.

Knows nothing of processes: it reads descriptors and writes to files.
"""

from __future__ import annotations

import os
import select
import selectors
import time

__all__ = ["LinePrefixer", "Printer"]

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20


class LinePrefixer:
    """Turns pieces of one rank's output into whole lines with ``[rank] `` in front."""

    def __init__(self, rank: int) -> None:
        """Starts with nothing held back."""
        self._prefix = b"[%d] " % rank
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that are complete now. An endless line is cut after a megabyte."""
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > _LONGEST_LINE_BYTES:
            lines.append(self._held)
            self._held = b""
        return b"".join(b"%s%s\n" % (self._prefix, line) for line in lines)

    def finish(self) -> bytes:
        """What is left at the end, made a line."""
        return self.feed(b"\n") if self._held else b""


class Printer:
    """Reads the ranks' pipes and writes their lines to other descriptors."""

    def __init__(self) -> None:
        """Starts without pipes."""
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Ready to be read when a pipe is: for the caller's own selector."""
        return self._selector.fileno()

    def add(self, pipe: int, *, rank: int, target: int) -> None:
        """Takes over a pipe; its lines go to ``target``, the caller's descriptor."""
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, (LinePrefixer(rank), target))

    def read(self, *, timeout: float = 0.0) -> None:
        """Passes on what is there. Raises BrokenPipeError if nobody reads our own output."""
        for key, _ in self._selector.select(timeout):
            prefixer, target = key.data
            data = os.read(key.fd, _READ_BYTES)
            _write(target, prefixer.feed(data) if data else prefixer.finish())
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)

    def drain(self, seconds: float) -> None:
        """Passes on the rest once all ranks have ended.

        A process that left its rank's group can hold a pipe open for ever: hence the limit.
        """
        end = time.monotonic() + seconds
        while self._selector.get_map() and (left := end - time.monotonic()) > 0:
            self.read(timeout=left)

    def close(self) -> None:
        """Closes all pipes."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # somebody made our own output non-blocking
            select.select([], [target], [])
