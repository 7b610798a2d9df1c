"""Which ranks of a machine are simulated: all of them, or one of every kind that behaves alike.

Knows nothing of what ranks do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuallreduce.simulation.engine import Schedule, Visit
from gpuallreduce.simulation.machine import Link, Machine

__all__ = ["SYMMETRIES", "View"]

MOST_SHARING = 8
SYMMETRIES = {
    "none": "every rank is simulated",
    "nodes": "one node stands for all",
    "local": "one rank of each node (or those that share a link) stands for its others",
    "ranks": "one rank (or those that share a link) stands for all",
}


class View:
    """A machine as a schedule sees it.

    NOTE symmetry. Where a shift of ranks (of nodes, or within nodes) maps a schedule onto itself,
    all ranks of an orbit do the same at the same time, so one of them, the actor, is enough: what
    it waits for from another rank of the orbit is what it does itself, and each link carries for
    all of the orbit that pass it what it carries for the actor times their number.

    Ranks that share a network card or a PCIe switch's uplink are told apart, since they take turns
    at it; so up to MOST_SHARING actors of a node stand for the others.

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
        self._peers: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        g, p = machine.gpus, machine.nranks
        cards = machine.nics if machine.nodes > 1 else g
        sharing = math.lcm(g // cards, g // machine.switches if machine.switches > 1 else 1)
        self._apart = sharing if sharing <= MOST_SHARING and not rotated else 1
        self.actors: Sequence[int] = {
            "none": range(p),
            "nodes": range(g),
            "local": [first + i for first in range(0, p, g) for i in range(self._apart)],
            "ranks": range(self._apart),
        }[symmetry]

    def seat(self, rank: int, lane: int = 0) -> tuple[int, int]:
        """The actor and its lane that stand for a rank and its lane."""
        node, local = divmod(rank, self.machine.gpus)
        if self.symmetry == "ranks":
            turned = (lane - local) % self.machine.gpus if self.rotated else lane
            return local % self._apart, turned
        if self.symmetry == "nodes":
            return local, lane
        if self.symmetry == "local":
            return node * self.machine.gpus + local % self._apart, lane
        return rank, lane

    def _link(self, link: Link) -> tuple[int, float]:
        """Its number, and how much of it one actor's byte takes."""
        weight = 1.0
        if self.symmetry == "nodes":
            link = link._replace(node=0)
        elif self.symmetry in ("local", "ranks"):
            g, count = self.machine.gpus, self.machine.count(link.kind)
            apart = max(1, count * self._apart // g)  # links of the kind that are told apart
            weight = (g / self._apart) / (count / apart)
            node = link.node if self.symmetry == "local" else 0
            link = link._replace(place=link.place % apart, node=node)
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
        """Those whom an actor addresses: (a rank, how many like it that it is merged with).

        NOTE order. In a node rank + 1 comes first, as in the kernels; of each further node the rank
        with the same place, so that no rank is everybody's first.

        Args:
            actor: the actor.
            local: of its own node only.
        """
        if (actor, local) not in self._peers:
            self._peers[actor, local] = self._find_peers(actor, local)
        return self._peers[actor, local]

    def _find_peers(self, actor: int, local: bool) -> list[tuple[int, int]]:
        machine = self.machine
        m, g = machine.nodes, machine.gpus
        node, place = divmod(actor, g)
        others = [
            (node + i) % m * g + (place + j) % g
            for i in range(1 if local else m)
            for j in range(g)
            if i or j
        ]
        if self.symmetry == "none":
            return [(rank, 1) for rank in others]
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank in others:
            kinds = tuple(link.kind for link in machine.route(actor, rank))
            alike.setdefault((self.seat(rank)[0], *kinds), []).append(rank)
        return [(ranks[0], len(ranks)) for ranks in alike.values()]
