"""The calls of a rank whose job has several nodes: all-reduce and what can be made of it.

Knows nothing of how chunks travel; arguments were checked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpuallreduce.across.chunks import chunk_count, depth_of
from gpuallreduce.across.host import HostAcross
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.arrays import Bound
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.calls import Calls, Options, digest
from gpuallreduce.errors import NotSupported
from gpuallreduce.fabric.mpi import Mpi
from gpuallreduce.placement import Placement
from gpuallreduce.plan import Config, Plan, Request, Shards
from gpuallreduce.tuner import IN_RANK_ORDER, Forced
from gpuallreduce.types import DTYPES, reduction

__all__ = ["CallsAcross"]

KEPT_PLANS = 4096


class CallsAcross(Calls):
    """As Calls, for ranks on several nodes. Host devices; MPI carries data between nodes."""

    has_short_way = False

    def __init__(self, nodes: Nodes, placement: Placement, *, timeout: float | None) -> None:
        """Connects the nodes; a collective of all ranks.

        Args:
            nodes: where the ranks of the job are.
            placement: of this node's ranks.
            timeout: seconds that one wait may last; None: no limit.

        Raises:
            NotSupported: MPI cannot be used; all ranks raise.
        """
        super().__init__(placement, timeout=timeout)
        self.nodes = nodes
        self._kept: dict[tuple[Request, Forced], Plan] = {}
        everyone = nodes.everyone
        self.nranks, self.ranks = everyone.nranks, (everyone.rank,)

        def exchange(payload: dict[str, Any]) -> list[dict[str, Any]]:
            return [part.payload for part in everyone.exchange("connecting MPI", payload)]

        names = [nodes.names[node] for node in nodes.node_of]
        mpi = Mpi.meet(exchange, rank=everyone.rank, nranks=everyone.nranks, nodes=names)
        shards = NodeShards(placement, timeout=None, orchestrator=self.orchestrator)
        self.across = HostAcross(nodes, shards, mpi)

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
        itemsize = request.dtype.itemsize
        chunk = min(chunk_count(itemsize, nshards), max(1, request.count))
        depth = depth_of(request.order, self.across.nnodes)
        return replace(
            inside,
            request=request,
            config=Config("hierarchical", inside.config.access, chunk, depth=depth),
            order=IN_RANK_ORDER if request.order == "rank" else "of the nodes' own sums",
            bytes_sent=self._bytes_between(request),
            transport=f"MPI between {len(self.nodes.names)} nodes, {inside.transport} inside",
            costs={},
        )

    def _plan(self, request: Request, forced: Forced) -> Plan:
        kept = self._kept.get((request, forced))
        if kept is None:
            if len(self._kept) >= KEPT_PLANS:
                self._kept.clear()
            kept = self._kept[request, forced] = self.decide(request, forced)
        return kept

    def _bytes_between(self, request: Request) -> int:
        """Bytes that a rank sends to other nodes: partials there and results back, of its shard."""
        nodes, shard = len(self.nodes.names), -(-request.nbytes // self.across.nshards)
        if request.order == "any":
            return 2 * shard * (nodes - 1) // nodes
        wide = DTYPES[request.dtype.accumulator].itemsize // request.dtype.itemsize
        return shard * (1 + wide)

    def run(self, collective: str, bounds: Sequence[Bound], options: Options) -> None:
        """See Calls.

        Raises:
            NotSupported: the collective is not offered between nodes.
        """
        self._check(collective, options.forced)
        (bound,) = bounds
        if collective == "barrier":
            byte = np.zeros(1, np.uint8)
            (bound,) = bounds = [self.device.arrays.bind(byte, None)]
        request = replace(self.request("allreduce", bounds, options), in_place=bound.in_place)
        reduction(request.dtype, request.op)
        plan = self._plan(request, options.forced)
        self.across.set_timeout(self.timeout if options.timeout is None else options.timeout)
        detail = digest((bound.layout, *options.parts))
        header = (
            f"allreduce(count={request.count}, dtype={request.dtype.name}, op={request.op.name}, "
            f"order={request.order}, arrangement={detail:#x})"
        )
        self.across.allreduce(bound.input, bound.output, plan, header, detail=detail)
        if bound.finish is not None:
            bound.finish()

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
        if forced.chunk_bytes is not None or forced.nchannels is not None:
            raise NotSupported("chunk_bytes and nchannels cannot be set between nodes yet")
