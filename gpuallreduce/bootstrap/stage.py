"""One stage of a star of ranks: rank 0 collects all parts, then all get all of them, or why not.

Knows nothing of how the ranks met, nor of what they exchange.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuallreduce.bootstrap.peers import GRACE_SECONDS, Failure, Labels, Peer
from gpuallreduce.bootstrap.wire import (
    GONE,
    MAX_FDS,
    ConnectionLost,
    Deadline,
    Malformed,
    Message,
    close_fds,
    encode,
)
from gpuallreduce.errors import Error, InvalidArgument, NotSupported, Timeout

__all__ = ["Part", "Request", "ask", "lost_of", "prepare", "serve"]


@dataclass(frozen=True)
class Part:
    """What one rank gave to a stage.

    Attributes:
        payload: as JSON brought it: tuples have become lists, and keys strings.
        fds: new descriptors, not inherited by child programs. The receiver closes them.
    """

    payload: dict[str, Any]
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """What one rank brings to a stage, ready to be sent."""

    stage: str
    frame: bytes
    fds: tuple[int, ...]
    error: BaseException | None
    deadline: Deadline
    labels: Labels


def lost_of(peers: Mapping[int, Peer]) -> tuple[int, ...]:
    """The ranks whose connections have ended; does not wait."""
    return tuple(rank for rank, peer in peers.items() if peer.connection.closed_by_peer())


def prepare(
    stage: str,
    payload: Mapping[str, Any] | None,
    fds: Sequence[int],
    error: BaseException | None,
    deadline: Deadline,
    *,
    labels: Labels,
    descriptors: bool,
) -> Request:
    """The request. What cannot be sent becomes this rank's error, so that nobody waits for it."""
    body: dict[str, Any] = {"stage": stage, "deadline": [deadline.at, deadline.seconds]}
    try:
        if error is None:
            if fds and not descriptors:
                raise NotSupported(
                    f"{len(fds)} descriptors cannot be passed to ranks of other nodes: pass them "
                    "among the ranks of one node (Nodes.node)"
                )
            if len(fds) > MAX_FDS:
                raise InvalidArgument(
                    f"{len(fds)} descriptors; a rank can pass {MAX_FDS} in a stage"
                )
            for fd in fds:
                os.fstat(fd)
            frame = encode({**body, "payload": dict(payload or {})})
            return Request(stage, frame, tuple(fds), None, deadline, labels)
    except (Error, OSError, OverflowError, TypeError, ValueError) as refused:
        error = refused
    text = f"{type(error).__name__}: {error}"[:10_000]
    frame = encode({**body, "payload": {}, "error": text})
    return Request(stage, frame, (), error, deadline, labels)


def ask(rank_0: Peer, nranks: int, request: Request) -> list[Part] | Failure:
    """The stage as a rank other than 0 runs it.

    Raises:
        ConnectionLost, Malformed, Timeout: rank 0 did not do its part.
    """
    connection = rank_0.connection
    awaiting = f"{request.labels.rank(0)} in stage {request.stage!r}"
    # If rank 0 is gone, the reason may have been sent before: the receive below finds it.
    with contextlib.suppress(ConnectionLost):
        connection.send(
            request.frame, deadline=request.deadline, awaiting=awaiting, fds=request.fds
        )
    parts: list[Part] = []
    try:
        while len(parts) < nranks:
            # Rank 0 tells of a timeout at the deadline itself, and whom it waited for.
            late = request.deadline.extended(GRACE_SECONDS)
            message = connection.recv(deadline=late, awaiting=awaiting)
            failure = Failure.found_in(message.body)
            if failure is not None:
                return failure
            parts.append(Part(message.body["part"], message.fds))
    except BaseException:
        for part in parts:
            close_fds(part.fds)
        raise
    return parts


def serve(peers: Mapping[int, Peer], request: Request) -> list[Part] | Failure:
    """The stage as rank 0 runs it, for all."""
    # Its own part goes through the same bytes as the others': all ranks get equal payloads.
    own = Message(json.loads(request.frame), tuple(os.dup(fd) for fd in request.fds))
    arrived = {0: own}
    passed = False
    try:
        failure = _collect(peers, arrived, request) or _disagreement(arrived, request)
        if failure is not None:
            # Before they are told: once told they close as well.
            failure = replace(failure, lost=lost_of(peers))
            for peer in peers.values():
                _send(peer, [Message(failure.message())])
            return failure
        ordered = [arrived[rank] for rank in sorted(arrived)]
        answer = [Message({"part": each.body["payload"]}, each.fds) for each in ordered]
        for peer in peers.values():
            _send(peer, answer)
        passed = True
        return [Part(each.body["payload"], each.fds) for each in ordered]
    finally:
        if not passed:
            for message in arrived.values():
                close_fds(message.fds)


def _collect(
    peers: Mapping[int, Peer], arrived: dict[int, Message], request: Request
) -> Failure | None:
    """Adds every peer's message to ``arrived``, or says why one did not come."""
    deadline = request.deadline
    with selectors.DefaultSelector() as selector:
        for rank, peer in peers.items():
            if peer.connection.fileno() < 0:
                return _loss(rank, GONE, arrived, request)
            selector.register(peer.connection, selectors.EVENT_READ, rank)
        while len(arrived) <= len(peers):
            ready = selector.select(deadline.remaining)
            if not ready and not deadline.remaining:
                return _absence(peers, arrived, request, deadline)
            for key, _ in ready:
                rank = key.data
                try:
                    message = peers[rank].connection.advance()
                    if message is None:
                        continue
                    if rank in arrived:
                        close_fds(message.fds)
                        raise Malformed("it spoke out of turn")
                    arrived[rank] = message
                    told = peers[rank].deadline(message.body["deadline"])
                except (ConnectionLost, Malformed) as error:
                    return _loss(rank, str(error), arrived, request)
                deadline = min(deadline, told, key=lambda each: each.at)
    # A part can lie here long before rank 0 comes for it, and its sender be gone since.
    for rank in lost_of(peers):
        return _loss(rank, GONE, arrived, request)
    return None


def _errors(arrived: Mapping[int, Message], labels: Labels) -> list[str]:
    return [
        f"{labels.rank(rank)} failed in stage {body['stage']!r}: {body['error']}"
        for rank, body in sorted((rank, message.body) for rank, message in arrived.items())
        if "error" in body
    ]


def _loss(rank: int, reason: str, arrived: Mapping[int, Message], request: Request) -> Failure:
    lost = f"{request.labels.rank(rank)} failed in stage {request.stage!r}: {reason}"
    return Failure("DeviceError", "; ".join([*_errors(arrived, request.labels), lost]))


def _absence(
    peers: Mapping[int, Peer],
    arrived: Mapping[int, Message],
    request: Request,
    deadline: Deadline,
) -> Failure:
    labels = request.labels
    missing, here = labels.names(set(peers) - set(arrived)), labels.names(arrived)
    text = (
        f"stage {request.stage!r}: waited {deadline.seconds:g} s for {missing}, while {here} came"
    )
    errors = _errors(arrived, labels)
    return Failure("DeviceError" if errors else Timeout.__name__, "; ".join([*errors, text]))


def _disagreement(arrived: Mapping[int, Message], request: Request) -> Failure | None:
    """Why the stage fails although all came, if it does."""
    ranks_in: dict[str, list[int]] = {}
    for rank, message in arrived.items():
        ranks_in.setdefault(str(message.body["stage"]), []).append(rank)
    labels = request.labels
    errors = _errors(arrived, labels)
    if len(ranks_in) > 1:
        where = ", ".join(f"{labels.names(ranks)} in {name!r}" for name, ranks in ranks_in.items())
        text = f"the ranks called different stages: {where}; all must make the same calls in order"
        return Failure("MismatchError", "; ".join([text, *errors]))
    # All ranks are in step: the next stage can still be run.
    return Failure("DeviceError", "; ".join(errors), final=False) if errors else None


def _send(peer: Peer, messages: Sequence[Message]) -> None:
    awaiting = "a rank to take what it waits for"
    try:
        for message in messages:
            deadline = Deadline.after(GRACE_SECONDS)
            frame = encode(message.body)
            peer.connection.send(frame, deadline=deadline, awaiting=awaiting, fds=message.fds)
    except (ConnectionLost, Timeout):
        # It has given its part and died since: the same as dying right after the stage. Nothing
        # follows a message sent in part; the next stage finds the connection closed and names it.
        peer.connection.close()
