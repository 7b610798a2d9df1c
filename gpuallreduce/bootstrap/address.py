"""Where the ranks of a job meet: abstract Unix sockets (``unix:NAME``) and ``HOST:PORT``.

Knows nothing of messages or ranks.
"""

from __future__ import annotations

import socket

from gpuallreduce.bootstrap.interfaces import chosen, interfaces
from gpuallreduce.errors import InvalidArgument

__all__ = ["MAX_NAME_BYTES", "connect", "described", "is_unix", "listen", "parse"]

MAX_NAME_BYTES = 100  # sun_path has 108, one of them for the leading zero byte
_UNIX = "unix:"
_BACKLOG = 4096  # the kernel cuts it to its own limit


def is_unix(address: str) -> bool:
    """Whether it names an abstract Unix socket: same machine, descriptors can be passed."""
    return address.startswith(_UNIX)


def parse(address: str) -> str | tuple[str, int]:
    """The abstract socket's name, or host and port.

    Raises:
        InvalidArgument: it is neither ``unix:NAME`` nor ``HOST:PORT``.
    """
    if is_unix(address):
        name = address.removeprefix(_UNIX)
        if not name or "\0" in name or len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidArgument(
                f"address {address!r} is malformed: NAME of unix:NAME has 1 to "
                f"{MAX_NAME_BYTES} bytes, none of them zero"
            )
        return name
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidArgument(
            f"address {address!r} is malformed: expected unix:NAME (an abstract Unix socket) or "
            "HOST:PORT with a port of 1 to 65535"
        )
    return host, int(port)


def listen(address: str, *, interface: str | None = None) -> socket.socket:
    """A listening socket that does not block. Raises OSError, EADDRINUSE if it is taken.

    An abstract name ends with the socket: nothing is left behind, however the process dies.

    Args:
        address: where to listen.
        interface: with HOST:PORT, listen at the address that this asks for instead of that which
            HOST has on this machine (``interfaces``).

    Raises:
        InvalidArgument: this machine has no address like that.
    """
    where = parse(address)
    if isinstance(where, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: str | tuple[str, int] = f"\0{where}"
    else:
        if interface is not None:
            where = chosen(interface, interfaces()), where[1]
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        # Only past connections are shared with: two listeners on one port stay an error.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        target = where
    try:
        sock.bind(target)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def described(address: str, sock: socket.socket) -> str:
    """The address, and the one that the socket listens at where that tells more."""
    if is_unix(address):
        return address
    bound = str(sock.getsockname()[0])
    if bound.startswith("127.") or bound == "::1":
        return f"{address} (here {bound}, which no other machine can reach)"
    return address if bound in address else f"{address} (here {bound})"


def connect(address: str, *, timeout: float) -> socket.socket:
    """A connected socket. Raises OSError if nobody listens, or the queue there is full."""
    where = parse(address)
    if isinstance(where, tuple):
        sock = socket.create_connection(where, timeout=timeout)
        if sock.getsockname() == sock.getpeername():
            # A local port that nobody listens on can be given to the caller itself, which then
            # talks to itself and keeps the listener from binding.
            sock.close()
            raise ConnectionRefusedError(f"nobody listens at {address}")
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(f"\0{where}")
    except BaseException:
        sock.close()
        raise
    return sock
