"""Messages between the processes of one job: length-prefixed JSON over a stream socket.

Knows nothing of ranks, stages or launchers; JSON and not pickle, so that bytes stay data.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuallreduce.errors import DeviceError, InvalidArgument, Timeout

__all__ = [
    "GONE",
    "MAX_FDS",
    "MAX_FRAME_BYTES",
    "Connection",
    "ConnectionLost",
    "Deadline",
    "Malformed",
    "Message",
    "close_fds",
    "encode",
]

MAX_FRAME_BYTES = 16 << 20
MAX_FDS = 250  # the kernel takes 253 in one message
GONE = "it closed the connection: its process ended, or it gave up"
_HEADER = struct.Struct("!II")  # bytes of JSON, descriptors
_LONGEST_WAIT_SECONDS = 1e6
_QUIET_SECONDS = 5  # a machine that is silent for three times this is lost
_READ_BYTES = 1 << 18
_FD_BYTES = array("i").itemsize


class ConnectionLost(DeviceError):
    """The other side closed its socket: its process ended, or it gave up."""


class Malformed(DeviceError):
    """What arrived is no message of this protocol."""


@dataclass(frozen=True)
class Deadline:
    """A point in time on the monotonic clock, and how long the wait for it was meant to be.

    Attributes:
        at: seconds on ``time.monotonic``, which all processes of one machine share.
        seconds: the length of the wait, for messages.
    """

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline that is ``seconds`` away."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative, nor more than the kernel's waits can take."""
        return max(0.0, min(self.at - time.monotonic(), _LONGEST_WAIT_SECONDS))

    def within(self, seconds: float) -> Deadline:
        """This deadline, or the one ``seconds`` away if that is earlier."""
        return min(self, Deadline.after(seconds), key=lambda deadline: deadline.at)

    def extended(self, seconds: float) -> Deadline:
        """A later deadline, for an answer that the other side gives only at this one."""
        return Deadline(max(self.at, time.monotonic()) + seconds, self.seconds)


@dataclass(frozen=True)
class Message:
    """One message; the descriptors belong to whoever received it."""

    body: dict[str, Any]
    fds: tuple[int, ...] = ()


def encode(body: dict[str, Any]) -> bytes:
    """The JSON bytes of a message.

    Raises:
        InvalidArgument: it holds something that JSON has no form for, or it is too long.
    """
    try:
        data = json.dumps(body, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"cannot send {body!r:.200}: {error}; messages hold what JSON can hold"
        ) from error
    if len(data) > MAX_FRAME_BYTES:
        raise InvalidArgument(
            f"cannot send a message of {len(data)} bytes: the limit is {MAX_FRAME_BYTES}; "
            "pass large data through shared memory"
        )
    return data


def close_fds(fds: Sequence[int]) -> None:
    """Closes descriptors that nobody will use."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _notice_lost_machines(sock: socket.socket) -> None:
    """A machine without power closes nothing: let the kernel ask it when nothing comes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _QUIET_SECONDS)
    # The same limit for data that nobody acknowledges.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000 * _QUIET_SECONDS)


class Connection:
    """A connected stream socket that carries messages. Every wait has a deadline.

    The socket never blocks: waiting is done by ``poll``, so one slow sender cannot hold up a
    reader that serves several connections through ``advance``.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over; ``close`` closes it."""
        self._sock = sock
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._flushing = False
        self._fds: list[int] = []
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_lost_machines(sock)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def peer_uid(self) -> int | None:
        """The user at the other end as the kernel saw it, or None over TCP."""
        if self._sock.family != socket.AF_UNIX:
            return None
        credentials = struct.Struct("3i")
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
        return int(credentials.unpack(raw)[1])

    def closed_by_peer(self) -> bool:
        """Whether the other end is gone; does not wait, and sees it behind unread data too."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def shutdown(self) -> None:
        """Ends the conversation in both directions; from any thread. The socket stays open."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket and drops what was received in part. Idempotent."""
        close_fds(self._fds)
        self._fds.clear()
        self.shutdown()  # wakes a thread of ours that waits on it
        self._sock.close()

    def abandon(self) -> None:
        """Closes the socket for this process alone: the conversation is that of the process that
        this one was forked from.
        """
        self._sock.close()

    def post(self, frame: bytes) -> bool:
        """Sends one encoded message as far as that can be done without waiting.

        Where this is used, ``send`` is not.

        Returns:
            False if a rest is left for ``flush``.
        """
        self._outbox += _HEADER.pack(len(frame), 0) + frame
        return self.flush()

    def flush(self) -> bool:
        """Sends what is left of posted messages; returns whether that was all. Never waits.

        If the other end is gone the rest is dropped: what it said before can still be received,
        and then ``advance`` tells of the loss.
        """
        if self._flushing:  # a signal handler has interrupted the flush, which then goes on
            return False
        self._flushing = True
        try:
            while self._outbox:
                sent = self._sock.send(bytes(self._outbox), socket.MSG_NOSIGNAL)
                del self._outbox[:sent]
        except BlockingIOError:
            return False
        except OSError:
            self._outbox.clear()
        finally:
            self._flushing = False
        return True

    def send(
        self, frame: bytes, *, deadline: Deadline, awaiting: str, fds: Sequence[int] = ()
    ) -> None:
        """Sends one encoded message, and copies of descriptors (AF_UNIX only).

        Raises:
            ConnectionLost: the other end is gone.
            Timeout: it read nothing until the deadline.
        """
        data = memoryview(_HEADER.pack(len(frame), len(fds)) + frame)
        # Descriptors travel with the first byte they are sent with: the header's.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        while data:
            try:
                sent = self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, awaiting)
                continue
            except OSError as error:
                if isinstance(error, ConnectionError) or self._sock.fileno() < 0:
                    raise ConnectionLost(f"the connection was lost ({error.strerror})") from error
                raise DeviceError(f"could not send {len(fds)} descriptors: {error}") from error
            data, rights = data[sent:], []

    def recv(
        self, *, deadline: Deadline, awaiting: str, limit_bytes: int = MAX_FRAME_BYTES
    ) -> Message:
        """Waits for one message.

        Raises:
            ConnectionLost: the other end is gone.
            Malformed: something else than a message arrived.
            Timeout: nothing, or not all of it, arrived until the deadline.
        """
        while (message := self.advance(limit_bytes=limit_bytes)) is None:
            self._wait(select.POLLIN, deadline, awaiting)
        return message

    def advance(self, *, limit_bytes: int = MAX_FRAME_BYTES) -> Message | None:
        """Takes what has arrived of the next message; returns it once whole. Never waits."""
        while (missing := self._missing_bytes(limit_bytes)) > 0:
            try:
                # Never past the end of a message: the next one's descriptors stay with it.
                data, ancillary, _, _ = self._sock.recvmsg(
                    min(missing, _READ_BYTES),
                    socket.CMSG_SPACE(MAX_FDS * _FD_BYTES),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return None
            except OSError as error:
                raise ConnectionLost(f"the connection was lost ({error.strerror})") from error
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._fds += array("i", raw[: len(raw) - len(raw) % _FD_BYTES])
            if not data:
                raise ConnectionLost(GONE)
            self._inbox += data
        return self._take()

    def _missing_bytes(self, limit_bytes: int) -> int:
        if len(self._inbox) < _HEADER.size:
            return _HEADER.size - len(self._inbox)
        length = int(_HEADER.unpack_from(self._inbox)[0])
        if length > limit_bytes:
            raise Malformed(f"announced {length} bytes where at most {limit_bytes} are taken")
        return _HEADER.size + length - len(self._inbox)

    def _take(self) -> Message:
        nfds = int(_HEADER.unpack_from(self._inbox)[1])
        data, fds = bytes(self._inbox[_HEADER.size :]), tuple(self._fds)
        self._inbox.clear()
        self._fds.clear()
        try:
            if nfds != len(fds):
                raise Malformed(
                    f"announced {nfds} descriptors and {len(fds)} arrived: is the limit of open "
                    "files reached (ulimit -n)?"
                )
            body = json.loads(data)
            if not isinstance(body, dict):
                raise Malformed(f"expected a JSON object, got {type(body).__name__}")
        except (ValueError, RecursionError) as error:
            close_fds(fds)
            raise Malformed(f"expected a JSON object: {error}") from error
        except Malformed:
            close_fds(fds)
            raise
        return Message(body, fds)

    def _wait(self, event: int, deadline: Deadline, awaiting: str) -> None:
        poll = select.poll()
        try:
            poll.register(self._sock, event)
        except ValueError as error:
            raise ConnectionLost("the connection is closed") from error
        if not poll.poll(deadline.remaining * 1000) and not poll.poll(0):
            raise Timeout(f"waited {deadline.seconds:g} s for {awaiting}")
