"""What rank 0 and the others know of each other: the way to a peer, and why all of them raise.

Knows nothing of sockets being opened, of start-up or of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuallreduce.bootstrap.wire import Connection, Deadline
from gpuallreduce.errors import (
    DeviceError,
    Error,
    InvalidArgument,
    MismatchError,
    NotSupported,
    Timeout,
)

__all__ = ["GRACE_SECONDS", "Failure", "Labels", "Peer", "names"]

GRACE_SECONDS = 2.0  # rank 0 tells of a timeout at the deadline; the others listen this much longer
_KINDS = {
    kind.__name__: kind
    for kind in (DeviceError, InvalidArgument, MismatchError, NotSupported, Timeout)
}


def names(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 1, 3``."""
    return Labels().names(ranks)


@dataclass(frozen=True)
class Labels:
    """What messages call the ranks: their numbers in the job, and nodes where there are several.

    Attributes:
        first: the number in the job of rank 0 of these ranks.
        nodes: name of the node by rank; a rank without one is called by its number alone.
    """

    first: int = 0
    nodes: Mapping[int, str] = field(default_factory=dict)

    def names(self, ranks: Iterable[int]) -> str:
        """``rank 2``, ``ranks 1, 3``, or ``ranks 0, 1 (node a), 2 (node b)``."""
        ordered = sorted(ranks)
        texts = []
        for rank, following in zip(ordered, [*ordered[1:], None], strict=True):
            node = self.nodes.get(rank)
            ends = following is None or self.nodes.get(following) != node
            at = f" (node {node})" if node is not None and ends else ""
            texts.append(f"{rank + self.first}{at}")
        return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(texts)}"

    def rank(self, rank: int) -> str:
        """``rank 2``, or ``rank 2 (node b)``."""
        return self.names([rank])


@dataclass(frozen=True)
class Failure:
    """Why all ranks raise: the same text on each.

    Attributes:
        kind: the class of ``gpuallreduce.errors`` to raise.
        text: the message.
        final: whether the connections are of no further use.
        lost: the peers whose connections had ended before anybody was told; not sent.
    """

    kind: str
    text: str
    final: bool = True
    lost: tuple[int, ...] = ()

    def message(self) -> dict[str, Any]:
        """It as the body of a message."""
        return {"failure": [self.kind, self.text, self.final]}

    @classmethod
    def found_in(cls, body: dict[str, Any]) -> Failure | None:
        """The failure that a message tells of, if it does."""
        return cls(*body["failure"]) if "failure" in body else None

    def error(self) -> Error:
        """It as an exception."""
        return _KINDS.get(self.kind, DeviceError)(self.text)


@dataclass(frozen=True)
class Peer:
    """Another rank and the way to it.

    Attributes:
        connection: the socket to it.
        clock_offset: what to add to a time on its monotonic clock to get one on ours.
        pid: its process.
    """

    connection: Connection
    clock_offset: float = 0.0
    pid: int = 0

    def deadline(self, told: Any) -> Deadline:
        """A deadline that it told of, ``[at, seconds]`` by its clock, by ours."""
        at, seconds = told
        return Deadline(float(at) + self.clock_offset, float(seconds))
