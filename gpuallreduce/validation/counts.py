"""How many elements a validation run tries: the edges of packs, chunks and ranks, and long arrays.

Pure arithmetic: knows nothing of which collectives run on them.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuallreduce.plan import LINE_BYTES
from gpuallreduce.types import DTYPES, Dtype

__all__ = ["MANY_CHUNKS", "chunked", "chunked_across", "long", "long_across", "pack", "plain"]

MANY_CHUNKS = 301  # more than are under way between nodes at once
# All widths of elements, and elements narrower than their accumulators.
_LONG = {"int8": 200_001, "bfloat16": 150_003, "float32": 200_001, "complex128": 20_011}


def pack(dtype: Dtype) -> int:
    """Elements of the widest pack of any target; its edges are edges of the narrower ones too."""
    return 64 // DTYPES[dtype.accumulator].itemsize


def plain(dtype: Dtype, nranks: int) -> list[int]:
    """None, one, and the edges of packs, ranks and slices."""
    edge = pack(dtype)
    edges = {edge - 1, edge, edge + 1, nranks - 1, nranks + 1, nranks * edge, nranks * edge + 1}
    return sorted({0, 1, 13, 127, *edges} - {2, 3})


def chunked(dtype: Dtype, nranks: int, *, few: bool) -> Iterator[tuple[int, int]]:
    """(count, chunk_bytes): one, several and many chunks; more than slots, and than ranks."""
    chunk = 3 * max(16, dtype.itemsize) // dtype.itemsize
    everyone = chunk * nranks
    counts = [40 * chunk + 1, everyone - 1, everyone + 1, chunk - 1, chunk, chunk + 1]
    for count in counts[:2] if few else [*counts, 5 * everyone + nranks + 1]:
        yield count, chunk * dtype.itemsize
    if not few:
        yield 5 * nranks + 1, dtype.itemsize  # chunks of one element


def chunked_across(dtype: Dtype, nranks: int, *, few: bool) -> Iterator[tuple[int, int]]:
    """As chunked, for shards of nodes: a chunk has lines for all shards, and not equally many."""
    chunk_bytes = LINE_BYTES * max(1, 2 * nranks - 3)
    chunk = chunk_bytes // dtype.itemsize
    counts = [(2 * nranks + 3) * chunk + 1, chunk - 1, chunk, chunk + 1, 3 * chunk + nranks + 1]
    for count in counts[:2] if few else counts:
        yield count, chunk_bytes
    if not few:
        yield 5 * nranks + 1, dtype.itemsize  # chunks of one element


def long(dtype: Dtype) -> int:
    """More than a slot, in chunks of the size that calls have unless they ask for another."""
    return 200_000 // dtype.itemsize + 7


def long_across(dtype: Dtype) -> int:
    """Between nodes; for some dtypes several chunks of the size that calls have there."""
    return _LONG.get(dtype.name, 5001)
