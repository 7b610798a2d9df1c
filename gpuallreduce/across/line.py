"""One rank's way to the owners of the same shard on other nodes: NCCL on streams of its own.

Knows nothing of what travels, nor of when.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, on_device
from gpuallreduce.errors import DeviceError, Error, NotSupported, Timeout
from gpuallreduce.fabric.nccl import Nccl, Transfer
from gpuallreduce.fabric.nccl_ending import abort_together
from gpuallreduce.plan import Request
from gpuallreduce.types import OPS

__all__ = ["Line", "Message", "Way", "agreed", "connected", "within"]

T = TypeVar("T")
Message = tuple[int, int, int]  # node at the other end, address, bytes
WARM_UP_BYTES = 8
IMPLICIT_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


class Way:
    """A stream, and an NCCL communicator of which all work is on it. Ranks in it are node numbers.

    Attributes:
        stream: what is enqueued here runs in order, beside the call's own stream.
    """

    def __init__(self, nccl: Nccl, ordinal: int) -> None:
        self._nccl = nccl
        with on_device(ordinal), cuda_errors("making a stream"):
            made = [cupy_module().cuda.Stream(non_blocking=True) for _ in range(2)]
        self._usual, self._captured = made
        self.use(captured=False)

    def use(self, *, captured: bool) -> None:
        """Chooses the stream of the next call. One for captured calls: once a call is captured, its
        stream is so until the capture ends, and other calls may come before that.
        """
        self.stream: Any = self._captured if captured else self._usual
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

    def warm_up(self, around: Sequence[int], buffers: Sequence[int]) -> None:
        """Sends a few bytes each way and sums one, and waits for it: NCCL connects two ranks at
        their first message, on the host, where nothing could end it.

        Args:
            around: the neighbouring nodes.
            buffers: addresses of WARM_UP_BYTES: this rank's, then one for each neighbour.
        """
        mine, *theirs = buffers
        self.move(
            [(node, mine, WARM_UP_BYTES) for node in around],
            [(node, at, WARM_UP_BYTES) for node, at in zip(around, theirs, strict=True)],
        )
        at = [mine]
        self._nccl.all_reduce(at, at, 1, dtype="uint8", op="max", streams=self._streams)
        with cuda_errors("NCCL's first messages"):
            self.stream.synchronize()

    def check(self) -> None:
        """Raises DeviceError if NCCL has found a fault; does not wait."""
        self._nccl.check()

    def tell_abort(self) -> None:
        """See nccl_ending.Endable."""
        self._nccl.tell_abort()

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
        _check_order(nodes)
        ways: list[Way] = []
        group, rank, nranks = nodes.local_rank if owner else None, nodes.this, len(nodes.sizes)
        with ExitStack() as stack:
            stack.callback(lambda: abort_together(ways, lambda: None))
            for _ in range(2):
                way = connected(
                    nodes,
                    ordinal,
                    lambda nccl: Way(nccl, ordinal),
                    group=group,
                    rank=rank,
                    nranks=nranks,
                    timeout=timeout,
                )
                ways += [] if way is None else [way]
            stack.pop_all()
        return cls(*ways) if owner else None

    def warm_up(self, around: Sequence[int], at: int, timeout: float) -> None:
        """Lets NCCL connect this rank with its neighbours; see Way.

        Args:
            around: the neighbouring nodes.
            at: address of as many times WARM_UP_BYTES as there are neighbours, and once more.
            timeout: seconds.

        Raises:
            Timeout, DeviceError: NCCL could not.
        """
        buffers = [at + i * WARM_UP_BYTES for i in range(1 + len(around))]

        def run() -> None:
            for way in (self.up, self.down):
                way.warm_up(around, buffers)

        within(timeout, run, f"NCCL's first messages with {len(around)} neighbouring nodes")

    def tell_abort(self) -> None:
        """See nccl_ending.Endable."""
        self._ended = True
        for way in (self.up, self.down):
            way.tell_abort()

    def check(self) -> None:
        """Raises DeviceError if NCCL has found a fault; does not wait."""
        if not self._ended:
            for way in (self.up, self.down):
                way.check()

    def close(self) -> None:
        """Gives everything back; waits for what is enqueued."""
        for way in (self.up, self.down):
            way.close()


def connected(
    nodes: Nodes,
    ordinal: int,
    make: Callable[[Nccl], T],
    *,
    group: int | None,
    rank: int,
    nranks: int,
    timeout: float,
) -> T | None:
    """Connects groups of ranks by NCCL, each its own; a collective of all ranks of the job.

    Args:
        nodes: where the ranks are.
        ordinal: this rank's GPU.
        make: what is made of the connection; its failure is all ranks' as well.
        group: ranks that name the same number are connected; None: only comes.
        rank, nranks: this rank's number in its group, and the ranks there.
        timeout: seconds; NCCL itself would wait without limit.

    Raises:
        NotSupported: NCCL is missing or too old; every rank raises.
        Timeout, DeviceError: NCCL could not connect; every rank raises.
    """
    everyone = nodes.everyone
    problem: Error | None = None
    made: T | None = None

    def exchange(payload: dict[str, Any]) -> list[dict[str, Any]]:
        brought = {"group": group, **payload}
        found = everyone.exchange("connecting NCCL", brought, timeout=timeout)
        return [part.payload for part in found if part.payload["group"] == group]

    def meet() -> Nccl:
        return Nccl([ordinal], ranks=[rank], nranks=nranks, exchange=exchange)

    try:
        if group is None:
            exchange({})
        else:
            what = (
                f"NCCL to connect {len(nodes.sizes)} nodes; NCCL_DEBUG=INFO shows what it tries, "
                "NCCL_SOCKET_IFNAME chooses the interface"
            )
            made = make(within(timeout, meet, what))
    except Error as error:
        problem = error
    agreed(nodes, problem, "NCCL is connected", timeout)
    return made


def agreed(nodes: Nodes, problem: Error | None, stage: str, timeout: float | None = None) -> None:
    """Raises on all ranks if one of them has a problem; its own keeps its kind. A collective."""
    try:
        nodes.everyone.exchange(stage, error=problem, timeout=timeout)
    except DeviceError as failure:
        raise problem or failure from failure


def _check_order(nodes: Nodes) -> None:
    problem = None
    if os.environ.get(IMPLICIT_ORDER) == "1":
        problem = NotSupported(
            f"{IMPLICIT_ORDER}=1 lets NCCL run one message after the other as each rank enqueues "
            "them, but partials and results go between nodes at once: unset it"
        )
    agreed(nodes, problem, "NCCL's settings")


def within(timeout: float, make: Callable[[], T], what: str) -> T:
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
    if thread.is_alive():
        raise Timeout(f"waited {timeout:g} s for {what}")
    return found[0]
