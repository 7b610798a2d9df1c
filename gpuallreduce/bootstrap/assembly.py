"""Brings all ranks of a job together: rank 0 listens, the others come, nobody goes on alone.

Knows nothing of what they say to each other afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from gpuallreduce.bootstrap import address as addresses
from gpuallreduce.bootstrap.environment import Identity
from gpuallreduce.bootstrap.handshake import Refused, introduce
from gpuallreduce.bootstrap.peers import GRACE_SECONDS, Failure, Peer
from gpuallreduce.bootstrap.reception import Reception
from gpuallreduce.bootstrap.wire import Connection, ConnectionLost, Deadline, Malformed, encode
from gpuallreduce.errors import DeviceError, MismatchError, Timeout

__all__ = ["assemble"]


def assemble(identity: Identity, *, deadline: Deadline, version: str | None) -> dict[int, Peer]:
    """Waits until all ranks are there.

    Returns:
        Rank 0: every other rank. The others: rank 0.

    Raises:
        MismatchError: two processes claim one rank, or nranks, version or secret differ.
        DeviceError: a rank came and ended, or the address cannot be listened at.
        NotSupported: the ranks are on different machines.
        Timeout: ranks are missing; names them.
    """
    hello = {
        "rank": identity.rank,
        "nranks": identity.nranks,
        "version": version if version is not None else _version(),
        "machine": _machine(),
        "pid": os.getpid(),
    }
    if identity.nranks == 1:
        return {}
    if identity.rank == 0:
        return _assemble_at_rank_0(identity, hello, deadline)
    peer, onward = _enlist(identity, identity.address, hello, deadline)
    if onward is not None:
        peer.connection.close()
        peer, _ = _enlist(identity, onward, hello, deadline)
    return {0: peer}


def _assemble_at_rank_0(
    identity: Identity, hello: dict[str, Any], deadline: Deadline
) -> dict[int, Peer]:
    door = _open_door(identity, hello, deadline)
    if addresses.is_unix(identity.address):
        return Reception(identity, hello, deadline, door).run(onward=None)
    # Descriptors only pass through Unix sockets: meet over TCP, then move to one with a random
    # name. That is enough while all ranks of a job are on one machine, which Reception checks;
    # ranks elsewhere would stay on TCP and have no descriptors to pass.
    onward = f"unix:gpuallreduce-{secrets.token_hex(16)}"
    with contextlib.ExitStack() as stack:
        inner = addresses.listen(onward)
        stack.callback(inner.close)
        for peer in Reception(identity, hello, deadline, door).run(onward=onward).values():
            stack.callback(peer.connection.close)
        return Reception(identity, hello, deadline, inner).run(onward=None)


def _version() -> str:
    try:
        return metadata.version("gpuallreduce")
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> str:
    """The same text wherever an abstract Unix socket of ours can be reached."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _open_door(identity: Identity, hello: dict[str, Any], deadline: Deadline) -> socket.socket:
    while True:
        try:
            return addresses.listen(identity.address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise DeviceError(f"rank 0 cannot listen at {identity.address}: {error}") from error
        # Taken: by a second rank 0, which will tell everybody; or for a moment more by one that is
        # about to end.
        with contextlib.suppress(OSError, ConnectionLost, Timeout):
            peer = _knock(identity, identity.address, hello, deadline)
            with contextlib.closing(peer.connection):
                _verdict(peer, deadline)
        if not deadline.remaining:
            raise Timeout(
                f"rank 0 waited {deadline.seconds:g} s for {identity.address}, where another "
                "process listens: choose another address, or end that process"
            )
        time.sleep(min(0.02, deadline.remaining))


def _enlist(
    identity: Identity, address: str, hello: dict[str, Any], deadline: Deadline
) -> tuple[Peer, str | None]:
    """Goes to rank 0, as often as it takes; returns the way to it and where to go from there."""
    pause = 0.001
    while True:
        try:
            peer = _knock(identity, address, hello, deadline)
            break
        except Refused as error:
            raise MismatchError(
                f"rank {identity.rank} was not let in at {address}: {error}"
            ) from error
        except (OSError, ConnectionLost, Malformed) as error:  # OSError includes our Timeout
            reason = error
        if not deadline.remaining:
            raise Timeout(
                f"rank {identity.rank} of {identity.nranks} waited {deadline.seconds:g} s for rank "
                f"0, which did not come to {address} (last try: {reason}); do all ranks "
                "have the same address?"
            )
        time.sleep(min(pause, deadline.remaining))
        pause = min(2 * pause, 0.05)
    try:
        return peer, _verdict(peer, deadline)
    except BaseException:
        peer.connection.close()
        raise


def _knock(identity: Identity, address: str, hello: dict[str, Any], deadline: Deadline) -> Peer:
    connection = Connection(
        addresses.connect(address, timeout=deadline.within(5).remaining or 0.001)
    )
    try:
        introduce(connection, identity.secret, deadline=deadline)
        body = {**hello, "now": time.monotonic(), "deadline": [deadline.at, deadline.seconds]}
        connection.send(encode(body), deadline=deadline, awaiting="rank 0 to take our name")
    except BaseException:
        connection.close()
        raise
    return Peer(connection)


def _verdict(peer: Peer, deadline: Deadline) -> str | None:
    try:
        body = peer.connection.recv(
            deadline=deadline.extended(GRACE_SECONDS), awaiting="rank 0 to say that all are there"
        ).body
    except ConnectionLost as error:
        raise DeviceError(f"rank 0 ended while the ranks were gathering: {error}") from error
    failure = Failure.found_in(body)
    if failure is not None:
        raise failure.error()
    onward = body.get("onward")
    return onward if isinstance(onward, str) else None
