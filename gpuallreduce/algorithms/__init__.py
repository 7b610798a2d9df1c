"""The algorithms, in the order in which ties are decided. To add one: a file here, its kernel, and
a line below.

An algorithm is geometry without devices: it knows nothing of memory, streams or processes.
"""

from __future__ import annotations

from gpuallreduce.algorithms.base import Algorithm
from gpuallreduce.algorithms.nccl import NcclEngine
from gpuallreduce.algorithms.one_shot import OneShot
from gpuallreduce.algorithms.ring import Ring
from gpuallreduce.algorithms.two_shot import TwoShot

__all__ = ["ALGORITHMS", "BY_NAME", "ENGINES", "Algorithm"]

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm for algorithm in (OneShot(), TwoShot(), Ring())
}

# Other libraries' collectives: never chosen, since they keep an order of their own; only asked for.
ENGINES: dict[str, Algorithm] = {engine.name: engine for engine in (NcclEngine(),)}

BY_NAME = {**ALGORITHMS, **ENGINES}
