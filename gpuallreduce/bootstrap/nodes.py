"""A job on several nodes: all ranks meet over TCP, those of one node also over a Unix socket.

Knows nothing of devices, memory or collectives, nor of what the two rendezvous are used for.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

from gpuallreduce.bootstrap.census import Census
from gpuallreduce.bootstrap.environment import Identity
from gpuallreduce.bootstrap.news import News
from gpuallreduce.bootstrap.peers import GRACE_SECONDS, Labels
from gpuallreduce.bootstrap.rendezvous import Rendezvous
from gpuallreduce.bootstrap.wire import Deadline
from gpuallreduce.errors import Error, InvalidArgument

__all__ = ["Nodes", "meet"]


class Nodes:
    """Where the ranks of a job are, and the ways between them. Made by ``meet``.

    Attributes:
        everyone: all ranks. With several nodes it passes payloads and no descriptors: a stage with
            descriptors fails on every rank.
        node: the ranks of this node, numbered 0 to k - 1 in rank order, with descriptors. Messages
            call them by their ranks in the job. With one node, ``everyone`` itself.
        names: of the nodes, by their numbers: in the order of their first ranks.
        node_of: number of the node, by rank.
        this: the number of this rank's node.
        local_rank: this rank's number among those of its node.
        sizes: number of ranks, by node.
        news: of all ranks, where there are several nodes.
    """

    def __init__(
        self,
        everyone: Rendezvous,
        node: Rendezvous,
        census: Census,
        news: News | None = None,
    ) -> None:
        """Internal: use ``meet``."""
        self.everyone = everyone
        self.node = node
        self.news = news
        self.names = census.names
        self.node_of = census.node_of
        self.this = census.node_of[everyone.rank]
        self.sizes = tuple(len(census.ranks_of(number)) for number in range(len(census.names)))
        self.local_rank = everyone.rank - sum(self.sizes[: self.this])

    def ranks_of(self, node: int) -> range:
        """The ranks of a node; they follow each other."""
        first = sum(self.sizes[:node])
        return range(first, first + self.sizes[node])

    def close(self) -> None:
        """Closes both rendezvous, and says goodbye in the news. Idempotent."""
        if self.news is not None:
            self.news.close()
        self.node.close()
        self.everyone.close()

    def __enter__(self) -> Nodes:
        """Itself; the end of the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()


def meet(identity: Identity, *, timeout: float, version: str | None = None) -> Nodes:
    """Meets all other ranks, wherever they are. A collective, as ``Rendezvous.join``.

    Ranks are on one node if they can share memory (same boot, name and network namespace), or by
    ``GPUALLREDUCE_NODE``. If all are, this is ``Rendezvous.join`` and takes no step more.

    Args:
        identity: who this process is, from ``identify(across=True)``.
        timeout: seconds until all must be there; the default of later stages.
        version: of gpuallreduce, compared between ranks; that of the installed package.

    Raises:
        InvalidArgument: the ranks of a node do not follow each other; says which are where. Or
            ranks on different machines claim one node. On every rank.
        MismatchError, Timeout, DeviceError: as ``Rendezvous.join``; name ranks, and their nodes
            where they are known.
    """
    deadline = Deadline.after(timeout)
    everyone = Rendezvous.join(identity, timeout=timeout, version=version, across=True)
    census = everyone.census
    if census is None:
        name = identity.node or socket.gethostname()
        return Nodes(everyone, everyone, Census((name,), (0,) * identity.nranks))
    with contextlib.ExitStack() as stack:
        stack.callback(everyone.close)
        # All ranks have the same census, so all raise alike.
        disorder = census.disorder()
        if disorder is not None:
            raise InvalidArgument(disorder)
        node, failure = _meet_on_node(identity, census, deadline, timeout, version)
        if node is not None:
            stack.callback(node.close)
        # A node that fails is everybody's failure. Those who failed at the deadline still come.
        rest = deadline.remaining + 2 * GRACE_SECONDS
        everyone.exchange("meeting on each node", error=failure, timeout=rest)
        assert node is not None
        rest = deadline.remaining + 2 * GRACE_SECONDS
        news = News.join(identity, census, timeout=rest, version=version)
        stack.pop_all()
        return Nodes(everyone, node, census, news)


def _meet_on_node(
    identity: Identity, census: Census, deadline: Deadline, timeout: float, version: str | None
) -> tuple[Rendezvous | None, Error | None]:
    """The rendezvous of this node's ranks, or why there is none."""
    number = census.node_of[identity.rank]
    ranks = census.ranks_of(number)
    local_rank = identity.rank - ranks[0]
    here = replace(
        identity,
        rank=local_rank,
        nranks=len(ranks),
        local_rank=local_rank,
        local_nranks=len(ranks),
        # Random, and another one for each node: they may be on one machine.
        address=f"unix:gpuallreduce-{census.token}-{number}",
        interface=None,
    )
    labels = Labels(first=ranks[0])
    try:
        node = Rendezvous.join(here, timeout=deadline.remaining, version=version, labels=labels)
    except Error as error:
        return None, type(error)(
            f"on node {census.names[number]}, whose rank 0 is rank {ranks[0]} of the job: {error}"
        )
    node.timeout = timeout
    return node, None
