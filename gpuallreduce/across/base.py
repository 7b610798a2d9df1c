"""What the ranks of a job on several nodes have in common, whatever they run on.

Knows nothing of engines, nor of how a call is made.
"""

from __future__ import annotations

from gpuallreduce.across.chunks import lag_of, turns_of
from gpuallreduce.across.in_step import GRACE_S, InStep
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.args import GarHeader
from gpuallreduce.bootstrap.nodes import Nodes
from gpuallreduce.plan import Plan, Request, decode_header
from gpuallreduce.tracing import Trace

__all__ = ["Across"]

HIERARCHICAL = 15  # in headers of calls between nodes; no algorithm inside a node has this number


class Across:
    """The nodes of a communicator, as one rank sees them.

    Attributes:
        nodes: where the ranks of the job are.
        shards: of this node's ranks.
        timeout: seconds that one wait for another node may last; None: no limit.
        nshards: shards of an array; each belongs to a rank of every node.
        nnodes: nodes of the job.
        engine: name of what carries data between nodes.
        trace: records stages, if they are to be recorded.
    """

    engine: str

    def __init__(self, nodes: Nodes, shards: NodeShards) -> None:
        self.nodes, self.shards = nodes, shards
        self.trace: Trace | None = None
        self.timeout: float | None = None
        self.nshards = min(nodes.sizes)
        self.nnodes = len(nodes.sizes)
        assert nodes.news is not None  # there are several nodes
        self._in_step = InStep(nodes, shards, nodes.news)

    @property
    def owner(self) -> bool:
        """Whether this rank owns a shard, and so talks to other nodes."""
        return self.nodes.local_rank < self.nshards

    def set_timeout(self, timeout: float | None) -> None:
        """Seconds that one wait for another node may last. Inside the node waits may last longer:
        who waits for another node is to give up first, since it can say more.
        """
        self.timeout = timeout
        inside = None if timeout is None else 2 * timeout + GRACE_S
        if inside != self.shards.timeout:
            self.shards.timeout = inside
            self.shards.forget()

    def lag(self, plan: Plan) -> int:
        """Chunks that this node folds before it needs the first result."""
        depth = plan.config.depth
        if plan.request.order == "any":
            return depth
        return lag_of(self.nodes.this, self.nnodes, turns_of(depth, self.nnodes))

    def longest_chunk(self, request: Request, depth: int) -> int:
        """Elements of the longest chunk of which so many may be under way at once."""
        return max(1, request.count)

    def header(self, plan: Plan, detail: int) -> GarHeader:
        """What must be equal on all nodes."""
        header = plan.header(HIERARCHICAL)
        header.detail = detail
        return header

    def difference(self, node: int, mine: GarHeader, theirs: GarHeader) -> str:
        """What to say where a neighbouring node makes another call."""
        return (
            "the ranks did not make the same call:\n"
            f"  {self.peer_name(self.nodes.this)}: {_text(mine)}\n"
            f"  {self.peer_name(node)}: {_text(theirs)}\n"
            "make the same calls with the same arguments in the same order on every rank"
        )

    def allreduce(self, source: int, target: int, plan: Plan, *, detail: int = 0) -> None:
        """All-reduces an array of this rank.

        Args:
            source, target: addresses of the request's ``count`` elements.
            plan: what was asked, of all ranks of the job, and how the array is cut.
            detail: a number for what of the call is not in the request; equal on all ranks.

        Raises:
            MismatchError, Timeout, Aborted, DeviceError: the ranks are out of step for good. On
                asynchronous devices later: see ``Orchestrator.diagnose``.
        """
        raise NotImplementedError

    def check_pair(self, plan: Plan) -> None:
        """Raises NotSupported if the engine lacks what the plan needs of it; on all ranks alike."""
        raise NotImplementedError

    def settle(self) -> None:
        """Learns what may have gone wrong, once all that was enqueued has ended."""

    def abort(self) -> None:
        """Lets the ranks of this node and of the others go; from any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives everything back; no call may be running."""
        raise NotImplementedError

    def peer_name(self, node: int) -> str:
        """Of this rank's peer on a node, for messages."""
        rank = self.nodes.ranks_of(node)[self.nodes.local_rank]
        return self._in_step.labels.rank(rank)


def _text(header: GarHeader) -> str:
    fields = decode_header(header, ())
    chosen = ("count", "dtype", "op", "order", "chunk_count", "arrangement")
    text = ", ".join(f"{name}={fields[name]}" for name in chosen)
    return f"call {fields['sequence']}: {fields['collective']}({text})"
