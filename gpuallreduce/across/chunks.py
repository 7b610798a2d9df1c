"""How a call between nodes is cut: the turns that chunks take, and how many are under way at once.

Pure arithmetic: knows nothing of devices, engines or memory, nor of what is fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuallreduce.plan import shard_range

__all__ = ["Chunk", "chunk_count", "chunks_of", "depth_of", "lag_of", "parts_of", "turns_of"]


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


def lag_of(node: int, nnodes: int, turns: int = 1) -> int:
    """Chunks that a node folds before it needs the first result, in rank order: its partial goes
    on to the last node and the result comes back, a hop in each turn, or in so many ``turns``.
    """
    return 2 * turns * (nnodes - 1 - node) + 1


def depth_of(nnodes: int, turns: int = 1) -> int:
    """Chunks that are under way between nodes at once in rank order: the longest lag."""
    return lag_of(0, nnodes, turns)


def turns_of(depth: int, nnodes: int) -> int:
    """The turns of a hop that a depth stands for: see ``depth_of``."""
    return (depth - 1) // (2 * (nnodes - 1))


def chunk_count(shard_bytes: int, itemsize: int, nshards: int) -> int:
    """Elements of a chunk whose shards have so many bytes."""
    return max(1, shard_bytes * nshards // itemsize)


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


def parts_of(nbytes: int, step: int) -> list[tuple[int, int]]:
    """First byte and bytes of each part of what is only moved; none of nothing.

    Args:
        nbytes: in all.
        step: bytes of a part but for the last.
    """
    return [(first, min(step, nbytes - first)) for first in range(0, nbytes, step)]
