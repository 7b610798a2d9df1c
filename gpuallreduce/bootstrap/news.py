"""What the ranks of a job must learn out of turn, at once and whatever they are doing: that a rank
gave up and why, that it leaves, that its process has ended.

Knows nothing of what the texts say, nor of what the ranks do meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuallreduce.bootstrap.assembly import assemble
from gpuallreduce.bootstrap.census import Census
from gpuallreduce.bootstrap.environment import Identity
from gpuallreduce.bootstrap.peers import names
from gpuallreduce.bootstrap.wire import (
    Connection,
    ConnectionLost,
    Deadline,
    Malformed,
    close_fds,
    encode,
)
from gpuallreduce.errors import Error

__all__ = ["LONGEST_TEXT", "News"]

LONGEST_TEXT = 8000  # characters; what is longer is cut
_CUT = " [...]"
_TEXT, _LEFT, _LOST = "text", "left", "lost"
_EVENTS = select.POLLIN | select.POLLOUT


class News:
    """One rank's part in it; made by ``join``. Nothing here waits, and any thread may call it.

    NOTE the tree. The first rank of each node is connected to the others of its node and to rank
    0, by connections that carry nothing else; so what happens on a node is known there even if its
    cable is cut. What is new at a rank goes to all its connections, and what comes by one goes on
    to all the others.

    NOTE the relay. The first ranks of nodes have a thread that sleeps until something comes and
    passes it on. It goes on after ``close`` until those it serves are gone, since they may still
    have something to tell each other. The others need no thread: they read when they ask.
    One text at most goes each way on a connection, which is enough for every rank to hear one
    of another rank. So what lies unread is bounded, and no relay waits for a rank that does not
    read.

    NOTE forks. A child closes its copies of the connections, so that a death is seen when the
    process itself ends; nothing of the parent's changes. In the child this object is closed.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection], *, relays: bool) -> None:
        """Internal: use ``join``.

        Args:
            rank: this process's.
            connections: by the rank at the other end. Taken over.
            relays: whether what comes by one is of interest to another.
        """
        self.rank = rank
        self._connections = dict(connections)
        self._heard: tuple[int, str] | None = None
        self._passed_text: set[int] = set()  # the connections that a text has gone by
        self._left: dict[int, int] = {}
        self._lost: set[int] = set()
        self._closed = self._reading = False
        self._lock = threading.RLock()  # a signal handler may tell while its thread holds it
        self._relays = relays
        self._bell: tuple[socket.socket, ...] = ()  # wakes the relay, once written to
        _living.add(self)
        if relays:
            self._bell = socket.socketpair()
            for end in self._bell:
                end.setblocking(False)
            relay = threading.Thread(target=self._relay, name="gpuallreduce-news", daemon=True)
            relay.start()

    @classmethod
    def join(
        cls, identity: Identity, census: Census, *, timeout: float, version: str | None = None
    ) -> News:
        """Connects all ranks, which have met before; a collective.

        Args:
            identity: who this process is. Rank 0 listens once more at the same address.
            census: of the nodes, several.
            timeout: seconds until all must have come.
            version: of gpuallreduce, as when they met.

        Raises:
            Timeout, DeviceError: ranks did not come.
        """
        number = census.node_of[identity.rank]
        mates = census.ranks_of(number)
        firsts = [census.ranks_of(node)[0] for node in range(len(census.names))]
        deadline = Deadline.after(timeout)
        # Nobody else's: other ranks that are to meet at this address know another token.
        known = replace(identity, secret=identity.secret + f" news {census.token}".encode())
        found: dict[int, Connection] = {}

        def connect(who: Identity, ranks: Sequence[int], where: str) -> None:
            try:
                met = assemble(who, deadline=deadline, version=version, across=who is not here)
            except Error as error:
                raise type(error)(f"connecting {names(ranks)} {where}: {error}") from error
            found.update({ranks[each]: peer.connection for each, peer in met.peers.items()})

        local = identity.rank - mates[0]
        address = f"unix:gpuallreduce-{census.token}-{number}"
        here = replace(known, rank=local, nranks=len(mates), address=address, interface=None)
        try:
            if local == 0:
                between = replace(known, rank=number, nranks=len(firsts))
                connect(between, firsts, "of the nodes, here numbered by node")
            connect(here, mates, f"of node {census.names[number]}, here numbered from 0")
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        return cls(identity.rank, found, relays=local == 0)

    def tell(self, text: str) -> None:
        """Tells all other ranks. They hear the first text that this rank tells, and no later one.

        Args:
            text: of at most LONGEST_TEXT characters; the rest is cut.
        """
        if len(text) > LONGEST_TEXT:
            text = text[: LONGEST_TEXT - len(_CUT)] + _CUT
        self._say(_TEXT, text)

    def heard(self) -> tuple[int, str] | None:
        """The first text that another rank told, and which rank that was. Never waits."""
        self._look()
        return self._heard

    def lost(self) -> list[int]:
        """The ranks whose processes have ended without ``close``, or whose connections broke.

        If one of them was the first of its node, deaths on that node can go unseen from then on;
        if it was rank 0, those on other nodes. Never waits.
        """
        self._look()
        return sorted(self._lost)

    def left(self) -> dict[int, int]:
        """The ranks that have called ``close``, and what number each gave. Never waits."""
        self._look()
        return dict(self._left)

    def close(self, number: int = 0) -> None:
        """Says goodbye to all: this rank is not lost when its process ends. Idempotent.

        Args:
            number: for the others, such as how many calls this rank has made.
        """
        with self._lock:
            self._say(_LEFT, number)
            self._look()  # what is unread when a socket is closed can cost the goodbye its way
            self._closed = True
            if not self._relays:
                self._close_connections()
        self._ring()

    # ---- inside ---------------------------------------------------------------------------------

    def _say(self, kind: str, value: Any) -> None:
        with self._lock:
            if not self._closed:
                self._note(kind, self.rank, value)
        self._ring()

    def _note(self, kind: str, rank: int, value: Any, by: int | None = None) -> None:
        """Takes in what is new of a rank, and passes it on. See NOTE the tree.

        Args:
            kind, value: what is new.
            rank: whom it is about.
            by: the connection that it came by.
        """
        if kind == _LEFT:
            self._left[rank] = value
        elif kind == _LOST:
            self._lost.add(rank)
        elif rank != self.rank and self._heard is None:
            self._heard = (rank, value)
        frame = encode({"news": [kind, rank, value]})
        for other, connection in list(self._connections.items()):
            if other == by or (kind == _TEXT and other in self._passed_text):
                continue
            if kind == _TEXT:
                self._passed_text.add(other)
            connection.post(frame)

    def _look(self) -> None:
        """Reads what has come, where no relay does it; if another thread reads, that is enough."""
        if self._relays or self._closed or self._reading:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._read(list(self._connections))
            finally:
                self._lock.release()

    def _read(self, connections: Iterable[int]) -> list[int]:
        """Takes in what these have brought; returns those that have ended."""
        ended = []
        self._reading = True
        try:
            for number in connections:
                connection = self._connections[number]
                try:
                    connection.flush()
                    while (message := connection.advance()) is not None:
                        close_fds(message.fds)
                        kind, rank, value = message.body["news"]
                        self._note(kind, rank, value, number)
                except (ConnectionLost, Malformed, KeyError, TypeError, ValueError):
                    ended.append(number)
        finally:
            self._reading = False
        for number in ended:
            self._connections.pop(number).close()
            if number not in self._left:
                self._note(_LOST, number, None)
        return ended

    def _close_connections(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _ring(self) -> None:
        """Lets the relay see what has changed: that a rest is to be sent, say."""
        if self._bell:
            with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
                self._bell[1].send(b".")

    def _relay(self) -> None:
        """See NOTE the relay."""
        poll = select.poll()
        poll.register(self._bell[0], select.POLLIN)
        with self._lock:
            numbers = {each.fileno(): rank for rank, each in self._connections.items()}
        for descriptor in numbers:
            poll.register(descriptor, select.POLLIN)
        # Rank 0 stays for all; the first of another node has gone when it serves nobody there.
        while any(rank > self.rank for rank in numbers.values()) or not self._closed:
            ready = [descriptor for descriptor, _ in poll.poll()]
            with self._lock:
                with contextlib.suppress(BlockingIOError):
                    self._bell[0].recv(4096)
                ended = self._read([numbers[each] for each in ready if each in numbers])
                for descriptor, rank in list(numbers.items()):
                    if rank in ended:
                        poll.unregister(descriptor)
                        del numbers[descriptor]
                for descriptor, rank in numbers.items():
                    done = self._connections[rank].flush()
                    poll.modify(descriptor, select.POLLIN if done else _EVENTS)
        with self._lock:
            self._close_connections()
            for end in self._bell:
                end.close()

    def _abandon(self) -> None:
        """See NOTE forks: in the child, where no other thread runs or will give back the lock."""
        self._closed = True
        self._lock = threading.RLock()
        for connection in self._connections.values():
            connection.abandon()
        self._connections = {}
        for end in self._bell:
            end.close()


_living: weakref.WeakSet[News] = weakref.WeakSet()


def _abandon_all() -> None:
    for each in list(_living):
        each._abandon()


os.register_at_fork(after_in_child=_abandon_all)
