"""Planning beyond this machine: all-reduce on machines that are described, not present.

Knows nothing of devices or processes; needs no GPU.
"""

from __future__ import annotations

from gpuallreduce.simulation.machine import PRESETS, Machine
from gpuallreduce.simulation.model import ALGORITHMS, Estimate, best, estimate

__all__ = ["ALGORITHMS", "PRESETS", "Estimate", "Machine", "best", "estimate"]
