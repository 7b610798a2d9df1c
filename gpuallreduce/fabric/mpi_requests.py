"""An operation of MPI under way: asked whether it is done, waited for with a limit, let go.

Knows nothing of communicators, dtypes or who is at the other end: texts are handed in.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuallreduce.errors import DeviceError, Error, MismatchError, NotSupported, Timeout

__all__ = ["LOCK", "Owner", "Piece", "Request", "error_of"]

# MPI_THREAD_SERIALIZED allows one call at a time: whichever thread of ours makes one, holds it.
LOCK = threading.Lock()

_SPIN_SECONDS = 20e-6
_YIELD_SECONDS = 1e-3
_LONGEST_SLEEP_SECONDS = 1e-3


class Owner(Protocol):
    """What a request needs of the group that made it."""

    mpi: Any

    def progress(self) -> None:
        """Starts receives whose messages have come, of any group. Called with LOCK held."""

    def check(self) -> None:
        """Raises Aborted or Closed if nothing may be waited for any more."""

    def settled(self, request: Request) -> None:
        """Hears that MPI is done with a request."""


def error_of(mpi: Any, error: Any, what: str) -> Error:
    """MPI's error in our words."""
    kind = error.Get_error_class()
    text = f"{what} failed: {error.Get_error_string()}"
    if kind in (mpi.ERR_OP, mpi.ERR_TYPE):
        return NotSupported(f"{text}; this MPI lacks the operator or the type")
    return DeviceError(text)


@dataclass
class Piece:
    """One request of MPI.

    Attributes:
        request: mpi4py's; None while a receive waits for its message.
        memory: mpi4py's buffer that it uses.
        fault: what is wrong with the message that came.
    """

    request: Any
    memory: Any
    fault: str | None = None


@dataclass(eq=False)
class Request:
    """A verb of ``Mpi`` under way. One thread at a time drives it by ``test`` or ``wait``.

    MPI uses the buffer until it is done: it must not be freed, nor (but by a send) read, nor
    written before.

    Attributes:
        owner: the group that made it.
        what: what is waited for.
        pieces: those that MPI is not done with.
        keep: the array, so that it lives as long.
        finish: called once, when all has gone well.
        source: of a receive, the rank that sends.
    """

    owner: Owner
    what: str
    pieces: list[Piece] = field(default_factory=list)
    keep: Any = None
    finish: Callable[[], None] | None = None
    source: int | None = None
    _error: Error | None = field(default=None, init=False)

    @property
    def done(self) -> bool:
        """Whether MPI is done with the buffer; does not ask it."""
        return not self.pieces

    def test(self) -> bool:
        """Whether it is complete. Never waits; gives MPI the time to move data.

        Raises:
            MismatchError: another number of bytes arrived.
            DeviceError: MPI reports a failure.
            Aborted, Closed: of the engine.
        """
        if self.pieces:
            self.owner.check()
            with LOCK:
                # Whatever is waited for: the peer may wait for us to take what it sent before.
                self.owner.progress()
                self._advance()
            if self.pieces:
                return False
            self.owner.settled(self)
            if self._error is None and self.finish is not None:
                self.finish()
            self.keep = self.finish = None
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float | None, poll: Callable[[], None] | None = None) -> None:
        """Waits until it is complete, never inside MPI: asks, yields, then sleeps between asking.

        Args:
            timeout: seconds; None for no limit. After a Timeout it can be waited for again.
            poll: called between two looks; what it raises ends the wait.

        Raises as ``test``, and
            Timeout: it is not complete; names the peer.
        """
        start = time.monotonic()
        while not self.test():
            if poll is not None:
                poll()
            waited = time.monotonic() - start
            if timeout is not None and waited >= timeout:
                raise Timeout(f"waited {timeout:g} s for {self.what}")
            if waited >= _YIELD_SECONDS:
                rest = waited if timeout is None else timeout - waited
                time.sleep(min(waited / 16, rest, _LONGEST_SLEEP_SECONDS))
            elif waited >= _SPIN_SECONDS:
                os.sched_yield()

    def cancel(self, reason: Error) -> None:
        """Fails it, and drops what MPI has not been given: receives that nothing has come for."""
        with LOCK:
            self._error = self._error or reason
            self.pieces = [piece for piece in self.pieces if piece.request is not None]

    def let_go(self) -> bool:
        """Whether MPI holds the buffer no more, whatever has become of it. Raises nothing."""
        if self.pieces:
            with LOCK:
                self._advance()
        return not self.pieces

    def _advance(self) -> None:
        mpi = self.owner.mpi
        left = []
        for piece in self.pieces:
            try:
                if piece.request is None or not piece.request.Test():
                    left.append(piece)
                elif piece.fault is not None:
                    self._error = self._error or MismatchError(f"{self.what}: {piece.fault}")
            except mpi.Exception as error:
                self._error = self._error or error_of(mpi, error, self.what)
        self.pieces = left
