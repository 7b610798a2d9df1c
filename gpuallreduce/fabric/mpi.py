"""MPI through mpi4py: messages and reductions of host memory that never block inside MPI.

Knows nothing of plans and algorithms, nor of how MPI is found and started.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce.bootstrap.peers import Labels
from gpuallreduce.errors import Aborted, Closed, InvalidArgument
from gpuallreduce.fabric.mpi_library import (
    Exchange,
    agree,
    communicator,
    mpi_module,
    mpi_version,
    unavailable,
)
from gpuallreduce.fabric.mpi_reductions import Reduced, Reductions, one_nan
from gpuallreduce.fabric.mpi_requests import LOCK, Piece, Request, error_of
from gpuallreduce.types import Dtype, dtype_of

__all__ = ["Buffer", "Exchange", "Mpi", "Request"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Buffer: TypeAlias = "Array | tuple[int, int]"
"""A contiguous NumPy array, or address and bytes of memory that the caller keeps alive."""

_PIECE_BYTES = 1 << 30  # MPI before its version 4 counts in int
_ABORT_SECONDS = 0.1
_expecting: set[Mpi] = set()  # groups with receives that wait for their messages
_held: list[Request] = []  # MPI may write to their buffers until the process ends


class Mpi:
    """Some ranks of a job, connected by MPI in a communicator of their own. Made by ``meet``.

    The program's own communicators are never used, so its messages and ours cannot meet. Ranks in
    arguments are numbers in this group; messages call them by their numbers in the job, and by
    their nodes. Calls to one peer match in their order, reductions in that of all ranks' calls.

    Attributes:
        rank: this process's number in the group.
        nranks: processes in the group.
        ranks: their numbers in the job.
    """

    def __init__(self, comm: Any, ranks: Sequence[int], labels: Labels) -> None:
        """Internal: use ``meet`` and ``over``."""
        self.mpi = mpi_module()
        self.rank = int(comm.rank)
        self.nranks = int(comm.size)
        self.ranks = tuple(ranks)
        self._comm = comm
        self._labels = labels
        self._pending: set[Request] = set()
        self._expected: defaultdict[int, deque[Piece]] = defaultdict(deque)
        self._aborted = self._closed = False
        comm.Set_errhandler(self.mpi.ERRORS_RETURN)

    @staticmethod
    def available(*, concurrent: bool = False) -> str | None:
        """None if MPI can be used here; else why not and what to do.

        Starts MPI if it can be used and the program has not done so. mpi4py asks MPI for
        MPI_THREAD_MULTIPLE by default.

        Args:
            concurrent: other threads may be in MPI while ours are, the program's included: that
                takes MPI_THREAD_MULTIPLE. Else MPI_THREAD_SERIALIZED is enough, which our threads
                keep to among themselves.
        """
        return unavailable(concurrent=concurrent)

    @staticmethod
    def version() -> str:
        """The library's own name and number, such as ``Open MPI v4.1.4``; raises NotSupported."""
        return mpi_version()

    @classmethod
    def meet(
        cls,
        exchange: Exchange,
        *,
        rank: int,
        nranks: int,
        nodes: Sequence[str] = (),
        concurrent: bool = False,
        tag: int = 0,
    ) -> Mpi:
        """Connects all ranks of the job; a collective. MPI may number its processes otherwise.

        The communicator is made inside MPI, without a limit; by then all ranks have said that they
        are there and come.

        Args:
            exchange: gives every rank what each brought, in any order: dicts that JSON can hold.
                Called once, also where MPI cannot be used: then all raise.
            rank: this process's.
            nranks: in the job; MPI's world may hold more.
            nodes: name of the node by rank, for messages.
            concurrent: as for ``available``.
            tag: another one for each group that several threads make at once.

        Raises:
            NotSupported: MPI cannot be used on some rank; says where and why.
            DeviceError: MPI failed.
        """
        labels = Labels(nodes=dict(enumerate(nodes)))
        worlds = agree(exchange, rank=rank, nranks=nranks, labels=labels, concurrent=concurrent)
        comm = communicator(mpi_module().COMM_WORLD, worlds, tag, f"connecting {nranks} ranks")
        return cls(comm, range(nranks), labels)

    def over(self, ranks: Sequence[int], *, tag: int) -> Mpi:
        """Some of these ranks as a group of their own, numbered in the order given.

        Collective over them alone; without a limit inside MPI, as ``meet``.

        Args:
            ranks: the same on each, this one among them.
            tag: the same on each; another one for each group that several threads make at once.

        Raises:
            InvalidArgument: ranks are not of this group, twice there, or without this one.
        """
        self.check()
        chosen = list(ranks)
        valid = all(0 <= rank < self.nranks for rank in chosen)
        if not valid or len(set(chosen)) < len(chosen) or self.rank not in chosen:
            raise InvalidArgument(
                f"a group over ranks {chosen} was asked for by rank {self.rank} of {self.nranks}: "
                "give each rank once, this one among them"
            )
        job = [self.ranks[rank] for rank in chosen]
        what = f"connecting {self._labels.names(job)}"
        return Mpi(communicator(self._comm, chosen, tag, what), job, self._labels)

    def isend(self, to: int, buffer: Buffer) -> Request:
        """Starts to send all bytes of a buffer.

        Raises:
            InvalidArgument: no such rank, or the array is not contiguous.
            Aborted, Closed: of this group.
        """
        address, nbytes = _memory(buffer, written=False)
        what = f"{nbytes} bytes to {self._peer(to)} to be taken"
        isend = self._comm.Isend
        request = Request(self, what, keep=buffer)
        return self._start(request, address, nbytes, lambda memory, _: isend(memory, to))

    def irecv(self, source: int, buffer: Buffer) -> Request:
        """Starts to receive as many bytes as the buffer has; the sender must send as many.

        Raises as ``isend``.
        """
        address, nbytes = _memory(buffer, written=True)
        what = f"{nbytes} bytes from {self._peer(source)}"
        request = Request(self, what, keep=buffer, source=source)
        return self._start(request, address, nbytes, lambda *_: None)

    def progress(self) -> None:
        """Internal: gives messages that have come to the receives of all groups that wait for them.

        A receive is not handed to MPI before, for two reasons. Open MPI 4 writes a message that is
        too long past the end of the buffer, and then says that it was truncated: so the length is
        compared first. And what MPI does not know, it need not be asked to cancel.
        """
        for group in tuple(_expecting):
            for source in tuple(group._expected):
                try:
                    group._match(source, group._expected[source])
                except self.mpi.Exception as error:
                    what = f"receiving from {group._labels.rank(group.ranks[source])}"
                    raise error_of(self.mpi, error, what) from error
            if not group._expected:
                _expecting.discard(group)

    def _match(self, source: int, waiting: deque[Piece]) -> None:
        """Messages of one source come in the order of its receives."""
        while waiting:
            status = self.mpi.Status()
            message = self._comm.Improbe(source, status=status)
            if message is None:
                return
            piece = waiting.popleft()
            arrived = status.Get_count(self.mpi.BYTE)
            memory = piece.memory
            if arrived != len(memory):
                piece.fault = (
                    f"a message of {arrived} bytes came where {len(memory)} were expected; both "
                    "ends must pass the same number"
                )
                memory = piece.memory = bytearray(arrived)  # taken all the same: its sender waits
            piece.request = message.Irecv([memory, self.mpi.BYTE])
        del self._expected[source]

    def iall_reduce(
        self, buffer: Buffer, dtype: Any, op: Any, *, source: Buffer | None = None
    ) -> Request:
        """Starts an all-reduce. ``avg`` is the sum: the caller divides.

        The order of the sum is MPI's. Types narrower than their accumulator are rounded at every
        hop. All ranks get equal bits as far as MPI's own algorithm gives them; NaNs are made one.

        Args:
            buffer: for the result, of equal length on all ranks.
            dtype: name or row of DTYPES.
            op: name or row of OPS.
            source: what is reduced, no part of ``buffer``; by default ``buffer`` itself. All ranks
                give one, or none. Open MPI 4 has its algorithms for long arrays only for this.

        Raises as ``isend``, and
            NotSupported: the operator makes no sense for the dtype.
        """
        row = dtype if isinstance(dtype, Dtype) else dtype_of(dtype)
        how = _reductions().of(row.name, getattr(op, "name", op))
        address, nbytes = _memory(buffer, written=True)
        if nbytes % row.itemsize:
            raise InvalidArgument(f"{nbytes} bytes are no whole number of {row.name} elements")
        start, length = (address, nbytes) if source is None else _memory(source, written=False)
        if length != nbytes:
            raise InvalidArgument(f"{length} bytes cannot be reduced to {nbytes} bytes")
        what = f"the all-reduce of {nbytes} bytes with {self._others()}"
        request = Request(self, what, keep=(buffer, source))
        if self.nranks > 1:
            result = _view(address, nbytes).view(row.numpy)
            request.finish = functools.partial(one_nan, result, row)

        def reduce(memory: list[Any], offset: int) -> Any:
            sent = self.mpi.IN_PLACE
            if source is not None:
                sent = [self.mpi.buffer.fromaddress(start + offset, len(memory[0])), *memory[1:]]
            return self._comm.Iallreduce(sent, memory, how.op)

        return self._start(request, address, nbytes, reduce, how)

    def ibroadcast(self, buffer: Buffer, root: int) -> Request:
        """Starts a broadcast: every rank's buffer gets the bytes of the root's. Raises as
        ``isend``.
        """
        address, nbytes = _memory(buffer, written=root != self.rank)
        what = f"the broadcast of {nbytes} bytes from {self._peer(root)}"
        bcast = self._comm.Ibcast
        request = Request(self, what, keep=buffer)
        return self._start(request, address, nbytes, lambda memory, _: bcast(memory, root))

    def iall_gather(self, source: Buffer, buffer: Buffer) -> Request:
        """Starts an all-gather: block r of every buffer gets the bytes of rank r's source. Raises
        as ``isend``; a source has at most 1 GiB.
        """
        (start, nbytes), (address, total) = (
            _memory(source, written=False),
            _memory(buffer, written=True),
        )
        if total != self.nranks * nbytes or nbytes > _PIECE_BYTES:
            raise InvalidArgument(
                f"{nbytes} bytes cannot be gathered from {self.nranks} ranks to {total} bytes: "
                f"bring as many blocks, of at most {_PIECE_BYTES} bytes"
            )
        gathered = [self.mpi.buffer.fromaddress(address, total), self.mpi.BYTE]
        gather = self._comm.Iallgather
        what = f"the all-gather of {nbytes} bytes with {self._others()}"
        request = Request(self, what, keep=(source, buffer))
        return self._start(request, start, nbytes, lambda memory, _: gather(memory, gathered))

    def ibarrier(self) -> Request:
        """Starts a barrier: it is complete once every rank has started it."""
        request = Request(self, f"{self._others()} to come")
        return self._start(request, 0, 0, lambda *_: self._comm.Ibarrier())

    def _others(self) -> str:
        return self._labels.names(
            self.ranks[rank] for rank in range(self.nranks) if rank != self.rank
        )

    def check_pair(self, dtype: Any, op: Any) -> None:
        """Raises NotSupported if a dtype cannot be reduced with an operator."""
        _reductions().of(getattr(dtype, "name", dtype), getattr(op, "name", op))

    def check(self) -> None:
        """Raises Aborted or Closed if no further calls can be made."""
        if self._closed:
            raise Closed("this group of MPI ranks is closed")
        if self._aborted:
            raise Aborted("this group of MPI ranks was aborted and can make no more calls")

    def settled(self, request: Request) -> None:
        """Internal: MPI is done with a request."""
        self._pending.discard(request)

    def abort(self) -> bool:
        """Ends what is under way as far as MPI can, in bounded time; later calls raise Aborted.

        From any thread: a wait in another one raises Aborted. Receives that nothing has come for
        end at once. MPI cannot cancel the rest: a send that its receiver has not taken, a receive
        whose message has begun to arrive, and a reduction. Their buffers stay MPI's until the
        process ends: arrays are kept alive here, memory given by address must be kept by the
        caller. Peers learn nothing of it.

        Returns:
            True if MPI holds no buffer of this group any more.
        """
        self._aborted = True
        with LOCK:
            self._expected.clear()
            _expecting.discard(self)
        pending = list(self._pending)
        for request in pending:
            request.cancel(Aborted(f"the group was aborted before {request.what} was done"))
        end = time.monotonic() + _ABORT_SECONDS
        while held := [request for request in pending if not request.let_go()]:
            if time.monotonic() >= end:
                break
            time.sleep(_ABORT_SECONDS / 100)
        _held.extend(request for request in held if request not in _held)
        self._pending = set(held)
        return not held

    def close(self) -> None:
        """Gives back what can be given back without waiting for anybody. Idempotent.

        MPI's standard calls freeing a communicator collective and expects it to be local; it is in
        Open MPI and MPICH. With requests under way, or after ``abort``, it is left to the end of
        the process, and the requests are treated as by ``abort``.
        """
        if self._closed:
            return
        if not self.mpi.Is_finalized():
            if self._pending:
                self.abort()
            if not self._aborted:
                with LOCK, contextlib.suppress(self.mpi.Exception):
                    self._comm.Free()
        self._closed = True

    def __enter__(self) -> Mpi:
        """Itself; the end of the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def _peer(self, rank: int) -> str:
        self.check()
        if not 0 <= rank < self.nranks:
            raise InvalidArgument(f"rank {rank} does not exist in a group of {self.nranks}")
        return self._labels.rank(self.ranks[rank])

    def _start(
        self,
        request: Request,
        address: int,
        nbytes: int,
        call: Callable[[list[Any], int], Any],
        how: Reduced | None = None,
    ) -> Request:
        """Hands the buffer to MPI, in pieces that it can count. No bytes are a message too."""
        self.check()
        datatype, itemsize = (self.mpi.BYTE, 1) if how is None else (how.datatype, how.nbytes)
        step = max(1, _PIECE_BYTES // itemsize) * itemsize
        try:
            with LOCK:
                for start in range(0, nbytes or int(how is None), step):
                    length = min(step, nbytes - start)
                    memory = self.mpi.buffer.fromaddress(address + start, length)
                    piece = Piece(call([memory, length // itemsize, datatype], start), memory)
                    request.pieces.append(piece)
                    if request.source is not None:
                        self._expected[request.source].append(piece)
                        _expecting.add(self)
        except self.mpi.Exception as error:
            raise error_of(self.mpi, error, request.what) from error
        finally:
            if request.pieces:
                self._pending.add(request)
        return request


@functools.cache
def _reductions() -> Reductions:
    return Reductions(mpi_module())


def _memory(buffer: Buffer, *, written: bool) -> tuple[int, int]:
    """Address and bytes of a buffer."""
    if isinstance(buffer, tuple):
        return buffer
    if not (buffer.flags.c_contiguous or buffer.flags.f_contiguous):
        raise InvalidArgument("MPI takes contiguous arrays; this one has gaps or turned axes")
    if written and not buffer.flags.writeable:
        raise InvalidArgument("MPI cannot write to a read-only array")
    return int(buffer.__array_interface__["data"][0]), buffer.nbytes


def _view(address: int, nbytes: int) -> Array:
    """Memory at an address as an array of bytes."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
