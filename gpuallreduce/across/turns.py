"""The turns that chunks of a call take on the streams of one GPU: shards are folded and gathered on
the call's stream, and travel between nodes on two streams beside it.

Knows nothing of how ranks agree on a call, nor of what ends one that cannot go on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gpuallreduce import args
from gpuallreduce.across.chunks import Chunk
from gpuallreduce.across.line import Line, Message, Way
from gpuallreduce.across.progress import Progress
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.across.slots import Slots
from gpuallreduce.plan import Request, Shards
from gpuallreduce.types import DTYPES

__all__ = ["Call", "Turns"]


@dataclass
class Call:
    """One call: where its array lies, and its chunks."""

    request: Request
    source: int
    target: int
    shards: Shards
    chunks: list[Chunk]
    lag: int
    kernels: Any  # the stream that the call is ordered on
    slots: Slots | None

    def address(self, base: int, turn: int) -> int:
        """Where a chunk begins in an array."""
        return base + self.chunks[turn].first * self.request.dtype.itemsize


class Stage(Protocol):
    """Records what a block enqueues on a stream, if stages are recorded."""

    def __call__(
        self, stream: Any, name: str, turn: int, *, message: bool = False
    ) -> AbstractContextManager[None]:
        """See CudaAcross."""


class Turns:
    """Enqueues the turns of calls of one rank.

    NOTE turns on streams. As in NOTE chain of nodes, with three streams. In turn t the call's own
    stream folds chunk t and gathers chunk t - lag. The way up sends partial t - 1 and receives seed
    t + 1 meanwhile; the way down receives result t and sends result t - 1 on. Turn t of node j is
    started when turn t - 1 is done there, which needs no more than turn t + 1 of node j - 1 and
    turn t - 3 of node j + 1 to have started on the way up, and turn t of node j + 1 and t - 2 of
    node j - 1 on the way down: t + 2 j there, and t - j here, only fall, so waits form no circle.

    NOTE one queue. Streams may share a queue of the GPU (CUDA_DEVICE_MAX_CONNECTIONS), where what
    was enqueued first holds up the rest. So messages down are enqueued as many turns later as there
    are nodes behind: then no rank has in front of one message another that needs a later one
    elsewhere, whichever streams share.

    NOTE slots between nodes. A slot is used again lag + 2 turns later, or after more. Nobody folds
    chunk t before chunk t - lag - 1 is gathered, so its result had come back: partial and result of
    that chunk had been received, thus sent. And no result of chunk t comes before chunk t is folded
    here. So slots need no waits but those for what they hold. At its end a call's own stream waits
    for both ways; a capture demands it.
    """

    def __init__(
        self,
        here: int,
        nnodes: int,
        shards: NodeShards,
        *,
        line: Line | None,
        progress: Progress,
        stage: Stage,
    ) -> None:
        """For a rank.

        Args:
            here: its node.
            nnodes: nodes of the job.
            shards: of the node's ranks.
            line: of a rank that owns a shard.
            progress: which such a rank tells of its turns.
            stage: records them.
        """
        self._here, self._nodes_behind = here, nnodes - 1 - here
        self._shards, self._line, self._progress, self._stage = shards, line, progress, stage

    def run(self, call: Call) -> None:
        """Enqueues a whole call; what the caller does next is not yet behind the ways."""
        for turn in range(len(call.chunks) + call.lag):
            self._turn(call, turn)

    def _turn(self, call: Call, turn: int) -> None:
        in_rank_order, line, slots = call.request.order == "rank", self._line, call.slots
        if line is not None and slots is not None and in_rank_order:
            if turn == 0:
                self._lift(call, line.up, slots, -1)
            self._lift(call, line.up, slots, turn)
        if turn < len(call.chunks):
            self._fold(call, turn)
        if line is not None and slots is not None:
            if in_rank_order:
                below = turn - self._nodes_behind
                if below >= 0:  # see NOTE one queue
                    self._lower(call, line.down, slots, below)
            elif turn < len(call.chunks):
                self._combine(call, line.up, slots, turn)
        if turn >= call.lag:
            self._gather(call, turn - call.lag)

    def _lift(self, call: Call, way: Way, slots: Slots, turn: int) -> None:
        """Sends the partial of the turn before, and receives the seed of the next."""
        sends, receives, here = [], [], self._here
        if self._nodes_behind and 1 <= turn <= len(call.chunks):
            sends.append(self._wide(call, here + 1, slots.partial(turn - 1), turn - 1))
        if self._here and turn + 1 < len(call.chunks):
            receives.append(self._wide(call, here - 1, slots.seed(turn + 1), turn + 1))
        if sends or receives:
            if turn >= 1:
                way.stream.wait_event(slots.folded[(turn - 1) % slots.count])
            with self._stage(way.stream, "up", turn, message=True):
                way.move(sends, receives)
            slots.lifted[turn % slots.count].record(way.stream)

    def _fold(self, call: Call, turn: int) -> None:
        slots, seed, output = call.slots, 0, 0
        if slots is not None:
            output = slots.result(turn) if call.shards.rounded else slots.partial(turn)
            if call.shards.seeded:
                seed = slots.seed(turn)
                call.kernels.wait_event(slots.lifted[(turn - 1) % slots.count])
        with self._stage(call.kernels, "reduce", turn):
            self._shards.reduce(
                [call.address(call.source, turn)],
                [output],
                dtype=call.request.dtype,
                op=call.request.op,
                count=call.chunks[turn].count,
                shards=call.shards,
                seeds=[seed] if call.shards.seeded else None,
            )
        self._tick(args.NODES_FOLDED, call.kernels)
        if slots is not None:
            slots.folded[turn % slots.count].record(call.kernels)

    def _lower(self, call: Call, way: Way, slots: Slots, turn: int) -> None:
        """Receives the result of this turn and sends that of the turn before on; the last node
        sends what it has just folded.
        """
        sends, receives, here, nturns = [], [], self._here, len(call.chunks)
        if not self._nodes_behind:
            if turn < nturns:
                way.stream.wait_event(slots.folded[turn % slots.count])
                sends.append(self._narrow(call, here - 1, slots.result(turn), turn))
        else:
            if turn < nturns:
                receives.append(self._narrow(call, here + 1, slots.result(turn), turn))
            if self._here and 1 <= turn <= nturns:
                sends.append(self._narrow(call, here - 1, slots.result(turn - 1), turn - 1))
        if sends or receives:
            with self._stage(way.stream, "down", turn, message=True):
                way.move(sends, receives)
            slots.lowered[turn % slots.count].record(way.stream)

    def _combine(self, call: Call, way: Way, slots: Slots, turn: int) -> None:
        """Lets NCCL sum the nodes' shards."""
        way.stream.wait_event(slots.folded[turn % slots.count])
        with self._stage(way.stream, "engine", turn, message=True):
            way.all_reduce(slots.result(turn), call.chunks[turn].owned, call.request)
        slots.lowered[turn % slots.count].record(way.stream)

    def _gather(self, call: Call, turn: int) -> None:
        slots, result = call.slots, 0
        if slots is not None:
            result = slots.result(turn)
            if call.request.order == "any" or self._nodes_behind:
                call.kernels.wait_event(slots.lowered[turn % slots.count])
        with self._stage(call.kernels, "gather", turn):
            self._shards.gather(
                [result],
                [call.address(call.target, turn)],
                dtype=call.request.dtype,
                count=call.chunks[turn].count,
                shards=call.shards,
                in_place=call.request.in_place,
            )
        self._tick(args.NODES_GATHERED, call.kernels)

    def _wide(self, call: Call, node: int, address: int, turn: int) -> Message:
        itemsize = DTYPES[call.request.dtype.accumulator].itemsize
        return node, address, call.chunks[turn].owned * itemsize

    def _narrow(self, call: Call, node: int, address: int, turn: int) -> Message:
        return node, address, call.chunks[turn].owned * call.request.dtype.itemsize

    def _tick(self, word: int, kernels: Any) -> None:
        if self._line is not None:
            self._progress.tick(word, kernels)
