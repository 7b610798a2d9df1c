"""Broadcast and all-gather of CUDA ranks on several nodes: NCCL's own over all ranks, on the call's
stream.

Knows nothing of how ranks agree on a call, nor of what ends one that cannot go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuallreduce.across.chunks import parts_of
from gpuallreduce.across.line import connected, within
from gpuallreduce.arrays import Bound
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.devices.cuda import CudaDevice
from gpuallreduce.devices.cuda_memory import DeviceBlock
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, on_device
from gpuallreduce.errors import Aborted
from gpuallreduce.fabric.nccl import Nccl
from gpuallreduce.plan import Request

__all__ = ["CudaMoves"]

PART_BYTES = 64 << 20  # that come to a rank between two of its steps
LEAST_BLOCK_BYTES = 1 << 20  # of an all-gather's part, however many ranks there are
COPY_DEFAULT = 4  # cudaMemcpyDefault


class CudaMoves:
    """All ranks of a job as one rank on a GPU sees them. Connected at first use.

    NOTE parts on streams. A long array is moved part by part, with a step told between two, so that
    a limit is for a part. Blocks of an all-gather lie apart in the result, so parts of them come
    through memory of the call: one more copy on the GPU, far faster than a network.
    """

    def __init__(self, nodes: Nodes, device: CudaDevice) -> None:
        """Connects nothing yet.

        Args:
            nodes: where the ranks of the job are.
            device: of this rank.
        """
        self._nodes, self._device, (self._ordinal,) = nodes, device, device.ordinals
        self._nccl: Nccl | None = None
        self._bytes: DeviceBlock | None = None  # for what carries nothing
        self._ending = threading.Lock()
        self._ended = False

    @property
    def ready(self) -> bool:
        """Whether the ranks are connected."""
        return self._nccl is not None

    def connect(self, timeout: float) -> None:
        """Connects all ranks; a collective.

        Args:
            timeout: seconds.

        Raises:
            NotSupported, Timeout, DeviceError: as Line.connect; every rank raises.
            Aborted: ``abort`` was called.
        """
        everyone = self._nodes.everyone

        def warmed_up(nccl: Nccl) -> Nccl:
            self._bytes = DeviceBlock(self._ordinal, 1 + everyone.nranks, zeros=1)
            within(timeout, lambda: self._warm_up(nccl), "NCCL's first calls with all ranks")
            return nccl

        nccl = connected(
            self._nodes,
            self._ordinal,
            warmed_up,
            group=0,
            rank=everyone.rank,
            nranks=everyone.nranks,
            timeout=timeout,
        )
        assert nccl is not None  # this rank is of the group
        with self._ending:
            self._nccl = nccl
            if self._ended:
                nccl.abort()
                raise Aborted("the ranks were aborted while NCCL connected them")

    def _warm_up(self, nccl: Nccl) -> None:
        """Makes each of NCCL's calls once: it connects ranks at the first one, on the host, where
        nothing could end it.
        """
        assert self._bytes is not None
        with on_device(self._ordinal), cuda_errors("NCCL's first calls"):
            stream = cupy_module().cuda.Stream(non_blocking=True)
            at, streams = [self._bytes.address], [stream.ptr]
            nccl.all_reduce(at, at, 1, dtype="uint8", op="max", streams=streams)
            nccl.broadcast(at, at, 1, root=0, streams=streams)
            nccl.all_gather(at, [self._bytes.address + 1], 1, streams=streams)
            stream.synchronize()

    def meet(self, stream: Any) -> None:
        """Enqueues what no rank gets past before all have come there."""
        nccl, at = self._connection(), [self._bytes.address if self._bytes else 0]
        nccl.all_reduce(at, at, 1, dtype="uint8", op="max", streams=[stream.ptr])

    def run(self, bound: Bound, request: Request, stream: Any, step: Callable[[], None]) -> None:
        """Enqueues a broadcast or an all-gather.

        Args:
            bound: this rank's array, and where the result is to be.
            request: of all ranks of the job.
            stream: of the call.
            step: enqueues that a part is there.
        """
        if request.collective == "broadcast":
            for first, length in parts_of(request.nbytes, PART_BYTES):
                at, streams = [bound.output + first], [stream.ptr]
                self._connection().broadcast(at, at, length, root=request.root, streams=streams)
                step()
        else:
            self._all_gather(bound, request, stream, step)

    def _all_gather(
        self, bound: Bound, request: Request, stream: Any, step: Callable[[], None]
    ) -> None:
        nccl, nranks, nbytes = self._connection(), request.nranks, request.nbytes
        parts = parts_of(nbytes, max(LEAST_BLOCK_BYTES, PART_BYTES // nranks))
        if len(parts) == 1:
            nccl.all_gather([bound.input], [bound.output], nbytes, streams=[stream.ptr])
        if len(parts) <= 1:
            return
        copy, longest = cupy_module().cuda.runtime.memcpy2DAsync, parts[0][1]
        room = self._device.arrays.empty((nranks * longest,), np.dtype(np.uint8), 0)
        at = int(room.data.ptr)
        for first, length in parts:
            nccl.all_gather([bound.input + first], [at], length, streams=[stream.ptr])
            target = bound.output + first
            copy(target, nbytes, at, length, length, nranks, COPY_DEFAULT, stream.ptr)
            step()

    def check(self) -> None:
        """Raises DeviceError if NCCL has found a fault; does not wait."""
        if self._nccl is not None and not self._ended:
            self._nccl.check()

    def tell_abort(self) -> None:
        """See nccl_ending.Endable."""
        with self._ending:
            if not self._ended and self._nccl is not None:
                self._nccl.tell_abort()
            self._ended = True

    def close(self) -> None:
        """Gives everything back; waits for what is enqueued."""
        if self._nccl is not None:
            self._nccl.close()
        if self._bytes is not None:
            self._bytes.free()

    def _connection(self) -> Nccl:
        assert self._nccl is not None  # see ``connect``
        return self._nccl
