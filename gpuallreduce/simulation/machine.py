"""Machines as data: nodes of GPUs, the links between them, their rates and latencies; presets.

Knows nothing of algorithms, nor of any machine that is present.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpuallreduce.errors import InvalidArgument
from gpuallreduce.links import NVLINK_GBPS, NVLINK_USABLE, PCIE_USABLE, pcie_gbps

__all__ = ["KINDS", "PRESETS", "Link", "Machine"]

# One direction each: a link carries both at once. `up` and `down` join a PCIe switch to the others.
KINDS = ("memory", "out", "in", "up", "down", "net out", "net in")


class Link(NamedTuple):
    """One direction of a link of a node: the GPU's, the switch's or the network card's."""

    kind: str
    node: int
    place: int


@dataclass(frozen=True)
class Machine:
    """Equal nodes of equal GPUs. Rates are one direction, usable, in GB/s; a GPU is a rank.

    Attributes:
        name: for people.
        nodes, gpus: nodes, and GPUs of one node.
        link: what joins the GPUs of a node: ``NVLink`` or ``PCIe``.
        link_gbps: what one GPU sends to its node's GPUs together, while it receives as much.
        memory_gbps: what a GPU's kernels read and write together.
        hop_us: from a store to when a waiting block of another GPU has seen it: barriers, fence,
            flag and polling included.
        launch_us: from the call to the first instruction, and from the last to the stream's next.
        net_gbps: of one network card.
        nics: network cards of a node, each serving as many GPUs.
        net_us: as hop_us, across nodes.
        engine_us: what a call of the library that moves data between nodes costs on its own.
        switches: PCIe switches of a node, each with as many GPUs; 1: all GPUs meet in one.
        uplink_gbps: what a switch sends to the others together.
        channels: blocks of a rank at most.
        messages: across nodes many messages are under way at once, as between host ranks; else an
            engine's calls follow each other.
        least_turns: chunks that a hop of partials takes at least: see ``across.chunks.lag_of``.
    """

    name: str
    nodes: int = 1
    gpus: int = 8
    link: str = "NVLink"
    link_gbps: float = 370.0
    memory_gbps: float = 2900.0
    hop_us: float = 2.1
    launch_us: float = 3.4
    net_gbps: float = 48.0
    nics: int = 8
    net_us: float = 10.0
    engine_us: float = 5.0
    switches: int = 1
    uplink_gbps: float = 0.0
    channels: int = 32
    messages: bool = False
    least_turns: int = 3

    def __post_init__(self) -> None:
        """Refuses what no machine can be."""
        for field in ("nodes", "gpus", "nics", "switches", "channels", "least_turns"):
            if getattr(self, field) < 1:
                raise InvalidArgument(f"{field}={getattr(self, field)}: a machine has at least 1")
        for field in ("link_gbps", "memory_gbps", "net_gbps"):
            if not 0 < getattr(self, field) < float("inf"):
                raise InvalidArgument(f"{field}={getattr(self, field)}: expected a rate above 0")
        for field in ("hop_us", "launch_us", "net_us", "engine_us"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise InvalidArgument(f"{field}={getattr(self, field)}: expected 0 or more")
        if self.nranks < 2:
            raise InvalidArgument("1 node of 1 GPU has nobody to talk to: ask for 2 ranks or more")
        for field in ("nics", "switches"):
            if self.gpus % getattr(self, field):
                raise InvalidArgument(
                    f"{self.gpus} GPUs of a node do not divide evenly among {field}="
                    f"{getattr(self, field)}"
                )
        if self.switches > 1 and not self.uplink_gbps > 0:
            raise InvalidArgument(f"{self.switches} switches need uplink_gbps to reach each other")

    @property
    def nranks(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus

    def count(self, kind: str) -> int:
        """Links of a kind in one node."""
        if kind in ("up", "down"):
            return self.switches
        return self.nics if kind in ("net out", "net in") else self.gpus

    def rate(self, kind: str) -> float:
        """GB/s of a link of a kind."""
        if kind == "memory":
            return self.memory_gbps
        if kind in ("up", "down"):
            return self.uplink_gbps
        return self.net_gbps if kind in ("net out", "net in") else self.link_gbps

    def latency_us(self, kind: str) -> float:
        """Of a link of a kind: counted once a way, where it ends."""
        return {"in": self.hop_us, "net in": self.net_us}.get(kind, 0.0)

    def title(self, kind: str) -> str:
        """A kind of link for people."""
        if kind in ("up", "down"):
            return "PCIe switch"
        return {"memory": "memory", "out": self.link, "in": self.link}.get(kind, "network")

    def memory(self, rank: int) -> Link:
        """A rank's memory."""
        return Link("memory", *divmod(rank, self.gpus))

    def route(self, source: int, target: int) -> tuple[Link, ...]:
        """The links from one rank to another, in the order in which bytes pass them."""
        (a, i), (b, j) = divmod(source, self.gpus), divmod(target, self.gpus)
        out, into = Link("out", a, i), Link("in", b, j)
        if a != b:
            each = self.gpus // self.nics
            wire = (Link("net out", a, i // each), Link("net in", b, j // each))
            return wire if self.link == "NVLink" else (out, *wire, into)
        each = self.gpus // self.switches
        if i // each == j // each:
            return (out, into)
        return (out, Link("up", a, i // each), Link("down", a, j // each), into)

    def describe(self) -> str:
        """A line for people."""
        parts = [f"{self.gpus} GPUs, {self.link} {self.link_gbps:g} GB/s a GPU"]
        if self.switches > 1:
            parts.append(f"{self.switches} switches joined at {self.uplink_gbps:g} GB/s")
        parts.append(f"memory {self.memory_gbps:g} GB/s, hop {self.hop_us:g} us")
        if self.nodes > 1:
            parts.append(f"{self.nics} x {self.net_gbps:g} GB/s network, {self.net_us:g} us")
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} of {', '.join(parts)}"


def _nvlink(generation: int, links: int) -> float:
    return NVLINK_GBPS[generation] * links * NVLINK_USABLE[generation]


def _pcie(generation: int) -> float:
    return round((pcie_gbps(generation, 16) or 0.0) * PCIE_USABLE, 1)


# Memory: about 85 % of the number on the box, as copies reach. Network: what NCCL's rings get of
# InfiniBand, 24 of 25 GB/s (HDR) and 48 of 50 GB/s (NDR). Latency across nodes is of the order that
# NCCL's tuning tables give a network hop with large messages.
PRESETS: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("dgx-a100", link_gbps=_nvlink(3, 12), memory_gbps=1700.0, net_gbps=24.0),
        Machine("dgx-h100", link_gbps=_nvlink(4, 18), memory_gbps=2900.0, net_gbps=48.0),
        Machine("dgx-h200", link_gbps=_nvlink(4, 18), memory_gbps=4100.0, net_gbps=48.0),
        Machine("dgx-b200", link_gbps=_nvlink(5, 18), memory_gbps=6800.0, net_gbps=48.0),
        Machine(
            "gb200-nvl72",
            gpus=72,
            nics=72,
            link_gbps=_nvlink(5, 18),
            memory_gbps=6800.0,
            net_gbps=48.0,
        ),
        Machine("pcie-one-switch", link="PCIe", memory_gbps=750.0, nics=1, link_gbps=_pcie(4)),
        Machine(
            "pcie-two-switches",
            link="PCIe",
            memory_gbps=750.0,
            nics=2,
            link_gbps=_pcie(4),
            switches=2,
            uplink_gbps=_pcie(4),
        ),
    )
}
