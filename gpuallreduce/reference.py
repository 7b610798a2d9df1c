"""The oracle: what an all-reduce must return to the bit, and how far from the real value it may be.

Knows nothing of kernels, devices or algorithms, and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import ml_dtypes
import numba  # type: ignore[import-untyped,unused-ignore]
import numpy as np

from gpuallreduce.errors import InvalidArgument
from gpuallreduce.types import DTYPES, Dtype, dtype_of, op_of, reduction

__all__ = ["NAN_BITS", "allreduce", "exact"]

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
    dtype = _checked(arrays, op)
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


def _checked(arrays: Sequence[Array], op: str) -> Dtype:
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
    return flat.view(_part(dtype).numpy).astype(DTYPES[_part(dtype).accumulator].numpy)


def _part(dtype: Dtype) -> Dtype:
    """The real type that a complex number is a pair of; other types are their own."""
    return DTYPES[_PART.get(dtype.name, dtype.name)]


def _rounded(acc: Array, dtype: Dtype, divisor: int) -> Array:
    """The fold's value divided, rounded once to the element type, its NaNs made one."""
    if dtype.kind not in ("float", "complex"):
        return acc.astype(dtype.numpy)
    part = _part(dtype)
    with np.errstate(all="ignore"):
        if divisor != 1:
            acc /= acc.dtype.type(divisor)
        result: Array = acc.astype(part.numpy)
        nan = np.isnan(result)
    result.view(f"u{part.itemsize}")[nan] = NAN_BITS[part.name]
    return result.view(dtype.numpy)


def exact(arrays: Sequence[Array], op: str) -> tuple[Array, Array]:
    """The real value of a reduction, and how far a correct result can be from it.

    The bound holds for any order of the fold whose partial results are kept in the accumulator
    type: (nranks - 1) u sum(abs(x)) for sum (Jeannerod and Rump, 2013), the like relative to the
    product for prod (with sqrt(5) u where complex: Brent, Percival and Zimmermann, 2007), plus
    the division of avg, plus half an ulp of the element type, plus the error of the value itself.

    Args:
        arrays: one array per rank, of one shape and dtype.
        op: name of the operator.

    Returns:
        ``(value, bound)`` of the arrays' shape. value is float64 (complex128 for complex), or the
        element type for integers and bool. bound is float64, on ``abs(result - value)``: 0 where
        the result is exact, not finite by its inputs, or not rounded; infinite where the fold may
        overflow, so that nothing can be said.

    Raises:
        InvalidArgument: as allreduce.
        NotSupported: as allreduce.
    """
    dtype = _checked(arrays, op)
    if len(arrays) == 1 or op in ("max", "min") or dtype.kind not in ("float", "complex"):
        value, bound = allreduce(arrays, op), np.zeros(arrays[0].shape)
        if dtype.kind in ("float", "complex"):
            with np.errstate(all="ignore"):  # a signalling NaN warns
                value = value.astype(np.complex128 if dtype.kind == "complex" else np.float64)
        return value, bound
    with np.errstate(all="ignore"):
        if op == "prod":
            value, bound = _exact_prod(arrays, dtype)
        else:
            value, bound = _exact_sum(arrays, dtype, len(arrays) if op == "avg" else 1)
    return value.reshape(arrays[0].shape), bound.reshape(arrays[0].shape)


def _exact_sum(arrays: Sequence[Array], dtype: Dtype, divisor: int) -> tuple[Array, Array]:
    """Sum or mean, of the parts where complex."""
    part = _part(dtype)
    limits = _Limits(part, len(arrays))
    total: Any = np.longdouble(0)
    magnitude: Any = np.longdouble(0)
    for x in arrays:
        wide = np.ascontiguousarray(x).reshape(-1).view(part.numpy).astype(np.longdouble)
        total = total + wide
        magnitude = magnitude + np.where(np.isfinite(wide), abs(wide), 0)
    error = limits.unit * magnitude
    if divisor != 1:
        total = total / divisor
        error = error / divisor
        error = error + _half_ulp(abs(total) + error, limits.accumulator)
    value, bound = limits.finish(total, error, magnitude)
    if dtype.kind == "complex":
        return value.view(np.complex128), np.hypot(bound[::2], bound[1::2])
    return value, bound


def _exact_prod(arrays: Sequence[Array], dtype: Dtype) -> tuple[Array, Array]:
    is_complex = dtype.kind == "complex"
    limits = _Limits(_part(dtype), len(arrays))
    product: Any = np.longdouble(1)
    above: Any = np.longdouble(1)
    below: Any = np.longdouble(1)
    for x in arrays:
        wide = x.reshape(-1).astype(np.clongdouble if is_complex else np.longdouble)
        size = np.where(np.isfinite(wide), abs(wide), 1)
        product = product * wide
        above = above * np.maximum(size, 1)
        below = below * np.where(size == 0, 1, np.minimum(size, 1))
    relative = limits.unit * (np.sqrt(5) if is_complex else 1)
    error = relative / (1 - relative) * abs(product)
    # An underflow loses at most two halves of the least subnormal; later factors magnify that.
    error = error + 2 * len(arrays) * limits.least * above
    # Where a partial product may vanish or overflow, infinity and zero can meet in some orders.
    undecided = (above * 2 >= limits.largest) | ~np.isfinite(product) & (
        is_complex | (below < limits.tiny)
    )
    return limits.finish(product, error, np.where(undecided, np.inf, 0))


class _Limits:
    """Where rounding, underflow and overflow happen for one real element type."""

    def __init__(self, dtype: Dtype, nranks: int) -> None:
        self.accumulator = _finfo(DTYPES[dtype.accumulator])
        self.element = None if dtype.accumulator == dtype.name else _finfo(dtype)
        self.tiny = np.longdouble(self.accumulator.tiny)
        self.least = np.longdouble(self.accumulator.smallest_subnormal)
        eps = np.longdouble(self.accumulator.eps)
        self.largest = np.longdouble(self.accumulator.max) * (1 - nranks * eps)
        # The longdouble arithmetic of the value itself makes the same kind of error.
        self.unit = (nranks - 1) * (eps + np.finfo(np.longdouble).eps) / 2

    def finish(self, total: Array, error: Array, magnitude: Array) -> tuple[Array, Array]:
        """Adds the last roundings; no bound where the magnitude or the result may overflow."""
        reach = abs(total) + error
        overflow = magnitude >= self.largest
        if self.element is not None:
            half = _half_ulp(reach, self.element)
            error = error + half
            largest = np.longdouble(self.element.max)
            overflow |= np.isfinite(total) & (reach >= largest + _half_ulp(largest, self.element))
        error = error + _half_ulp(reach, np.finfo(np.float64))
        value = total.astype(np.complex128 if np.iscomplexobj(total) else np.float64)
        bound = np.nextafter(error.astype(np.float64), np.inf)
        bound = np.where(np.isfinite(value), bound, 0)
        return value, np.where(overflow, np.inf, bound)


def _finfo(dtype: Dtype) -> Any:
    return ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-untyped-call,unused-ignore]


def _half_ulp(size: Any, info: Any) -> Any:
    """Half the distance of neighbours in a format at ``size``, down into its subnormals."""
    _, exponent = np.frexp(np.maximum(size, np.longdouble(info.tiny)))
    return np.ldexp(np.longdouble(0.5), exponent - 1 - info.nmant)
