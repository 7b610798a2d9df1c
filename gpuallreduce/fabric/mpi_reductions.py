"""How MPI reduces our dtypes with our operators: its own types where it has them, else functions.

Knows nothing of communicators or requests. MPI's module is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce.types import DTYPES, Dtype, Op, dtype_of, op_of, reduction

__all__ = ["Reduced", "Reductions", "combine", "one_nan"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 14  # elements: what a step makes in between stays in the cache

_TYPES = {
    "bool": "C_BOOL",
    "int8": "INT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "uint8": "UINT8_T",
    "uint16": "UINT16_T",
    "uint32": "UINT32_T",
    "uint64": "UINT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
}
_OPS = {
    "sum": "SUM",
    "avg": "SUM",
    "prod": "PROD",
    "max": "MAX",
    "min": "MIN",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_LOGICAL = {
    "sum": "LOR",
    "max": "LOR",
    "bor": "LOR",
    "prod": "LAND",
    "min": "LAND",
    "band": "LAND",
    "bxor": "LXOR",
}
_PARTS = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Reduced:
    """What a reduction is called with.

    Attributes:
        datatype: MPI's handle.
        op: MPI's handle.
        nbytes: of one element of that datatype.
    """

    datatype: Any
    op: Any
    nbytes: int


class Reductions:
    """MPI's types and operators for every pair that can be reduced. Made once in a process.

    MPI has no 16-bit and 8-bit floats. They travel as opaque elements and are folded by a function
    that accumulates in float32 and rounds once at every hop. MPI does not say what its own maximum
    makes of NaN, its product of complex infinities, nor, in Open MPI, whether short sums wrap:
    those are functions too. Few operators are made, however many types there are: mpi4py has room
    for 32, the program's own included.
    """

    def __init__(self, mpi: Any) -> None:
        """Makes nothing yet."""
        self._mpi = mpi
        self._opaque: list[tuple[Any, Dtype]] = []
        self._functions: dict[str, Any] = {}

    def of(self, dtype: Any, op: Any) -> Reduced:
        """How a pair is reduced; ``avg`` as its sum.

        Raises:
            InvalidArgument: there is no such dtype or operator.
            NotSupported: the operator makes no sense for the dtype.
        """
        row, by = dtype_of(dtype), op_of(op)
        reduction(row, by)
        name = "sum" if by.name == "avg" else by.name
        if row.kind == "complex" and name == "sum":
            row = DTYPES[_PARTS[row.name]]
        if not _native(row, by):
            return Reduced(self._datatype(row), self._function(name), row.itemsize)
        names = _LOGICAL if row.kind == "bool" else _OPS
        return Reduced(
            getattr(self._mpi, _TYPES[row.name]), getattr(self._mpi, names[name]), row.itemsize
        )

    def _datatype(self, row: Dtype) -> Any:
        for datatype, known in self._opaque:
            if known is row:
                return datatype
        datatype = self._mpi.BYTE.Create_contiguous(row.itemsize).Commit()
        self._opaque.append((datatype, row))
        return datatype

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            # Where the operands' order shows (max of +0 and -0), MPI must keep that of the ranks.
            commute = name not in ("max", "min")
            fold = partial(self._fold, name)
            self._functions[name] = self._mpi.Op.Create(fold, commute=commute)
        return self._functions[name]

    def _fold(self, name: str, lower: Any, upper: Any, datatype: Any) -> None:
        """MPI's callback: ``upper = lower op upper``, where lower comes from the lower ranks."""
        row = next(row for known, row in self._opaque if known == datatype)
        a, b = (np.frombuffer(memory, np.uint8).view(row.numpy) for memory in (lower, upper))
        combine(a, b, row, name, into=b)


def combine(lower: Array, upper: Array, dtype: Dtype, op: str, *, into: Array) -> None:
    """Folds elements of two groups of ranks, rounded once, as a hop of MPI does.

    Args:
        lower, upper: flat, of ``dtype``; lower has those of the lower ranks.
        dtype: of all three.
        op: name of an operator that makes sense for it; not ``avg``.
        into: one of the two.
    """
    step = _complex_product if dtype.kind == "complex" and op == "prod" else _STEPS[op]
    wide = DTYPES[dtype.accumulator].numpy
    with np.errstate(all="ignore"):
        for start in range(0, lower.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            into[part] = step(
                lower[part].astype(wide, copy=False), upper[part].astype(wide, copy=False)
            ).astype(dtype.numpy, copy=False)


def _native(row: Dtype, op: Op) -> bool:
    """Whether MPI has the pair, and it can only mean what ours does."""
    if row.name not in _TYPES:
        return False
    if row.kind in ("int", "uint"):
        # Open MPI's vector code saturates here, and its scalar code wraps
        # (github.com/open-mpi/ompi/issues/8045).
        return op.name != "sum" or row.itemsize > 2
    return row.kind != "float" or op.name not in ("max", "min")


def _maximum(a: Array, b: Array) -> Array:
    # A NaN in b fails the comparison and is taken; a tie keeps the lower ranks' value.
    return np.where((a >= b) | (a != a), a, b)


def _minimum(a: Array, b: Array) -> Array:
    return np.where((a <= b) | (a != a), a, b)


def _complex_product(a: Array, b: Array) -> Array:
    # By parts, so that no multiply and add is fused and a * b has the bits of b * a: ranks may
    # compute either.
    result = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result


_STEPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": _maximum,
    "min": _minimum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def one_nan(x: Array, dtype: Dtype) -> None:
    """Makes every NaN of a result the positive quiet one of its type: MPI's depend on the order of
    operands, which differs between ranks.

    Args:
        x: flat, of ``dtype``, contiguous; changed in place.
        dtype: other kinds than floats are left alone.
    """
    if dtype.kind not in ("float", "complex"):
        return
    part = DTYPES[_PARTS.get(dtype.name, dtype.name)].numpy
    parts = x.view(part)
    nan = np.array(np.nan).astype(part)
    with np.errstate(all="ignore"):
        for start in range(0, parts.size, _BLOCK):
            block = parts[start : start + _BLOCK]
            found = np.isnan(block)
            if found.any():
                block[found] = nan
