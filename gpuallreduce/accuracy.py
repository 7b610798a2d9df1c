"""How far a correct result may be from the real value of a reduction.

Knows nothing of kernels, devices or algorithms, and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from gpuallreduce import reference
from gpuallreduce.reference import checked, part_of
from gpuallreduce.types import DTYPES, Dtype

__all__ = ["exact"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def exact(
    arrays: Sequence[Array], op: str, *, rounds_each_hop: bool = False
) -> tuple[Array, Array]:
    """The real value of a reduction, and how far a correct result can be from it.

    The bound holds for any order of the fold whose partial results are kept in the accumulator
    type: (nranks - 1) u sum(abs(x)) for sum (Jeannerod and Rump, 2013), the like relative to the
    product for prod (with sqrt(5) u where complex: Brent, Percival and Zimmermann, 2007), plus
    the division of avg, plus half an ulp of the element type, plus the error of the value itself.

    Args:
        arrays: one array per rank, of one shape and dtype.
        op: name of the operator.
        rounds_each_hop: the bound of a fold that also rounds each partial result to the element
            type, as a ring does that sends partial results on as elements.

    Returns:
        ``(value, bound)`` of the arrays' shape. value is float64 (complex128 for complex), or the
        element type for integers and bool. bound is float64, on ``abs(result - value)``: 0 where
        the result is exact, not finite by its inputs, or not rounded; infinite where the fold may
        overflow, so that nothing can be said.

    Raises:
        InvalidArgument: as reference.allreduce.
        NotSupported: as reference.allreduce.
    """
    dtype = checked(arrays, op)
    if len(arrays) == 1 or op in ("max", "min") or dtype.kind not in ("float", "complex"):
        value, bound = reference.allreduce(arrays, op), np.zeros(arrays[0].shape)
        if dtype.kind in ("float", "complex"):
            with np.errstate(all="ignore"):  # a signalling NaN warns
                value = value.astype(np.complex128 if dtype.kind == "complex" else np.float64)
        return value, bound
    with np.errstate(all="ignore"):
        limits = _Limits(part_of(dtype), len(arrays), rounds_each_hop)
        if op == "prod":
            value, bound = _exact_prod(arrays, dtype, limits)
        else:
            value, bound = _exact_sum(arrays, dtype, limits, len(arrays) if op == "avg" else 1)
    return value.reshape(arrays[0].shape), bound.reshape(arrays[0].shape)


def _exact_sum(
    arrays: Sequence[Array], dtype: Dtype, limits: _Limits, divisor: int
) -> tuple[Array, Array]:
    """Sum or mean, of the parts where complex."""
    part = part_of(dtype)
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


def _exact_prod(arrays: Sequence[Array], dtype: Dtype, limits: _Limits) -> tuple[Array, Array]:
    is_complex = dtype.kind == "complex"
    product: Any = np.longdouble(1)
    above: Any = np.longdouble(1)
    below: Any = np.longdouble(1)
    for x in arrays:
        wide = x.reshape(-1).astype(np.clongdouble if is_complex else np.longdouble)
        size = np.where(np.isfinite(wide), abs(wide), 1)
        product = product * wide
        above = above * np.maximum(size, 1)
        below = below * np.where(size == 0, 1, np.minimum(size, 1))
    relative = limits.growth(np.sqrt(5) if is_complex else 1)
    error = relative * abs(product)
    # An underflow loses at most two halves of the least subnormal; later factors magnify that.
    error = error + 2 * len(arrays) * limits.least * above * (1 + relative)
    # Where a partial product may vanish or overflow, infinity and zero can meet in some orders.
    undecided = (above * 2 >= limits.largest) | ~np.isfinite(product) & (
        is_complex | (below < limits.tiny)
    )
    return limits.finish(product, error, np.where(undecided, np.inf, 0))


class _Limits:
    """Where rounding, underflow and overflow happen for one real element type."""

    def __init__(self, dtype: Dtype, nranks: int, rounds_each_hop: bool) -> None:
        self.accumulator = _finfo(DTYPES[dtype.accumulator])
        self.element = None if dtype.accumulator == dtype.name else _finfo(dtype)
        narrow = rounds_each_hop and self.element is not None
        partial: Any = self.element if narrow else self.accumulator
        self.tiny = np.longdouble(partial.tiny)
        self.least = np.longdouble(partial.smallest_subnormal)
        # The longdouble arithmetic of the value itself makes the same kind of error.
        eps = np.longdouble(self.accumulator.eps) + np.finfo(np.longdouble).eps
        if narrow:  # rounded twice at each hop: the two roundings together, and a bit
            eps = (eps + np.longdouble(partial.eps)) * (1 + eps)
        self._hop, self._hops = eps / 2, nranks - 1
        # The smaller bound of Jeannerod and Rump needs one rounding to nearest at each hop.
        self.unit = self.growth(1) if narrow else self._hops * self._hop
        self.largest = np.longdouble(partial.max) / (1 + self.growth(1))

    def growth(self, factor: Any) -> Any:
        """The relative error of a chain of products whose hops make ``factor`` roundings each."""
        return np.expm1(self._hops * np.log1p(self._hop * factor))

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
