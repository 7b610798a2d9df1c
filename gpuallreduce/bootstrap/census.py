"""Which node each rank of a job is on: nodes numbered in the order of their first ranks.

Knows nothing of sockets. A node is where ranks can pass each other descriptors: one machine, or one
network namespace of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Census", "Home", "known_nodes"]


@dataclass(frozen=True)
class Home:
    """Where one rank says that it is.

    Attributes:
        node: the same text on all ranks of one node, and on no others.
        name: what people call the node; several may have one name.
        machine: the same text wherever an abstract Unix socket of ours can be reached.
    """

    node: str
    name: str
    machine: str

    def message(self) -> dict[str, str]:
        """It as part of a message."""
        return {"node": self.node, "name": self.name}

    @classmethod
    def found_in(cls, hello: Mapping[str, Any]) -> Home:
        """The home that a rank's first message tells of; raises TypeError or KeyError."""
        home, machine = hello.get("home", {"node": "", "name": ""}), hello.get("machine")
        return cls(str(home["node"]), str(home["name"]), str(machine))


@dataclass(frozen=True)
class Census:
    """The nodes of a job.

    Attributes:
        names: of the nodes, all different.
        node_of: number of the node, by rank.
        token: a random text that is the same on all ranks.
    """

    names: tuple[str, ...]
    node_of: tuple[int, ...]
    token: str = ""

    @classmethod
    def taken(cls, homes: Mapping[int, Home], token: str) -> Census:
        """The census of all ranks' homes."""
        numbers: dict[str, int] = {}
        names: list[str] = []
        for rank in range(len(homes)):
            home = homes[rank]
            if home.node not in numbers:
                numbers[home.node] = len(names)
                names.append(home.name)
        # Clones of one machine share its name.
        distinct = tuple(
            f"{name}#{number}" if names.count(name) > 1 else name
            for number, name in enumerate(names)
        )
        return cls(distinct, tuple(numbers[homes[rank].node] for rank in range(len(homes))), token)

    def message(self) -> dict[str, Any]:
        """It as part of a message."""
        return {"census": [list(self.names), list(self.node_of), self.token]}

    @classmethod
    def found_in(cls, body: Mapping[str, Any]) -> Census | None:
        """The census that a message tells of, if it does."""
        if "census" not in body:
            return None
        names, node_of, token = body["census"]
        return cls(tuple(names), tuple(node_of), token)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks of a node, rising."""
        return tuple(rank for rank, number in enumerate(self.node_of) if number == node)

    def disorder(self) -> str | None:
        """None if the ranks of each node follow each other; else which are where, and what to do.

        Nodes are numbered by their first ranks, so ranks are in order if node numbers never fall.
        """
        if list(self.node_of) == sorted(self.node_of):
            return None
        where = "; ".join(
            f"{name} has {_runs(self.ranks_of(node))}" for node, name in enumerate(self.names)
        )
        return (
            f"ranks must be numbered node by node, and they are not: {where}. Start them with "
            "mpirun --map-by slot (and --rank-by slot), or srun --distribution=block; torchrun "
            "numbers them so by itself"
        )


def known_nodes(homes: Mapping[int, Home]) -> dict[int, str]:
    """Names of the nodes of the ranks that came, and of those between two of one node."""
    known: dict[int, str] = {}
    before: int | None = None
    for rank in sorted(homes):
        same = before is not None and homes[rank].node == homes[before].node
        for each in range(before + 1 if same and before is not None else rank, rank + 1):
            known[each] = homes[rank].name
        before = rank
    return known


def _runs(ranks: tuple[int, ...]) -> str:
    """``ranks 0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts)}"
