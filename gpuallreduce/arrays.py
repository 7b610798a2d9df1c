"""Arrays as calls see them: address, element count and memory layout; copies only where strides
leave holes.

Knows nothing of ranks, plans or kernels, nor of any kind of array beside NumPy's: another kind is a
subclass of Arrays.
"""

from __future__ import annotations

import ctypes
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuallreduce.errors import InvalidArgument

__all__ = ["Array", "Arrays", "Bound", "HostArrays", "layout_digest"]

Array = Any  # numpy.ndarray, or what another kind of device has in its place
OVERLAP_WORK: Any = 100_000  # enough for views that people make; NumPy's stubs know only 0 and -1


def _dense_axes(array: Array) -> tuple[int, ...] | None:
    """Axes from the slowest to the fastest if the elements fill memory without holes, else None."""
    axes = [axis for axis in range(array.ndim) if array.shape[axis] != 1]
    axes.sort(key=lambda axis: -array.strides[axis])
    expected = array.itemsize
    for axis in reversed(axes):
        if array.strides[axis] != expected:
            return None
        expected *= array.shape[axis]
    return tuple(axes)


def layout_digest(array: Array) -> int | None:
    """How elements follow each other in memory: 0 for C order, a number for another dense order,
    None for strides.

    Arrays of equal digest and count agree element by element. Shapes do not count in C order, as in
    MPI and NCCL.
    """
    if array.flags.c_contiguous:
        return 0
    axes = _dense_axes(array)
    if axes is None:
        return None
    text = f"{array.shape} {axes}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") or 1


@dataclass
class Bound:
    """The memory of one rank's call.

    Attributes:
        input, output: addresses of dense elements.
        count: elements.
        layout: see layout_digest.
        in_place: True if both addresses are the same.
        source: the caller's input.
        result: the array the caller gets back.
        finish: copies a result into strided memory; None where nothing is to be done.
        keep: arrays that must live as long as the call.
        written: False if the result is left as it is.
    """

    input: int
    output: int
    count: int
    layout: int
    in_place: bool
    source: Array
    result: Array
    finish: Callable[[], None] | None
    keep: tuple[Array, ...]
    written: bool = True


class Arrays(ABC):
    """The arrays of one kind of device, and how a call gets at their memory."""

    @abstractmethod
    def check(self, array: Any, what: str, local: int) -> Array:
        """The array itself, or a view of it, if ranks of this kind can use it.

        Args:
            array: what the caller brought.
            what: how messages name it.
            local: position among the ranks of this process.

        Raises:
            InvalidArgument: it is no such array.
        """

    @abstractmethod
    def address(self, array: Array) -> int:
        """Where its first element lies; 0 may stand for an empty array."""

    @abstractmethod
    def span(self, array: Array) -> tuple[int, int]:
        """First and last-plus-one byte that its elements touch."""

    @abstractmethod
    def overlap(self, a: Array, b: Array) -> bool:
        """Whether two arrays share an element."""

    @abstractmethod
    def is_writeable(self, array: Array) -> bool:
        """Whether results may be stored there."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], local: int) -> Array:
        """A new array in C order, of unspecified content, for one of the ranks of this process."""

    @abstractmethod
    def packed(self, array: Array, local: int) -> Array:
        """The array in C order: itself, or a copy."""

    @abstractmethod
    def assign(self, target: Array, source: Array, local: int) -> None:
        """``target[...] = source`` for arrays of one shape and dtype."""

    @abstractmethod
    def ready_to_assign(self, target: Array, source: Array, local: int) -> None:
        """Raises now what ``assign`` would otherwise raise once a call has been made."""

    @abstractmethod
    def copy_bytes(self, bound: Bound, local: int) -> None:
        """Copies a bound input to its output, bit for bit."""

    def is_addressable(self, array: Array) -> bool:
        """Whether other ranks of this process can address its memory."""
        return True

    # ---- what follows from these ----------------------------------------------------------------

    def check_writeable(self, array: Array, what: str) -> None:
        """Raises InvalidArgument if results cannot be written to an array."""
        sizes = zip(array.strides, array.shape, strict=True)
        if any(step == 0 and n > 1 for step, n in sizes) and array.size > 0:
            raise InvalidArgument(
                f"{what} repeats elements (a zero stride), so a result cannot be written there"
            )
        if not self.is_writeable(array):
            raise InvalidArgument(
                f"{what} is read-only, and the result is to be written there; pass out= or a "
                "writeable copy"
            )

    def _same_memory(self, a: Array, b: Array) -> bool:
        same = self.address(a) == self.address(b)
        return bool(same and a.shape == b.shape and a.strides == b.strides)

    def _through_a_copy(self, array: Array, target: Array, local: int) -> Bound:
        """Binds a packed copy of the input, whose result goes to the strided target."""
        packed = self.packed(array, local)
        at = self.address(packed)
        shaped = packed.reshape(target.shape)
        self.ready_to_assign(target, shaped, local)

        def finish() -> None:
            self.assign(target, shaped, local)

        return Bound(at, at, array.size, 0, True, array, target, finish, (packed, array))

    def bind(self, array: Array, out: Array | None, local: int = 0) -> Bound:
        """Binds an input of a call to its output of the same shape (``None``: in place).

        Raises:
            InvalidArgument: shapes or dtypes differ, memory overlaps in part, or the output is
                read-only.
        """
        if out is not None and out is not array:
            if out.shape != array.shape or out.dtype != array.dtype:
                raise InvalidArgument(
                    f"out has shape {out.shape} and dtype {out.dtype}, the input "
                    f"{array.shape} and {array.dtype}; they must be equal"
                )
            if not self._same_memory(array, out):
                return self.bind_pair(array, out, local)
            out = None
        target = array if out is None else out
        self.check_writeable(target, "the array")
        layout = layout_digest(array)
        if layout is not None:
            at = self.address(array)
            return Bound(at, at, array.size, layout, True, array, target, None, (array,))
        return self._through_a_copy(array, target, local)

    def bind_pair(self, array: Array, out: Array, local: int = 0) -> Bound:
        """Binds an input to a separate output, which may have another shape (all_gather, ...).

        Raises:
            InvalidArgument: memory overlaps, or the output cannot be written.
        """
        self.check_writeable(out, "out")
        if self.overlap(array, out):
            raise InvalidArgument(
                "out overlaps the input: pass one that shares no element (for allreduce and reduce "
                "the input itself does as well: in place)"
            )
        layout, out_layout = layout_digest(array), layout_digest(out)
        same = array.shape == out.shape and layout is not None and layout == out_layout
        packed = array if same else self.packed(array, local)
        source, count = self.address(packed), array.size
        if same or out_layout == 0:
            digest = layout if same and layout is not None else 0
            target = self.address(out)
            return Bound(source, target, count, digest, False, array, out, None, (packed, out))
        dense = self.empty(out.shape, out.dtype, local)
        self.ready_to_assign(out, dense, local)
        target = self.address(dense)

        def finish() -> None:
            self.assign(out, dense, local)

        return Bound(source, target, count, 0, False, array, out, finish, (packed, dense))

    def bind_input(self, array: Array, local: int = 0) -> Bound:
        """Binds an array that is only read, in C order."""
        packed = self.packed(array, local)
        at = self.address(packed)
        return Bound(at, at, array.size, 0, True, array, array, None, (packed,), written=False)

    def bind_in_c_order(self, array: Array, out: Array | None, local: int = 0) -> Bound:
        """As bind, for calls whose ranks do not all bring an output, so that layouts cannot
        differ.
        """
        bound = self.bind(array, out, local)
        if bound.layout == 0:
            return bound
        return self._through_a_copy(array, bound.result, local)

    def bind_blocks(
        self, array: Array, out: Array | None, shape: tuple[int, ...], local: int
    ) -> Bound:
        """Binds an input to an output of another shape, both in C order: blocks lie along axis 0.

        Args:
            array: the input, any layout.
            out: the output; made if None.
            shape: what the output must have.
            local: position among the ranks of this process.

        Raises:
            InvalidArgument: the output has another shape or dtype, overlaps, or is read-only.
        """
        if out is None:
            out = self.empty(shape, array.dtype, local)
        if out.shape != shape or out.dtype != array.dtype:
            raise InvalidArgument(
                f"out has shape {out.shape} and dtype {out.dtype}; this call needs {shape} and "
                f"{array.dtype}"
            )
        return self.bind_pair(self.packed(array, local), out, local)


class HostArrays(Arrays):
    """NumPy arrays."""

    def check(self, array: Any, what: str, local: int) -> Array:
        """A NumPy array that has no mask."""
        if isinstance(array, list | tuple) and len(array) == 1 and isinstance(array[0], np.ndarray):
            raise InvalidArgument(
                f"{what} is a {type(array).__name__} of one array; with one rank in this process "
                "pass the array itself"
            )
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(
                f"{what} is a {type(array).__module__}.{type(array).__qualname__}; ranks on host "
                "devices take numpy.ndarray (np.asarray(x) makes one; results of a copy are not "
                "written back)"
            )
        if isinstance(array, np.ma.MaskedArray):
            raise InvalidArgument(
                f"{what} is a masked array, and the mask would be ignored; pass x.filled(value) or "
                "x.data"
            )
        return array

    def address(self, array: Array) -> int:
        """See Arrays."""
        return int(array.__array_interface__["data"][0])

    def span(self, array: Array) -> tuple[int, int]:
        """See Arrays."""
        low, high = np.lib.array_utils.byte_bounds(array)
        return int(low), int(high)

    def overlap(self, a: Array, b: Array) -> bool:
        """See Arrays."""
        if not np.may_share_memory(a, b):
            return False
        try:
            return bool(np.shares_memory(a, b, max_work=OVERLAP_WORK))
        except Exception:  # too hard to tell: refuse rather than risk
            return True

    def is_writeable(self, array: Array) -> bool:
        """See Arrays."""
        return bool(array.flags.writeable)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], local: int) -> Array:
        """See Arrays."""
        return np.empty(shape, dtype)

    def packed(self, array: Array, local: int) -> Array:
        """See Arrays."""
        return np.ascontiguousarray(array)

    def assign(self, target: Array, source: Array, local: int) -> None:
        """See Arrays."""
        target[...] = source

    def ready_to_assign(self, target: Array, source: Array, local: int) -> None:
        """NumPy copies between any strides."""

    def copy_bytes(self, bound: Bound, local: int) -> None:
        """See Arrays."""
        ctypes.memmove(bound.output, bound.input, bound.count * bound.result.dtype.itemsize)
