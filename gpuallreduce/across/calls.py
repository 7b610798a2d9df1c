"""The calls of a rank whose job has several nodes: all-reduce and what can be made of it.

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

KEPT_PLANS = 4096
NO_LIMIT_S = 1e9


class CallsAcross(Calls):
    """As Calls, for ranks on several nodes. Host devices; MPI carries data between nodes."""

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
        return replace(request, nranks=len(self.nodes.node_of), direct=False)

    def decide(self, request: Request, forced: Forced) -> Plan:
        """See Calls."""
        self._check(request.collective, forced)
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
            NotSupported: the collective is not offered between nodes.
        """
        self._check(collective, options.forced)
        (bound,) = bounds
        if collective == "barrier":
            kind = self.device.arrays
            byte = kind.empty((1,), np.dtype(np.uint8), 0)
            (bound,) = bounds = [kind.bind(byte, None, 0)]
        request = replace(self.request("allreduce", bounds, options), in_place=bound.in_place)
        reduction(request.dtype, request.op)
        plan = self._plan(request, options.forced)
        self.across.set_timeout(self.timeout if options.timeout is None else options.timeout)
        detail = digest((bound.layout, *options.parts, options.forced.chunk_bytes or 0))
        self.across.check_pair(plan)
        self.across.allreduce(bound.input, bound.output, plan, detail=detail)
        if bound.finish is not None:
            bound.finish()

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

    def _check(self, collective: str, forced: Forced) -> None:
        if collective not in ("allreduce", "barrier"):
            raise NotSupported(
                f"{collective} between nodes is not offered yet; there are allreduce, "
                "allreduce_many and barrier"
            )
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
