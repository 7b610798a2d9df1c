"""One node's part in a call of several nodes: its ranks fold an array by shards, and hand finished
shards to all of them.

Knows nothing of other nodes, nor of how shards travel between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuallreduce import tuner
from gpuallreduce.devices.base import LaunchArgs
from gpuallreduce.orchestrator import Addresses, Orchestrator
from gpuallreduce.placement import Placement
from gpuallreduce.plan import Plan, Request, Shards
from gpuallreduce.tuner import Forced
from gpuallreduce.types import OPS, Dtype, Op

__all__ = ["NodeShards"]

KEPT_PLANS = 4096
NOT_FORCED = Forced(algorithm="one_shot")


class NodeShards:
    """The ranks of one node, of which the first own a shard each: rank s shard s.

    All ranks of the node make the same calls in the same order. On asynchronous devices a call is
    ordered as any other: between the device's ``begin`` and ``end``. Addresses are one for each
    local rank; see plan.shard_range for what a shard is.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        timeout: float | None,
        orchestrator: Orchestrator | None = None,
    ) -> None:
        """For the ranks of a placement.

        Args:
            placement: of this node's ranks.
            timeout: seconds that one wait may last; None: no limit.
            orchestrator: runs other calls of these ranks too, and is ended by its owner; None:
                makes one, a collective.
        """
        self.transport = placement.transport
        self.topology = placement.topology
        self.timeout = timeout
        self._owned = orchestrator is None
        self.orchestrator = orchestrator or Orchestrator(
            placement.transport, placement.device, placement.topology
        )
        self._plans: dict[Any, tuple[Plan, tuple[LaunchArgs, ...]]] = {}

    def reduce(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        dtype: Dtype,
        op: Op,
        count: int,
        shards: Shards,
        seeds: Sequence[int] | None = None,
        forced: Forced = NOT_FORCED,
    ) -> None:
        """Folds shard s of all ranks' arrays, in rank order, into the shard buffer of rank s.

        Args:
            inputs: arrays of ``count`` elements.
            outputs: shard buffers, which overlap no array: accumulators, or elements if the shards
                are to be rounded. Ranks without a shard need none (0).
            dtype: of the elements.
            op: the operator.
            count: elements of one array.
            shards: how they are cut, and what to make of them.
            seeds: shard buffers of accumulators that come before rank 0's elements; a seed may be
                the same rank's output, unless that is rounded.
            forced: what the tuner may not decide.
        """
        assert (seeds is not None) == shards.seeded
        request = Request(
            "shard_reduce",
            dtype=dtype,
            op=op,
            count=count,
            nranks=self.topology.nranks,
            in_place=True,  # shards are read again soon
            shards=shards,
        )
        self._run(request, forced, Addresses(inputs, outputs, seeds=seeds))

    def gather(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        dtype: Dtype,
        count: int,
        shards: Shards,
        in_place: bool = True,
        forced: Forced = NOT_FORCED,
    ) -> None:
        """Puts the finished shards together to an array on every rank.

        Args:
            inputs: shard buffers of elements, rounded; 0 on ranks without a shard.
            outputs: arrays of ``count`` elements.
            dtype: of the elements.
            count: elements of one array.
            shards: how they are cut.
            in_place: whether outputs are the arrays that were reduced.
            forced: what the tuner may not decide.
        """
        request = Request(
            "shard_gather",
            dtype=dtype,
            op=OPS["sum"],
            count=count,
            nranks=self.topology.nranks,
            in_place=in_place,
            shards=Shards(shards.count, fold_ranks=shards.fold_ranks),
        )
        self._run(request, forced, Addresses(inputs, outputs))

    def plan(self, request: Request, forced: Forced = NOT_FORCED) -> Plan:
        """What a call does.

        Raises:
            InvalidArgument, NotSupported: it cannot be made so.
        """
        return tuner.decide(request, self.topology, forced, transport=self.transport.name)

    def forget(self) -> None:
        """Drops kept plans: something that they depend on has changed."""
        self._plans.clear()

    def end(self) -> None:
        """Leaves the ranks, if the orchestrator is its own; no call may be running."""
        self.forget()
        if self._owned:
            self.orchestrator.depart()
            self.transport.close(self.orchestrator.departed)

    def _run(self, request: Request, forced: Forced, addresses: Addresses) -> None:
        key = request, forced, self.timeout
        kept = self._plans.get(key)
        if kept is None:
            if len(self._plans) >= KEPT_PLANS:
                self.forget()
            plan = self.plan(request, forced)
            args = tuple(
                self.orchestrator.arguments(plan, rank, timeout_s=self.timeout)
                for rank in self.transport.ranks
            )
            kept = self._plans[key] = (plan, args)
        self.orchestrator.run(*kept, addresses)
