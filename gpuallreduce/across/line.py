"""One rank's way to the owners of the same shard on other nodes: NCCL on streams of its own.

Knows nothing of what travels, nor of when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, on_device
from gpuallreduce.errors import DeviceError, Error, Timeout
from gpuallreduce.fabric.nccl import Nccl, Transfer
from gpuallreduce.plan import Request
from gpuallreduce.types import OPS

__all__ = ["Line", "Message", "Way"]

T = TypeVar("T")
Message = tuple[int, int, int]  # node at the other end, address, bytes


class Way:
    """A stream, and an NCCL communicator of which all work is on it. Ranks in it are node numbers.

    Attributes:
        stream: what is enqueued here runs in order, beside the call's own stream.
    """

    def __init__(self, nccl: Nccl, ordinal: int) -> None:
        self._nccl, self._ordinal = nccl, ordinal
        with on_device(ordinal), cuda_errors("making a stream"):
            self.stream: Any = cupy_module().cuda.Stream(non_blocking=True)
        self._streams = [self.stream.ptr]

    def move(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Enqueues messages that may all be under way at once; empty ones are no messages."""
        (here,) = self._nccl.ranks
        transfers = [
            [Transfer(here, node, at, nbytes) for node, at, nbytes in side if nbytes]
            for side in (sends, receives)
        ]
        if any(transfers):
            self._nccl.send_recv(*transfers, streams=self._streams)

    def all_reduce(self, address: int, count: int, request: Request) -> None:
        """Enqueues NCCL's own all-reduce of elements, in place; for ``avg`` each node has already
        divided by all ranks.
        """
        if count:
            op = OPS["sum"] if request.op.name == "avg" else request.op
            at = [address]
            self._nccl.all_reduce(at, at, count, dtype=request.dtype, op=op, streams=self._streams)

    def check(self) -> None:
        """Raises DeviceError if NCCL has found a fault; does not wait."""
        self._nccl.check()

    def abort(self) -> None:
        """Ends all that is enqueued; from any thread."""
        self._nccl.abort()

    def close(self) -> None:
        """Gives everything back; waits for what is enqueued."""
        self._nccl.close()


class Line:
    """Two such ways, since messages of one communicator never pass each other.

    NOTE two ways. Partials go up to the last node, results come down. What a rank enqueues on one
    way waits only for the call's stream and for its neighbours' messages on the same way.

    Attributes:
        up, down: the ways.
    """

    def __init__(self, up: Way, down: Way) -> None:
        self.up, self.down = up, down
        self._ended = False

    @classmethod
    def connect(cls, nodes: Nodes, ordinal: int, *, owner: bool, timeout: float) -> Line | None:
        """Connects the ranks that own the same shard. A collective of all ranks of the job.

        Args:
            nodes: where the ranks are; a rank's line is its number on its node.
            ordinal: this rank's GPU.
            owner: whether it owns a shard; others get None.
            timeout: seconds; NCCL itself would wait without limit.

        Raises:
            NotSupported: NCCL is missing or too old; every rank raises.
            Timeout, DeviceError: NCCL could not connect; every rank raises.
        """
        everyone, problem, ways = nodes.everyone, None, []

        def exchange(payload: dict[str, Any]) -> list[dict[str, Any]]:
            brought = {"line": nodes.local_rank if owner else -1, **payload}
            parts = [part.payload for part in everyone.exchange("connecting NCCL", brought)]
            return [part for part in parts if part["line"] == nodes.local_rank]

        def meet() -> Nccl:
            ranks, nranks = [nodes.this], len(nodes.sizes)
            return Nccl([ordinal], ranks=ranks, nranks=nranks, exchange=exchange)

        for _ in range(2):
            try:
                if owner:
                    what = (
                        f"NCCL to connect {len(nodes.sizes)} nodes; NCCL_DEBUG=INFO shows what it "
                        "tries, NCCL_SOCKET_IFNAME chooses the interface"
                    )
                    ways.append(Way(_within(timeout, meet, what), ordinal))
                else:
                    exchange({})
            except Error as error:
                problem = error
            try:
                everyone.exchange("NCCL is connected", error=problem)
            except DeviceError as failure:  # its own problem keeps its kind
                raise problem or failure from failure
        return cls(*ways) if owner else None

    def abort(self) -> None:
        """Ends all that is enqueued; from any thread. Idempotent.

        Down first: a seed that is aborted on its way up is folded like any other, and what comes of
        that must not be sent.
        """
        if not self._ended:
            self._ended = True
            for way in (self.down, self.up):
                way.abort()

    def check(self) -> None:
        """Raises DeviceError if NCCL has found a fault; does not wait."""
        if not self._ended:
            for way in (self.up, self.down):
                way.check()

    def close(self) -> None:
        """Gives everything back; waits for what is enqueued."""
        for way in (self.up, self.down):
            way.close()


def _within(timeout: float, make: Callable[[], T], what: str) -> T:
    """What a function returns that cannot be told to give up: it is left behind at the limit."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(make())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="gpuallreduce-connect", daemon=True)
    thread.start()
    thread.join(timeout)
    if raised:
        raise raised[0]
    if not found:
        raise Timeout(f"waited {timeout:g} s for {what}")
    return found[0]
