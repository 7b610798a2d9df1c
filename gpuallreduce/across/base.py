"""What the ranks of a job on several nodes have in common, whatever they run on.

Knows nothing of engines, nor of how a call is made.
"""

from __future__ import annotations

from gpuallreduce.across.chunks import lag_of, turns_of
from gpuallreduce.across.in_step import GRACE_S, InStep
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.args import GarHeader
from gpuallreduce.arrays import Bound
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
        self.shards.timeout = inside

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

    @property
    def neighbours_suffice(self) -> bool:
        """Whether all ranks make one call if this rank's node does, and its neighbours."""
        return self.nnodes == 2 and max(self.nodes.sizes) == self.nshards

    def allreduce(
        self,
        source: int,
        target: int,
        plan: Plan,
        *,
        detail: int = 0,
        asked: Request | None = None,
    ) -> None:
        """All-reduces an array of this rank.

        Args:
            source, target: addresses of the request's ``count`` elements.
            plan: what is to run, on all ranks of the job, and how the array is cut.
            detail: a number for what of the call is not in the request; equal on all ranks.
            asked: what the call is of which this is a part; ranks compare that.

        Raises:
            MismatchError, Timeout, Aborted, DeviceError: the ranks are out of step for good. On
                asynchronous devices later: see ``Orchestrator.diagnose``.
        """
        raise NotImplementedError

    def move(self, bound: Bound, plan: Plan, *, detail: int = 0) -> None:
        """Broadcasts or gathers arrays of all ranks: the engine alone carries them.

        NOTE all before data. A rank compares its call with those of its node and of its neighbours.
        Where that does not tell that all ranks agree, they first meet in the engine: nobody gets
        there whose call differs from a neighbour's, so no data are moved by calls that differ.

        Args:
            bound: this rank's array.
            plan: what was asked, of all ranks of the job.
            detail: as for ``allreduce``.

        Raises as ``allreduce``, and
            NotSupported: CUDA: the first such call is captured into a graph; nothing was sent.
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
    chosen = ["count", "dtype", "op", "order", "chunk_count", "arrangement"]
    if fields["collective"] in ("reduce", "broadcast"):
        chosen.insert(0, "root")
    text = ", ".join(f"{name}={fields[name]}" for name in chosen)
    return f"call {fields['sequence']}: {fields['collective']}({text})"
