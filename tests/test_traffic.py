"""Bytes that plans of several nodes speak of are bytes that kernels hand to other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuallreduce.across.chunks import chunks_of
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.across.traffic import bytes_between, bytes_within
from gpuallreduce.placement import local_ranks
from gpuallreduce.plan import Request, Shards
from gpuallreduce.types import DTYPES, OPS

COUNT = 12_345
LAYOUTS = [(2, 2), (4, 4), (3, 5), (1, 3)]
BYTE, SUM = DTYPES["uint8"], OPS["sum"]


def asked(sizes: tuple[int, ...], dtype: str = "uint8", order: str = "rank") -> Request:
    return Request("allreduce", DTYPES[dtype], SUM, COUNT, sum(sizes), order=order)


def slots_of(node: NodeShards, rank: int) -> np.ndarray[Any, Any]:
    """The beginnings of a rank's slots, as far as arrays of this test fill them."""
    segments = node.orchestrator.segments
    found = segments.layout.regions["exchange"]
    slot_bytes, nlinks = found.region.slot_bytes, found.nlinks
    end = found.slots + segments.layout.max_channels * found.region.nslots * nlinks * slot_bytes
    whole = segments.buffer.array(rank, (segments.buffer.nbytes,), np.dtype(np.uint8))
    return whole[found.slots : end].reshape(-1, slot_bytes)[:, : 2 * COUNT]


def handed_on(nranks: int, nshards: int, counts: list[int]) -> list[int]:
    """Bytes that the busiest rank of a node hands to others in arrays of some counts: found in the
    ranks' slots, which are zero at birth. No byte here is, and so few steps use each slot once.
    """
    node = NodeShards(local_ranks(["host"] * nranks), timeout=30.0)
    slots = [slots_of(node, rank) for rank in range(nranks)]
    shards = Shards(nshards, fold_ranks=nranks)
    most, before = [], np.zeros(nranks, int)
    for count in counts:
        arrays = [np.ones(count, np.uint8) for _ in range(nranks)]
        buffers = [np.zeros(count, np.uint8) for _ in range(nshards)]
        at, to = ([x.ctypes.data for x in each] for each in (arrays, buffers))
        to += [0] * (nranks - nshards)
        node.reduce(at, to, dtype=BYTE, op=SUM, count=count, shards=shards)
        reduced = np.array([np.count_nonzero(x) for x in slots])
        node.gather(to, at, dtype=BYTE, count=count, shards=shards)
        gathered = np.array([np.count_nonzero(x) for x in slots])
        assert all((x == nranks).all() for x in arrays)
        # What others fold, and a finished shard, which every other rank reads.
        most.append(int((reduced - before + (nranks - 1) * (gathered - reduced)).max()))
        before = gathered
    node.end()
    return most


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_bytes_within_are_those_that_kernels_hand_to_the_ranks_of_a_node(
    sizes: tuple[int, ...],
) -> None:
    step = 5000  # each chunk is cut into shards for itself
    chunks = [chunk.count for chunk in chunks_of(COUNT, 1, min(sizes), 0, step)]
    moved = [handed_on(nranks, min(sizes), [COUNT, *chunks]) for nranks in set(sizes)]
    assert max(whole for whole, *_ in moved) == bytes_within(asked(sizes), sizes, COUNT)
    assert max(sum(parts) for _, *parts in moved) == bytes_within(asked(sizes), sizes, step)


@pytest.mark.parametrize(
    ("sizes", "dtype", "order", "shards"),
    [
        ((4, 4), "float32", "rank", 1),  # one way partials, the other way results
        ((4, 4), "bfloat16", "rank", 2),
        ((4, 4), "bfloat16", "any", 1),
        ((2, 2, 2), "float32", "rank", 2),
        ((2, 2, 2), "float16", "rank", 3),
        ((2, 2, 2, 2), "float32", "any", 1.5),
        ((3, 5), "float64", "rank", 1),
    ],
    ids=str,
)
def test_bytes_between_are_partials_and_results_of_a_shard(
    sizes: tuple[int, ...], dtype: str, order: str, shards: float
) -> None:
    request = asked(sizes, dtype, order)
    itemsize = request.dtype.itemsize
    (whole,) = chunks_of(COUNT, itemsize, min(sizes), 0, COUNT)
    assert bytes_between(request, sizes, COUNT) == shards * whole.owned * itemsize
