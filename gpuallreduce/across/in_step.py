"""Keeps the ranks of several nodes in step: those of a node meet before a call, and all learn why a
rank gave up.

Knows nothing of what a call moves.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from gpuallreduce.across.shards import NOT_FORCED, NodeShards
from gpuallreduce.args import GarHeader
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.bootstrap.peers import Labels
from gpuallreduce.devices.base import LaunchArgs
from gpuallreduce.errors import Aborted, DeviceError, Error, MismatchError, Timeout
from gpuallreduce.fabric.mpi_words import Words
from gpuallreduce.orchestrator import ALGORITHM_CODES, Addresses, Orchestrator
from gpuallreduce.plan import Plan, Request
from gpuallreduce.types import DTYPES, OPS

__all__ = ["GRACE_S", "InStep"]

GRACE_S = 1.0  # a rank that closes after the last call is no failure of it
NEWS_S = 0.5  # a reason is on the way when its effect shows: how long it is waited for
KEPT_MEETINGS = 4096
_KINDS = {kind.__name__: kind for kind in (MismatchError, Timeout, Aborted, DeviceError)}


class InStep:
    """One rank's part in it.

    Attributes:
        hurried: whether reasons are not waited for any more.

    NOTE who gives up first. A rank that does not come is named by those who share its node, at the
    limit: there they only wait for each other. Other nodes wait GRACE_S longer for that node, so
    its reason reaches them first. Later in a call it is the other way round: whoever waits for
    another node gives up at the limit, and its node's ranks wait for it inside longer.
    """

    def __init__(self, nodes: Nodes, shards: NodeShards, words: Words) -> None:
        """For this rank.

        Args:
            nodes: where the ranks of the job are.
            shards: of this node's ranks.
            words: to all ranks of the job.
        """
        self._nodes, self._shards, self._words = nodes, shards, words
        self._orchestrator: Orchestrator = shards.orchestrator
        self.labels = Labels(nodes={r: nodes.names[n] for r, n in enumerate(nodes.node_of)})
        here = nodes.ranks_of(nodes.this)
        self._rank = nodes.everyone.rank
        self._near = [rank for rank in here if rank != self._rank]
        if nodes.local_rank < min(nodes.sizes):
            around = [nodes.this - 1, nodes.this + 1]
            places = [nodes.ranks_of(node) for node in around if 0 <= node < len(nodes.sizes)]
            self._near += [ranks[nodes.local_rank] for ranks in places]
        self._orchestrator.labels = Labels(
            here[0], dict.fromkeys(range(len(here)), nodes.names[nodes.this])
        )
        self._orchestrator.reason = self.reason
        self._meetings: dict[tuple[Request, float | None], tuple[Plan, LaunchArgs]] = {}
        self._told: Error | None = None
        self._over = self.hurried = False
        self._hearing = threading.Lock()
        self._lost_since: float | None = None

    def meet(self, request: Request, detail: int, timeout: float | None) -> None:
        """Waits for the other ranks of this node, and compares the calls.

        Args:
            request: of all ranks of the job.
            detail: what else must be equal, as a number.
            timeout: seconds.
        """
        kept = self._meetings.get((request, timeout))
        if kept is None:
            if len(self._meetings) >= KEPT_MEETINGS:
                self._meetings.clear()
            local = self._shards.topology.nranks
            nothing = Request("barrier", DTYPES["uint8"], OPS["max"], count=0, nranks=local)
            plan = self._shards.plan(nothing, NOT_FORCED)
            rank = self._shards.transport.ranks[0]
            args = self._orchestrator.arguments(plan, rank, timeout_s=timeout)
            args.header = self._header(plan, request)
            kept = self._meetings[request, timeout] = (plan, args)
        plan, args = kept
        args.header.detail = detail
        self._orchestrator.run(plan, [args], Addresses([0], [0]))

    def _header(self, plan: Plan, request: Request) -> GarHeader:
        """The ranks compare the call that they are about to make, not the meeting."""
        whole = replace(plan, request=request)
        return whole.header(ALGORITHM_CODES[plan.config.algorithm])

    def listen(self) -> None:
        """Hears what others told, and then ends what this rank's kernels wait for. Never waits."""
        if self._hear() is not None and not self._orchestrator.aborted:
            self._orchestrator.abort()

    def _hear(self) -> Error | None:
        with self._hearing:
            heard = self._words.heard() if self._told is None else None
            if heard is not None:
                rank, kind, text = heard.split("\n", 2)
                who = self.labels.rank(int(rank))
                self._told = _KINDS.get(kind, Aborted)(f"{who} reports: {text}")
                if not self._over:
                    self._words.tell(self._near, heard)
        return self._told

    def starts_to_wait(self) -> None:
        """To be called before a wait that is to look."""
        self._lost_since = None

    def look(self) -> None:
        """Raises if what is waited for can no longer come."""
        if self._orchestrator.aborted:
            raise self._orchestrator.diagnose()
        if self._told is not None:
            raise self._told
        lost = self._nodes.everyone.lost()
        if not lost:
            return
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if now - self._lost_since >= GRACE_S:
            raise Aborted(
                f"{self.labels.names(lost)} left the job, or failed, while "
                f"{self.labels.rank(self._rank)} waited for another node"
            )

    def reason(self, error: Error) -> Error:
        """What another rank told, if this rank only sees that it ended; else the error itself."""
        end = time.monotonic() + NEWS_S
        while isinstance(error, Aborted) and not self._over:
            told = self._hear()
            if told is not None:
                return told
            if self.hurried or time.monotonic() >= end:
                break
            time.sleep(NEWS_S / 100)
        return error

    def give_up(self, error: BaseException) -> None:
        """Tells all ranks why this one ends, unless one of them told before. From any thread.

        It tells its node and the neighbouring ones, and they hand it on.
        """
        if self._over:
            return
        self._over = True
        if self._told is not None:
            return
        name = type(error).__name__
        text = str(error) if isinstance(error, Error) else f"it was interrupted by {error!r}"
        self._words.tell(self._near, f"{self._rank}\n{name}\n{text}")
