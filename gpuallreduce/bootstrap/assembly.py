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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gpuallreduce.bootstrap import address as addresses
from gpuallreduce.bootstrap.census import Census, Home
from gpuallreduce.bootstrap.environment import Identity
from gpuallreduce.bootstrap.handshake import Refused, introduce
from gpuallreduce.bootstrap.peers import GRACE_SECONDS, Failure, Peer
from gpuallreduce.bootstrap.reception import Reception
from gpuallreduce.bootstrap.wire import Connection, ConnectionLost, Deadline, Malformed, encode
from gpuallreduce.errors import DeviceError, MismatchError, Timeout

__all__ = ["Assembly", "assemble"]


@dataclass(frozen=True)
class Assembly:
    """All ranks, connected.

    Attributes:
        peers: of rank 0: every other rank; of the others: rank 0.
        census: where the ranks are, if they are on several nodes.
    """

    peers: dict[int, Peer]
    census: Census | None = None


def assemble(
    identity: Identity, *, deadline: Deadline, version: str | None, across: bool = False
) -> Assembly:
    """Waits until all ranks are there.

    Args:
        identity: who this process is.
        deadline: for all ranks to be there.
        version: compared between ranks; by default that of the installed package.
        across: let ranks be on several nodes, the same on every rank.

    Raises:
        MismatchError: two processes claim one rank, or nranks, version or secret differ.
        DeviceError: a rank came and ended, or the address cannot be listened at.
        NotSupported: the ranks are on different machines.
        InvalidArgument: with ``across``, ranks on different machines say they are on one node.
        Timeout: ranks are missing; names them.
    """
    machine = _machine()
    hello = {
        "rank": identity.rank,
        "nranks": identity.nranks,
        "version": version if version is not None else _version(),
        "machine": machine,
        "home": _home(identity, machine).message(),
        "pid": os.getpid(),
    }
    if identity.nranks == 1:
        return Assembly({})
    if identity.rank == 0:
        return _assemble_at_rank_0(identity, hello, deadline, across=across)
    peer, word = _enlist(identity, identity.address, hello, deadline)
    if word.onward is not None:
        peer.connection.close()
        peer, _ = _enlist(identity, word.onward, hello, deadline)
    return Assembly({0: peer}, word.census)


def _assemble_at_rank_0(
    identity: Identity, hello: dict[str, Any], deadline: Deadline, *, across: bool
) -> Assembly:
    door = _open_door(identity, hello, deadline)
    reception = Reception(identity, hello, deadline, door, across=across)
    if addresses.is_unix(identity.address):
        return Assembly(reception.run(onward=None), reception.census)
    # Descriptors only pass through Unix sockets: meet over TCP, then, if all ranks are on one
    # node, move to one with a random name. Ranks of several nodes stay on TCP.
    onward = f"unix:gpuallreduce-{secrets.token_hex(16)}"
    with contextlib.ExitStack() as stack:
        inner = addresses.listen(onward)
        stack.callback(inner.close)
        peers = reception.run(onward=onward)
        if reception.census is not None:
            return Assembly(peers, reception.census)
        for peer in peers.values():
            stack.callback(peer.connection.close)
        return Assembly(Reception(identity, hello, deadline, inner).run(onward=None))


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


def _home(identity: Identity, machine: str) -> Home:
    host = socket.gethostname()
    if identity.node is not None:
        return Home(f"name {identity.node}", identity.node, machine)
    # The name too: virtual machines restored from one snapshot share even the boot's number.
    return Home(f"{machine} {host}", host, machine)


def _open_door(identity: Identity, hello: dict[str, Any], deadline: Deadline) -> socket.socket:
    while True:
        try:
            return addresses.listen(identity.address, interface=identity.interface)
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
) -> tuple[Peer, _Word]:
    """Goes to rank 0, as often as it takes; returns the way to it and what it said."""
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


@dataclass(frozen=True)
class _Word:
    """What rank 0 says once all are there: where to go from there, or who is where."""

    onward: str | None
    census: Census | None


def _verdict(peer: Peer, deadline: Deadline) -> _Word:
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
    return _Word(onward if isinstance(onward, str) else None, Census.found_in(body))
