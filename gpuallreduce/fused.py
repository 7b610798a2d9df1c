"""Many small arrays in one call: which go together, and their way into a bucket and back.

Knows nothing of ranks' memory or of how a call runs. Bits do not depend on it: the numeric
contract gives every element the same result wherever it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuallreduce.arrays import Array, Arrays

__all__ = ["Column", "Fuser", "buckets"]

FUSED_BYTES = 4 << 20  # a bucket; also the memory that fusing takes beyond the caller's arrays
ALONE_BYTES = 1 << 20  # larger arrays go by themselves: packing would cost more than a call

Column = Sequence[Array]  # one array on every local rank


def buckets(columns: Sequence[Column]) -> list[list[Column]]:
    """Arrays that go together: of one dtype, up to FUSED_BYTES. The same on every rank."""
    found: list[list[Column]] = []
    open_buckets: dict[Any, tuple[list[Column], int]] = {}
    for column in columns:
        dtype, nbytes = column[0].dtype, column[0].nbytes
        if nbytes >= ALONE_BYTES:
            found.append([column])
            continue
        bucket, filled = open_buckets.get(dtype, (None, 0))
        if bucket is None or filled + nbytes > FUSED_BYTES:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(column)
        open_buckets[dtype] = (bucket, filled + nbytes)
    return found


class Fuser:
    """Packs buckets, keeping one buffer per local rank for all of them."""

    def __init__(self, nlocal: int, arrays: Arrays) -> None:
        self._nlocal = nlocal
        self._arrays = arrays
        self._buffers: list[Array] = []

    def run(
        self, bucket: Sequence[Column], call: Callable[[Column, tuple[int, ...]], None]
    ) -> None:
        """Makes one call for a bucket.

        Args:
            bucket: arrays of one dtype.
            call: runs a column in place; gets the counts of what was packed, which must agree
                between ranks.
        """
        if len(bucket) == 1:
            call(bucket[0], ())
            return
        if not self._buffers:
            self._buffers = [
                self._arrays.empty((FUSED_BYTES,), np.dtype(np.uint8), local)
                for local in range(self._nlocal)
            ]
        counts = tuple(column[0].size for column in bucket)
        dtype = bucket[0][0].dtype
        packed = [each[: sum(counts) * dtype.itemsize].view(dtype) for each in self._buffers]
        pairs = [
            (part.reshape(column[rank].shape), column[rank], rank)
            for rank, buffer in enumerate(packed)
            for part, column in zip(_parts(buffer, counts), bucket, strict=True)
        ]
        for part, array, local in pairs:
            self._arrays.assign(part, array, local)
        call(packed, counts)
        for part, array, local in pairs:
            self._arrays.assign(array, part, local)


def _parts(buffer: Array, counts: Sequence[int]) -> list[Array]:
    ends = np.cumsum(counts)
    return [buffer[end - count : end] for end, count in zip(ends, counts, strict=True)]
