"""What rank 0 and the others know of each other: the way to a peer, and why all of them raise.

Knows nothing of sockets being opened, of start-up or of stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuallreduce.bootstrap.wire import Connection, Deadline
from gpuallreduce.errors import DeviceError, Error, MismatchError, NotSupported, Timeout

__all__ = ["GRACE_SECONDS", "Failure", "Peer", "names"]

GRACE_SECONDS = 2.0  # rank 0 tells of a timeout at the deadline; the others listen this much longer
_KINDS = {kind.__name__: kind for kind in (DeviceError, MismatchError, NotSupported, Timeout)}


def names(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 1, 3``."""
    ordered = [str(rank) for rank in sorted(ranks)]
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(ordered)}"


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
