"""What the ranks of a communicator run on, as far as it decides how to move data.

Knows nothing of requests or algorithms.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["PATHS", "Topology", "available_cores", "cuda_topology", "host_topology"]

# How GPUs reach each other's memory, and what a GPU then sends to its peers together where nothing
# better is known: one PCIe 4.0 x16 link; through host memory each byte takes it twice.
PATHS = {"nvlink": 200.0, "pcie": 22.0, "host memory": 10.0, "one device": 400.0}


@dataclass(frozen=True)
class Topology:
    """The machine under a communicator.

    Attributes:
        device_kind: ``host`` or ``cuda``.
        nranks: ranks of the communicator.
        cores: processor cores that this process may use (host ranks run on them).
        one_process: True where all ranks live in this process, so that every array can be addressed
            by every rank.
        path: CUDA: how GPUs reach each other, one of PATHS.
        link_gbps: CUDA: what one GPU sends to its peers together.
        max_channels: blocks that a rank may run at most, so that all ranks' are resident at once.
    """

    device_kind: str
    nranks: int
    cores: int
    one_process: bool
    path: str = ""
    link_gbps: float = 0.0
    max_channels: int = 4

    @property
    def crowded(self) -> bool:
        """More host ranks than cores: a waiting rank must give its core away at once."""
        return self.device_kind == "host" and self.nranks > self.cores

    @property
    def sharing(self) -> float:
        """Ranks that share one core, at least 1."""
        return max(1.0, self.nranks / self.cores)


def available_cores() -> int:
    """Cores that this process may run on (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def host_topology(nranks: int, *, cores: int, one_process: bool) -> Topology:
    """The topology of host ranks. ``cores`` counts those that all ranks together may use."""
    return Topology("host", nranks, cores, one_process)


def cuda_topology(
    nranks: int,
    *,
    one_process: bool,
    path: str,
    max_channels: int,
    link_gbps: float | None = None,
) -> Topology:
    """The topology of CUDA ranks.

    Args:
        nranks: ranks of the communicator.
        one_process: all ranks live in this process.
        path: one of PATHS.
        max_channels: blocks of every rank that are resident at once.
        link_gbps: what one GPU sends to its peers together; None: what is usual for the path.
    """
    rate = PATHS[path] if link_gbps is None else link_gbps
    return Topology("cuda", nranks, available_cores(), one_process, path, rate, max_channels)
