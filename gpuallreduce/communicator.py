"""The public API: a communicator, its collectives, and how one comes to be.

Knows nothing of kernels, words or processes: it checks arguments, asks the tuner and lets the orchestrator run.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuallreduce import tuner
from gpuallreduce.args import GarArgs
from gpuallreduce.arrays import Bound, bind, bind_pair, check_array
from gpuallreduce.devices.host import HostDevice
from gpuallreduce.errors import Aborted, Closed, Error, InvalidArgument, NotSupported
from gpuallreduce.memory import Mapping, SymmetricBuffer
from gpuallreduce.orchestrator import Addresses, Orchestrator
from gpuallreduce.plan import ORDERS, Plan, Request
from gpuallreduce.topology import Topology, available_cores, host_topology
from gpuallreduce.transport import LocalTransport, Transport
from gpuallreduce.tuner import Forced
from gpuallreduce.types import dtype_of, op_of, reduction

__all__ = ["Communicator", "DEFAULT_TIMEOUT_S"]

Array = np.ndarray[Any, Any]
DEFAULT_TIMEOUT_S = 60.0
MAX_CHANNELS = 4
FUSED_BYTES = 4 << 20  # allreduce_many packs arrays into buckets of this size
ALONE_BYTES = 1 << 20  # ... and calls larger arrays by themselves: packing would cost more than a call
CACHED_PLANS = 4096


@dataclass(frozen=True)
class _Prepared:
    """A plan and its kernel arguments on every local rank, reused by calls of the same request."""

    plan: Plan
    args: tuple[GarArgs, ...]


class Communicator:
    """A group of ranks that make the same collective calls in the same order.

    Made directly for ranks of this process (``Communicator(["host"] * 4)``: one array per rank in every call), or by
    ``gpuallreduce.init`` with one rank per process (one array in every call). Use it as a context manager.

    Attributes:
        nranks: ranks of the group.
        ranks: the ranks that live in this process.
        topology: what the ranks run on.

    Calls on host devices are complete on return. One call runs at a time; another thread's call waits for it.
    """

    def __init__(self, devices: Sequence[str], *, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Ranks of this process, one per device.

        Args:
            devices: a device for each rank; ``"host"`` is a processor core with NumPy arrays.
            timeout: seconds that one wait of a call may last before every rank raises Timeout; None: no limit.

        Raises:
            InvalidArgument: no device, or a name that does not exist.
            NotSupported: CUDA devices.
        """
        names = _check_devices(devices)
        transport = LocalTransport(len(names))
        topology = host_topology(len(names), cores=available_cores(), one_process=True)
        self._start(transport, topology, timeout)

    @classmethod
    def over(cls, transport: Transport, topology: Topology, *, timeout: float | None) -> Communicator:
        """A communicator over any transport; ``gpuallreduce.init`` uses it."""
        self = cls.__new__(cls)
        self._start(transport, topology, timeout)
        return self

    def _start(self, transport: Transport, topology: Topology, timeout: float | None) -> None:
        self._timeout = _check_timeout(timeout)
        self.nranks = transport.nranks
        self.ranks = transport.ranks
        self.topology = topology
        self._transport = transport
        self._device = HostDevice(spin=not topology.crowded)
        self._orchestrator = Orchestrator(transport, self._device, topology, max_channels=MAX_CHANNELS)
        self._call = self._device.call if len(self.ranks) == 1 and self.nranks > 1 else _no_call
        self._plans: dict[Any, _Prepared] = {}
        self._symmetric: dict[int, SymmetricBuffer] = {}
        self._scratch: list[Array] | None = None
        self._broken: str | None = None
        self._closed = False
        self._lock = threading.RLock()
        _open_communicators.add(self)

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank.

        Raises:
            InvalidArgument: several ranks live in this process; see ``ranks``.
        """
        if len(self.ranks) != 1:
            raise InvalidArgument(
                f"this process holds {len(self.ranks)} ranks, so there is no single rank; use comm.ranks"
            )
        return self.ranks[0]

    @property
    def timeout(self) -> float | None:
        """Seconds that one wait of a call may last; None: no limit. May be set between calls."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._timeout = _check_timeout(seconds)
        self._forget()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._broken else "open"
        return f"<gpuallreduce.Communicator nranks={self.nranks} ranks={list(self.ranks)} {state}>"

    def close(self) -> None:
        """Ends the communicator. Idempotent; a call that another thread is in is aborted first.

        Peers that wait for this rank in a later call raise Aborted at once. Arrays from ``empty`` stay usable.
        """
        if self._closed:
            return
        self._closed = True
        self._device.close()
        if not self._lock.acquire(blocking=False):
            self._orchestrator.abort()
        else:
            self._lock.release()
        self._device.drain()
        with self._lock:
            self._orchestrator.depart()
            self._transport.close()
            self._forget()
            self._symmetric.clear()

    def abort(self) -> None:
        """Makes every rank leave the call it is in with Aborted, and refuse later calls. From any thread, at any time."""
        if self._closed:
            return
        self._broken = self._broken or "it was aborted by this rank"
        self._device.close()
        self._orchestrator.abort()

    # ---- collectives --------------------------------------------------------------------------------------------

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
        timeout: float | None = None,
    ) -> Any:
        """Combines the arrays of all ranks elementwise; every rank ends with the same bits.

        ``result[i] = round(x[0][i] op x[1][i] op ... op x[nranks-1][i])``, folded left to right in rank order in the
        accumulator (float32 for 16- and 8-bit floats, else the type itself) and rounded once.

        Args:
            arrays: one array of any shape; with several local ranks a sequence of them, one per rank.
            out: where to put the result: same shape and dtype, no partial overlap. None: in place.
            op: sum, prod, max, min, avg (floats and complex), band, bor, bxor (integers and bool).
            algorithm: one_shot, two_shot or ring; None: the tuner's choice. Never changes the bits.
            order: ``"rank"`` (default: the contract above) or ``"any"`` (the algorithm's own order of the sum).
            access: ``"direct"`` or ``"staged"``; None: the tuner's choice.
            chunk_bytes: bytes of one chunk of the pipeline.
            nchannels: blocks per rank that work side by side.
            timeout: seconds that one wait may last, instead of the communicator's.

        Returns:
            ``out`` if given, else ``arrays``.

        Raises:
            InvalidArgument: an argument cannot be right; nothing was sent, and the communicator stays usable.
            NotSupported: the operator does not fit the dtype; the message lists what does.
            MismatchError: the ranks' calls differ; every rank raises.
            Timeout: a rank did not come within the limit; names it. Every waiting rank raises.
            Aborted: the communicator was aborted or broke earlier.
        """
        if algorithm is order is access is chunk_bytes is nchannels is timeout is None:
            done = self._call(arrays, out, op)
            if done is not None:
                if done is False:
                    raise self._break(self._orchestrator.diagnose())
                return done
        forced = Forced(algorithm, access, chunk_bytes, nchannels)
        with self._entered():
            bounds = self._bind(arrays, out)
            self._run("allreduce", op, bounds, forced, order=order, timeout=timeout, fast=True)
        return arrays if out is None else out

    def allreduce_many(self, arrays: Sequence[Any], *, op: str = "sum", timeout: float | None = None) -> Any:
        """All-reduces many arrays in place, small ones packed together: same bits as separate calls, fewer waits.

        Args:
            arrays: arrays of any shapes and dtypes; with several local ranks one such sequence per rank.
            op, timeout: as in allreduce.

        Memory beyond the arrays: one bucket of 4 MiB per local rank.
        """
        with self._entered():
            per_rank = self._per_rank(arrays, "sequences of arrays")
            if len({len(each) for each in per_rank}) > 1:
                raise InvalidArgument(
                    f"local ranks brought {[len(each) for each in per_rank]} arrays; bring as many on every rank"
                )
            columns = [self._bind_locals(list(column), None) for column in zip(*per_rank, strict=True)]
            for column in columns:
                reduction(dtype_of(column[0].result.dtype), op_of(op))
            for bucket in _buckets(columns):
                self._run_bucket(bucket, op, timeout)
        return arrays

    def reduce(
        self, arrays: Any, out: Any = None, *, root: int = 0, op: str = "sum", timeout: float | None = None
    ) -> Any:
        """As allreduce, but only the root gets the result; the other ranks' arrays stay as they are.

        ``out`` may be None anywhere but is read on the root only (there: in place).
        """
        with self._entered():
            self._check_root(root)
            outs = self._per_rank(out, "out") if out is not None else [None] * len(self.ranks)
            bounds = []
            for rank, array, to in zip(self.ranks, self._per_rank(arrays, "arrays"), outs, strict=True):
                checked = check_array(array, f"the array of rank {rank}")
                if rank == root:
                    bounds.append(bind(checked, None if to is None else check_array(to, "out")))
                else:
                    bounds.append(_read_only(checked))
            self._run("reduce", op, bounds, Forced(), root=root, timeout=timeout)
        return arrays if out is None else out

    def reduce_scatter(
        self, arrays: Any, out: Any = None, *, op: str = "sum", timeout: float | None = None
    ) -> Any:
        """Rank r ends with block r of the all-reduced array: ``x.reshape(nranks, -1, ...)[r]`` along the first axis.

        Args:
            arrays: shape (nranks * k, ...).
            out: shape (k, ...); made if None.
        """
        with self._entered():
            bounds, results = [], []
            for rank, array, to in self._pairs(arrays, out):
                if array.ndim == 0 or array.shape[0] % self.nranks:
                    raise InvalidArgument(
                        f"the array of rank {rank} has shape {array.shape}; its first axis must be a multiple of the "
                        f"{self.nranks} ranks"
                    )
                shape = (array.shape[0] // self.nranks, *array.shape[1:])
                bounds.append(_bind_blocks(array, _result(to, shape, array.dtype), shape))
                results.append(bounds[-1].result)
            self._run("reduce_scatter", op, bounds, Forced(), timeout=timeout, blocks=self.nranks)
        return results[0] if len(self.ranks) == 1 else results

    def all_gather(self, arrays: Any, out: Any = None, *, timeout: float | None = None) -> Any:
        """Every rank ends with all ranks' arrays, one after the other along the first axis.

        Args:
            arrays: shape (k, ...), or 0-d.
            out: shape (nranks * k, ...), for 0-d (nranks,); made if None.
        """
        with self._entered():
            bounds, results = [], []
            for _, array, to in self._pairs(arrays, out):
                shape = (self.nranks * (array.shape[0] if array.ndim else 1), *array.shape[1:])
                bounds.append(_bind_blocks(array, _result(to, shape, array.dtype), shape))
                results.append(bounds[-1].result)
            self._run("all_gather", "sum", bounds, Forced(), timeout=timeout)
        return results[0] if len(self.ranks) == 1 else results

    def broadcast(self, arrays: Any, *, root: int = 0, timeout: float | None = None) -> Any:
        """Every rank's array becomes the root's, in place."""
        with self._entered():
            self._check_root(root)
            bounds = self._bind(arrays, None)
            self._run("broadcast", "sum", bounds, Forced(), root=root, timeout=timeout)
        return arrays

    def barrier(self, *, timeout: float | None = None) -> None:
        """Returns when every rank has come."""
        with self._entered():
            nothing = [np.empty(0, np.uint8) for _ in self.ranks]
            bounds = self._bind_locals(nothing, None)
            self._run("barrier", "sum", bounds, Forced(), timeout=timeout)

    # ---- memory and plans -----------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Any:
        """An array that peers can address, so that all-reduce needs no staging copy. A collective: all ranks call it.

        Returns:
            One array of zeros; with several local ranks a list of them.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        row = dtype_of(dtype)
        with self._entered():
            nbytes = int(np.prod(shape, dtype=np.int64)) * row.itemsize
            buffer = self._transport.allocate(nbytes, purpose="symmetric buffer")
            arrays = [buffer.array(rank, shape, row.numpy) for rank in self.ranks]
            if len(self.ranks) == 1:
                self._register(buffer, self.ranks[0])
        return arrays[0] if len(arrays) == 1 else arrays

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
        """What ``allreduce`` with these arguments would run; nothing is sent. ``print(plan.describe())``."""
        with self._entered():
            bounds = self._bind(arrays, out)
            request = self._request("allreduce", op, bounds, order=order)
            return self._decide(request, Forced(algorithm, access, chunk_bytes, nchannels))

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _entered(self) -> threading.RLock:
        """The lock of a call, once it is sure that a call can be made at all."""
        if self._closed:
            raise Closed("this communicator is closed; make a new one")
        if self._device.forked:
            raise Closed(
                "this communicator belongs to the process that this one was forked from; call gpuallreduce.init() "
                "after the fork, or start processes with spawn"
            )
        if self._broken is None and self._orchestrator.aborted:
            raise self._break(self._orchestrator.diagnose())  # the peers gave up before this rank came
        if self._broken is not None:
            raise Aborted(f"this communicator can make no more calls: {self._broken}")
        return self._lock

    def _break(self, error: Error) -> Error:
        self._broken = self._broken or f"in an earlier call, {type(error).__name__}: {error}"
        self._device.close()
        return error

    def _forget(self) -> None:
        self._plans.clear()
        self._device.forget()

    def _per_rank(self, values: Any, what: str) -> list[Any]:
        if len(self.ranks) == 1:
            return [values]
        if isinstance(values, np.ndarray) or not isinstance(values, Sequence) or len(values) != len(self.ranks):
            found = f"{len(values)}" if isinstance(values, Sequence) else f"a {type(values).__name__}"
            raise InvalidArgument(
                f"this communicator has {len(self.ranks)} ranks in this process and takes a list of {what}, one per "
                f"rank; it got {found}"
            )
        return list(values)

    def _pairs(self, arrays: Any, out: Any) -> list[tuple[int, Array, Array | None]]:
        outs = self._per_rank(out, "out arrays") if out is not None else [None] * len(self.ranks)
        return [
            (rank, check_array(array, f"the array of rank {rank}"), None if to is None else check_array(to, "out"))
            for rank, array, to in zip(self.ranks, self._per_rank(arrays, "arrays"), outs, strict=True)
        ]

    def _bind(self, arrays: Any, out: Any) -> list[Bound]:
        outs = None if out is None else self._per_rank(out, "out arrays")
        return self._bind_locals(self._per_rank(arrays, "arrays"), outs)

    def _bind_locals(self, arrays: list[Any], outs: list[Any] | None) -> list[Bound]:
        bounds = []
        for i, (rank, array) in enumerate(zip(self.ranks, arrays, strict=True)):
            to = None if outs is None else check_array(outs[i], f"out of rank {rank}")
            bounds.append(bind(check_array(array, f"the array of rank {rank}"), to))
        first = bounds[0]
        for rank, bound in zip(self.ranks, bounds, strict=True):
            if bound.count != first.count or bound.result.dtype != first.result.dtype:
                raise InvalidArgument(
                    f"rank {rank} brought {bound.count} x {bound.result.dtype}, rank {self.ranks[0]} {first.count} x "
                    f"{first.result.dtype}; bring the same count and dtype on every rank"
                )
            if bound.layout != first.layout:
                raise InvalidArgument(
                    f"rank {rank} and rank {self.ranks[0]} brought arrays of different memory layouts (such as C and "
                    "Fortran order); bring the same layout on every rank, or np.ascontiguousarray(x)"
                )
        return bounds

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.nranks:
            raise InvalidArgument(f"root={root} is not a rank; there are ranks 0 to {self.nranks - 1}")

    def _request(
        self, collective: str, op: str, bounds: list[Bound], *, order: str | None, root: int = 0, blocks: int = 1
    ) -> Request:
        order = "rank" if order is None else order
        if order not in ORDERS:
            raise InvalidArgument(f"order={order!r} does not exist; there are {', '.join(ORDERS)}")
        first = bounds[0]
        return Request(
            collective=collective,
            dtype=dtype_of(first.result.dtype),
            op=op_of(op),
            count=first.count // blocks,
            nranks=self.nranks,
            order=order,
            direct=self._is_direct(bounds),
            in_place=all(bound.in_place for bound in bounds),
            root=root,
        )

    def _decide(self, request: Request, forced: Forced) -> Plan:
        return tuner.decide(
            request, self.topology, forced, max_channels=MAX_CHANNELS, transport=self._transport.name
        )

    def _is_direct(self, bounds: list[Bound]) -> bool:
        """Whether every rank can address these arrays."""
        if self.topology.one_process:
            return True
        return all(
            self._symmetric_at(address) is not None
            for bound in bounds
            for address in (bound.input, bound.output)
        )

    def _register(self, buffer: SymmetricBuffer, rank: int) -> None:
        begin = buffer.addresses[rank]
        mine: Mapping = buffer.mappings[rank]
        # The caller's arrays own this rank's pages; when the last is gone, so are the peers' mappings.
        buffer.mappings = tuple(other for i, other in enumerate(buffer.mappings) if i != rank)
        self._symmetric[begin] = buffer
        self._device.add_symmetric(begin, buffer.nbytes)
        weakref.finalize(mine, self._symmetric.pop, begin, None)

    def _symmetric_at(self, address: int) -> tuple[SymmetricBuffer, int] | None:
        for begin, buffer in self._symmetric.items():
            if begin <= address < begin + max(buffer.nbytes, 1):
                return buffer, address - begin
        return None

    def _run(
        self,
        collective: str,
        op: str,
        bounds: list[Bound],
        forced: Forced,
        *,
        order: str | None = None,
        root: int = 0,
        blocks: int = 1,
        timeout: float | None = None,
        extra: tuple[int, ...] = (),
        fast: bool = False,
    ) -> None:
        """Plans and runs one call on all local ranks, then copies results into strided memory where need be."""
        request = self._request(collective, op, bounds, order=order, root=root, blocks=blocks)
        if self.nranks == 1:
            reduction(request.dtype, request.op)
            self._decide(request, forced)
            _copy_alone(bounds)
        else:
            limit = self._timeout if timeout is None else _check_timeout(timeout)
            prepared, addresses = self._prepare(request, forced, bounds, limit, extra)
            try:
                self._orchestrator.run(prepared.plan, prepared.args, addresses)
            except Error as error:
                raise self._break(error) from None
            except BaseException:
                self._broken = "a call was interrupted"
                self._device.close()
                raise
            if fast and len(self.ranks) == 1 and forced == Forced() and order is None and timeout is None:
                self._remember(prepared, bounds[0], op)
        for bound in bounds:
            if bound.finish is not None:
                bound.finish()

    def _prepare(
        self, request: Request, forced: Forced, bounds: list[Bound], limit: float | None, extra: tuple[int, ...]
    ) -> tuple[_Prepared, Addresses]:
        key = (request, forced, limit)
        prepared = self._plans.get(key)
        if prepared is None:
            if len(self._plans) >= CACHED_PLANS:
                self._forget()
            plan = self._decide(request, forced)
            args = tuple(
                self._orchestrator.arguments(plan, rank, timeout_s=limit) for rank in self.ranks
            )
            prepared = self._plans[key] = _Prepared(plan, args)
        inputs = [bound.input for bound in bounds]
        outputs = [bound.output for bound in bounds]
        detail: tuple[int, ...] = (bounds[0].layout, *extra)
        addresses = Addresses(inputs, outputs)
        if prepared.plan.config.access == "direct":
            if self.topology.one_process:
                addresses = Addresses(inputs, outputs, _table(inputs), _table(outputs))
            else:
                places = [self._symmetric_at(address) for address in (inputs[0], outputs[0])]
                tables, offsets = [], []
                for place in places:
                    assert place is not None
                    buffer, offset = place
                    tables.append(_table([base + offset for base in buffer.addresses]))
                    offsets += [buffer.identity, offset]
                detail += tuple(offsets)
                addresses = Addresses(inputs, outputs, *tables)
        for each in prepared.args:
            each.header.detail = _digest(detail)
        return prepared, addresses

    def _remember(self, prepared: _Prepared, bound: Bound, op: str) -> None:
        """Lets the next call of this dtype, operator and size take the short way."""
        if bound.layout != 0 or bound.finish is not None or prepared.plan.config.nchannels != 1:
            return
        direct = prepared.plan.config.access == "direct"
        if direct:
            return
        self._device.prepare(
            prepared.plan.kernel,
            prepared.args[0],
            dtype=bound.result.dtype,
            op=op,
            nbytes=bound.count * bound.result.dtype.itemsize,
            in_place=bound.in_place,
        )

    def _run_bucket(self, bucket: list[list[Bound]], op: str, timeout: float | None) -> None:
        if len(bucket) == 1:
            self._run("allreduce", op, bucket[0], Forced(), timeout=timeout)
            return
        if self._scratch is None:
            self._scratch = [np.empty(FUSED_BYTES, np.uint8) for _ in self.ranks]
        dtype = bucket[0][0].result.dtype
        count = sum(column[0].count for column in bucket)
        bounds = []
        for i, scratch in enumerate(self._scratch):
            packed = scratch[: count * dtype.itemsize].view(dtype)
            at = 0
            for column in bucket:
                part = column[i].result
                packed[at : at + part.size] = part.ravel()
                at += part.size
            bounds.append(bind(packed, None))
        counts = tuple(column[0].count for column in bucket)
        self._run("allreduce", op, bounds, Forced(), timeout=timeout, extra=counts)
        for i, bound in enumerate(bounds):
            at = 0
            for column in bucket:
                part = column[i].result
                part[...] = bound.result[at : at + part.size].reshape(part.shape)
                at += part.size


def _no_call(arrays: Any, out: Any, op: str) -> None:
    """Stands in for the device's short way where it does not apply."""
    return None


def _check_devices(devices: Sequence[str]) -> list[str]:
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise InvalidArgument(
            f'devices={devices!r}: give a list with one device per rank, such as ["host"] * 4'
        )
    for name in devices:
        if isinstance(name, str) and name.startswith("cuda"):
            raise NotSupported(f"device {name!r}: this version runs on host devices only")
        if name != "host":
            raise InvalidArgument(f'device {name!r} does not exist; there is "host"')
    return list(devices)


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is not None and not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r}: give seconds above 0, or None for no limit")
    return timeout


def _digest(values: tuple[int, ...]) -> int:
    """0 for the plain case of C-ordered arrays, else a number that tells different values apart."""
    if not any(values):
        return 0
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def _table(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _result(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype:
        raise InvalidArgument(
            f"out has shape {out.shape} and dtype {out.dtype}; this call needs {shape} and {dtype}"
        )
    return out


def _bind_blocks(array: Array, out: Array, shape: tuple[int, ...]) -> Bound:
    """Blocks are counted along the first axis, so both sides must be in C order."""
    return bind_pair(np.ascontiguousarray(array), out)


def _read_only(array: Array) -> Bound:
    packed = np.ascontiguousarray(array)
    address = int(packed.__array_interface__["data"][0])
    return Bound(address, address, array.size, 0, True, array, None, (packed,))


def _copy_alone(bounds: list[Bound]) -> None:
    """One rank: the result is the input, bit for bit."""
    bound = bounds[0]
    if not bound.in_place:
        nbytes = bound.count * bound.result.dtype.itemsize
        ctypes.memmove(bound.output, bound.input, nbytes)


def _buckets(columns: list[list[Bound]]) -> list[list[list[Bound]]]:
    """Arrays that go together: neighbours of one dtype up to FUSED_BYTES, in an order that all ranks share."""
    buckets: list[list[list[Bound]]] = []
    by_dtype: dict[Any, tuple[list[list[Bound]], int]] = {}
    for column in columns:
        dtype = column[0].result.dtype
        nbytes = column[0].count * dtype.itemsize
        if nbytes >= ALONE_BYTES:
            buckets.append([column])
            continue
        bucket, filled = by_dtype.get(dtype, (None, 0))
        if bucket is None or filled + nbytes > FUSED_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(column)
        by_dtype[dtype] = (bucket, filled + nbytes)
    return buckets


_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for communicator in list(_open_communicators):
        communicator.close()
