"""The element types and operators that can be reduced, and which kernel serves each pair.

Knows nothing of ranks, memory or devices. A dtype is a row in DTYPES, an operator a row in OPS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from gpuallreduce.errors import InvalidArgument, NotSupported

__all__ = ["DTYPES", "OPS", "Dtype", "Op", "Reduction", "dtype_of", "op_of", "reduction"]


@dataclass(frozen=True)
class Dtype:
    """One element type.

    Attributes:
        name: NumPy's (or ml_dtypes') name.
        numpy: the NumPy dtype.
        kind: ``bool``, ``int``, ``uint``, ``float`` or ``complex``; operators list what they take.
        element: the C++ type of ``kernels/dtypes.cuh``.
        accumulator: name of the dtype in which the fold over the ranks runs.
    """

    name: str
    numpy: np.dtype[Any]
    kind: str
    element: str
    accumulator: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @property
    def code(self) -> int:
        """Position in DTYPES: how a call header names the dtype."""
        return list(DTYPES).index(self.name)


@dataclass(frozen=True)
class Op:
    """One operator: the dtype kinds that it takes and its functor in ``kernels/ops.cuh``."""

    name: str
    functor: str
    kinds: tuple[str, ...]

    @property
    def code(self) -> int:
        """Position in OPS: how a call header names the operator."""
        return list(OPS).index(self.name)


def _dtype(name: str, kind: str, element: str, accumulator: str | None = None) -> Dtype:
    scalar = getattr(ml_dtypes, name, None) or getattr(np, f"{name}_", None) or getattr(np, name)
    return Dtype(name, np.dtype(scalar), kind, element, accumulator or name)


_DTYPE_ROWS = (
    _dtype("bool", "bool", "uint8_t"),
    _dtype("int8", "int", "int8_t"),
    _dtype("int16", "int", "int16_t"),
    _dtype("int32", "int", "int32_t"),
    _dtype("int64", "int", "int64_t"),
    _dtype("uint8", "uint", "uint8_t"),
    _dtype("uint16", "uint", "uint16_t"),
    _dtype("uint32", "uint", "uint32_t"),
    _dtype("uint64", "uint", "uint64_t"),
    _dtype("float8_e4m3fn", "float", "Float8E4M3FN", "float32"),
    _dtype("float8_e5m2", "float", "Float8E5M2", "float32"),
    _dtype("float16", "float", "Float16", "float32"),
    _dtype("bfloat16", "float", "BFloat16", "float32"),
    _dtype("float32", "float", "float"),
    _dtype("float64", "float", "double"),
    _dtype("complex64", "complex", "Complex<float>"),
    _dtype("complex128", "complex", "Complex<double>"),
)
DTYPES: dict[str, Dtype] = {row.name: row for row in _DTYPE_ROWS}
_BY_NUMPY = {row.numpy: row for row in _DTYPE_ROWS}

_ORDERED = ("bool", "int", "uint", "float")
_BITS = ("bool", "int", "uint")
_OP_ROWS = (
    Op("sum", "Sum", (*_ORDERED, "complex")),
    Op("prod", "Prod", (*_ORDERED, "complex")),
    Op("max", "Max", _ORDERED),
    Op("min", "Min", _ORDERED),
    Op("avg", "Avg", ("float", "complex")),
    Op("band", "BitAnd", _BITS),
    Op("bor", "BitOr", _BITS),
    Op("bxor", "BitXor", _BITS),
)
OPS: dict[str, Op] = {row.name: row for row in _OP_ROWS}

# bool has no arithmetic of its own: over {0, 1} sum and max are OR, prod and min are AND.
_BOOL_FUNCTORS = {"sum": "BitOr", "max": "BitOr", "prod": "BitAnd", "min": "BitAnd"}


@dataclass(frozen=True)
class Reduction:
    """What a kernel is instantiated with for a (dtype, operator) pair.

    Attributes:
        element: C++ element type.
        functor: C++ operator.
        elements_per_item: kernel elements in one array element (2 where a complex sum runs as the
            sum of its real and imaginary parts).
    """

    element: str
    functor: str
    elements_per_item: int = 1


def dtype_of(dtype: Any) -> Dtype:
    """The row of DTYPES for a NumPy dtype or a name.

    Raises:
        InvalidArgument: it is not a dtype that can be reduced; the message lists those that can.
    """
    try:
        found = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        found = None
    row = DTYPES.get(dtype) if isinstance(dtype, str) else None
    row = row or (_BY_NUMPY.get(found) if found is not None else None)
    if row is not None:
        return row
    hint = ""
    if found is not None and not found.isnative:
        hint = " (byte-swapped: convert with x.astype(x.dtype.newbyteorder('=')))"
    raise InvalidArgument(
        f"dtype {dtype!s} cannot be reduced{hint}; supported: {', '.join(DTYPES)}"
    )


def op_of(op: Any) -> Op:
    """The row of OPS for a name.

    Raises:
        InvalidArgument: there is no such operator; the message lists those that exist.
    """
    row = OPS.get(op) if isinstance(op, str) else None
    if row is None:
        raise InvalidArgument(f"operator {op!r} does not exist; supported: {', '.join(OPS)}")
    return row


@lru_cache(maxsize=None)
def reduction(dtype: Dtype, op: Op) -> Reduction:
    """The kernel that serves a pair, with the fewest distinct kernels.

    Wrapping arithmetic and bit operations do not see a sign, and complex sums act on parts alone,
    so those pairs share a kernel; the bits are the same.

    Raises:
        NotSupported: the operator makes no sense for the dtype; the message lists what does.
    """
    if dtype.kind not in op.kinds:
        ops = ", ".join(row.name for row in _OP_ROWS if dtype.kind in row.kinds)
        dtypes = ", ".join(row.name for row in _DTYPE_ROWS if row.kind in op.kinds)
        raise NotSupported(
            f"{op.name} of {dtype.name} is not defined: {dtype.name} takes {ops}; "
            f"{op.name} takes {dtypes}"
        )
    if dtype.kind == "bool":
        return Reduction("uint8_t", _BOOL_FUNCTORS.get(op.name, op.functor))
    if dtype.kind == "int" and op.name not in ("max", "min"):
        return Reduction(f"u{dtype.element}", op.functor)
    if dtype.kind == "complex" and op.name in ("sum", "avg"):
        return Reduction(dtype.element.removeprefix("Complex<").rstrip(">"), op.functor, 2)
    return Reduction(dtype.element, op.functor)
