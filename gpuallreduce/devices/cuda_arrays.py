"""CuPy arrays as calls see them, and what offers GPU memory as CuPy does: numba, torch, JAX.

Knows nothing of ranks or calls beyond the stream that orders a call on each GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from gpuallreduce.arrays import Array, Arrays, Bound, HostArrays
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, in_any_capture
from gpuallreduce.devices.cuda_streams import external_stream, is_capturing
from gpuallreduce.errors import InvalidArgument

__all__ = ["CudaArrays", "gpu_with"]

DLPACK_CUDA, DLPACK_CUDA_MANAGED = 2, 13
MEMORY_HOST = 1  # CU_MEMORYTYPE_HOST
COPY_DEFAULT = 4  # cudaMemcpyDefault


@functools.cache
def _read_only_type() -> Any:
    """CuPy arrays cannot be read-only; a view of what another library offers can."""

    class ReadOnly(cupy_module().ndarray):  # type: ignore[misc]
        """A view that must not be written to."""

    return ReadOnly


def _shadow(array: Array) -> np.ndarray[Any, Any]:
    """A NumPy array of the same address, shape and strides; never looked into."""
    dtype = np.dtype(f"V{array.itemsize}")
    described = {
        "shape": array.shape,
        "typestr": dtype.str,
        "data": (array.data.ptr or 1, True),
        "strides": array.strides,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


class Mover(Protocol):
    """Copies between arrays of any strides on a local rank's GPU, on the stream of its call."""

    def arena_of(self, local: int) -> Any:
        """The stream in whose order memory of the present call may be used again."""

    def ready_to_move(self, target: Array, source: Array, local: int) -> None:
        """Compiles and loads what ``move`` needs.

        Raises:
            NotSupported: there are too many axes.
            CompileError, DeviceError: there is no kernel.
        """

    def move(self, target: Array, source: Array, local: int) -> None:
        """``target[...] = source``."""


class CudaArrays(Arrays):
    """Arrays of the GPUs of one communicator.

    Copies are ordered on the streams of the call: see ``stream_of``.
    """

    def __init__(
        self,
        ordinals: Sequence[int],
        stream_of: Callable[[int], Any],
        mover: Mover,
        *,
        peers: bool,
    ) -> None:
        """For the GPUs of the ranks of this process.

        Args:
            ordinals: the GPU of each local rank.
            stream_of: the stream that orders the present call on a local rank.
            mover: copies between arrays of any strides.
            peers: GPUs of this process address each other's memory.
        """
        self._cupy = cupy_module()
        self._ordinals = ordinals
        self._stream_of = stream_of
        self._mover = mover
        self._peers = peers
        self._host = HostArrays()
        self._captured: list[Array] = []  # what graphs use whenever they are launched

    def check(self, array: Any, what: str, local: int) -> Array:
        """A CuPy array on the rank's GPU: the caller's, or a view of it."""
        cupy, ordinal = self._cupy, self._ordinals[local]
        if isinstance(array, list | tuple) and len(array) == 1:
            raise InvalidArgument(
                f"{what} is a {type(array).__name__} of one array; with one rank in this process "
                "pass the array itself"
            )
        if isinstance(array, cupy.ndarray):
            found = array
        elif hasattr(array, "__cuda_array_interface__") and not _says_more_by_dlpack(array):
            found = self._from_interface(array, what, local)
        elif hasattr(array, "__dlpack_device__"):
            found = self._from_dlpack(array, what, local)
        else:
            raise InvalidArgument(
                f"{what} is a {type(array).__module__}.{type(array).__qualname__}; ranks on CUDA "
                "devices take cupy.ndarray, or anything with __cuda_array_interface__ or DLPack on "
                "a GPU (cupy.asarray(x) copies host data to the current GPU)"
            )
        device = found.data.device_id
        if found.size and device != ordinal:
            raise InvalidArgument(
                f"{what} lies on cuda:{device} and the rank runs on cuda:{ordinal}; bring an array "
                f"of cuda:{ordinal}"
            )
        return found

    def _from_interface(self, array: Any, what: str, local: int) -> Array:
        """A view by ``__cuda_array_interface__``, behind the work of its producer's stream."""
        offered = array.__cuda_array_interface__
        address, read_only = offered["data"]
        stream = offered.get("stream")
        if stream == 0:
            raise InvalidArgument(
                f"{what} names stream 0 in its __cuda_array_interface__, which the protocol "
                "forbids: 1 is the legacy default stream, 2 the per-thread one"
            )
        ordinal = self._ordinals[local]
        if address:
            with cuda_errors(f"looking up {what}"):
                facts = self._cupy.cuda.runtime.pointerGetAttributes(address)
            ordinal = facts.device if facts.device >= 0 else ordinal
        dtype = np.dtype(offered["typestr"])
        shape, strides = tuple(offered["shape"]), offered.get("strides")
        extents = zip(shape, strides, strict=True) if strides else ()
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if strides and nbytes:
            nbytes = dtype.itemsize + sum((n - 1) * step for n, step in extents if step > 0)
        memory = self._cupy.cuda.UnownedMemory(address or 0, nbytes, array, ordinal)
        kind = _read_only_type() if read_only else self._cupy.ndarray
        view = kind(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0), strides)
        if stream is not None:
            self._wait_for(external_stream(stream, ordinal), ordinal, local)
        return view

    def _wait_for(self, producer: Any, ordinal: int, local: int) -> None:
        consumer = self._stream_of(local)
        if producer.ptr == consumer.ptr:
            return
        with cuda_errors("waiting for the stream of an array"):
            with self._cupy.cuda.Device(ordinal):
                event = self._cupy.cuda.Event(disable_timing=True)
                event.record(producer)
            with self._cupy.cuda.Device(self._ordinals[local]):
                consumer.wait_event(event)

    def _from_dlpack(self, array: Any, what: str, local: int) -> Array:
        """A view by DLPack, whose producer orders it on the stream of the call."""
        kind, number = array.__dlpack_device__()
        if int(kind) not in (DLPACK_CUDA, DLPACK_CUDA_MANAGED):
            raise InvalidArgument(
                f"{what} is a {type(array).__qualname__} in host memory; ranks on CUDA devices "
                "take arrays of a GPU"
            )
        ordinal = self._ordinals[local]
        if int(number) != ordinal:
            raise InvalidArgument(
                f"{what} lies on cuda:{number} and the rank runs on cuda:{ordinal}; bring an array "
                f"of cuda:{ordinal}"
            )
        with self._cupy.cuda.Device(ordinal), self._stream_of(local):
            return self._cupy.from_dlpack(array)

    def address(self, array: Array) -> int:
        """See Arrays."""
        return int(array.data.ptr)

    def span(self, array: Array) -> tuple[int, int]:
        """See Arrays."""
        return self._host.span(_shadow(array))

    def overlap(self, a: Array, b: Array) -> bool:
        """See Arrays."""
        if a.size == 0 or b.size == 0 or a.data.device_id != b.data.device_id:
            return False
        if a.flags.c_contiguous and b.flags.c_contiguous:
            low, high = a.data.ptr, b.data.ptr
            return bool(low < high + b.nbytes and high < low + a.nbytes)
        return self._host.overlap(_shadow(a), _shadow(b))

    def is_writeable(self, array: Array) -> bool:
        """See Arrays."""
        return not isinstance(array, _read_only_type())

    def is_addressable(self, array: Array) -> bool:
        """Peers reach what cudaMalloc gave, and all GPUs pinned host memory; memory pools of CUDA
        and managed memory have rules of their own, so calls on them go through slots.
        """
        if array.size == 0:
            return True
        address = int(array.data.ptr)
        return (self._peers and _plainly_allocated(address)) or _on_host(address)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], local: int) -> Array:
        """See Arrays."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        ordinal, stream = self._ordinals[local], self._mover.arena_of(local)
        what = f"allocating {nbytes} bytes on cuda:{ordinal}"
        with cuda_errors(what), in_any_capture(), self._cupy.cuda.Device(ordinal), stream:
            # Not cupy.empty, which knows no float8.
            array = self._cupy.ndarray(shape, dtype, self._cupy.cuda.alloc(nbytes))
        if is_capturing(self._stream_of(local)):
            self._captured.append(array)
        return array

    def ready_to_assign(self, target: Array, source: Array, local: int) -> None:
        """See Arrays."""
        if target.size and not (target.flags.c_contiguous and source.flags.c_contiguous):
            self._mover.ready_to_move(target, source, local)

    def packed(self, array: Array, local: int) -> Array:
        """See Arrays."""
        if array.flags.c_contiguous:
            return array
        dense = self.empty(array.shape, array.dtype, local)
        self.assign(dense, array, local)
        return dense

    def assign(self, target: Array, source: Array, local: int) -> None:
        """See Arrays."""
        if target.size == 0:
            return
        if target.flags.c_contiguous and source.flags.c_contiguous:
            self._copy(target.data.ptr, source.data.ptr, target.nbytes, local)
        else:
            self._mover.move(target, source, local)

    def copy_bytes(self, bound: Bound, local: int) -> None:
        """See Arrays."""
        nbytes = bound.count * bound.result.dtype.itemsize
        if not bound.in_place and nbytes:
            self._copy(bound.output, bound.input, nbytes, local)

    def _copy(self, target: int, source: int, nbytes: int, local: int) -> None:
        with cuda_errors(f"copying {nbytes} bytes"), self._cupy.cuda.Device(self._ordinals[local]):
            stream = self._stream_of(local).ptr
            self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, COPY_DEFAULT, stream)


def _says_more_by_dlpack(array: Any) -> bool:
    """Whether it is of a type that has no name in array interfaces, such as torch's bfloat16."""
    if not hasattr(array, "__dlpack_device__"):
        return False
    offered = array.__cuda_array_interface__
    return "V" in offered["typestr"] or "stream" not in offered


def gpu_with(array: Any) -> str:
    """The name of the GPU that an array lies on, or ``host``.

    Raises:
        NotSupported: CuPy or a GPU is missing.
    """
    cupy = cupy_module()
    if hasattr(array, "__dlpack_device__"):
        kind, number = array.__dlpack_device__()
        return f"cuda:{int(number)}" if int(kind) in (DLPACK_CUDA, DLPACK_CUDA_MANAGED) else "host"
    address = array.__cuda_array_interface__["data"][0]
    if not address:  # an empty array is everywhere
        return f"cuda:{cupy.cuda.runtime.getDevice()}"
    with cuda_errors("looking up an array"):
        return f"cuda:{cupy.cuda.runtime.pointerGetAttributes(address).device}"


def _plainly_allocated(address: int) -> bool:
    """Whether memory came from cudaMalloc: it is what old-style IPC can export, so the driver
    knows.
    """
    error, capable = _driver().cuPointerGetAttribute(_ipc_capable(), address)
    return bool(int(error) == 0 and capable)


def _on_host(address: int) -> bool:
    """Whether memory is pinned memory of the host, which unified addressing lets all GPUs reach."""
    error, kind = _driver().cuPointerGetAttribute(_memory_type(), address)
    return bool(int(error) == 0 and int(kind) == MEMORY_HOST)


@functools.cache
def _memory_type() -> Any:
    return _driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver  # type: ignore[import-untyped]

    return driver


@functools.cache
def _ipc_capable() -> Any:
    return _driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
