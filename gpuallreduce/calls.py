"""From bound arrays to a finished call: the request, its plan kept for the next time, and the run.

Knows nothing of how arguments were checked, nor of kernels and words.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gpuallreduce import tuner
from gpuallreduce.arrays import Bound
from gpuallreduce.devices.base import LaunchArgs
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.fabric.base import Engine
from gpuallreduce.memory import SymmetricBuffer
from gpuallreduce.orchestrator import Addresses, Orchestrator
from gpuallreduce.placement import Placement
from gpuallreduce.plan import ORDERS, Plan, Request
from gpuallreduce.symmetric import SymmetricBuffers, address_table
from gpuallreduce.tracing import Trace
from gpuallreduce.tuner import Forced
from gpuallreduce.types import dtype_of, op_of, reduction

__all__ = ["Calls", "Options", "digest"]

CACHED_PLANS = 4096
NOT_FORCED = Forced()
_UNTRACED = nullcontext()


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its arrays.

    Attributes:
        op: name of the operator.
        forced: what the tuner may not decide.
        order: ``rank``, ``any``, or None for ``rank``.
        root: for broadcast and reduce.
        blocks: blocks of an input that holds one for every rank.
        timeout: seconds that one wait may last; None: the communicator's.
        parts: counts of the arrays that were packed together.
    """

    op: str = "sum"
    forced: Forced = NOT_FORCED
    order: str | None = None
    root: int = 0
    blocks: int = 1
    timeout: float | None = None
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Prepared:
    """A plan and its kernel arguments on every local rank, reused by calls of the same request."""

    plan: Plan
    args: tuple[LaunchArgs, ...]


def digest(values: tuple[int, ...]) -> int:
    """0 for the plain case of arrays in C order, else a number that tells values apart."""
    if not any(values):
        return 0
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


class Calls:
    """Runs the calls of one communicator on its local ranks.

    Attributes:
        timeout: seconds that one wait may last; None: no limit. After a change call ``forget``.
        nranks, ranks: of the communicator, and those of them that live in this process.
        layout: name and number of ranks of every node, in the order of ranks.
        has_short_way: whether repeated calls may go past this class to the device.
        trace: records stages, if asked for.
    """

    has_short_way = True

    def __init__(
        self,
        placement: Placement,
        *,
        timeout: float | None,
        trace: Trace | None = None,
    ) -> None:
        self.transport = placement.transport
        self.device = placement.device
        self.topology = placement.topology
        self.nranks, self.ranks = self.transport.nranks, self.transport.ranks
        self.layout: tuple[tuple[str, int], ...] = ((socket.gethostname(), self.nranks),)
        self.timeout = timeout
        self.trace = trace
        if trace is not None:
            self.has_short_way = False  # where nothing is recorded
        self.orchestrator = Orchestrator(self.transport, self.device, self.topology)
        self._connect = placement.engine
        self._engine: Engine | None = None
        self._engine_aborted = False
        self.symmetric = SymmetricBuffers()
        self._plans: dict[Any, _Prepared] = {}

    def forget(self) -> None:
        """Drops kept plans: something that they depend on has changed."""
        self._plans.clear()
        self.device.forget()

    def end(self) -> None:
        """Leaves the ranks; no call may be running. Arrays over symmetric buffers may live on."""
        if self.trace is not None:
            self.trace.write()
        self.orchestrator.leave()
        if self._engine is not None:
            self._engine.close()
        self.transport.let_go()
        self.orchestrator.depart()
        self.transport.close(self.orchestrator.departed)
        self.forget()
        self.symmetric.clear()

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """A symmetric buffer; a collective."""
        purpose = "symmetric buffer"
        return self.transport.allocate(nbytes, purpose=purpose, timeout=self.timeout)

    def adopt(self, buffer: SymmetricBuffer) -> None:
        """Lets arrays over the buffer be used without staging. One local rank."""
        rank = self.transport.ranks[0]
        self.device.add_symmetric(buffer.addresses[rank], buffer.nbytes)
        self.symmetric.add(buffer, rank, gone=self.device.remove_symmetric)

    def request(self, collective: str, bounds: Sequence[Bound], options: Options) -> Request:
        """What the arrays and options ask for.

        Raises:
            InvalidArgument: dtype, operator or order does not exist.
        """
        order = "rank" if options.order is None else options.order
        if order not in ORDERS:
            raise InvalidArgument(f"order={order!r} does not exist; there are {', '.join(ORDERS)}")
        return Request(
            collective=collective,
            dtype=dtype_of(bounds[0].result.dtype),
            op=op_of(options.op),
            count=bounds[0].count // options.blocks,
            nranks=self.topology.nranks,
            order=order,
            direct=self._is_direct(bounds),
            in_place=all(bound.in_place for bound in bounds),
            root=options.root,
        )

    def decide(self, request: Request, forced: Forced) -> Plan:
        """The tuner's plan for a request.

        Raises:
            InvalidArgument, NotSupported: the request cannot be served so.
        """
        return tuner.decide(request, self.topology, forced, transport=self.transport.name)

    def run(self, collective: str, bounds: Sequence[Bound], options: Options) -> None:
        """Runs one call on all local ranks, and puts results where strided arrays want them.

        Raises:
            InvalidArgument, NotSupported, CompileError: nothing was sent.
            MismatchError, Timeout, Aborted: the ranks are out of step for good.
        """
        request = self.request(collective, bounds, options)
        if self.topology.nranks == 1:
            reduction(request.dtype, request.op)
            self.decide(request, options.forced)
            self.device.arrays.copy_bytes(bounds[0], 0)
        else:
            prepared = self._prepare(request, options)
            addresses = self._addresses(prepared, bounds, options)
            engine = self._engine_for(prepared.plan)
            with self._span(prepared.plan):
                self.orchestrator.run(prepared.plan, prepared.args, addresses)
            if engine is not None:
                self._run_engine(engine, request, addresses)
            self._remember(prepared, bounds, options)
        for bound in bounds:
            if bound.finish is not None:
                bound.finish()

    def _span(self, plan: Plan) -> AbstractContextManager[None]:
        """Records a call, if calls are recorded."""
        if self.trace is None:
            return _UNTRACED
        request, config = plan.request, plan.config
        name = f"{request.collective} {config.algorithm} {config.access}"
        return self.trace.span(name, bytes=request.nbytes)

    # ---- another library's collectives ----------------------------------------------------------
    # NOTE engines meet first. Before an engine's collective our barrier compares the ranks' calls.
    # If it fails, ranks are left waiting inside the engine, so whoever waits for the device looks
    # out for that, and for processes that ended, and aborts the engine.

    def _engine_for(self, plan: Plan) -> Engine | None:
        """The engine that a plan asks for, connected at first use. A collective."""
        if plan.config.access != "engine":
            return None
        if self._engine is None:
            assert self._connect is not None  # host devices have no plan that asks for one
            self._engine = self._connect()
        self._engine.check_pair(plan.request.dtype, plan.request.op)
        return self._engine

    def _run_engine(self, engine: Engine, request: Request, addresses: Addresses) -> None:
        try:
            engine.all_reduce(
                addresses.inputs,
                addresses.outputs,
                request.count,
                dtype=request.dtype,
                op=request.op,
                streams=self.device.streams(),
            )
        except BaseException:  # the others met us, and wait inside the engine
            self.orchestrator.abort()
            self.abort_engine()
            raise

    def abort_engine(self) -> None:
        """Ends what the engine is waiting for; from any thread."""
        if self._engine is not None and not self._engine_aborted:
            self._engine_aborted = True
            self._engine.abort()

    def look_out(self) -> None:
        """See NOTE engines meet first; called now and then while the device works."""
        if self._engine is None or self._engine_aborted:
            return
        if not self.orchestrator.aborted and self.transport.lost():
            self.orchestrator.abort()
        if self.orchestrator.aborted:
            self.abort_engine()

    def settle(self) -> None:
        """Learns what may have gone wrong, once all that was launched has ended."""

    def _is_direct(self, bounds: Sequence[Bound]) -> bool:
        """Whether every rank can address these arrays."""
        if self.topology.one_process:
            kind = self.device.arrays
            # What kernels touch: copies of strided arrays come from whatever allocator is set.
            return all(kind.is_addressable(array) for bound in bounds for array in bound.keep)
        addresses = [address for bound in bounds for address in (bound.input, bound.output)]
        return all(self.symmetric.find(address) is not None for address in addresses)

    def _prepare(self, request: Request, options: Options) -> _Prepared:
        timeout = self.timeout if options.timeout is None else options.timeout
        key = (request, options.forced, timeout)
        prepared = self._plans.get(key)
        if prepared is None:
            if len(self._plans) >= CACHED_PLANS:
                self.forget()
            plan = self.decide(request, options.forced)
            args = tuple(
                self.orchestrator.arguments(plan, rank, timeout_s=timeout)
                for rank in self.transport.ranks
            )
            prepared = self._plans[key] = _Prepared(plan, args)
        return prepared

    def _addresses(
        self, prepared: _Prepared, bounds: Sequence[Bound], options: Options
    ) -> Addresses:
        """The call's memory; also tells the kernels what else must agree between ranks."""
        inputs = [bound.input for bound in bounds]
        outputs = [bound.output for bound in bounds]
        detail: tuple[int, ...] = (bounds[0].layout, *options.parts)
        addresses = Addresses(inputs, outputs)
        if prepared.plan.config.access == "direct" and self.topology.one_process:
            addresses = Addresses(inputs, outputs, address_table(inputs), address_table(outputs))
        elif prepared.plan.config.access == "direct":
            source, target = self.symmetric.find(inputs[0]), self.symmetric.find(outputs[0])
            # Both lie in buffers, or the plan would not be direct.
            assert source is not None
            assert target is not None
            places = (source, target)
            detail += tuple(n for place in places for n in (place.buffer.identity, place.offset))
            addresses = Addresses(inputs, outputs, source.table(), target.table())
        for args in prepared.args:
            args.header.detail = digest(detail)
        return addresses

    def _remember(self, prepared: _Prepared, bounds: Sequence[Bound], options: Options) -> None:
        """Lets the next call of this dtype, operator and size take the device's short way."""
        plan, bound = prepared.plan, bounds[0]
        if plan.request.collective != "allreduce" or options != Options(op=options.op):
            return
        if any(each.layout != 0 or each.finish is not None for each in bounds):
            return
        if len({each.in_place for each in bounds}) > 1:
            return
        if bound.result.dtype is not plan.request.dtype.numpy:
            return  # the short way knows a dtype by its object, and this one is a copy
        symmetric = (0, 0)
        if not self.topology.one_process:
            found = [self.symmetric.find(address) for address in (bound.input, bound.output)]
            symmetric = (bound.input if found[0] else 0, bound.output if found[1] else 0)
        self.device.prepare(
            plan,
            prepared.args,
            dtype=bound.result.dtype,
            in_place=bound.in_place,
            symmetric=symmetric,
        )
