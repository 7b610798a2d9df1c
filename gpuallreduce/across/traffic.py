"""How many bytes a call of several nodes moves, inside a node and between nodes.

Pure arithmetic: knows nothing of devices, engines or memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuallreduce.across.chunks import chunks_of
from gpuallreduce.plan import Request
from gpuallreduce.types import DTYPES

__all__ = ["bytes_between", "bytes_within"]


def bytes_within(request: Request, sizes: Sequence[int], chunk_count: int) -> int:
    """Bytes that a rank sends to ranks of its node: of each chunk the elements that others fold,
    and its own finished shard to all of them. That is n + (k - 2) s for k ranks and a shard of s
    bytes, and nothing for a rank that is alone.

    Args:
        request: of all ranks of the job.
        sizes: ranks of each node.
        chunk_count: elements of a chunk.

    Returns:
        The largest over the ranks: that of the first rank of the largest node, since first shards
        are the longest.
    """
    return request.nbytes + (max(sizes) - 2) * _shard_bytes(request, sizes, chunk_count)


def bytes_between(request: Request, sizes: Sequence[int], chunk_count: int) -> int:
    """Bytes of data that a rank sends to other nodes: its shard, as a partial there and a result
    back. Two nodes in no order send each other what they folded; more leave it to the engine,
    which cannot do with less than is counted here.

    Args, Returns: as ``bytes_within``.
    """
    nodes, shard = len(sizes), _shard_bytes(request, sizes, chunk_count)
    if request.order == "any":
        return -(-2 * shard * (nodes - 1) // nodes)
    partial = shard * DTYPES[request.dtype.accumulator].itemsize // request.dtype.itemsize
    # The first node sends partials, the last one results, those between both.
    return partial + (shard if nodes > 2 else 0)


def _shard_bytes(request: Request, sizes: Sequence[int], chunk_count: int) -> int:
    """Of the first shards of all chunks."""
    itemsize = request.dtype.itemsize
    chunks = chunks_of(request.count, itemsize, min(sizes), 0, chunk_count)
    return sum(chunk.owned for chunk in chunks) * itemsize
