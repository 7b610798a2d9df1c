"""The arrays that a benchmark reduces, and their values: neutral to time, exact to check.

Knows nothing of libraries or time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuallreduce.checks import wrong_count
from gpuallreduce.errors import NotSupported
from gpuallreduce.inputs import exact_inputs
from gpuallreduce.types import Dtype, Op

from .ranks import Ranks

__all__ = ["Buffers", "Pattern", "expected", "neutral"]

Array = np.ndarray[Any, Any]
PAGE_BYTES = 4096
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
            symmetric: from ``comm.empty``, else page-aligned memory of the process.

        Raises:
            NotSupported: the machine has not as much memory free.
        """
        _check_memory(2 * nbytes * ranks.nranks)
        ranks.barrier()  # before anyone allocates: what others took must not count against us
        self._sides: list[list[Array]] = []
        for _ in ("input", "output"):
            if symmetric:
                made = ranks.comm.empty(nbytes, np.uint8)
                arrays = made if isinstance(made, list) else [made]
            else:
                arrays = [_aligned(nbytes) for _ in ranks.local]
            for array in arrays:
                array.fill(0)
            self._sides.append(arrays)

    def inputs(self, dtype: Dtype, count: int) -> list[Array]:
        """Inputs of a row, one per local rank."""
        return [array[: count * dtype.itemsize].view(dtype.numpy) for array in self._sides[0]]

    def outputs(self, dtype: Dtype, count: int) -> list[Array]:
        """Outputs of a row, one per local rank."""
        return [array[: count * dtype.itemsize].view(dtype.numpy) for array in self._sides[1]]


class Pattern:
    """Inputs of all ranks whose reduction is exact in any order, and the result."""

    def __init__(self, dtype: Dtype, op: Op, count: int, nranks: int, seed: int) -> None:
        self._inputs = exact_inputs(dtype, op, min(count, PERIOD), nranks, seed)
        self._expected = expected(self._inputs, dtype, op)

    def fill(self, array: Array, rank: int) -> None:
        """Writes a rank's input."""
        values = self._inputs[rank]
        for begin in range(0, array.size, PERIOD):
            part = array[begin : begin + PERIOD]
            part[...] = values[: part.size]

    def wrong_input(self, array: Array, rank: int) -> int:
        """Elements of an input that are no longer what was written."""
        return _wrong(array, self._inputs[rank])

    def wrong_result(self, array: Array) -> int:
        """Elements of a result that are not, bit for bit, what they must be."""
        return _wrong(array, self._expected)


def _wrong(array: Array, values: Array) -> int:
    parts = (array[begin : begin + PERIOD] for begin in range(0, array.size, PERIOD))
    return sum(wrong_count(part, values[: part.size]) for part in parts)


def expected(inputs: list[Array], dtype: Dtype, op: Op) -> Array:
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


def _aligned(nbytes: int) -> Array:
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    shift = -memory.ctypes.data % PAGE_BYTES
    return memory[shift : shift + nbytes]


def _check_memory(nbytes: int) -> None:
    available = _available_bytes()
    if available is not None and nbytes > available:
        raise NotSupported(
            f"the arrays of all ranks need {nbytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of "
            "memory are available; lower -e or the number of ranks"
        )


def _available_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
