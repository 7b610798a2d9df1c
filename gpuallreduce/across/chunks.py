"""How a call between nodes is cut: the turns that chunks take, and how many are under way at once.

Pure arithmetic: knows nothing of devices, engines or memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuallreduce.plan import shard_range

__all__ = [
    "ENGINE_LAG",
    "SHARD_CHUNK_BYTES",
    "Chunk",
    "chunk_count",
    "chunks_of",
    "depth_of",
    "lag_of",
]

SHARD_CHUNK_BYTES = 128 << 10  # long enough for TCP, short enough that stages overlap
ENGINE_LAG = 8  # chunks that travel while others are folded and gathered; 1 MiB a rank


@dataclass(frozen=True)
class Chunk:
    """A part of an array that takes one turn.

    Attributes:
        first, count: its elements.
        owned: elements of this rank's shard of it.
    """

    first: int
    count: int
    owned: int


def lag_of(node: int, nnodes: int) -> int:
    """Chunks that a node folds before it needs the first result: its partial goes on to the last
    node and the result comes back, a hop in each turn.
    """
    return 2 * (nnodes - 1 - node) + 1


def depth_of(order: str, nnodes: int) -> int:
    """Chunks that are under way between nodes at once, at most: see ``Config``."""
    return lag_of(0, nnodes) if order == "rank" else ENGINE_LAG


def chunk_count(itemsize: int, nshards: int) -> int:
    """Elements of a chunk."""
    return max(1, SHARD_CHUNK_BYTES * nshards // itemsize)


def chunks_of(count: int, itemsize: int, nshards: int, owner: int, step: int) -> list[Chunk]:
    """The turns of a call; an empty array takes one too, so that all ranks meet.

    Args:
        count: elements of the array.
        itemsize: bytes of one.
        nshards: shards of a chunk.
        owner: whose shards count as owned; none's, if there are not as many.
        step: elements of a chunk.
    """
    chunks = []
    for first in range(0, max(count, 1), step):
        size = min(step, count - first)
        owned = shard_range(size, owner, nshards, itemsize)[1] if owner < nshards else 0
        chunks.append(Chunk(first, size, owned))
    return chunks
