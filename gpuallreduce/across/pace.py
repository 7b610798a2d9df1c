"""The pace of a call between nodes: how long its chunks are and how many are under way at once, so
that it takes the least time by the model of ``gpuallreduce simulate``.

Pure arithmetic on rates that all ranks hold alike: reads nothing, and knows no devices or engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpuallreduce.across.chunks import chunk_count, depth_of
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.plan import LINE_BYTES

__all__ = ["SHARD_CHUNK_BYTES", "Pace", "Ways", "pace"]

# What is tried, unless the array is shorter: below, MPI over TCP was slower at any rate.
SHARD_CHUNK_BYTES = (64 << 10, 16 << 20)
SLOT_GRAIN_BYTES = 128 * 16  # shards take whole slots: multiples of 128 elements, however wide
LEAST_DEPTH = 4  # without an order of nodes: what comes late once does not hold up the others
MOST_TURNS = 16  # of a hop
NEARLY = 1.01  # of chunks that cost as good as the same the shortest hold the least memory


@dataclass(frozen=True)
class Ways:
    """The ways between and inside nodes, the same numbers on all ranks. Rates are one direction.

    Attributes:
        nnodes: nodes.
        nshards: ranks of a node that own a shard and send it to other nodes.
        nlocal: ranks of the largest node.
        net_gbps: of the network, for each of a node's owners when all send.
        card_gbps: for an owner while no other sends.
        net_us: from a message's last byte sent to the receiver's waiting rank.
        message_us: what a message, or a call of the engine, costs its sender on its own.
        link_gbps: what one rank sends to those of its node together.
        memory_gbps: what one rank reads and writes together.
        hop_us: until a rank has seen what another of its node wrote.
        launch_us: what starting a kernel costs.
        messages: many messages are under way at once, and two nodes swap what they folded; else an
            engine's calls follow each other.
        net_through_link: what goes to other nodes takes a rank's link inside its node too.
        least_turns: of a hop.
        buffer_bytes: what a rank may hold of chunks under way.
        most_shard_bytes: the longest shard of a chunk, whatever the model says of longer ones.
    """

    nnodes: int
    nshards: int
    nlocal: int
    net_gbps: float
    card_gbps: float
    net_us: float
    message_us: float
    link_gbps: float
    memory_gbps: float
    hop_us: float
    launch_us: float
    messages: bool
    net_through_link: bool = False
    least_turns: int = 1
    buffer_bytes: int = 64 << 20
    most_shard_bytes: int = SHARD_CHUNK_BYTES[1]


class Pace(NamedTuple):
    """What was decided.

    Attributes:
        chunk_count: elements of a chunk of the array.
        depth: chunks that are under way between nodes at once.
        cost_us: what the call takes.
    """

    chunk_count: int
    depth: int
    cost_us: float


class _Stages(NamedTuple):
    """Of one chunk, in us.

    Attributes:
        reduce, gather: inside a node.
        wire: how long a rank's share of the network is taken.
        there, back: until the next node has what was folded, and the one before the result.
    """

    reduce: float
    gather: float
    wire: float
    there: float
    back: float


def _stages(order: str, shard: float, wide: float, ways: Ways) -> _Stages:
    """See ``simulation.nodes``, which plays the same stages.

    Args:
        order: of the sum.
        shard: bytes of a shard of the chunk.
        wide: bytes of a partial for each byte of an element.
        ways: between and inside nodes.
    """
    peers, memory, net = ways.nlocal - 1, ways.memory_gbps * 1e3, ways.net_gbps * 1e3
    push = ways.hop_us + peers * shard * max(1 / (ways.link_gbps * 1e3), 2 / memory) if peers else 0
    in_order = order == "rank"
    fold = ways.nlocal + (2 * wide if in_order else 1)
    swaps = ways.messages and ways.nnodes == 2
    keep = 2 * peers if peers else 2
    if swaps and not in_order:
        keep += 3  # two nodes' shards become one
    reduce = ways.launch_us + push + fold * shard / memory
    gather = ways.launch_us + push + keep * shard / memory
    if in_order:
        there, back = wide * shard, shard
        # The first node sends partials only, the last one results only, others both.
        sent, each = (max(there, back) if ways.nnodes == 2 else there + back), max(there, back)
        once = ways.message_us + ways.net_us
        way, home = there / net + once, back / net + once
    else:
        steps = 1 if swaps else 2 * (ways.nnodes - 1)
        sent = each = shard if swaps else steps * shard / ways.nnodes
        way, home = sent / net + ways.message_us + steps * ways.net_us, 0.0
    alone = ways.message_us + each / (ways.card_gbps * 1e3)
    if not in_order:
        alone += steps * ways.net_us
    if ways.messages:  # their costs add up on a node's cores: no rank makes use of another's
        wire = sent / net + ways.message_us * (2 if in_order and ways.nnodes > 2 else 1)
    else:
        wire = max(sent / net, alone)
    if ways.net_through_link:  # messages wait behind what the rank sends inside its node
        inside = 2 * peers * shard / (ways.link_gbps * 1e3)
        wire = max(wire, inside + sent / (ways.link_gbps * 1e3)) if in_order else wire + inside
    return _Stages(reduce, gather, wire, way, home)


def _turns(stages: _Stages, ways: Ways) -> int:
    """Turns of a hop, as many as it lasts: a partial goes on and its result comes back while others
    are folded and sent.
    """
    busy = max(stages.reduce + stages.gather, stages.wire)
    needed = -(-(stages.there + stages.reduce + stages.back) // (2 * busy))
    return max(ways.least_turns, min(MOST_TURNS, int(needed)))


def _held(order: str, wide: float, ways: Ways) -> float:
    """Bytes that a turn holds for each byte of a shard: a seed, a partial and a result; what was
    folded here and what came; or what an engine sums in place.
    """
    if order == "rank":
        return 1 + 2 * wide
    return 2 if ways.messages else 1


def _depth(order: str, shard: int, wide: float, ways: Ways, stages: _Stages) -> int | None:
    """As deep as pays and as there is room for; None if there is no room at all."""
    slot = -(-shard // SLOT_GRAIN_BYTES) * SLOT_GRAIN_BYTES
    room = int(ways.buffer_bytes // (slot * _held(order, wide, ways))) - 2
    if order == "rank":
        turns = _turns(stages, ways)
        while turns > ways.least_turns and depth_of(ways.nnodes, turns) > room:
            turns -= 1
        depth = depth_of(ways.nnodes, turns)
        return depth if depth <= room else None
    busy = max(stages.reduce + stages.gather, stages.wire)
    depth = min(room, max(LEAST_DEPTH, int(stages.there // busy) + 2))
    return depth if depth >= 2 else None


def _time_us(order: str, chunks: float, depth: int, ways: Ways, stages: _Stages) -> float:
    """Of a call of so many chunks.

    NOTE pace. The slowest of three sets the time of a turn: a rank's kernels, its share of the
    network, and the way there and back, for which there are as many turns as chunks are under way.
    The last chunk takes its whole way after all others.
    """
    reduce, gather, wire, there, back = stages
    more = max(0.0, chunks - 1)
    if order == "rank":
        hops = ways.nnodes - 1
        trip = hops * (there + reduce + back)
        lag = depth if hops == 1 else depth - 1
        turn = max(reduce + gather, wire, trip / lag if chunks > lag else 0.0)
        return more * turn + reduce + trip + gather
    way = there + gather
    return max(
        chunks * (reduce + gather),
        chunks * reduce + max(0.0, more - depth) * gather + way,
        more * max(wire, there / depth) + reduce + way,
    )


def _tried(shard_bytes: int, room_bytes: int, ways: Ways) -> Iterator[int]:
    """Bytes of a chunk's shard: powers of two and the most that there is room for, evened out over
    the array, in whole cache lines.
    """
    each, most = SHARD_CHUNK_BYTES
    most = min(most, ways.most_shard_bytes)
    most = max(each, min(most, room_bytes // SLOT_GRAIN_BYTES * SLOT_GRAIN_BYTES))
    while True:
        pieces = -(-shard_bytes // each)
        even = -(-shard_bytes // pieces)
        yield -(-even // LINE_BYTES) * LINE_BYTES
        if pieces == 1 or each == most:
            return
        each = min(2 * each, most)


def pace(
    order: str,
    nbytes: int,
    itemsize: int,
    wide_itemsize: int,
    ways: Ways,
    *,
    chunk_bytes: int | None = None,
) -> Pace:
    """Chunk and depth of the least time.

    Args:
        order: ``rank`` or ``any``.
        nbytes: of one rank's array.
        itemsize: bytes of an element.
        wide_itemsize: bytes of its accumulator.
        ways: between and inside nodes.
        chunk_bytes: of a chunk of the array, if it was asked for.

    Raises:
        InvalidArgument: chunks of ``chunk_bytes`` hold no element, or have no room.
    """
    shard_bytes, wide = max(1, -(-nbytes // ways.nshards)), wide_itemsize / itemsize
    least_depth = depth_of(ways.nnodes, ways.least_turns) if order == "rank" else 2

    def at(shard: int) -> tuple[int | None, float]:
        stages = _stages(order, shard, wide, ways)
        depth = _depth(order, shard, wide, ways, stages)
        chunks = max(1.0, shard_bytes / shard)
        return depth, _time_us(order, chunks, depth or least_depth, ways, stages)

    if chunk_bytes is not None:
        if chunk_bytes < itemsize:
            raise InvalidArgument(
                f"chunk_bytes={chunk_bytes} holds no element: give {itemsize} or more"
            )
        depth, cost = at(max(1, min(shard_bytes, -(-chunk_bytes // ways.nshards))))
        if depth is None and not ways.messages:
            raise InvalidArgument(
                f"chunk_bytes={chunk_bytes} between {ways.nnodes} nodes has no room in the "
                f"{ways.buffer_bytes} bytes that a rank has for chunks under way: give less"
            )
        return Pace(chunk_bytes // itemsize, depth or least_depth, cost)
    found: list[Pace] = []
    room_bytes = int(ways.buffer_bytes / ((least_depth + 2) * _held(order, wide, ways)))
    for shard in _tried(shard_bytes, room_bytes, ways):
        depth, cost = at(shard)
        if depth is not None or not found:
            count = chunk_count(shard, itemsize, ways.nshards)
            found.append(Pace(count, depth or least_depth, cost))
    limit_us = NEARLY * min(each.cost_us for each in found)
    return next(each for each in found if each.cost_us <= limit_us)
