"""The calls of a rank whose job has several nodes: which of them are all-reduces, and which the
engine carries alone.

Knows nothing of how chunks travel; arguments were checked before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuallreduce.across.host import HostAcross
from gpuallreduce.across.pace import Pace, pace
from gpuallreduce.across.rates import agreed
from gpuallreduce.across.scratch import whole_of
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.across.traffic import bytes_between, bytes_within
from gpuallreduce.arrays import Bound
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.calls import Calls, Options, digest
from gpuallreduce.devices.base import Device
from gpuallreduce.errors import NotSupported
from gpuallreduce.fabric.mpi import Mpi
from gpuallreduce.placement import Placement
from gpuallreduce.plan import ORDERS, Config, Plan, Request, Shards
from gpuallreduce.tracing import trace_of
from gpuallreduce.tuner import IN_RANK_ORDER, Forced
from gpuallreduce.types import DTYPES, reduction

if TYPE_CHECKING:
    from gpuallreduce.across.cuda import CudaAcross

__all__ = ["CallsAcross"]

MOVES = ("broadcast", "all_gather")
KEPT_PLANS = 4096
NO_LIMIT_S = 1e9


class CallsAcross(Calls):
    """As Calls, for ranks on several nodes.

    reduce and reduce_scatter keep the numeric contract as all-reduces of which a rank keeps its
    part: they send the bytes of an all-reduce, 2 n/p between nodes for a reduce_scatter that could
    do with one n/p, and take n bytes of memory on ranks that do not keep all. broadcast and
    all_gather only move bytes: the engine carries them between all ranks, as it likes.
    """

    has_short_way = False

    def __init__(
        self,
        nodes: Nodes,
        placement: Placement,
        *,
        timeout: float | None,
        trace: Path | None = None,
    ) -> None:
        """Connects the nodes; a collective of all ranks.

        Args:
            nodes: where the ranks of the job are.
            placement: of this node's ranks.
            timeout: seconds that one wait may last; None: no limit.
            trace: the file that stages are written to; None: what GPUALLREDUCE_TRACE says.

        Raises:
            NotSupported: MPI cannot be used; all ranks raise.
        """
        recorder = trace_of(
            os.environ,
            node=nodes.this,
            node_name=nodes.names[nodes.this],
            rank=nodes.everyone.rank,
            file=trace,
        )
        super().__init__(placement, timeout=timeout, trace=recorder)
        self.nodes = nodes
        self.layout = tuple(zip(nodes.names, nodes.sizes, strict=True))
        self._kept: dict[tuple[Request, Forced], Plan] = {}
        everyone = nodes.everyone
        self.nranks, self.ranks = everyone.nranks, (everyone.rank,)
        self.ways, self._rates = agreed(nodes, self.topology)

        shards = NodeShards(placement, timeout=None, orchestrator=self.orchestrator)
        connect = _connect_gpus if placement.device.asynchronous else _connect_hosts
        self.across: HostAcross | CudaAcross = connect(nodes, shards, placement.device, timeout)
        self.across.trace = recorder

    def request(self, collective: str, bounds: Sequence[Bound], options: Options) -> Request:
        """See Calls; of all ranks of the job."""
        request = super().request(collective, bounds, options)
        order = request.order
        if self.device.asynchronous and request.op.name in ("max", "min"):
            order = "rank"  # any order gives the same bits, but NCCL's own drops NaN
        return replace(request, nranks=len(self.nodes.node_of), direct=False, order=order)

    def decide(self, request: Request, forced: Forced) -> Plan:
        """See Calls."""
        self._check(forced)
        if request.collective in MOVES:
            return self._moved(request)
        nshards = self.across.nshards
        shards = Shards(nshards, fold_ranks=request.nranks)
        part = replace(request, collective="shard_reduce", shards=shards)
        inside = self.across.shards.plan(replace(part, nranks=self.topology.nranks))
        paces = {order: self._pace(order, request, forced) for order in ORDERS}
        chunk, depth, _ = paces[request.order]
        chunk = min(chunk, max(1, request.count), self.across.longest_chunk(request, depth))
        return replace(
            inside,
            request=request,
            config=Config("hierarchical", inside.config.access, chunk, depth=depth),
            order=IN_RANK_ORDER if request.order == "rank" else "of the nodes' own sums",
            bytes_within=bytes_within(request, self.nodes.sizes, chunk),
            bytes_between=bytes_between(request, self.nodes.sizes, chunk),
            transport=f"{self.across.engine} between {len(self.nodes.names)} nodes "
            f"({self._rates}), {inside.transport} inside",
            costs={
                "hierarchical" if order == request.order else f"order={order}": found.cost_us
                for order, found in paces.items()
            },
        )

    def _moved(self, request: Request) -> Plan:
        """The plan of what the engine carries alone; inside a node ranks only meet."""
        meeting = replace(request, collective="barrier", count=0, nranks=self.topology.nranks)
        engine = self.across.engine
        return replace(
            self.across.shards.plan(meeting),
            request=request,
            config=Config(engine.lower(), "engine", max(1, request.count)),
            order="of no sum",
            bytes_within=0,
            bytes_between=request.nbytes,
            transport=f"{engine} between all ranks of {len(self.nodes.names)} nodes",
            costs={},
        )

    def _pace(self, order: str, request: Request, forced: Forced) -> Pace:
        wide = DTYPES[request.dtype.accumulator].itemsize
        asked, itemsize = forced.chunk_bytes, request.dtype.itemsize
        return pace(order, request.nbytes, itemsize, wide, self.ways, chunk_bytes=asked)

    def _plan(self, request: Request, forced: Forced) -> Plan:
        kept = self._kept.get((request, forced))
        if kept is None:
            if len(self._kept) >= KEPT_PLANS:
                self._kept.clear()
            kept = self._kept[request, forced] = self.decide(request, forced)
        return kept

    def run(self, collective: str, bounds: Sequence[Bound], options: Options) -> None:
        """See Calls.

        Raises:
            NotSupported: an option is not offered between nodes.
        """
        self._check(options.forced)
        (bound,) = bounds
        asked = self.request(collective, bounds, options)
        detail = digest((bound.layout, *options.parts, options.forced.chunk_bytes or 0))
        if collective in MOVES:
            plan = self._plan(asked, options.forced)
            self._set_timeout(options)
            self.across.move(bound, plan, detail=detail)
        else:
            self._reduce(asked, bound, options, detail)
        if bound.finish is not None:
            bound.finish()

    def _reduce(self, asked: Request, bound: Bound, options: Options, detail: int) -> None:
        """Makes an all-reduce of a call, and keeps what this rank is to have of it."""
        reduction(asked.dtype, asked.op)
        kind = self.device.arrays
        if asked.collective == "barrier":
            bound = kind.bind(kind.empty((1,), np.dtype(np.uint8), 0), None, 0)
        whole = whole_of(asked, bound, kind, self.ranks[0])
        request = replace(
            asked,
            collective="allreduce",
            count=whole.bound.count,
            root=0,
            in_place=whole.bound.in_place,
        )
        plan = self._plan(request, options.forced)
        self.across.check_pair(plan)
        self._set_timeout(options)
        source, target = whole.bound.input, whole.bound.output
        self.across.allreduce(source, target, plan, detail=detail, asked=asked)
        if whole.kept is not None:
            kind.copy_bytes(whole.kept, 0)

    def _set_timeout(self, options: Options) -> None:
        self.across.set_timeout(self.timeout if options.timeout is None else options.timeout)

    def settle(self) -> None:
        """See Calls."""
        self.across.settle()

    def abort_engine(self) -> None:
        """See Calls."""
        self.across.abort()

    def end(self) -> None:
        """See Calls."""
        self.across.close()
        super().end()

    def _check(self, forced: Forced) -> None:
        if forced.algorithm not in (None, "hierarchical") or forced.access is not None:
            raise NotSupported(
                "between nodes there is algorithm='hierarchical' only, with staged access inside "
                "a node"
            )
        if forced.nchannels is not None:
            raise NotSupported("nchannels cannot be set between nodes: leave it out")


def _connect_hosts(
    nodes: Nodes, shards: NodeShards, device: Device, timeout: float | None
) -> HostAcross:
    """Connects host ranks by MPI."""
    everyone = nodes.everyone

    def exchange(payload: dict[str, Any]) -> list[dict[str, Any]]:
        return [part.payload for part in everyone.exchange("connecting MPI", payload)]

    names = [nodes.names[node] for node in nodes.node_of]
    mpi = Mpi.meet(exchange, rank=everyone.rank, nranks=everyone.nranks, nodes=names)
    return HostAcross(nodes, shards, mpi)


def _connect_gpus(
    nodes: Nodes, shards: NodeShards, device: Device, timeout: float | None
) -> CudaAcross:
    """Connects CUDA ranks by NCCL. Imported when asked for, as placement.py does."""
    from gpuallreduce.across.cuda import CudaAcross
    from gpuallreduce.devices.cuda import CudaDevice

    assert isinstance(device, CudaDevice)
    return CudaAcross(nodes, shards, device, timeout=timeout or NO_LIMIT_S)
