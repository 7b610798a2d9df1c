"""What the ranks of a communicator run on, as far as it decides how to move data.

Knows nothing of requests or algorithms.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Topology", "available_cores", "host_topology"]


@dataclass(frozen=True)
class Topology:
    """The machine under a communicator.

    Attributes:
        device_kind: ``host`` or ``cuda``.
        nranks: ranks of the communicator.
        cores: processor cores that this process may use (host ranks run on them).
        one_process: True where all ranks live in this process, so that every array can be addressed
            by every rank.
    """

    device_kind: str
    nranks: int
    cores: int
    one_process: bool

    @property
    def crowded(self) -> bool:
        """More host ranks than cores: a waiting rank must give its core away at once."""
        return self.nranks > self.cores

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
