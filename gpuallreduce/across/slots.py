"""Memory of a GPU for shards that are under way between nodes, and the events that go with it.

Knows nothing of what is done with them, nor when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuallreduce.across.chunks import Chunk
from gpuallreduce.across.rates import GPU_BUFFER_BYTES
from gpuallreduce.devices.cuda_memory import DeviceBlock
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, on_device
from gpuallreduce.plan import Request
from gpuallreduce.types import DTYPES

__all__ = ["BUFFER_BYTES", "SlotRoom", "Slots", "longest"]

BUFFER_BYTES = GPU_BUFFER_BYTES
GRAIN = 128  # elements; so that every slot begins on a cache line, however wide they are


@dataclass
class Slots:
    """Where shards lie that are under way, and the events by which streams follow each other. Slots
    and events are taken in turn; a turn's own lie at its number modulo their count.

    Attributes:
        seeds, partials, results: address of the first slot of each kind.
        stride: bytes from one slot to the next, by kind.
        folded: recorded behind the fold of a turn, on the call's stream.
        lifted: behind a turn's messages on the way up.
        lowered: behind a turn's messages on the way down, or its all-reduce.
    """

    count: int
    seeds: int
    partials: int
    results: int
    stride: tuple[int, int]
    folded: list[Any]
    lifted: list[Any]
    lowered: list[Any]

    def seed(self, turn: int) -> int:
        """Accumulators that came from the node before."""
        return self.seeds + turn % self.count * self.stride[0]

    def partial(self, turn: int) -> int:
        """Accumulators for the node behind."""
        return self.partials + turn % self.count * self.stride[0]

    def result(self, turn: int) -> int:
        """Finished elements."""
        return self.results + turn % self.count * self.stride[1]


class SlotRoom:
    """The memory, for one call after the other."""

    def __init__(self, ordinal: int) -> None:
        """Takes it.

        Raises:
            DeviceError: there is none.
        """
        self._ordinal = ordinal
        self._buffer = DeviceBlock(ordinal, BUFFER_BYTES, zeros=0)
        self._events: dict[int, tuple[list[Any], ...]] = {}

    def slots(self, request: Request, chunks: Sequence[Chunk], depth: int) -> Slots:
        """Those of a call.

        Args:
            request: of all ranks.
            chunks: of the call; none longer than ``longest`` says.
            depth: as many may be under way at once.
        """
        count = _slots_for(depth)
        most = -(-max(chunk.owned for chunk in chunks) // GRAIN) * GRAIN
        wide = most * DTYPES[request.dtype.accumulator].itemsize if request.order == "rank" else 0
        base = self._buffer.address
        if count not in self._events:
            self._events[count] = tuple([self._event() for _ in range(count)] for _ in range(3))
        return Slots(
            count,
            base,
            base + count * wide,
            base + 2 * count * wide,
            (wide, most * request.dtype.itemsize),
            *self._events[count],
        )

    def close(self) -> None:
        """Gives it back; no call may be running."""
        self._buffer.free()

    def _event(self) -> Any:
        with on_device(self._ordinal), cuda_errors("making an event"):
            return cupy_module().cuda.Event(disable_timing=True)


def longest(request: Request, depth: int) -> int:
    """Elements of the longest shard of a chunk that there is room for."""
    itemsize = request.dtype.itemsize
    wide = 2 * DTYPES[request.dtype.accumulator].itemsize if request.order == "rank" else 0
    return int(BUFFER_BYTES // (_slots_for(depth) * (itemsize + wide) * GRAIN) * GRAIN)


def _slots_for(depth: int) -> int:
    """As many as chunks are under way, and two that are being written and read."""
    return depth + 2
