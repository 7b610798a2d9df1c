"""The streams of one rank's calls on its GPU, and what keeps the calls in order across them.

Knows nothing of what a call does.
"""

from __future__ import annotations

import threading
from typing import Any

from gpuallreduce.devices.cuda_runtime import cupy_module, on_device
from gpuallreduce.errors import InvalidArgument

__all__ = ["Lane", "external_stream", "is_capturing"]

LEGACY_DEFAULT = (0, 1)  # no stream given, cudaStreamLegacy
PER_THREAD_DEFAULT = 2  # cudaStreamPerThread
SUCCESS, NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady


class _Pointer:
    """A stream of another library, as CuPy takes it."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def external_stream(pointer: int, ordinal: int) -> Any:
    """Another library's stream as CuPy's; its life is the other's business."""
    cupy = cupy_module()
    if hasattr(cupy.cuda.Stream, "from_external"):
        with cupy.cuda.Device(ordinal):
            return cupy.cuda.Stream.from_external(_Pointer(pointer))
    return cupy.cuda.ExternalStream(pointer, ordinal)  # CuPy 13


class Lane:
    """One local rank: its GPU, the stream of the present call, and the one of the call before.

    NOTE one call after the other. Step counters and slots are plain memory of a rank, so its calls
    must run in the order in which they were made, whatever streams they are on. A call on another
    stream than the one before waits for an event that is recorded behind that one. Where that
    stream may be gone by then, and its number another's, the event is recorded when the call ends,
    behind all that it put there. A call under capture takes no part in this: CUDA allows no wait
    for work outside the graph, so a graph's launches are ordered like any other work, by the stream
    that they are launched on; calls outside follow each other as if it were not there.

    NOTE ranks of one GPU. Their kernels wait for each other, so they must be able to run at the
    same time: not one behind the other on one stream, nor on two that CUDA's legacy default stream
    ties together. Each such rank has a non-blocking stream of its own, behind the caller's when a
    call begins and before it when the call ends.

    Attributes:
        ordinal: the GPU.
        stream: of the present call.
    """

    def __init__(self, ordinal: int, *, shared: bool) -> None:
        """A rank on a GPU.

        Args:
            ordinal: the GPU.
            shared: other ranks of this process are on the same one.
        """
        self._cupy = cupy_module()
        self._device = self._cupy.cuda.Device(ordinal)
        self.ordinal = ordinal
        self.stream: Any = self._cupy.cuda.Stream.null
        self._own: Any = None
        self._callers: Any = None
        if shared:
            with self._device:
                self._own = self._cupy.cuda.Stream(non_blocking=True)
        self._last: Any = self.stream  # of the last call outside of graphs
        self._key: Any = None  # of that stream
        self._may_vanish = False  # others destroy it, or no other thread can name it
        self._event: Any = None  # behind that call, where its stream may be gone by now

    @property
    def arena(self) -> Any:
        """The stream in whose order memory of the call may be used again: the caller's."""
        return self.stream if self._callers is None else self._callers

    def begin(self, chosen: Any, may_vanish: bool) -> None:
        """Orders the next call on a stream, behind the call before.

        Args:
            chosen: the stream.
            may_vanish: others may destroy it meanwhile; see ``chosen``.
        """
        if self._own is not None:
            with self._device:
                self._own.wait_event(self._recorded(chosen))
            self.stream, self._callers = self._own, chosen
            return
        self.stream = chosen
        if is_capturing(chosen):
            return
        key = self._identity(chosen)
        if self._key is not None and (key != self._key or self._event is not None):
            with self._device:
                if self._event is None and not is_capturing(self._last):
                    self._event = self._recorded(self._last)
                if self._event is not None:
                    chosen.wait_event(self._event)
        self._last, self._key, self._event = chosen, key, None
        self._may_vanish = may_vanish or chosen.ptr == PER_THREAD_DEFAULT

    def end(self) -> None:
        """Orders what the caller does next behind the call."""
        if self._callers is not None:
            with self._device:
                self._callers.wait_event(self._recorded(self._own))
            self._callers = None
        elif self._may_vanish and self.stream is self._last and not is_capturing(self._last):
            with self._device:
                self._event = self._recorded(self._last)

    def launch(self, function: Any, nblocks: int, nthreads: int, argument: Any) -> None:
        """Launches a kernel on the call's stream."""
        with on_device(self.ordinal):
            function((nblocks, 1, 1), (nthreads, 1, 1), (argument,), stream=self.stream)

    def done(self) -> bool:
        """Whether everything on the stream of the last call has ended. Raises CUDA's errors."""
        runtime = self._cupy.cuda.runtime
        last = self._last if self._own is None else self._own
        with on_device(self.ordinal):
            if self._event is not None:
                status = runtime.eventQuery(self._event.ptr)
            elif is_capturing(last):
                return True
            else:
                status = runtime.streamQuery(last.ptr)
        if status not in (SUCCESS, NOT_READY):  # which CuPy's own ``done`` takes for not done
            raise runtime.CUDARuntimeError(status)
        return bool(status == SUCCESS)

    def _recorded(self, stream: Any) -> Any:
        """An event behind what a stream holds."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def chosen(self, stream: Any) -> tuple[Any, bool]:
        """The stream as CuPy's, and whether others may destroy it meanwhile.

        Args:
            stream: what the caller passed; None: CuPy's current stream of the GPU.

        Raises:
            InvalidArgument: it is no stream, or one of another GPU.
        """
        kind = self._cupy.cuda.Stream
        if stream is None:
            stream = self._cupy.cuda.get_current_stream(self.ordinal)
        if not isinstance(stream, kind | self._cupy.cuda.ExternalStream):
            if not hasattr(stream, "__cuda_stream__"):
                raise InvalidArgument(
                    f"stream={stream!r} is no stream: give a cupy.cuda.Stream, or anything with "
                    "__cuda_stream__ such as a torch.cuda.Stream"
                )
            _, pointer = stream.__cuda_stream__()
            stream = external_stream(pointer, self.ordinal)
        if stream.device_id not in (-1, self.ordinal):
            raise InvalidArgument(
                f"stream={stream!r} belongs to cuda:{stream.device_id}, the rank runs on "
                f"cuda:{self.ordinal}"
            )
        # CuPy knows the GPU of the streams that it made.
        made = isinstance(stream, kind) and stream.device_id >= 0
        return stream, not made and stream.ptr not in LEGACY_DEFAULT

    def _identity(self, stream: Any) -> Any:
        """Equal for streams in which work follows in order."""
        if stream.ptr == PER_THREAD_DEFAULT:
            return (PER_THREAD_DEFAULT, threading.get_ident())
        return stream.ptr


def is_capturing(stream: Any) -> bool:
    """Whether work on the stream becomes part of a graph."""
    return stream.ptr != 0 and bool(stream.is_capturing())
