"""GPUs as places of ranks: arrays in their memory, a stream for each rank, and what they are.

Knows nothing of what is measured. Values are made by NumPy and copied: no kernel but those that are
measured has to run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gpuallreduce.communicator import Communicator
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, gpu_of
from gpuallreduce.errors import NotSupported

from .places import row_among

__all__ = ["CudaPlace"]

COPY_DEFAULT = 4  # cudaMemcpyDefault


class CudaPlace:
    """See places.Place. Each local rank has a stream for its calls.

    Attributes:
        ordinals: the GPU of each local rank.
        streams: the stream of each local rank.
    """

    kind = "cuda"

    def __init__(self, comm: Communicator) -> None:
        """A collective: memory of the ranks tells which GPUs they are on."""
        cupy = cupy_module()
        self._cupy, self._runtime, self._comm = cupy, cupy.cuda.runtime, comm
        blocks = comm.empty(1, np.uint8)
        self.ordinals = [block.device.id for block in (blocks if len(comm.ranks) > 1 else [blocks])]
        self.streams: list[Any] = []
        for ordinal in self.ordinals:
            with cupy.cuda.Device(ordinal):
                self.streams.append(cupy.cuda.Stream(non_blocking=True))
        # Programs name no stream where one is current. Ranks that share a GPU need one each.
        shared = len(set(self.ordinals)) < len(self.ordinals)
        self.keywords: Mapping[str, Any] = {"stream": self.streams} if shared else {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Makes each rank's stream the current one of its GPU, in this thread, for a while."""
        before = [self._cupy.cuda.get_current_stream(ordinal) for ordinal in self.ordinals]
        self._use(self.streams)
        try:
            yield
        finally:
            self._use(before)

    def _use(self, streams: Sequence[Any]) -> None:
        for ordinal, stream in zip(self.ordinals, streams, strict=True):
            with self._cupy.cuda.Device(ordinal):
                stream.use()

    def check_memory(self, nbytes: int) -> None:
        """Ranks of this process that share a GPU share its memory."""
        for ordinal in sorted(set(self.ordinals)):
            needed = nbytes * self.ordinals.count(ordinal)
            with self._cupy.cuda.Device(ordinal):
                self._cupy.get_default_memory_pool().free_all_blocks()
                free, _ = self._runtime.memGetInfo()
            if needed > free:
                raise NotSupported(
                    f"the arrays need {needed / 1e9:.1f} GB of cuda:{ordinal}, and "
                    f"{free / 1e9:.1f} GB are free; lower -e or the number of ranks"
                )

    def make(self, nbytes: int) -> list[Any]:
        """Straight from cudaMalloc's pool in CuPy."""
        arrays = []
        for ordinal in self.ordinals:
            with cuda_errors(f"allocating {nbytes} bytes"), self._cupy.cuda.Device(ordinal):
                arrays.append(self._cupy.empty(nbytes, np.uint8))
        return arrays

    def view(self, array: Any, count: int, dtype: np.dtype[Any]) -> Any:
        """Not by ``array.view``: CuPy makes no arrays of float8, but takes memory that is there."""
        with array.device:
            return self._cupy.ndarray((count,), dtype, array.data)

    def write(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        """The values come from the host once; the GPU doubles what it has until it is enough."""
        total, source = array.nbytes, np.ascontiguousarray(values)
        begin, done = array.data.ptr, min(array.nbytes, source.nbytes)
        if total == 0:
            return
        with self._copies(array) as stream:
            self._runtime.memcpyAsync(begin, source.ctypes.data, done, COPY_DEFAULT, stream.ptr)
            while done < total:
                more = min(done, total - done)
                self._runtime.memcpyAsync(begin + done, begin, more, COPY_DEFAULT, stream.ptr)
                done += more

    def read(self, array: Any, begin: int, end: int) -> np.ndarray[Any, Any]:
        """A copy in host memory."""
        result = np.empty(end - begin, array.dtype)
        source = array.data.ptr + begin * array.itemsize
        if result.size:
            with self._copies(array) as stream:
                self._runtime.memcpyAsync(
                    result.ctypes.data, source, result.nbytes, COPY_DEFAULT, stream.ptr
                )
        return result

    @contextlib.contextmanager
    def _copies(self, array: Any) -> Iterator[Any]:
        """A stream for copies, which have ended when the block has."""
        with cuda_errors(f"copying {array.nbytes} bytes"), array.device:
            stream = self.streams[self.ordinals.index(array.device.id)]
            try:
                yield stream
            finally:
                stream.synchronize()

    def wait(self) -> None:
        """Also for what other libraries put on the streams."""
        self._comm.synchronize()
        for stream in self.streams:
            with cuda_errors("work on a GPU"):
                stream.synchronize()

    def gather(self, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """See Place."""
        with self._cupy.cuda.Device(self.ordinals[0]):
            if len(self._comm.layout) > 1:
                rows = row_among(self._comm, row)
                array = self.make(rows.nbytes)[0]
                self.write(array, rows)
                self._comm.allreduce(array, **self.keywords)
                self.wait()
                return self.read(array, 0, array.size).view(row.dtype)
            array = self.view(self.make(row.nbytes)[0], row.size, row.dtype)
            self.write(array, row)
            gathered = self._comm.all_gather(array, **self.keywords)
            self.wait()
            return self.read(gathered, 0, gathered.size)

    def describe(self) -> list[dict[str, Any]]:
        """As nccl-tests: the number that the process has for it, its bus address and its name."""
        gpus = [gpu_of(ordinal) for ordinal in self.ordinals]
        return [
            {
                "number": gpu.ordinal,
                "bus": gpu.bus_id.rpartition(".")[0].lower(),
                "info": gpu.name,
                "uuid": gpu.uuid,
            }
            for gpu in gpus
        ]
