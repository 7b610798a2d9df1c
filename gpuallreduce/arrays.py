"""NumPy arrays as calls see them: address, element count and memory layout; copies only where
strides leave holes.

Knows nothing of ranks, plans or kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuallreduce.errors import InvalidArgument

__all__ = [
    "Array",
    "Bound",
    "bind",
    "bind_blocks",
    "bind_in_c_order",
    "bind_input",
    "bind_pair",
    "check_array",
    "check_writeable",
    "copy_to_output",
    "layout_digest",
    "overlap",
]

Array = np.ndarray[Any, Any]
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


def check_array(array: Any, what: str) -> Array:
    """The array itself, if it is one that host ranks can use.

    Raises:
        InvalidArgument: it is not a NumPy array, or a masked one.
    """
    if isinstance(array, list | tuple) and len(array) == 1 and isinstance(array[0], np.ndarray):
        raise InvalidArgument(
            f"{what} is a {type(array).__name__} of one array; with one rank in this process pass "
            "the array itself"
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


def check_writeable(array: Array, what: str) -> None:
    """Raises InvalidArgument if results cannot be written to an array."""
    repeats = any(step == 0 and n > 1 for step, n in zip(array.strides, array.shape, strict=True))
    if repeats and array.size > 0:
        raise InvalidArgument(
            f"{what} repeats elements (a zero stride), so a result cannot be written there"
        )
    if not array.flags.writeable:
        raise InvalidArgument(
            f"{what} is read-only, and the result is to be written there; pass out= or a "
            "writeable copy"
        )


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays share an element."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=OVERLAP_WORK))
    except Exception:  # too hard to tell: refuse rather than risk
        return True


def _same_memory(a: Array, b: Array) -> bool:
    return _address(a) == _address(b) and a.shape == b.shape and a.strides == b.strides


def bind(array: Array, out: Array | None) -> Bound:
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
        if not _same_memory(array, out):
            return bind_pair(array, out)
        out = None
    target = array if out is None else out
    check_writeable(target, "the array")
    layout = layout_digest(array)
    if layout is not None:
        address = _address(array)
        return Bound(address, address, array.size, layout, True, array, target, None, (array,))
    packed = np.ascontiguousarray(array)

    def scatter() -> None:
        target[...] = packed

    address = _address(packed)
    return Bound(address, address, array.size, 0, True, array, target, scatter, (packed, array))


def bind_pair(array: Array, out: Array) -> Bound:
    """Binds an input to a separate output, which may have another shape (all_gather, ...).

    Raises:
        InvalidArgument: memory overlaps, or the output cannot be written.
    """
    check_writeable(out, "out")
    if overlap(array, out):
        raise InvalidArgument(
            "out overlaps the input: pass one that shares no element (for allreduce and reduce the "
            "input itself does as well: in place)"
        )
    layout, out_layout = layout_digest(array), layout_digest(out)
    same = array.shape == out.shape and layout is not None and layout == out_layout
    packed = array if same else np.ascontiguousarray(array)
    source, count = _address(packed), array.size
    if same or out_layout == 0:
        digest = layout if same and layout is not None else 0
        return Bound(source, _address(out), count, digest, False, array, out, None, (packed, out))
    dense = np.empty(out.shape, out.dtype)

    def scatter() -> None:
        out[...] = dense

    return Bound(source, _address(dense), count, 0, False, array, out, scatter, (packed, dense))


def bind_input(array: Array) -> Bound:
    """Binds an array that is only read, in C order."""
    packed = np.ascontiguousarray(array)
    at = _address(packed)
    return Bound(at, at, array.size, 0, True, array, array, None, (packed,), written=False)


def bind_in_c_order(array: Array, out: Array | None) -> Bound:
    """As bind, for calls whose ranks do not all bring an output, so that layouts cannot differ."""
    bound = bind(array, out)
    if bound.layout == 0:
        return bound
    packed = np.ascontiguousarray(array)
    target = bound.result

    def scatter() -> None:
        target[...] = packed

    at = _address(packed)
    return Bound(at, at, array.size, 0, True, array, target, scatter, (packed, array))


def bind_blocks(array: Array, out: Array | None, shape: tuple[int, ...]) -> Bound:
    """Binds an input to an output of another shape, both in C order: blocks lie along axis 0.

    Args:
        array: the input, any layout.
        out: the output; made if None.
        shape: what the output must have.

    Raises:
        InvalidArgument: the output has another shape or dtype, overlaps, or is read-only.
    """
    if out is None:
        out = np.empty(shape, array.dtype)
    if out.shape != shape or out.dtype != array.dtype:
        raise InvalidArgument(
            f"out has shape {out.shape} and dtype {out.dtype}; this call needs {shape} and "
            f"{array.dtype}"
        )
    return bind_pair(np.ascontiguousarray(array), out)


def copy_to_output(bound: Bound) -> None:
    """What a single rank does: the result is the input, bit for bit."""
    if not bound.in_place:
        ctypes.memmove(bound.output, bound.input, bound.count * bound.result.dtype.itemsize)
