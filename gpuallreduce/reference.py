"""The oracle: what an all-reduce must return, to the bit.

Knows nothing of kernels, devices or algorithms, and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numba  # type: ignore[import-untyped,unused-ignore]
import numpy as np

from gpuallreduce.errors import InvalidArgument
from gpuallreduce.types import DTYPES, Dtype, dtype_of, op_of, reduction

__all__ = ["NAN_BITS", "allreduce", "checked", "part_of"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_Step: TypeAlias = Callable[[Array, Array], None]

NAN_BITS = {
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E,
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC0_0000,
    "float64": 0x7FF8_0000_0000_0000,
}
"""The one NaN of each float type that a reduction of two or more ranks returns."""

_PART = {"complex64": "float32", "complex128": "float64"}
_LOGICAL = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}


def _step(combine: Callable[[Any, Any], Any]) -> _Step:
    """Compiles ``acc = combine(acc, x)`` over all elements, at the first use with a type.

    No fastmath: LLVM then neither contracts a * b + c nor reorders. No cache on disk: the
    installation may be read-only, and a step compiles in a tenth of a second.
    """
    inner = numba.njit(combine)

    def step(acc: Array, x: Array) -> None:
        for i in range(acc.size):
            acc[i] = inner(acc[i], x[i])

    return cast(_Step, numba.njit(step, nogil=True))


# max and min: a NaN in b fails the comparison and is taken; a tie keeps the lower ranks' value a.
_STEPS: dict[str, _Step] = {
    "sum": _step(lambda a, b: a + b),
    "prod": _step(lambda a, b: a * b),
    "max": _step(lambda a, b: a if a != a or a >= b else b),
    "min": _step(lambda a, b: a if a != a or a <= b else b),
    "band": _step(lambda a, b: a & b),
    "bor": _step(lambda a, b: a | b),
    "bxor": _step(lambda a, b: a ^ b),
}
_STEPS["avg"] = _STEPS["sum"]


def _complex_prod(acc: Array, x: Array) -> None:
    for i in range(0, acc.size, 2):
        a, b, c, d = acc[i], acc[i + 1], x[i], x[i + 1]
        acc[i] = a * c - b * d
        acc[i + 1] = a * d + b * c


_complex_step = cast(_Step, numba.njit(_complex_prod, nogil=True))


def allreduce(arrays: Sequence[Array], op: str) -> Array:
    """The result that every rank must hold under ``order="rank"``, bit for bit.

    Folds left to right over the ranks in the dtype's accumulator, divides there for ``avg``, and
    rounds once, to nearest even. Integers wrap; bool is logical; every NaN of a result (of each
    real or imaginary part) is the one in NAN_BITS. One rank gets its own bits back.

    Args:
        arrays: one array per rank, in rank order, of one shape and dtype; not modified.
        op: name of the operator.

    Returns:
        A new C-contiguous array of the same shape and dtype.

    Raises:
        InvalidArgument: no array, or shapes or dtypes differ, or no such dtype or operator.
        NotSupported: the operator is not defined for the dtype.
    """
    dtype = checked(arrays, op)
    if len(arrays) == 1:
        return np.array(arrays[0], order="C")
    step = _STEPS[_LOGICAL.get(op, op) if dtype.kind == "bool" else op]
    if dtype.kind == "complex" and op == "prod":
        step = _complex_step
    with np.errstate(all="ignore"):
        acc = _widened(arrays[0], dtype, op)
        for x in arrays[1:]:
            step(acc, _widened(x, dtype, op))
    result = _rounded(acc, dtype, len(arrays) if op == "avg" else 1)
    return np.reshape(result, arrays[0].shape)


def checked(arrays: Sequence[Array], op: str) -> Dtype:
    """The dtype of arrays that can be reduced together.

    Raises:
        InvalidArgument, NotSupported: as allreduce.
    """
    if not arrays:
        raise InvalidArgument("no array was given; pass one array per rank")
    first = arrays[0]
    for rank, x in enumerate(arrays):
        if x.shape != first.shape or x.dtype != first.dtype:
            raise InvalidArgument(
                f"rank {rank} has {x.dtype}{x.shape}, rank 0 has {first.dtype}{first.shape}; "
                f"all ranks need one shape and dtype"
            )
    dtype = dtype_of(first.dtype)
    reduction(dtype, op_of(op))
    return dtype


def _widened(x: Array, dtype: Dtype, op: str) -> Array:
    """A flat copy in the type that the fold runs in; exact for every element type.

    All integers fold in 64 bits: truncation at the end commutes with wrapping and bit operators.
    """
    flat = np.ascontiguousarray(x).reshape(-1)
    if dtype.kind == "bool":
        return np.not_equal(flat.view(np.uint8), 0).astype(np.uint64)
    if dtype.kind == "uint":
        return flat.astype(np.uint64)
    if dtype.kind == "int":
        wide = flat.astype(np.int64)
        return wide if op in ("max", "min") else wide.view(np.uint64)
    return flat.view(part_of(dtype).numpy).astype(DTYPES[part_of(dtype).accumulator].numpy)


def part_of(dtype: Dtype) -> Dtype:
    """The real type that a complex number is a pair of; other types are their own."""
    return DTYPES[_PART.get(dtype.name, dtype.name)]


def _rounded(acc: Array, dtype: Dtype, divisor: int) -> Array:
    """The fold's value divided, rounded once to the element type, its NaNs made one."""
    if dtype.kind not in ("float", "complex"):
        return acc.astype(dtype.numpy)
    part = part_of(dtype)
    with np.errstate(all="ignore"):
        if divisor != 1:
            acc /= acc.dtype.type(divisor)
        result: Array = acc.astype(part.numpy)
        nan = np.isnan(result)
    result.view(f"u{part.itemsize}")[nan] = NAN_BITS[part.name]
    return result.view(dtype.numpy)
