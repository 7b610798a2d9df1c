"""Rank 0's side of start-up: lets in who belongs to the job, until all are there or all must raise.

Knows nothing of how the others find the way, nor of what is said once all are there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from typing import Any

from gpuallreduce.bootstrap import address as addresses
from gpuallreduce.bootstrap.census import Census, Home, known_nodes
from gpuallreduce.bootstrap.environment import NODE, Identity
from gpuallreduce.bootstrap.handshake import Doorkeeper, Refused
from gpuallreduce.bootstrap.peers import Failure, Labels, Peer
from gpuallreduce.bootstrap.wire import (
    Connection,
    ConnectionLost,
    Deadline,
    Malformed,
    close_fds,
    encode,
)
from gpuallreduce.errors import (
    DeviceError,
    Error,
    InvalidArgument,
    MismatchError,
    NotSupported,
    Timeout,
)

__all__ = ["Reception"]

_LINGER_SECONDS = 1.0
_MAX_VISITORS = 64  # more of them wait in the kernel's queue, at no cost to us


class Reception:
    """Serves one gathering of the ranks.

    One thread, and no wait on any single client: each is served as its bytes come, and an unknown
    one has a few seconds and a few kilobytes to prove itself. So garbage, silence, half a message
    or a wrong secret cost that client its connection and nobody else anything.
    """

    def __init__(
        self,
        identity: Identity,
        hello: dict[str, Any],
        deadline: Deadline,
        door: socket.socket,
        *,
        across: bool = False,
    ) -> None:
        """Takes the listening socket over.

        Args:
            identity: of rank 0.
            hello: what the others' words are compared with.
            deadline: for all ranks to be there; an earlier one of any that came is kept as well.
            door: the listening socket.
            across: let ranks of other nodes in.

        Attributes:
            census: once all are there, if they are on several nodes.
        """
        self.census: Census | None = None
        self._identity = identity
        self._hello = hello
        self._deadline = deadline
        self._door = door
        self._place = addresses.described(identity.address, door)
        self._visitors: list[Doorkeeper] = []
        self._peers: dict[int, Peer] = {}
        self._across = across
        self._homes = {0: Home.found_in(hello)}
        self._failure: Failure | None = None
        self._told: set[int] = set()

    def run(self, *, onward: str | None) -> dict[int, Peer]:
        """Waits for all other ranks and tells them to go on: to another address (``onward``) if
        all are on one node, else here, with the census of nodes.

        Raises:
            MismatchError, DeviceError, NotSupported, Timeout: all that came are told the same.
        """
        done = False
        try:
            while not self._complete():
                self._step()
            # Before anybody goes on: the next job of these ranks may use the same address.
            self._door.close()
            if self._failure is not None:
                raise self._failure.error()
            word = self._parting_word(onward)
            for peer in self._peers.values():
                _tell(peer.connection, word)
            done = True
            return self._peers
        finally:
            self._door.close()
            for visitor in self._visitors:
                visitor.connection.close()
            if not done:
                for peer in self._peers.values():
                    peer.connection.close()

    def _parting_word(self, onward: str | None) -> dict[str, Any]:
        if self._across:
            census = Census.taken(self._homes, secrets.token_hex(16))
            if len(census.names) > 1:
                self.census = census
                return census.message()
        return {"onward": onward}

    def _complete(self) -> bool:
        expected = self._identity.nranks - 1
        if self._failure is not None:
            return len(self._told - {0}) >= expected or not self._deadline.remaining
        if len(self._peers) == expected:
            return True
        if self._deadline.remaining:
            return False
        here = {0, *self._peers}
        missing = set(range(self._identity.nranks)) - here
        over_tcp = self._across and not addresses.is_unix(self._identity.address)
        labels = Labels(nodes=known_nodes(self._homes) if over_tcp else {})
        self._fail(
            Timeout,
            f"waited {self._deadline.seconds:g} s at {self._place} for {labels.names(missing)} "
            f"of {self._identity.nranks}, while {labels.names(here)} came: did all processes "
            "start, with the same address and secret?",
        )
        return True

    def _step(self) -> None:
        """Waits for whatever comes next and serves it."""
        with selectors.DefaultSelector() as selector:
            if len(self._visitors) < _MAX_VISITORS:
                selector.register(self._door, selectors.EVENT_READ, self._admit)
            for visitor in self._visitors:
                selector.register(visitor.connection, selectors.EVENT_READ, visitor)
            for rank, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, rank)
            deadlines = [self._deadline, *(visitor.deadline for visitor in self._visitors)]
            ready = selector.select(min(deadline.remaining for deadline in deadlines))
        for key, _ in ready:
            if isinstance(key.data, Doorkeeper):
                self._hear(key.data)
            elif isinstance(key.data, int):
                self._left(key.data)
            else:
                self._admit()
        for visitor in [late for late in self._visitors if not late.deadline.remaining]:
            self._dismiss(visitor)

    def _admit(self) -> None:
        try:
            sock, _ = self._door.accept()
        except OSError:  # it left again, or descriptors are short: the others go on all the same
            return
        connection = Connection(sock)
        try:
            self._visitors.append(Doorkeeper(connection, self._identity.secret))
        except (Refused, ConnectionLost, Timeout, DeviceError):
            connection.close()

    def _dismiss(self, visitor: Doorkeeper) -> None:
        self._visitors.remove(visitor)
        visitor.connection.close()

    def _hear(self, visitor: Doorkeeper) -> None:
        try:
            hello = visitor.advance()
            if hello is None:
                return
            rank, home = int(hello["rank"]), Home.found_in(hello)
            offset = time.monotonic() - float(hello["now"])
            peer = Peer(visitor.connection, offset, int(hello["pid"]))
            deadline = peer.deadline(hello["deadline"])
        except (Refused, Malformed, ConnectionLost, Timeout, KeyError, TypeError, ValueError):
            self._dismiss(visitor)
            return
        if self._failure is None:
            self._object(rank, peer, hello, home)
        if self._failure is not None:
            _tell(visitor.connection, self._failure.message())
            self._told.add(rank)
            self._dismiss(visitor)
            return
        self._visitors.remove(visitor)
        self._peers[rank], self._homes[rank] = peer, home
        self._deadline = min(self._deadline, deadline, key=lambda each: each.at)

    def _object(self, rank: int, peer: Peer, hello: dict[str, Any], home: Home) -> None:
        """Fails the gathering if this rank cannot be part of it."""
        ours = self._hello
        if hello.get("version") != ours["version"]:
            self._fail(
                MismatchError,
                f"rank 0 runs gpuallreduce {ours['version']} and rank {rank} runs "
                f"{hello.get('version')}: install one version for all ranks",
            )
        elif hello.get("nranks") != ours["nranks"]:
            self._fail(
                MismatchError,
                f"rank 0 expects {ours['nranks']} ranks and rank {rank} expects "
                f"{hello.get('nranks')}: give all ranks the same number",
            )
        elif rank == 0 or rank in self._peers:
            other = os.getpid() if rank == 0 else self._peers[rank].pid
            self._fail(
                MismatchError,
                f"two processes claim rank {rank} (pids {other} and {peer.pid}): give every "
                "process a rank of its own, and every job an address of its own",
            )
        elif self._across:
            self._object_to_home(rank, home)
        elif hello.get("machine") != ours["machine"]:
            self._fail(
                NotSupported,
                f"rank 0 and rank {rank} are on different machines (or in containers without a "
                "common network): start all ranks on one machine",
            )

    def _object_to_home(self, rank: int, home: Home) -> None:
        for other, known in self._homes.items():
            if known.node == home.node and known.machine != home.machine:
                self._fail(
                    InvalidArgument,
                    f"ranks {min(other, rank)} and {max(other, rank)} both say that they are on "
                    f"node {home.name}, and are on different machines (or in containers without a "
                    f"common network): give {NODE} another value on each machine, or none",
                )
                return

    def _left(self, rank: int) -> None:
        if rank not in self._peers:  # a failure of a moment ago has closed it
            return
        try:
            message = self._peers[rank].connection.advance()
            if message is None:
                return
            close_fds(message.fds)
            reason = "it spoke out of turn"
        except (ConnectionLost, Malformed) as error:
            reason = str(error)
        self._fail(DeviceError, f"rank {rank} failed while the ranks were gathering: {reason}")

    def _fail(self, kind: type[Error], text: str) -> None:
        """Tells all that came, then stays a moment for those who are just coming."""
        self._failure = Failure(kind.__name__, text)
        for rank, peer in self._peers.items():
            _tell(peer.connection, self._failure.message())
            peer.connection.close()
            self._told.add(rank)
        self._peers.clear()
        self._deadline = self._deadline.within(_LINGER_SECONDS)


def _tell(connection: Connection, body: dict[str, Any]) -> None:
    # Who cannot be told is gone, and the first stage will find that; a frame of this size always
    # fits into the buffer of a socket that is still empty.
    with contextlib.suppress(ConnectionLost, Timeout):
        connection.send(encode(body), deadline=Deadline.after(0), awaiting="a rank")
