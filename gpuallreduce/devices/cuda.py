"""CUDA devices: ranks on GPUs, arrays in their memory, kernels launched through CuPy.

Knows nothing of algorithms, plans or other ranks: it loads kernels and launches them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpuallreduce.args import GarDeviceArgs
from gpuallreduce.arrays import Array
from gpuallreduce.devices.cuda_arrays import CudaArrays
from gpuallreduce.devices.cuda_control import ControlWords, LostWatch
from gpuallreduce.devices.cuda_memory import collect
from gpuallreduce.devices.cuda_quick import QuickCalls, QuickLaunch
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, gpu_of, in_any_capture
from gpuallreduce.devices.cuda_streams import Lane
from gpuallreduce.devices.cuda_strided import MAX_BLOCK, plan_move
from gpuallreduce.errors import DeviceError, InvalidArgument, NotSupported
from gpuallreduce.jit import Kernel
from gpuallreduce.jit_cuda import device_code, target_of
from gpuallreduce.plan import Plan

__all__ = ["CudaDevice", "argument", "load"]

COPY_DEFAULT = 4  # cudaMemcpyDefault
LONGEST_NAP_S = 1e-3

_load_lock = threading.Lock()
_launching = threading.RLock()  # see NOTE one thread launches all local ranks
_loaded: dict[tuple[Kernel, int], Any] = {}


def load(kernel: Kernel, ordinal: int) -> Any:
    """A kernel as CuPy launches it on a GPU, compiled and loaded if need be.

    ``load(kernel, 0)((blocks,), (threads,), (argument(struct),), stream=stream)`` on device 0.

    Raises:
        CompileError: it does not compile.
        DeviceError: the driver refused it.
    """
    function = _loaded.get((kernel, ordinal))
    if function is None:
        with _load_lock:
            gpu, cupy = gpu_of(ordinal), cupy_module()
            code = device_code(kernel, target_of(gpu.major, gpu.minor))
            what = f"loading {kernel.symbol} on cuda:{ordinal}"
            with _launching, cuda_errors(what), in_any_capture(), cupy.cuda.Device(ordinal):
                module = cupy.cuda.function.Module()
                module.load(code)
                function = module.get_function(kernel.symbol)
            _loaded[kernel, ordinal] = function
    return function


def argument(struct: ctypes.Structure) -> np.ndarray[Any, Any]:
    """A struct as CuPy passes it to a kernel by value: an array of one element over its bytes."""
    raw = memoryview(struct).cast("B")
    return np.frombuffer(raw, np.dtype((np.void, ctypes.sizeof(struct))))


class CudaDevice(ControlWords):
    """The GPUs of one communicator's local ranks. See devices.base.Device.

    Launches are ordered on streams and return at once. NOTE one thread launches all local ranks:
    their kernels wait for each other, so between the first launch and the last nothing may wait for
    a GPU. Kernels are loaded before the first, and no finalizer of the garbage collector runs in
    between; nor does another thread load kernels then, or launch another communicator's call, which
    on streams that both use might come first on one GPU and second on the other.
    """

    arguments = GarDeviceArgs
    asynchronous = True
    poll = poll_context = 0

    def __init__(self, ordinals: Sequence[int], *, peers: bool) -> None:
        """For local ranks on these GPUs.

        Args:
            ordinals: the GPU of each local rank.
            peers: GPUs of this process address each other's memory.
        """
        self._cupy = cupy_module()
        if len(ordinals) > 1 and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise NotSupported(
                "CUDA_LAUNCH_BLOCKING=1 makes every launch wait for its kernel, but kernels of "
                "several ranks in one process wait for each other: unset it, or start a process "
                "per rank (gpuallreduce.init)"
            )
        self.ordinals = list(ordinals)
        self.lanes = [
            Lane(ordinal, shared=self.ordinals.count(ordinal) > 1) for ordinal in ordinals
        ]
        self.arrays = CudaArrays(self.ordinals, self._stream_of, self, peers=peers)
        self._quick = QuickCalls(self._cupy.ndarray, self.ordinals, self.arrays.is_addressable)
        self._process = os.getpid()
        self._watch: LostWatch | None = None
        self._launcher: int | None = None  # the thread that is between two launches of a call

    def _stream_of(self, local: int) -> Any:
        return self.lanes[local].stream

    @property
    def forked(self) -> bool:
        """CUDA does not live on in a forked child."""
        return os.getpid() != self._process

    def call(self, arrays: Any, out: Any, op: str) -> Any:
        """See Device. The caller holds the communicator's lock."""
        launch = self._quick.find(arrays, out, op)
        if launch is None:
            return None
        self.begin(None)
        try:
            self._launch(launch.functions, launch.arguments, launch.nblocks, launch.nthreads)
        finally:
            self.end()
        return arrays if out is None else out

    # ---- launching ----------------------------------------------------------------------------

    def begin(self, stream: Any) -> None:
        """See Device."""
        collect()
        pairs = list(zip(self.lanes, self._per_lane(stream), strict=True))
        with cuda_errors("ordering a call on its stream"):
            chosen = [lane.chosen(each) for lane, each in pairs]  # all are right, or none begins
            for lane, each in zip(self.lanes, chosen, strict=True):
                lane.begin(*each)

    def end(self) -> None:
        """See Device."""
        with cuda_errors("ordering a stream behind a call"):
            for lane in self.lanes:
                lane.end()

    def _per_lane(self, stream: Any) -> list[Any]:
        count = len(self.lanes)
        if stream is None:
            return [None] * count
        if count == 1 and not isinstance(stream, list | tuple):
            return [stream]
        if not isinstance(stream, list | tuple) or len(stream) != count:
            raise InvalidArgument(
                f"stream={stream!r}: this process holds {count} ranks; give a list with a stream "
                "for each, or None for CuPy's current streams"
            )
        return list(stream)

    def launch(
        self, kernel: Kernel, args: Sequence[Any], nblocks: int, *, nthreads: int = 1
    ) -> bool:
        """See Device. Always True: what a kernel finds out is read later."""
        functions = [load(kernel, lane.ordinal) for lane in self.lanes]
        self._launch(functions, [argument(each) for each in args], nblocks, nthreads)
        return True

    def _launch(
        self,
        functions: Sequence[Any],
        arguments: Sequence[np.ndarray[Any, Any]],
        nblocks: int,
        nthreads: int,
    ) -> None:
        collecting = gc.isenabled()
        gc.disable()  # see NOTE one thread launches all local ranks
        outer, self._launcher = self._launcher, threading.get_ident()
        try:
            with _launching, cuda_errors("launching a call"):
                for lane, function, each in zip(self.lanes, functions, arguments, strict=True):
                    lane.launch(function, nblocks, nthreads, each)
        finally:
            self._launcher = outer
            if collecting:
                gc.enable()

    @contextmanager
    def in_one_call(self) -> Iterator[None]:
        """Everything launched in the block is one call: a signal handler that runs meanwhile cannot
        end what it needs; see ``in_signal_handler``.
        """
        outer, self._launcher = self._launcher, threading.get_ident()
        try:
            yield
        finally:
            self._launcher = outer

    def arena_of(self, local: int) -> Any:
        """See cuda_arrays.Mover."""
        return self.lanes[local].arena

    def ready_to_move(self, target: Array, source: Array, local: int) -> None:
        """See cuda_arrays.Mover."""
        load(plan_move(target, source)[0], self.lanes[local].ordinal)

    def move(self, target: Array, source: Array, local: int) -> None:
        """See cuda_arrays.Mover."""
        lane = self.lanes[local]
        kernel, struct, nblocks = plan_move(target, source)
        with cuda_errors("copying a strided array"):
            lane.launch(load(kernel, lane.ordinal), nblocks, MAX_BLOCK, argument(struct))

    def prepare(
        self,
        plan: Plan,
        args: Sequence[Any],
        *,
        dtype: Any,
        in_place: bool,
        symmetric: tuple[int, int] = (0, 0),
    ) -> None:
        """See Device."""
        config, request = plan.config, plan.request
        if config.access == "engine" or any(symmetric):
            return
        structs = [GarDeviceArgs.from_buffer_copy(each) for each in args]
        launch = QuickLaunch(
            functions=[load(plan.kernel, lane.ordinal) for lane in self.lanes],
            structs=structs,
            arguments=[argument(each) for each in structs],
            nblocks=config.nchannels,
            nthreads=config.nthreads,
            direct=config.access == "direct",
        )
        direct = request.direct and len(self.lanes) > 1
        self._quick.keep(dtype, request.op.name, request.nbytes, in_place, direct, launch)

    def forget(self) -> None:
        """See Device."""
        self._quick.forget()

    def add_symmetric(self, begin: int, nbytes: int) -> None:
        """See Device."""
        self._quick.add_symmetric(begin, nbytes)

    def remove_symmetric(self, begin: int) -> None:
        """See Device."""
        self._quick.remove_symmetric(begin)

    # ---- waiting ------------------------------------------------------------------------------

    def idle(self) -> bool:
        """No thread is ever inside a launch for long."""
        return True

    @property
    def in_signal_handler(self) -> bool:
        """See Device."""
        return self._launcher == threading.get_ident()

    def streams(self) -> Sequence[int]:
        """See Device."""
        return [lane.stream.ptr for lane in self.lanes]

    def synchronize(self, meanwhile: Callable[[], None]) -> None:
        """See Device. Lets signal handlers run."""
        for lane in self.lanes:
            with cuda_errors(f"work on cuda:{lane.ordinal}"):
                _wait_until(lane.done, meanwhile)

    def drain(self, meanwhile: Callable[[], None], abandon: Callable[[], None]) -> None:
        """See Device."""
        for lane in self.lanes:
            try:
                with cuda_errors("work"):
                    _wait_until(lane.done, meanwhile)
            except DeviceError:
                abandon()  # the others wait for this GPU in vain
        collect()

    def close(self) -> None:
        """Ends the watch over other processes."""
        if self._watch is not None and not self.forked:
            self._watch.stop()

    # ---- words --------------------------------------------------------------------------------

    def read_word(self, address: int) -> int:
        """See Device. A copy of its own stream, so that it waits for nobody's work."""
        word = ctypes.c_uint64()
        self._copy_words([(ctypes.addressof(word), address)], "reading a segment")
        return word.value

    def write_words(self, addresses: Sequence[int], value: int) -> None:
        """See Device."""
        word = ctypes.c_uint64(value)
        pairs = [(address, ctypes.addressof(word)) for address in addresses]
        self._copy_words(pairs, "writing a segment")

    def _copy_words(self, pairs: Sequence[tuple[int, int]], what: str) -> None:
        runtime = self._cupy.cuda.runtime
        with cuda_errors(what), self._cupy.cuda.Device(self.ordinals[0]):
            stream = self._cupy.cuda.Stream(non_blocking=True)
            for target, source in pairs:
                runtime.memcpyAsync(target, source, 8, COPY_DEFAULT, stream.ptr)
            stream.synchronize()

    def watch(self, args: Any, processes: Mapping[int, int], keep: Any) -> None:
        """See Device."""
        self._watch = LostWatch(args, processes, keep) if processes else None


def _wait_until(done: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Looks often at first, then seldom; between two looks signal handlers run."""
    nap_s = 0.0
    while not done():
        if nap_s == LONGEST_NAP_S:
            meanwhile()
        time.sleep(nap_s)
        nap_s = min(LONGEST_NAP_S, nap_s * 1.5 + 1e-6)
