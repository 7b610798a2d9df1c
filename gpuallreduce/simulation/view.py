"""Which ranks of a machine are simulated: all of them, or one of every kind that behaves alike.

Knows nothing of what ranks do.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuallreduce.simulation.engine import Schedule, Visit
from gpuallreduce.simulation.machine import Link, Machine

__all__ = ["SYMMETRIES", "View"]

SYMMETRIES = {
    "none": "every rank is simulated",
    "nodes": "one node stands for all",
    "local": "one rank of each node stands for its node",
    "ranks": "one rank stands for all",
}


class View:
    """A machine as a schedule sees it.

    NOTE symmetry. Where a shift of ranks (of nodes, or within nodes) maps a schedule onto itself, all
    ranks of an orbit do the same at the same time, so one of them, the actor, is enough: what it
    waits for from another rank of the orbit is what it does itself, and each link carries for all
    of the orbit that pass it what it carries for the actor times their number.

    Args:
        machine: the machine.
        symmetry: a key of SYMMETRIES.
        rotated: rings leave each node by another GPU: lane k by GPU k. Then equal ranks under
            ``ranks`` are those that stand alike in their ring.
    """

    def __init__(self, machine: Machine, symmetry: str, *, rotated: bool = False) -> None:
        self.machine, self.symmetry, self.rotated = machine, symmetry, rotated
        self.schedule = Schedule()
        self._links: dict[Link, int] = {}
        self._routes: dict[tuple[int, int], list[tuple[int, float]]] = {}
        g = machine.gpus
        self.actors: Sequence[int] = {
            "none": range(machine.nranks),
            "nodes": range(g),
            "local": range(0, machine.nranks, g),
            "ranks": range(1),
        }[symmetry]

    @property
    def whole(self) -> bool:
        """Whether every rank is simulated."""
        return self.symmetry == "none"

    def seat(self, rank: int, lane: int = 0) -> tuple[int, int]:
        """The actor and its lane that stand for a rank and its lane."""
        node, local = divmod(rank, self.machine.gpus)
        if self.symmetry == "ranks":
            return (0, (lane - local) % self.machine.gpus) if self.rotated else (0, lane)
        if self.symmetry == "nodes":
            return local, lane
        return (node * self.machine.gpus if self.symmetry == "local" else rank), lane

    def _link(self, link: Link) -> tuple[int, float]:
        """Its number, and how much of it one actor's byte takes."""
        weight = 1.0
        if self.symmetry == "nodes":
            link = link._replace(node=0)
        elif self.symmetry in ("local", "ranks"):
            weight = self.machine.gpus / self.machine.count(link.kind)
            link = link._replace(index=0, node=link.node if self.symmetry == "local" else 0)
        if link not in self._links:
            machine, kind = self.machine, link.kind
            self._links[link] = self.schedule.link(
                link, machine.rate(kind), machine.latency_us(kind)
            )
        return self._links[link], weight

    def memory(self, rank: int, nbytes: float) -> Visit:
        """A rank's memory reads and writes so much."""
        number, weight = self._link(self.machine.memory(rank))
        return number, nbytes * weight

    def way(self, source: int, target: int, nbytes: float) -> list[Visit]:
        """Bytes go from one rank to another."""
        found = self._routes.get((source, target))
        if found is None:
            found = [self._link(link) for link in self.machine.route(source, target)]
            self._routes[source, target] = found
        return [(number, nbytes * weight) for number, weight in found]

    def peers(self, actor: int, *, local: bool) -> list[tuple[int, int]]:
        """Those whom an actor addresses: (a rank, how many like it), nearest first where they are
        merged.

        Args:
            actor: the actor.
            local: of its own node only.
        """
        machine = self.machine
        g, p = machine.gpus, machine.gpus if local else machine.nranks
        first = actor // g * g if local else 0
        others = [first + (actor - first + j) % p for j in range(1, p)]
        if self.whole:
            return [(rank, 1) for rank in others]
        kinds: dict[tuple[str, ...], list[int]] = {}
        for rank in others:
            kinds.setdefault(tuple(x.kind for x in machine.route(actor, rank)), []).append(rank)
        return [(ranks[0], len(ranks)) for ranks in kinds.values()]
