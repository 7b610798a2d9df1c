"""Checks that see what comparing values does not: guard bands, bits, errors beside their bounds.

Knows nothing of devices, communicators or how a reduction is computed.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuallreduce.errors import InvalidArgument
from gpuallreduce.types import Dtype, dtype_of

__all__ = [
    "Deviation",
    "Guarded",
    "first_difference",
    "worst_deviation",
    "worst_error",
    "wrong_count",
]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Guarded:
    """An array within a larger buffer whose bytes on both sides are known.

    Attributes:
        array: the array, of shape ``(count,)``; its bytes are arbitrary at first (bool: 0 or 1).
        buffer: all bytes, guards included, to be carried to another memory and back.
    """

    def __init__(
        self,
        dtype: Dtype | np.dtype[Any],
        count: int,
        *,
        offset: int = 0,
        guard_bytes: int = 1024,
        memory: Array | None = None,
    ) -> None:
        """Allocates, or takes its bytes from the start of ``memory``.

        Args:
            dtype: element type.
            count: elements of the array, 0 allowed.
            offset: elements by which the array starts past a multiple of 128 bytes.
            guard_bytes: length of either guard, rounded up to a multiple of 128.
            memory: bytes to lie in instead of new ones, such as those that peers can address.

        Raises:
            InvalidArgument: ``memory`` is too small.
        """
        row = dtype if isinstance(dtype, Dtype) else dtype_of(dtype)
        guard_bytes = -(-guard_bytes // 128) * 128
        self._start = guard_bytes + offset * row.itemsize
        self._stop = self._start + count * row.itemsize
        total = self._stop + guard_bytes
        if memory is None:
            memory = np.empty(total + 128, np.uint8)
        shift = -memory.ctypes.data % 128
        self.buffer: Array = memory[shift : shift + total]
        if self.buffer.size != total:
            raise InvalidArgument(
                f"{total + shift} bytes are needed with both guards, and memory has {memory.size}"
            )
        self.buffer[:] = self._pattern = _guard_pattern(total)
        inside = self.buffer[self._start : self._stop]
        if row.kind == "bool":
            inside &= 1
        self.array: Array = inside.view(row.numpy)

    @classmethod
    def holding(cls, values: Array, *, offset: int = 0, guard_bytes: int = 1024) -> Guarded:
        """A guarded copy of ``values``, flattened, bit for bit."""
        guarded = cls(values.dtype, values.size, offset=offset, guard_bytes=guard_bytes)
        guarded.array.view(np.uint8)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return guarded

    def check(self) -> str | None:
        """None while both guards are whole, else which was overwritten, where and by what."""
        for edge, origin, low, high in (
            ("start", self._start, 0, self._start),
            ("end", self._stop, self._stop, self.buffer.size),
        ):
            bad = low + np.flatnonzero(self.buffer[low:high] != self._pattern[low:high])
            if bad.size:
                first, last = int(bad[0]), int(bad[-1])
                return (
                    f"{bad.size} guard bytes overwritten at {first - origin:+d} .. "
                    f"{last - origin:+d} from the array's {edge}: the first is "
                    f"{self.buffer[first]:#04x}, was {self._pattern[first]:#04x}"
                )
        return None


_salts = itertools.count(41, 37)


def _guard_pattern(count: int) -> Array:
    # 256 neighbours all differ, and so do 256 buffers at one place: a guard that is copied shows,
    # even from the same place of another buffer.
    period = (np.arange(256) * 167 + next(_salts)).astype(np.uint8)
    return np.resize(period, count)


def first_difference(a: Array, b: Array) -> str | None:
    """None if two arrays have the same shape, dtype and bits, else where they first differ.

    Returns:
        The index, both values and both bit patterns, and how many elements differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}"
    different = np.flatnonzero(_differences(a, b))
    if not different.size:
        return None
    first = int(different[0])
    index = tuple(int(i) for i in np.unravel_index(first, a.shape))
    left, right = (f"{x.reshape(-1)[first]!s} ({_hex(x, first)})" for x in (a, b))
    where = str(index[0]) if len(index) == 1 else str(index)
    return f"element {where}: {left} is not {right}; {different.size} of {a.size} differ"


def wrong_count(result: Array, expected: Array) -> int:
    """How many elements differ in their bits.

    Raises:
        InvalidArgument: shapes or dtypes differ.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        raise InvalidArgument(
            f"{result.dtype}{result.shape} cannot be compared with {expected.dtype}{expected.shape}"
        )
    return int(np.count_nonzero(_differences(result, expected)))


def _differences(a: Array, b: Array) -> Array:
    return np.asarray((_bits(a) != _bits(b)).any(axis=1))


def _bits(x: Array) -> Array:
    """Bit patterns, a row per element, a column per real or imaginary part."""
    columns = 2 if x.dtype.kind == "c" else 1
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.view(f"u{x.dtype.itemsize // columns}").reshape(x.size, columns)


def _hex(x: Array, index: int) -> str:
    row = _bits(x)[index]
    return " ".join(f"0x{int(bits):0{2 * row.itemsize}x}" for bits in row)


def worst_error(result: Array, value: Array, bound: Array) -> float:
    """The largest error of a result as a fraction of its bound; correct if at most 1.

    See ``worst_deviation``.
    """
    return worst_deviation(result, value, bound).fraction


class Deviation(NamedTuple):
    """How far one element is from the real value, and how far it may be."""

    fraction: float
    error: float
    bound: float


def worst_deviation(result: Array, value: Array, bound: Array) -> Deviation:
    """The element whose error is the largest fraction of its bound.

    Args:
        result: what a reduction returned.
        value: the real value, in float64, complex128 or, for integers and bool, the same type.
        bound: largest ``abs(result - value)`` of a correct result; infinite where unknown.

    Returns:
        fraction is 0 for no element, infinite where an exact element differs or just one side is
        NaN or infinite.
    """
    if value.dtype.kind in "biu":
        wrong = math.inf if bool((result != value).any()) else 0.0
        return Deviation(wrong, wrong, 0.0)
    if not result.size:
        return Deviation(0.0, 0.0, 0.0)
    with np.errstate(all="ignore"):
        got = result.reshape(-1).astype(value.dtype).view(np.float64)
        real = np.ascontiguousarray(value).reshape(-1).view(np.float64)
        error = np.where((got == real) | (np.isnan(got) & np.isnan(real)), 0, abs(got - real))
        if value.dtype.kind == "c":
            error = np.hypot(error[::2], error[1::2])
        limit = bound.reshape(-1)
        fraction = np.where((error == 0) | np.isinf(limit), 0, error / limit)
    fraction = np.where(np.isnan(fraction), np.inf, fraction)
    worst = int(np.argmax(fraction))
    return Deviation(float(fraction[worst]), float(error[worst]), float(limit[worst]))
