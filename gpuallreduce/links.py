"""What joins the GPUs of a machine, and how fast: facts about each GPU, words and rates of pairs.

Pure data and arithmetic: knows nothing of how the facts were found out. What is not known is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "ANCESTORS",
    "GpuFacts",
    "Link",
    "Machine",
    "bus_id_of",
    "from_plain",
    "link_between",
    "nvlink_usable",
    "path_of",
    "pcie_gbps",
    "pcie_usable",
    "sends_gbps",
    "to_plain",
]

# One direction of one link, by NVLink's generation, GB/s: NVIDIA's numbers.
NVLINK_GBPS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
# What kernels get out of all links of a GPU. Rings on 8 GPUs reach 365 to 370 of an H100's 450 GB/s
# and as much of their links on A100 (240 of 300) and B200 (720 of 900); older ones are taken alike.
NVLINK_USABLE = {3: 240 / 300, 4: 370 / 450, 5: 720 / 900}
NVLINK_USABLE_ELSE = 0.8

# A lane: transfers per ns (each one bit), and what its encoding leaves: 8 of 10 bits, 128 of 130,
# or 242 of the 256 bytes of a flit.
PCIE_LANES = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 242 / 256),
}
# An estimate: headers of packets take a tenth to a fifth, and both directions are busy at once.
PCIE_USABLE = 0.7

# Where the ways of two GPUs to the host meet, the nearest first, as nvidia-smi topo -m has it.
ANCESTORS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}


@dataclass(frozen=True)
class GpuFacts:
    """A GPU, as far as its links go.

    Attributes:
        uuid: as nvidia-smi prints it; the same in every process.
        name: of the model.
        bus_id: PCI address, as ``bus_id_of`` writes it.
        numa_node: of the host's processors that are near.
        nvlink_version: generation.
        nvlinks: links that are up.
        switch_links: those of them that lead to a switch, which joins all GPUs on it.
        direct_links: (bus_id, links) of each GPU that others lead to.
        pcie_generation, pcie_width: the best that the GPU and its slot can do.
        pcie_generation_now, pcie_width_now: idle GPUs save power, so these may be less.
    """

    uuid: str
    name: str | None = None
    bus_id: str | None = None
    numa_node: int | None = None
    nvlink_version: int | None = None
    nvlinks: int | None = None
    switch_links: int = 0
    direct_links: tuple[tuple[str, int], ...] = ()
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_generation_now: int | None = None
    pcie_width_now: int | None = None

    @property
    def nvlink_gbps(self) -> float | None:
        """One direction of one of its NVLinks."""
        return NVLINK_GBPS.get(self.nvlink_version or 0)

    def links_to(self, other: GpuFacts) -> int:
        """NVLinks to another GPU, directly or through switches."""
        if self.switch_links and other.switch_links:
            return min(self.switch_links, other.switch_links)
        return dict(self.direct_links).get(other.bus_id or "", 0)


@dataclass(frozen=True)
class Link:
    """What joins two GPUs.

    Attributes:
        kind: ``X`` (the same GPU), ``NV12`` (so many NVLinks), a key of ANCESTORS, ``?``.
        gbps: one direction, by the numbers on the box; None: not known.
        usable_gbps: what kernels can be expected to get of it.
    """

    kind: str
    gbps: float | None
    usable_gbps: float | None


@dataclass(frozen=True)
class Machine:
    """GPUs and what lies between them.

    Attributes:
        gpus: the GPUs.
        ancestors: for each pair a key of ANCESTORS, or None.
        peers: for each ordered pair whether the driver lets the first address the second's memory.
        driver: version of the driver.
    """

    gpus: tuple[GpuFacts, ...]
    ancestors: tuple[tuple[str | None, ...], ...]
    peers: tuple[tuple[bool | None, ...], ...]
    driver: str | None = None

    def link(self, a: int, b: int) -> Link:
        """What joins the GPUs at two places of ``gpus``."""
        if a == b:
            return Link("X", None, None)
        return link_between(self.gpus[a], self.gpus[b], self.ancestors[a][b])


def from_plain(facts: dict[str, Any]) -> GpuFacts:
    """The facts that ``dataclasses.asdict`` turned into plain data, and JSON may have touched."""
    pairs = tuple((str(bus), int(count)) for bus, count in facts["direct_links"])
    return GpuFacts(**{**facts, "direct_links": pairs})


def to_plain(facts: GpuFacts) -> dict[str, Any]:
    """See ``from_plain``."""
    return asdict(facts)


def bus_id_of(text: str) -> str:
    """A PCI address in one way of writing: CUDA writes domains with 4 digits, NVML with 8."""
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):08X}:{rest.upper()}"


def pcie_gbps(generation: int | None, width: int | None) -> float | None:
    """One direction of a PCIe link, less its encoding."""
    if generation not in PCIE_LANES or not width:
        return None
    transfers, encoding = PCIE_LANES[generation]
    return transfers * encoding * width / 8


def pcie_usable(gpu: GpuFacts) -> float | None:
    """What a GPU can be expected to send over PCIe while it receives as much, GB/s."""
    rate = pcie_gbps(gpu.pcie_generation, gpu.pcie_width)
    return None if rate is None else rate * PCIE_USABLE


def nvlink_usable(gpu: GpuFacts, links: int | None = None) -> float | None:
    """What a GPU can be expected to send over some of its NVLinks, or all of them, GB/s."""
    count = gpu.nvlinks if links is None else links
    if gpu.nvlink_gbps is None or count is None:
        return None
    usable = NVLINK_USABLE.get(gpu.nvlink_version or 0, NVLINK_USABLE_ELSE)
    return gpu.nvlink_gbps * count * usable


def _least(*rates: float | None) -> float | None:
    """The least of rates; None if one is not known."""
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def link_between(a: GpuFacts, b: GpuFacts, ancestor: str | None = None) -> Link:
    """What joins two different GPUs; its rate is that of the slower end."""
    links = a.links_to(b)
    if links:
        rates = [gpu.nvlink_gbps and gpu.nvlink_gbps * links for gpu in (a, b)]
        usable = [nvlink_usable(gpu, links) for gpu in (a, b)]
        return Link(f"NV{links}", _least(*rates), _least(*usable))
    rates = [pcie_gbps(gpu.pcie_generation, gpu.pcie_width) for gpu in (a, b)]
    return Link(ancestor or "?", _least(*rates), _least(*map(pcie_usable, (a, b))))


def path_of(gpus: Sequence[GpuFacts]) -> str:
    """How GPUs that address each other do it: a key of topology.PATHS.

    ``nvlink`` only if it joins every pair: else the slowest pair's PCIe sets the pace of all.
    """
    different = list({gpu.uuid: gpu for gpu in gpus}.values())
    if len(different) == 1:
        return "one device"
    pairs = [(a, b) for a in different for b in different if a is not b]
    return "nvlink" if all(a.links_to(b) for a, b in pairs) else "pcie"


def sends_gbps(gpus: Sequence[GpuFacts], path: str) -> float | None:
    """What the weakest of some GPUs can send to all others together, GB/s; None: not known.

    Args:
        gpus: the communicator's; a GPU may stand for several ranks.
        path: how they reach each other, a key of topology.PATHS.
    """
    different = list({gpu.uuid: gpu for gpu in gpus}.values())
    if path == "nvlink":
        return _least(*(_nvlink_sends(gpu, different) for gpu in different))
    if path == "pcie":
        return _least(*map(pcie_usable, different))
    if path == "host memory":  # a byte goes up one link and down another, which carry both ways
        rate = _least(*map(pcie_usable, different))
        return None if rate is None else rate / 2
    return None


def _nvlink_sends(gpu: GpuFacts, gpus: Sequence[GpuFacts]) -> float | None:
    """All ranks send alike to all others, so the thinnest pair holds the others back."""
    thinnest = min(gpu.links_to(other) for other in gpus if other is not gpu)
    together = thinnest * (len(gpus) - 1)
    return nvlink_usable(gpu, min(together, gpu.nvlinks or together))
