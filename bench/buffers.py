"""The arrays that a benchmark reduces, and their values: neutral to time, exact to check.

Knows nothing of libraries, time or kinds of devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuallreduce.checks import wrong_count
from gpuallreduce.inputs import exact_inputs
from gpuallreduce.types import Dtype, Op

from .places import Array, Place, pieces
from .ranks import Ranks

__all__ = ["Buffers", "Pattern", "expected", "neutral"]

# Patterns repeat: making fresh values for a gigabyte takes longer than reducing it. No chunk, slice
# or slot is a multiple of this prime, so data from a wrong place still differ.
PERIOD = 1_048_573
_UFUNCS = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


class Buffers:
    """An input and an output for each local rank; every row uses their beginning."""

    def __init__(self, ranks: Ranks, nbytes: int, *, symmetric: bool) -> None:
        """Allocates and writes every page, so that no call is the first to touch one.

        Args:
            ranks: whose arrays; with ``symmetric`` a collective.
            nbytes: bytes of one array.
            symmetric: from ``comm.empty``, else ordinary memory of the process or GPU.

        Raises:
            NotSupported: the machine or a GPU has not as much memory free.
        """
        self._place = ranks.place
        self._place.check_memory(2 * nbytes)
        ranks.barrier()  # before anyone allocates: what others took must not count against us
        self._sides: list[list[Array]] = []
        for _ in ("input", "output"):
            if symmetric:
                made = ranks.comm.empty(nbytes, np.uint8)
                arrays = made if isinstance(made, list) else [made]
            else:
                arrays = self._place.make(nbytes)
            for array in arrays:
                self._place.write(array, np.zeros(1, np.uint8))
            self._sides.append(arrays)

    def inputs(self, dtype: Dtype, count: int) -> list[Array]:
        """Inputs of a row, one per local rank."""
        return [self._place.view(array, count, dtype.numpy) for array in self._sides[0]]

    def outputs(self, dtype: Dtype, count: int) -> list[Array]:
        """Outputs of a row, one per local rank."""
        return [self._place.view(array, count, dtype.numpy) for array in self._sides[1]]


class Pattern:
    """Inputs of all ranks whose reduction is exact in any order, and the result."""

    def __init__(
        self, dtype: Dtype, op: Op, count: int, nranks: int, seed: int, place: Place
    ) -> None:
        self._place = place
        self._inputs = exact_inputs(dtype, op, min(count, PERIOD), nranks, seed)
        self._expected = expected(self._inputs, dtype, op)

    def fill(self, array: Array, rank: int) -> None:
        """Writes a rank's input."""
        self._place.write(array, self._inputs[rank])

    def wrong_input(self, array: Array, rank: int) -> int:
        """Elements of an input that are no longer what was written."""
        return self._wrong(array, self._inputs[rank])

    def wrong_result(self, array: Array) -> int:
        """Elements of a result that are not, bit for bit, what they must be."""
        return self._wrong(array, self._expected)

    def _wrong(self, array: Array, values: np.ndarray[Any, Any]) -> int:
        wrong = 0
        for begin, end in pieces(array.size, PERIOD):
            wrong += wrong_count(self._place.read(array, begin, end), values[: end - begin])
        return wrong


def expected(inputs: list[np.ndarray[Any, Any]], dtype: Dtype, op: Op) -> np.ndarray[Any, Any]:
    """The reduction of exact inputs; floats in float64, which holds every partial result."""
    wide = {"float": np.dtype(np.float64), "complex": np.dtype(np.complex128)}.get(dtype.kind)
    total = inputs[0].astype(wide or dtype.numpy)
    for each in inputs[1:]:
        _UFUNCS[op.name](total, each.astype(total.dtype), out=total)
    if op.name == "avg":
        total /= len(inputs)
    return np.asarray(total.astype(dtype.numpy))


def neutral(op: Op) -> int:
    """A value that reduction in place leaves as it is: no overflow, NaN or slow subnormal."""
    return 1 if op.name == "prod" else 0
