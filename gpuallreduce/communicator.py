"""The public API: a communicator, its life, and all-reduce.

Knows nothing of plans, kernels or processes: it checks arguments and hands bound arrays on.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gpuallreduce.arrays import Array
from gpuallreduce.calls import Calls, Options
from gpuallreduce.collectives import Collectives
from gpuallreduce.errors import (
    Aborted,
    Closed,
    DeviceError,
    Error,
    InvalidArgument,
    MismatchError,
    Timeout,
)
from gpuallreduce.fused import Fuser, buckets
from gpuallreduce.lifetime import end_dropped, lay_aside, lay_aside_when_dropped, remember
from gpuallreduce.locals import (
    LocalRanks,
    check_devices,
    check_integer,
    check_shape,
    check_timeout,
)
from gpuallreduce.placement import Placement, local_ranks
from gpuallreduce.plan import Plan
from gpuallreduce.tracing import check_traced, trace_file, trace_of_node
from gpuallreduce.tuner import Forced
from gpuallreduce.types import dtype_of, op_of, reduction

__all__ = ["DEFAULT_TIMEOUT_S", "Communicator"]

DEFAULT_TIMEOUT_S = 60.0
_AnyError = TypeVar("_AnyError", bound=BaseException)


class Communicator(Collectives):
    """A group of ranks that make the same collective calls in the same order.

    Made directly for ranks of this process (``Communicator(["host"] * 4)``: calls take a list with
    one array per rank), or by ``gpuallreduce.init`` with one rank per process (calls take one
    array). Use it as a context manager.

    Attributes:
        nranks: ranks of the group.
        ranks: the ranks that live in this process.
        topology: what the ranks run on.
        layout: name and number of ranks of every node, in the order of ranks.

    Calls on host devices are complete on return. On CUDA devices they are ordered on a stream and
    the host does not wait: see ``synchronize``. One call is made at a time; another thread's waits.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """Ranks of this process, one per device.

        Args:
            devices: a device for each rank, all of one kind: ``"host"`` is a processor core with
                NumPy arrays, ``"cuda:1"`` a GPU with CuPy arrays, ``"cuda"`` CuPy's current GPU.
                Several ranks may share a GPU.
            timeout: seconds that one wait of a call may last before every rank raises Timeout;
                None: no limit.
            trace: as in ``gpuallreduce.init``.

        Raises:
            InvalidArgument: no device, or a name that does not exist; or ``trace`` cannot be
                written.
            NotSupported: CUDA devices where CuPy or a GPU is missing; says which; or with
                ``trace``.
        """
        names = check_devices(devices)
        check_traced(names[0], trace)
        file = trace_file(trace)
        self._start(local_ranks(names), timeout, trace=file)

    @classmethod
    def over(
        cls,
        placement: Placement,
        *,
        timeout: float | None,
        connect: Callable[[Placement, float | None], Calls] | None = None,
        trace: Path | None = None,
    ) -> Communicator:
        """A communicator of ranks placed in any way; ``gpuallreduce.init`` uses it.

        Args:
            placement: of the ranks of this machine.
            timeout: as in the constructor.
            connect: makes the calls of ranks that are not all on this machine.
            trace: the file that stages are written to, where ``connect`` does not see to it.
        """
        self = cls.__new__(cls)
        self._start(placement, timeout, connect, trace)
        return self

    def _start(
        self,
        placement: Placement,
        timeout: float | None,
        connect: Callable[[Placement, float | None], Calls] | None = None,
        trace: Path | None = None,
    ) -> None:
        limit = check_timeout(timeout)
        self.topology = placement.topology
        self._device = placement.device
        try:
            if connect is not None:
                calls = connect(placement, limit)
            else:
                recorder = trace_of_node(trace, placement.transport.ranks)
                calls = Calls(placement, timeout=limit, trace=recorder)
        except BaseException:
            placement.device.close()
            placement.transport.close()  # no kernel of any rank has run
            raise
        self._calls = calls
        self.nranks, self.ranks, self.layout = calls.nranks, calls.ranks, calls.layout
        self._locals = LocalRanks(self.ranks, self.nranks, self._device.arrays)
        self._fuser = Fuser(len(self.ranks), self._device.arrays)
        self._call = self._short_way()
        self._broken: str | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._dropped: Any = None
        if self._device.asynchronous:
            end_dropped()
            self._dropped = lay_aside_when_dropped(self, self._device, self._calls)
        remember(self)

    # ---- state ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank.

        Raises:
            InvalidArgument: several ranks live in this process; see ``ranks``.
        """
        if len(self.ranks) != 1:
            raise InvalidArgument(
                f"this process holds {len(self.ranks)} ranks, so there is no single rank; use "
                "comm.ranks"
            )
        return self.ranks[0]

    @property
    def timeout(self) -> float | None:
        """Seconds that one wait of a call may last; None: no limit. May be set between calls."""
        return self._calls.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._calls.timeout = check_timeout(seconds)
        self._calls.forget()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with suppress(Error):  # what the block raised says more
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._broken else "open"
        return f"<gpuallreduce.Communicator nranks={self.nranks} ranks={list(self.ranks)} {state}>"

    def close(self) -> None:
        """Ends the communicator. Idempotent; a call that another thread is in is aborted first.

        Peers that wait for this rank in a later call raise Aborted at once. Arrays from ``empty``
        stay usable on host devices; on CUDA devices with one process per rank their memory ends
        with the communicator of the last rank that closes.

        Raises:
            MismatchError, Timeout, Aborted: CUDA: why a launched call failed, if no later call or
                ``synchronize`` has raised it. All is freed even so.
        """
        if self._closed:
            return
        self._closed = True
        if self._dropped is not None:
            self._dropped.detach()
            end_dropped()
        self._device.close()
        if self._device.forked:
            return  # all that could be closed is the parent's
        if not self._device.idle():
            self._calls.orchestrator.abort()
        if self._device.in_signal_handler:  # the call that it interrupts ends once it returns
            if self._device.asynchronous:  # and may have more to launch
                lay_aside(self._device, self._calls)
            else:
                self._calls.transport.close()
            return
        if not self._lock.acquire(blocking=False):
            self._calls.transport.interrupt()  # another thread may wait in empty()
            self._lock.acquire()
        try:
            self._device.drain(self._calls.look_out, self._calls.orchestrator.abort)
            self._calls.settle()
            failure = self._unraised()
            self._calls.end()
        finally:
            self._lock.release()
        if failure is not None:
            raise failure

    def _unraised(self) -> Error | None:
        """Why launched calls failed, if the caller does not know yet."""
        if not self._device.asynchronous or self._broken is not None:
            return None
        orchestrator = self._calls.orchestrator
        return orchestrator.diagnose() if orchestrator.aborted else None

    def synchronize(self) -> None:
        """Waits until the calls that this process made have ended, and raises what went wrong.

        Calls on CUDA devices return once they are launched; errors of other ranks (and of this
        one's waits) are raised by this method or by the next call. On host devices calls are
        complete on return, and this does nothing.

        Raises:
            MismatchError, Timeout, Aborted: as in allreduce.
            DeviceError: a GPU failed.
        """
        with self._lock:
            self._check_usable()
            try:
                self._device.synchronize(self._calls.look_out)
            except DeviceError as error:
                self._give_up(error)
                raise
            self._calls.settle()
            self._check_usable()

    def abort(self) -> None:
        """Makes every rank leave its call with Aborted, and refuse later ones. From any thread."""
        if self._closed:
            return
        self._broken = self._broken or "this rank aborted it"
        self._device.close()
        self._calls.orchestrator.abort()
        self._calls.abort_engine()
        self._calls.transport.interrupt()

    @property
    def usable(self) -> bool:
        """False once the communicator is closed, broken, aborted, or of another process."""
        gone = self._closed or self._device.forked or self._broken is not None
        return not (gone or self._calls.orchestrator.aborted)

    # ---- collectives ----------------------------------------------------------------------------

    def allreduce(
        self,
        arrays: Any,
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str | None = None,
        order: str | None = None,
        access: str | None = None,
        chunk_bytes: int | None = None,
        nchannels: int | None = None,
        stream: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Combines the arrays of all ranks elementwise; every rank ends with the same bits.

        ``result[i] = round(x[0][i] op x[1][i] op ... op x[nranks-1][i])``, folded left to right in
        rank order in the accumulator (float32 for 16- and 8-bit floats, else the type itself) and
        rounded once.

        Args:
            arrays: one array of any shape; with several local ranks a list, one per rank.
            out: where to put the result: same shape and dtype, no partial overlap. None: in place.
            op: sum, prod, max, min, avg (floats and complex), band, bor, bxor (integers and bool).
            algorithm: one_shot, two_shot or ring; None: the tuner's choice. Never changes the bits.
            order: ``"rank"`` (default: the contract above) or ``"any"`` (the algorithm's own).
            access: ``"direct"`` or ``"staged"``; None: the tuner's choice.
            chunk_bytes: bytes of one chunk of the pipeline.
            nchannels: blocks per rank that work side by side.
            stream: CUDA: the stream that orders the call (CuPy's, or anything with
                ``__cuda_stream__``); with several local ranks a list. None: CuPy's current stream
                of each device.
            timeout: seconds that one wait may last, instead of the communicator's.

        Returns:
            ``out`` if given, else ``arrays``.

        Raises:
            InvalidArgument: an argument cannot be right. Nothing was sent: this rank can go on.
            NotSupported: the operator does not fit the dtype; the message lists what does.
            MismatchError: the ranks' calls differ; every rank raises.
            Timeout: a rank did not come within the limit; names it. Every waiting rank raises.
            Aborted: the communicator was aborted or broke earlier, or a rank is gone.
            Closed: the communicator is closed.
        """
        if algorithm is order is access is None and chunk_bytes is nchannels is stream is None:
            done = self._call(arrays, out, op) if timeout is None else None
            if done is not None:
                if done is False:
                    raise self._break(self._calls.orchestrator.diagnose())
                return done
        forced = _forced(algorithm, access, chunk_bytes, nchannels)
        options = Options(op, forced, order, timeout=check_timeout(timeout))
        with self._entered(stream):
            self._calls.run("allreduce", self._locals.bind(arrays, out), options)
        return arrays if out is None else out

    def allreduce_many(
        self,
        arrays: Sequence[Any],
        *,
        op: str = "sum",
        stream: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """All-reduces many arrays in place, small ones packed together: the bits of separate calls.

        Args:
            arrays: arrays of any shapes and dtypes that share no memory; with several local ranks
                one such list per rank.
            op: as in allreduce.
            stream: as in allreduce.
            timeout: as in allreduce.

        Memory beyond the arrays: one bucket of 4 MiB per local rank.
        """
        options = Options(op, timeout=check_timeout(timeout))
        with self._entered(stream):
            columns = self._locals.columns(arrays)
            for column in columns:
                self._locals.check_fusible(column)
                reduction(dtype_of(column[0].dtype), op_of(op))
            for bucket in buckets(columns):
                self._fuser.run(
                    bucket, lambda column, parts: self._run_fused(column, parts, options)
                )
        return arrays

    def _run_fused(self, column: Sequence[Array], parts: tuple[int, ...], options: Options) -> None:
        bounds = self._locals.bind(self._locals.give(list(column)), None)
        self._calls.run("allreduce", bounds, replace(options, parts=parts))

    # ---- memory and plans -----------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """An array that peers can address, so that all-reduce needs no staging copy.

        A collective: all ranks call it, with equal sizes, and all must then bring such arrays to a
        call, at equal offsets: whether peers are let at the arrays is part of what must match.

        On CUDA devices with one process per rank, and where arrays lie in pinned host memory, the
        memory is given back only when all ranks have closed the communicator: make such arrays
        once, and use them no longer than that. Elsewhere it lives as long as the arrays.

        Returns:
            An array of zeros; with several local ranks a list of them.
        """
        sizes = check_shape(shape)
        row = dtype_of(dtype)
        nbytes = math.prod(sizes) * row.itemsize
        with self._entered():
            try:
                buffer = self._calls.allocate(nbytes)
            except (Timeout, Aborted):  # the ranks can agree on no more buffers
                self._calls.orchestrator.abort()
                raise
            here = self._calls.transport.ranks  # numbers on this node
            arrays = [buffer.array(rank, sizes, row.numpy) for rank in here]
            if len(self.ranks) == 1:
                self._calls.adopt(buffer)
        return self._locals.give(arrays)

    def plan(
        self,
        arrays: Any,
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str | None = None,
        order: str | None = None,
        access: str | None = None,
        chunk_bytes: int | None = None,
        nchannels: int | None = None,
    ) -> Plan:
        """What ``allreduce`` with these arguments would run; nothing is sent.

        ``print(comm.plan(x).describe())`` shows algorithm, order, channels, chunks, bytes,
        transport and estimated costs.
        """
        forced = _forced(algorithm, access, chunk_bytes, nchannels)
        with self._entered():
            bounds = self._locals.bind(arrays, out)
            request = self._calls.request("allreduce", bounds, Options(op, forced, order))
            return self._calls.decide(request, forced)

    # ---- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _entered(self, stream: Any = None) -> Iterator[None]:
        """Holds the lock for a call, if one can be made; remembers a call that broke the ranks."""
        with self._lock:
            self._check_usable()
            try:
                try:
                    self._device.begin(stream)
                except DeviceError as error:  # this rank will not come again
                    self._give_up(error)
                    raise
                try:
                    yield
                finally:
                    self._device.end()
            except (MismatchError, Timeout, Aborted) as error:
                if self._calls.orchestrator.aborted:
                    self._break(error)
                raise
            except BaseException as error:
                if self._calls.orchestrator.aborted:
                    self._broken = self._broken or f"a call was interrupted: {error!r}"
                    self._device.close()
                raise

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed("this communicator is closed; make a new one")
        if self._device.forked:
            raise Closed(
                "this communicator belongs to the process that this one was forked from; call "
                "gpuallreduce.init() after the fork, or start processes with spawn"
            )
        if self._broken is None and self._calls.orchestrator.aborted:
            # The peers gave up before this rank came.
            raise self._break(self._calls.orchestrator.diagnose())
        if self._broken is not None:
            raise Aborted(f"this communicator can make no more calls: {self._broken}")

    def _short_way(self) -> Callable[[Any, Any, str], Any]:
        """What all-reduces without options try first: see devices.base.Device.call."""
        if self.nranks == 1 or not self._calls.has_short_way:
            return _no_call
        device = self._device
        if not device.asynchronous:
            return device.call  # it locks for itself
        aborted = self._calls.orchestrator.abort_word()

        def locked(arrays: Any, out: Any, op: str) -> Any:
            with self._lock:
                if self._closed or self._broken is not None or aborted.value or device.forked:
                    return None  # the long way says why not
                try:
                    return device.call(arrays, out, op)
                except BaseException as error:  # some local ranks may have been launched
                    self._give_up(error)
                    raise

        return locked

    def _give_up(self, error: BaseException) -> None:
        """Lets the other ranks go: a device of this process has failed, or a call was cut short."""
        self._calls.orchestrator.abort()
        self._break(error)

    def _break(self, error: _AnyError) -> _AnyError:
        self._broken = self._broken or f"in an earlier call, {type(error).__name__}: {error}"
        self._device.close()
        self._calls.abort_engine()
        return error


def _forced(
    algorithm: str | None, access: str | None, chunk_bytes: int | None, nchannels: int | None
) -> Forced:
    return Forced(
        algorithm,
        access,
        None if chunk_bytes is None else check_integer(chunk_bytes, "chunk_bytes"),
        None if nchannels is None else check_integer(nchannels, "nchannels"),
    )


def _no_call(arrays: Any, out: Any, op: str) -> None:
    """Stands in for the device's short way where it does not apply."""
    return None
