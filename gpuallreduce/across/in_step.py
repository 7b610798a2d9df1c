"""Keeps the ranks of several nodes in step: those of a node meet before a call, and all learn why a
rank gave up.

Knows nothing of what a call moves.
"""

from __future__ import annotations

import time
from dataclasses import replace

from gpuallreduce.across.shards import NOT_FORCED, NodeShards
from gpuallreduce.args import GarHeader
from gpuallreduce.bootstrap.news import News
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.bootstrap.peers import Labels
from gpuallreduce.devices.base import LaunchArgs
from gpuallreduce.errors import Aborted, DeviceError, Error, MismatchError, Timeout
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

    NOTE overtaking. News come faster than data: a rank may hear why another one failed in the next
    call, or that it left, while results that it sent before are still on the way. So both carry
    the number of the first call that can no longer succeed. Calls before it go on for GRACE_S, in
    case that the one who told has a failure of theirs hidden from this rank.
    """

    def __init__(self, nodes: Nodes, shards: NodeShards, news: News) -> None:
        """For this rank.

        Args:
            nodes: where the ranks of the job are.
            shards: of this node's ranks.
            news: of all ranks of the job; closed by ``leave``.
        """
        self._shards, self._news = shards, news
        self._orchestrator: Orchestrator = shards.orchestrator
        self.labels = Labels(nodes={r: nodes.names[n] for r, n in enumerate(nodes.node_of)})
        here = nodes.ranks_of(nodes.this)
        self._rank = nodes.everyone.rank
        self._orchestrator.labels = Labels(
            here[0], dict.fromkeys(range(len(here)), nodes.names[nodes.this])
        )
        self._orchestrator.reason = self.reason
        self._meetings: dict[tuple[Request, float | None], tuple[Plan, LaunchArgs]] = {}
        self._told: Error | None = None
        self._over = self.hurried = False
        self._told_of, self._told_at = 0, 0.0
        self._gone_since: float | None = None
        self._calls = 0
        self._calling = False

    def meet(self, request: Request, detail: int, timeout: float | None) -> None:
        """Waits for the other ranks of this node, and compares the calls.

        Args:
            request: of all ranks of the job.
            detail: what else must be equal, as a number.
            timeout: seconds.
        """
        self._calls += 1
        self._calling = True
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

    def ended(self) -> None:
        """To be called when all calls so far have succeeded. See NOTE overtaking."""
        self._calling = False

    def listen(self) -> None:
        """Hears what others told, and then ends what this rank's kernels wait for. Never waits."""
        if self._ending() is not None and not self._orchestrator.aborted:
            self._orchestrator.abort()

    def _hear(self) -> Error | None:
        heard = self._news.heard() if self._told is None else None
        if heard is not None:
            rank, (number, kind, text) = heard[0], heard[1].split("\n", 2)
            told = f"{self.labels.rank(rank)} reports: {text}"
            self._told_of, self._told_at = int(number), time.monotonic()
            self._told = _KINDS.get(kind, Aborted)(told)
        return self._told

    def _ending(self) -> Error | None:
        """What was told, if this call is to end for it. See NOTE overtaking."""
        told = self._hear()
        if self._told_of > self._calls and time.monotonic() < self._told_at + GRACE_S:
            return None
        return told

    def starts_to_wait(self) -> None:
        """To be called before a wait that is to look."""
        self._gone_since = None

    def look(self) -> None:
        """Raises if what is waited for can no longer come."""
        if self._orchestrator.aborted:
            raise self._orchestrator.diagnose()
        told = self._ending()
        if told is not None:
            raise told
        gone = self._gone()
        if gone is None:
            return
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if now - self._gone_since >= GRACE_S:
            waited = f"while {self.labels.rank(self._rank)} waited for another node"
            raise Aborted(f"{gone} {waited}")

    def _gone(self) -> str | None:
        """Who will not do its part in this call. See NOTE overtaking."""
        lost = self._news.lost()
        if lost:
            end = "its process has ended, or the connection to it was lost"
            return f"{self.labels.names(lost)} is gone ({end})"
        left = [rank for rank, calls in self._news.left().items() if calls < self._calls]
        return f"{self.labels.names(left)} has closed its communicator" if left else None

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
        """Tells all ranks why this one ends, unless one of them told before. From any thread."""
        if self._over:
            return
        self._over = True
        if self._told is not None:
            return
        name = type(error).__name__
        text = str(error) if isinstance(error, Error) else f"it was interrupted by {error!r}"
        number = self._calls if self._calling else self._calls + 1
        self._news.tell(f"{number}\n{name}\n{text}")

    def leave(self) -> None:
        """Tells all ranks that this one makes no more calls; it is not lost when it ends."""
        self._news.close(self._calls)
