"""NCCL through CuPy: communicators and collectives on raw addresses, errors in our words.

Knows nothing of arrays, plans or timeouts. Calls are enqueued on the given streams and return at
once; the sums follow NCCL's own order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from gpuallreduce.devices.cuda_runtime import cupy_module
from gpuallreduce.errors import Aborted, Closed, DeviceError, InvalidArgument, NotSupported
from gpuallreduce.fabric.nccl_ending import abort_together, in_time
from gpuallreduce.fabric.nccl_library import (
    in_progress,
    nccl_errors,
    nccl_group,
    nccl_module,
    nccl_version,
)
from gpuallreduce.fabric.nccl_start import Exchange, agree
from gpuallreduce.fabric.nccl_types import BYTE, Element, element, text_of_version
from gpuallreduce.types import dtype_of, op_of

__all__ = ["Exchange", "Nccl", "Transfer"]

USED_S = 1.0  # for a thread to come out of NCCL before an abort


@dataclass(frozen=True)
class Transfer:
    """One message of ``send_recv``, seen from one of its ends.

    Attributes:
        rank: the rank of this process that sends or receives it.
        peer: the rank at the other end.
        address: of the data on ``rank``'s GPU.
        nbytes: its length; the same at both ends.
    """

    rank: int
    peer: int
    address: int
    nbytes: int


class Nccl:
    """NCCL communicators of the ranks of this process.

    Sequences of addresses and streams have one entry per rank of this process, in the order of
    ``ranks``. A stream is its pointer; ranks that share a GPU need different streams.

    Attributes:
        nranks: ranks in all.
        ranks: those of this process.
        devices: the number of each one's GPU.
    """

    nranks: int
    ranks: tuple[int, ...]
    devices: tuple[int, ...]

    def __init__(
        self,
        devices: Sequence[int],
        *,
        ranks: Sequence[int] | None = None,
        nranks: int | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Meets the other ranks; all must come.

        Args:
            devices: the GPU of each rank of this process.
            ranks: their ranks; by default 0, 1, 2 and so on.
            nranks: ranks in all; by default, those of this process.
            exchange: gives every process what each brought, itself included, in any order: a dict
                that JSON can hold. Needed if there are ranks in other processes; all call it once.

        Raises:
            InvalidArgument: the arguments do not fit each other.
            NotSupported: NCCL is missing or too old, or ranks share a GPU and that is not enabled.
            DeviceError: NCCL could not connect the ranks, or another process failed.
        """
        self.devices = tuple(devices)
        self.ranks = tuple(range(len(self.devices)) if ranks is None else ranks)
        self.nranks = len(self.ranks) if nranks is None else nranks
        self._comms: list[Any] = []
        self._aborted = self._closed = False
        self._using = threading.RLock()
        start = agree(self.devices, self.ranks, self.nranks, exchange)
        self._shared_gpu = start.shared_gpu
        self._connect(start.unique_id)

    @staticmethod
    def available() -> str | None:
        """None if NCCL can be used here; else why not and what to do."""
        try:
            nccl_module()
        except NotSupported as error:
            return str(error)
        return None

    @staticmethod
    def version() -> str:
        """NCCL's version, such as ``2.30.3``.

        Raises:
            NotSupported: there is no NCCL to use.
        """
        return text_of_version(nccl_version())

    def _connect(self, unique_id: bytes) -> None:
        nccl, cupy = nccl_module(), cupy_module()
        key: Any = unique_id
        if int(cupy.__version__.split(".")[0]) < 14:  # CuPy 13 takes C chars
            key = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
        with (
            nccl_errors(f"connecting NCCL ranks {list(self.ranks)} of {self.nranks}"),
            nccl_group(),
        ):
            for rank, device in zip(self.ranks, self.devices, strict=True):
                with cupy.cuda.Device(device):
                    self._comms.append(nccl.NcclCommunicator(self.nranks, key, rank))

    def all_reduce(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        count: int,
        *,
        dtype: Any,
        op: Any,
        streams: Sequence[int],
    ) -> None:
        """Every output becomes the fold over all inputs. In place where addresses are equal.

        Args:
            inputs: addresses of ``count`` elements.
            outputs: addresses of ``count`` elements.
            count: elements.
            dtype: name or row of DTYPES.
            op: name or row of OPS.
            streams: where the work is enqueued.

        Raises:
            NotSupported: NCCL lacks the dtype or the operator.
            DeviceError: NCCL refused.
        """
        what = self._element(dtype, op)
        for_nccl = (count * what.per_item, what.type_code, what.op_code)
        with self._call("all_reduce", inputs, outputs, streams):
            for comm, *buffers, stream in zip(self._comms, inputs, outputs, streams, strict=True):
                comm.allReduce(*buffers, *for_nccl, stream)

    def prepared(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        count: int,
        *,
        dtype: Any,
        op: Any,
        streams: Sequence[int],
    ) -> Callable[[], None]:
        """An all_reduce to be made often: its arguments are looked at once, so that a call of it
        costs what NCCL and CuPy cost. Else as all_reduce.
        """
        what = self._element(dtype, op)
        for_nccl = (count * what.per_item, what.type_code, what.op_code)
        rows = zip(self._comms, inputs, outputs, streams, strict=True)
        calls = [(comm.allReduce, (*buffers, *for_nccl, stream)) for comm, *buffers, stream in rows]
        nccl = nccl_module()
        single = len(calls) == 1

        def call() -> None:
            with self._using:
                enqueued()

        def enqueued() -> None:
            try:
                if single:
                    calls[0][0](*calls[0][1])
                    return
                nccl.groupStart()
                for enqueue, arguments in calls:
                    enqueue(*arguments)
                nccl.groupEnd()
            except Exception:
                if not single:  # an open group would swallow whatever comes next
                    with suppress(Exception):
                        nccl.groupEnd()
                with nccl_errors("NCCL all_reduce"):
                    raise

        return call

    def reduce_scatter(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        count: int,
        *,
        dtype: Any,
        op: Any,
        streams: Sequence[int],
    ) -> None:
        """Rank r's output becomes block r of the fold: inputs have ``nranks * count`` elements,
        outputs ``count``. In place where the output is the rank's own block. Else as all_reduce.
        """
        what = self._element(dtype, op)
        for_nccl = (count * what.per_item, what.type_code, what.op_code)
        with self._call("reduce_scatter", inputs, outputs, streams):
            for comm, *buffers, stream in zip(self._comms, inputs, outputs, streams, strict=True):
                comm.reduceScatter(*buffers, *for_nccl, stream)

    def all_gather(
        self, inputs: Sequence[int], outputs: Sequence[int], nbytes: int, *, streams: Sequence[int]
    ) -> None:
        """Block r of every output becomes rank r's input of ``nbytes``; outputs have ``nranks``
        such blocks. In place where the input is the rank's own block.
        """
        with self._call("all_gather", inputs, outputs, streams):
            for comm, *buffers, stream in zip(self._comms, inputs, outputs, streams, strict=True):
                comm.allGather(*buffers, nbytes, BYTE, stream)

    def broadcast(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        nbytes: int,
        *,
        root: int,
        streams: Sequence[int],
    ) -> None:
        """Every output becomes the root's input of ``nbytes``; other inputs are not read."""
        with self._call("broadcast", inputs, outputs, streams):
            for comm, *buffers, stream in zip(self._comms, inputs, outputs, streams, strict=True):
                comm.broadcast(*buffers, nbytes, BYTE, root, stream)

    def send_recv(
        self, sends: Sequence[Transfer], receives: Sequence[Transfer], *, streams: Sequence[int]
    ) -> None:
        """Moves messages between ranks, all at once. Those of one pair of ranks keep their order.

        Raises:
            InvalidArgument: a rank is not of this process.
            DeviceError: NCCL refused.
        """
        for message in (*sends, *receives):
            if message.rank not in self.ranks:
                raise InvalidArgument(
                    f"a message of rank {message.rank} was given; here are {list(self.ranks)}"
                )
        with self._call("send_recv", streams):
            for messages, name in ((sends, "send"), (receives, "recv")):
                for message in messages:
                    local = self.ranks.index(message.rank)
                    move = getattr(self._comms[local], name)
                    move(message.address, message.nbytes, BYTE, message.peer, streams[local])

    def check(self) -> None:
        """Returns if all is well so far; does not wait.

        Raises:
            DeviceError: work that was enqueued has failed, here or on another rank.
        """
        if self._aborted or self._closed:
            return
        if not self._using.acquire(blocking=False):
            return  # a thread is inside NCCL; the next look will do
        try:
            self._check()
        finally:
            self._using.release()

    def _check(self) -> None:
        if self._aborted:
            return
        for rank, comm in zip(self.ranks, self._comms, strict=True):
            try:
                with nccl_errors(f"NCCL work of rank {rank}"):
                    comm.check_async_error()
            except DeviceError as error:
                if not in_progress(error):
                    raise

    def abort(self) -> None:
        """Ends all work that is enqueued, without waiting for peers; from any thread."""
        abort_together([self], lambda: None)

    def tell_abort(self) -> None:
        """See nccl_ending.Endable. No thread may be inside NCCL with these communicators meanwhile;
        one that does not come out, since it waits for a peer there, is not waited for.
        """
        self._aborted = True
        alone = self._using.acquire(timeout=USED_S)
        try:
            for comm in self._comms:
                comm.abort()
        finally:
            if alone:
                self._using.release()

    def close(self) -> None:
        """Waits for the work of this process's ranks and gives everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True

        def destroy() -> None:
            for comm in self._comms:
                comm.destroy()

        in_time(destroy)

    def __enter__(self) -> Nccl:
        """Itself; the end of the block closes it."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Closes it; after an error, aborts first: peers may never come."""
        if kind is not None:
            self.abort()
        self.close()

    @classmethod
    def check_pair(cls, dtype: Any, op: Any) -> None:
        """Raises NotSupported if NCCL lacks the dtype or the operator."""
        cls._element(dtype, op)

    @staticmethod
    def _element(dtype: Any, op: Any) -> Element:
        row = dtype_of(getattr(dtype, "name", dtype))
        return element(row, op_of(getattr(op, "name", op)), nccl_version())

    @contextmanager
    def _call(self, what: str, *sequences: Sequence[int]) -> Iterator[None]:
        """One group of calls. The last sequence are the streams."""
        if self._closed:
            raise Closed(f"{what} was asked of NCCL communicators that are closed")
        for sequence in sequences:
            if len(sequence) != len(self.ranks):
                raise InvalidArgument(
                    f"{what} was given {len(sequence)} addresses or streams for "
                    f"{len(self.ranks)} ranks; one each is needed"
                )
        streams = sequences[-1]
        if self._shared_gpu and len(set(streams)) < len(streams):
            raise InvalidArgument(f"{what}: ranks that share a GPU need a stream each")
        with self._using:
            if self._aborted:
                raise Aborted(f"{what} was asked of NCCL communicators that were aborted")
            with nccl_errors(f"NCCL {what}"), nccl_group():
                yield
