"""The ranks of one job, connected in a star round rank 0: stages that all pass, or all raise.

Knows nothing of what is exchanged, nor of devices and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuallreduce.bootstrap.assembly import assemble
from gpuallreduce.bootstrap.census import Census
from gpuallreduce.bootstrap.environment import Identity
from gpuallreduce.bootstrap.peers import Failure, Labels, Peer
from gpuallreduce.bootstrap.stage import Part, ask, lost_of, prepare, serve
from gpuallreduce.bootstrap.wire import ConnectionLost, Deadline, Malformed
from gpuallreduce.errors import Aborted, Closed

__all__ = ["Part", "Rendezvous"]


class Rendezvous:
    """A connection between all ranks, open for the life of a communicator. Made by ``join``.

    No thread serves it: rank 0 serves inside its own ``exchange``, which is enough because that is
    a collective call. One thread of a rank uses it at a time; ranks may be threads of one process.
    A child made by fork without exec keeps the sockets open: then a death shows when it ends too.
    """

    def __init__(
        self,
        identity: Identity,
        peers: dict[int, Peer],
        *,
        timeout: float,
        census: Census | None = None,
        labels: Labels | None = None,
    ) -> None:
        """Internal: use ``join``.

        Attributes:
            census: which node each rank is on, if they are on several; descriptors cannot be
                passed then.
        """
        self.census = census
        nodes = {r: census.names[n] for r, n in enumerate(census.node_of)} if census else {}
        self._labels = labels or Labels(nodes=nodes)
        self.rank = identity.rank
        self.nranks = identity.nranks
        self.timeout = timeout
        self._peers = peers
        self._closed = False
        self._broken: str | None = None
        self._lost: list[int] | None = None

    @classmethod
    def join(
        cls,
        identity: Identity,
        *,
        timeout: float,
        version: str | None = None,
        across: bool = False,
        labels: Labels | None = None,
    ) -> Rendezvous:
        """Meets all other ranks; they may come in any order, rank 0 too.

        Args:
            identity: who this process is, from ``identify``.
            timeout: seconds until all must be there; the default of later stages. The shortest
                of all ranks' holds.
            version: of gpuallreduce, compared between ranks; that of the installed package.
            across: let ranks be on several nodes; the same on all ranks. If they are on one,
                nothing differs.
            labels: what messages call the ranks; by default their numbers, and their nodes where
                there are several.

        Raises:
            MismatchError: two processes claim one rank, or nranks, version or secret differ.
            Timeout: ranks are missing; names them.
            NotSupported: the ranks are not on one machine, without ``across``.
            InvalidArgument: with it, ranks of different machines say they are on one node.
            DeviceError: a rank came and ended, or rank 0 cannot listen at the address.
        """
        deadline = Deadline.after(timeout)
        met = assemble(identity, deadline=deadline, version=version, across=across)
        return cls(identity, met.peers, timeout=timeout, census=met.census, labels=labels)

    def exchange(
        self,
        stage: str,
        payload: dict[str, Any] | None = None,
        *,
        fds: Sequence[int] = (),
        error: BaseException | None = None,
        timeout: float | None = None,
    ) -> list[Part]:
        """Gives every rank what every rank brought to this stage; all ranks call it alike.

        It is also how ranks agree that a step of start-up worked: who failed passes ``error`` and
        all raise. After that the rendezvous can still be used (all ranks are in step); after any
        other failure it cannot. A rank that dies once its part has arrived can go unseen until
        the next stage.

        Args:
            stage: the name of the stage, the same on every rank.
            payload: what JSON can hold.
            fds: descriptors to copy to every rank; they stay the caller's.
            error: this rank failed to do what the stage is about.
            timeout: seconds until all must have come; the shortest of all ranks' holds.

        Returns:
            The parts in rank order. The caller closes their descriptors.

        Raises:
            DeviceError: a rank passed ``error`` or was lost; names it, the stage and its message.
            MismatchError: the ranks called different stages.
            Timeout: ranks did not come; names them.
            Aborted: an earlier stage broke the rendezvous.
            Closed: ``close`` was called.
        """
        if self._closed:
            raise Closed(f"stage {stage!r} was asked of a rendezvous that is closed")
        if self._broken is not None:
            raise Aborted(f"stage {stage!r} cannot run, an earlier one failed: {self._broken}")
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        request = prepare(
            stage,
            payload,
            fds,
            error,
            deadline,
            labels=self._labels,
            descriptors=self.census is None,
        )
        try:
            if self.rank == 0:
                result = serve(self._peers, request)
            else:
                result = ask(self._peers[0], self.nranks, request)
        except (ConnectionLost, Malformed) as lost:
            text = f"{self._labels.rank(0)} failed in stage {stage!r}: {lost}"
            result = Failure("DeviceError", text, lost=(0,))
        except BaseException as interruption:  # how far it came is unknown: let the others see it
            self._break(f"{type(interruption).__name__}: {interruption}", lost_of(self._peers))
            raise
        if isinstance(result, Failure):
            if result.final:
                self._break(result.text, result.lost)
            raise result.error() from request.error
        return result

    def lost(self) -> list[int]:
        """Which peers have closed their sockets, without waiting: rank 0 sees all, others rank 0.

        After a failure that broke the rendezvous: which had at that moment.
        """
        if self._lost is not None:
            return list(self._lost)
        return list(lost_of(self._peers))

    def interrupt(self) -> None:
        """Makes a stage that another thread of this rank is in fail, and every later one."""
        for peer in list(self._peers.values()):
            peer.connection.shutdown()

    def close(self) -> None:
        """Closes all connections. Idempotent; the others see it in ``lost`` or the next stage."""
        self._closed = True
        for peer in self._peers.values():
            peer.connection.close()
        self._peers = {}

    def __enter__(self) -> Rendezvous:
        """Itself; the end of the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def _break(self, reason: str, lost: Sequence[int]) -> None:
        self._lost = list(lost)
        self._broken = reason
        for peer in self._peers.values():
            peer.connection.close()
