"""All-reduce over several nodes, as one host rank takes part in it: shards are folded and gathered
inside the node, chunk by chunk, while other chunks travel between the nodes.

Knows nothing of how a node's ranks address each other, nor of how an engine moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpuallreduce.across.base import Across
from gpuallreduce.across.chunks import Chunk, chunks_of
from gpuallreduce.across.host_moves import HostMoves, address_of, aligned
from gpuallreduce.across.in_step import GRACE_S
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.args import GarHeader
from gpuallreduce.arrays import Bound
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.errors import Aborted, MismatchError
from gpuallreduce.fabric.mpi import Mpi
from gpuallreduce.fabric.mpi import Request as Message
from gpuallreduce.fabric.mpi_reductions import combine, one_nan
from gpuallreduce.fabric.pump import Pump
from gpuallreduce.plan import Plan, Request, Shards
from gpuallreduce.types import DTYPES, OPS

__all__ = ["HostAcross"]

Array = np.ndarray[Any, Any]
_UNTRACED = nullcontext()


@dataclass
class _Flight:
    """One chunk on its way, on a rank that owns a shard of it.

    Attributes:
        seed, partial: accumulators from the node before, and on to the next.
        theirs: of two nodes in no order, the other's elements, then finished ones.
        result: finished elements.
        sends: what must be done before the buffers are used again.
        awaited: what is to come: the seed, then the result.
    """

    seed: Array
    partial: Array
    result: Array
    theirs: Array
    sends: list[Message] = field(default_factory=list)
    awaited: dict[str, Message] = field(default_factory=dict)


@dataclass
class _Call:
    """One call: where its array lies, its chunks, and the flights that they take in turn."""

    request: Request
    source: int
    target: int
    shards: Shards
    chunks: list[Chunk]
    flights: list[_Flight]

    def flight(self, turn: int) -> _Flight:
        """The flight of a chunk."""
        return self.flights[turn % len(self.flights)]

    def address(self, base: int, turn: int) -> int:
        """Where a chunk begins in an array."""
        return base + self.chunks[turn].first * self.request.dtype.itemsize


class HostAcross(Across):
    """As Across, for a host rank.

    NOTE chain of nodes. Node j folds its ranks onto the partial of node j - 1, in the accumulator,
    and hands it on; the last node rounds, and results travel back. So the fold is that of one node
    with all ranks. In turn t a node folds chunk t and gathers chunk t - lag. Messages between two
    nodes are in the order of chunks, in each direction. In turn t node j waits for what node j - 1
    sends in its turn t and for what node j + 1 sends in its turn t - 2, or longer ago where a hop
    has more turns, so waits form no circle.
    """

    engine = "MPI"

    def __init__(self, nodes: Nodes, shards: NodeShards, mpi: Mpi) -> None:
        """Connects this rank with the owners of the same shard on other nodes; a collective.

        Args:
            nodes: where the ranks of the job are.
            shards: of this node's ranks.
            mpi: all ranks of the job.
        """
        super().__init__(nodes, shards)
        self._aborted = False
        self._calls = 0
        self._pump = Pump(self._in_step.listen)
        self._moves = HostMoves(mpi, self._watch, self._wait)
        self._line: Mpi | None = None
        if self.owner:
            line = [nodes.ranks_of(node)[nodes.local_rank] for node in range(self.nnodes)]
            self._line = mpi.over(line, tag=nodes.local_rank)

    def allreduce(
        self,
        source: int,
        target: int,
        plan: Plan,
        *,
        detail: int = 0,
        asked: Request | None = None,
    ) -> None:
        """See Across."""
        with self._in_call(plan, detail, asked or plan.request):
            call = self._call(source, target, plan)
            lag = self.lag(plan)
            if plan.request.order == "rank":
                self._expect_seed(call, 0)
            for turn in range(len(call.chunks) + lag):
                if turn < len(call.chunks):
                    self._reduce(call, turn)
                if turn >= lag:
                    self._gather(call, turn - lag)
            for flight in call.flights:
                self._settle(flight)

    def move(self, bound: Bound, plan: Plan, *, detail: int = 0) -> None:
        """See Across."""
        with self._in_call(plan, detail, plan.request):
            if not self.neighbours_suffice:
                self._moves.meet(self.shards.timeout)  # see NOTE all before data
            request = plan.request
            if request.collective == "broadcast":
                self._moves.broadcast(bound, request.nbytes, request.root)
            else:
                self._moves.all_gather(bound, request.nbytes)

    @contextmanager
    def _in_call(self, plan: Plan, detail: int, asked: Request) -> Iterator[None]:
        """A call, which begins once this rank's node and its neighbours are known to make it too;
        if it fails, it ends on all ranks.
        """
        self._pump.begin()
        try:
            self._in_step.meet(asked, detail, self.timeout)
            self._agree(self.header(replace(plan, request=asked), detail))
            yield
            self._in_step.ended()
        except BaseException as error:  # KeyboardInterrupt too: the others must not wait
            self._end(error)
            if self._aborted and isinstance(error, Aborted):  # it may be of a message
                raise self.shards.orchestrator.diagnose() from error
            raise
        finally:
            self._pump.end()

    def check_pair(self, plan: Plan) -> None:
        """See Across."""
        if self._line is not None:
            pair = "sum" if plan.request.op.name == "avg" else plan.request.op.name
            self._line.check_pair(plan.request.dtype.name, pair)

    def abort(self) -> None:
        """See Across."""
        self._aborted = self._in_step.hurried = True
        orchestrator = self.shards.orchestrator
        if not orchestrator.aborted:  # else another rank's reason must stay the first
            orchestrator.abort()
        self._end(orchestrator.diagnose())

    def _end(self, error: BaseException) -> None:
        self._in_step.give_up(error)
        self.shards.orchestrator.abort()
        if self._line is not None:
            self._line.abort()
        self._moves.abort()
        self.nodes.everyone.interrupt()  # nobody is to wait for this rank in a stage

    def close(self) -> None:
        """See Across."""
        self._pump.close()
        if self._line is not None:
            self._line.close()
        self._moves.close()
        self._in_step.leave()
        self.nodes.everyone.close()

    # ---- before the first turn ----------------------------------------------------------------

    def _agree(self, header: GarHeader) -> None:
        """Compares the call with those of the neighbouring nodes; owners of shards do it."""
        if self._line is None:
            return
        self._calls += 1
        header.sequence = self._calls
        mine = np.frombuffer(bytes(header), np.uint8)
        here = self.nodes.this
        around = [node for node in (here - 1, here + 1) if 0 <= node < self.nnodes]
        theirs = [np.empty_like(mine) for _ in around]
        messages = [self._receive(node, theirs[i]) for i, node in enumerate(around)]
        messages += [self._send(node, mine) for node in around]
        limit = None if self.timeout is None else self.timeout + GRACE_S
        for i, message in enumerate(messages):
            peer = self.peer_name(around[i % len(around)])
            message.what = f"{peer} to make the same call" if i < len(around) else message.what
            self._wait(message, limit)  # see NOTE who gives up first
        for node, other in zip(around, theirs, strict=True):
            if other.tobytes() != mine.tobytes():
                found = GarHeader.from_buffer_copy(other.tobytes())
                raise MismatchError(self.difference(node, header, found))

    def _call(self, source: int, target: int, plan: Plan) -> _Call:
        request = plan.request
        in_rank_order = request.order == "rank"
        here, last = self.nodes.this, self.nnodes - 1
        shards = Shards(
            self.nshards,
            seeded=in_rank_order and here > 0,
            rounded=not in_rank_order or here == last,
            fold_ranks=request.nranks,
        )
        itemsize, owner = request.dtype.itemsize, self.nodes.local_rank
        chunks = chunks_of(request.count, itemsize, self.nshards, owner, plan.config.chunk_count)
        flights = []
        if self._line is not None:
            wide = DTYPES[request.dtype.accumulator].numpy
            most = max(chunk.owned for chunk in chunks)
            for _ in range(min(len(chunks), self.lag(plan) + 2)):
                seed = aligned(most if shards.seeded else 0, wide)
                partial = aligned(0 if shards.rounded else most, wide)
                result = aligned(most, request.dtype.numpy)
                theirs = aligned(most if self._swaps(request) else 0, request.dtype.numpy)
                flights.append(_Flight(seed, partial, result, theirs))
        return _Call(request, source, target, shards, chunks, flights)

    # ---- a turn; in order rank see NOTE chain of nodes ----------------------------------------

    def _reduce(self, call: _Call, turn: int) -> None:
        here, chunk = self.nodes.this, call.chunks[turn]
        seed = output = 0
        if call.flights:
            flight = call.flight(turn)
            if call.shards.seeded:
                self._expect_seed(call, turn + 1)
                with self._span("wait seed", call, turn):
                    self._wait(flight.awaited.pop("seed"))
                seed = address_of(flight.seed)
            self._settle(flight)
            output = address_of(flight.result if call.shards.rounded else flight.partial)
        with self._span("reduce", call, turn):
            self.shards.reduce(
                [call.address(call.source, turn)],
                [output],
                dtype=call.request.dtype,
                op=call.request.op,
                count=chunk.count,
                shards=call.shards,
                seeds=[seed] if call.shards.seeded else None,
            )
        if not call.flights:
            return
        if self._swaps(call.request):
            theirs = flight.theirs[: chunk.owned]
            flight.awaited["result"] = self._receive(1 - here, theirs)
            flight.sends.append(self._send(1 - here, flight.result[: chunk.owned]))
        elif call.request.order == "any":
            flight.awaited["result"] = self._start_engine(flight.result[: chunk.owned], call)
        elif not call.shards.rounded:
            result = flight.result[: chunk.owned]
            flight.awaited["result"] = self._receive(here + 1, result)
            flight.sends.append(self._send(here + 1, flight.partial[: chunk.owned]))
        else:
            flight.sends.append(self._send(here - 1, flight.result[: chunk.owned]))

    def _gather(self, call: _Call, turn: int) -> None:
        here, chunk = self.nodes.this, call.chunks[turn]
        result = 0
        if call.flights:
            flight = call.flight(turn)
            if "result" in flight.awaited:
                with self._span("wait result", call, turn):
                    self._wait(flight.awaited.pop("result"))
            if call.request.order == "rank" and 0 < here < self.nnodes - 1:
                flight.sends.append(self._send(here - 1, flight.result[: chunk.owned]))
            result = address_of(flight.result)
            if self._swaps(call.request):
                self._combine(call.request, flight.result, flight.theirs, chunk.owned)
                result = address_of(flight.theirs)
        with self._span("gather", call, turn):
            self.shards.gather(
                [result],
                [call.address(call.target, turn)],
                dtype=call.request.dtype,
                count=chunk.count,
                shards=call.shards,
                in_place=call.request.in_place,
            )

    def _swaps(self, request: Request) -> bool:
        """Whether two nodes give each other what they folded: as few bytes as a reduction by
        halves, and one hop instead of two. Both fold alike, so they get equal bits.
        """
        return request.order == "any" and self.nnodes == 2

    def _combine(self, request: Request, mine: Array, theirs: Array, owned: int) -> None:
        """Finishes a shard of two nodes, in ``theirs``: mine is still being sent."""
        pair = [mine[:owned], theirs[:owned]]
        lower, upper = pair if self.nodes.this == 0 else reversed(pair)
        op = "sum" if request.op.name == "avg" else request.op.name
        combine(lower, upper, request.dtype, op, into=pair[1])
        one_nan(pair[1], request.dtype)

    def _expect_seed(self, call: _Call, turn: int) -> None:
        """Posts the receive of a seed, if the node has one and the chunk exists."""
        if call.flights and call.shards.seeded and turn < len(call.chunks):
            flight, owned = call.flight(turn), call.chunks[turn].owned
            flight.awaited["seed"] = self._receive(self.nodes.this - 1, flight.seed[:owned])

    def _start_engine(self, shard: Array, call: _Call) -> Message:
        """The engine's own all-reduce of a shard over the nodes; each has already divided by all
        ranks for ``avg``.
        """
        assert self._line is not None
        op = OPS["sum"] if call.request.op.name == "avg" else call.request.op
        message = self._line.iall_reduce(shard, call.request.dtype, op)
        return self._watch(message, "engine", bytes=shard.nbytes)

    def _span(self, name: str, call: _Call, turn: int) -> AbstractContextManager[None]:
        """Records a stage of a chunk, if stages are recorded."""
        if self.trace is None:
            return _UNTRACED
        nbytes = call.chunks[turn].count * call.request.dtype.itemsize
        return self.trace.span(name, chunk=turn, bytes=nbytes)

    # ---- messages -----------------------------------------------------------------------------

    def _send(self, node: int, buffer: Array) -> Message:
        assert self._line is not None
        return self._watch(self._line.isend(node, buffer), "send", node=node, bytes=buffer.nbytes)

    def _receive(self, node: int, buffer: Array) -> Message:
        assert self._line is not None
        message = self._line.irecv(node, buffer)
        return self._watch(message, "receive", node=node, bytes=buffer.nbytes)

    def _watch(self, message: Message, name: str, **values: int) -> Message:
        """Lets the pump drive a message, and records it if stages are recorded."""
        if self.trace is not None:
            self.trace.watch(message, name, **values)
        self._pump.watch(message)
        return message

    def _settle(self, flight: _Flight) -> None:
        """Waits until a flight's buffers are free."""
        for message in flight.sends:
            self._wait(message)
        flight.sends.clear()

    def _wait(self, message: Message, limit: float | None = None) -> None:
        self._in_step.starts_to_wait()
        self._pump.wait(message, limit or self.timeout, self._in_step.look)
