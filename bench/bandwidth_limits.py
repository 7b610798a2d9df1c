"""What the links and memories under a bandwidth test can do, by the numbers on the box.

Pure: knows nothing of NVML or CUDA, which find these numbers. What is not known is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuallreduce.links import Machine, pcie_gbps

from .bandwidth_tests import Copy, Test

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Rates of some GPUs, by their places.

    Attributes:
        machine: their links, if NVML knows.
        memory_gbps: reads and writes of each GPU's memory together.
    """

    machine: Machine | None
    memory_gbps: Sequence[float | None]

    def words(self, test: Test, part: str) -> str:
        """What the limit of a test's matrix is; empty if it has none."""
        if test.engine == "latency":
            return ""
        if test.name == "device_local_copy":
            return "half of the memory's rate, since a copy reads and writes"
        if test.counts == "all":
            return "rate of the column's links to all peers, one direction"
        if part == "total":
            return "rate of the link, both directions"
        return "rate of the link, one direction" if test.rows == "gpus" else "rate of PCIe"

    def of(self, test: Test, part: str, copies: Sequence[Copy]) -> float | None:
        """The limit of one cell, GB/s.

        Args:
            test: the test.
            part: which of its matrices.
            copies: those of the cell.
        """
        if test.engine == "latency" or not copies:
            return None
        if test.counts == "all":
            return self._star(copies)
        rate = self._one(copies[0])
        return rate * 2 if rate is not None and part == "total" else rate

    def _one(self, copy: Copy) -> float | None:
        if copy.source is not None and copy.source == copy.target:
            rate = self.memory_gbps[copy.source]
            return None if rate is None else rate / 2
        if self.machine is None:
            return None
        if copy.between is not None:
            return self.machine.link(*copy.between).gbps
        return self._pcie(copy.runner)

    def _pcie(self, gpu: int) -> float | None:
        assert self.machine is not None
        facts = self.machine.gpus[gpu]
        return pcie_gbps(facts.pcie_generation, facts.pcie_width)

    def _star(self, copies: Sequence[Copy]) -> float | None:
        """NVLinks to different peers add up, as far as the GPU has links; PCIe is one for all."""
        ends = [copy.between for copy in copies if copy.between is not None]
        if self.machine is None or not ends:
            return None
        hub = (set(ends[0]) & set(ends[-1])).pop() if len(ends) > 1 else ends[0][0]
        one = self.machine.gpus[hub]
        peers = [self.machine.gpus[a if b == hub else b] for a, b in ends]
        links = [one.links_to(peer) for peer in peers]
        if not any(links):
            return self._pcie(hub)
        if not all(links) or one.nvlink_gbps is None:
            return None
        return one.nvlink_gbps * min(sum(links), one.nvlinks or sum(links))
