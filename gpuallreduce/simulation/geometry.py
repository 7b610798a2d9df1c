"""The sizes that a call's plan gives to its steps, as schedules use them.

Knows nothing of machines or links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuallreduce.plan import Plan

__all__ = ["Geometry", "lanes_for", "of_plan", "pieces"]

MOST_LANES = 4
LEAST_CHUNK_BYTES = 1024  # with more than 512 ranks a plan's slots round down to nothing


@dataclass(frozen=True)
class Geometry:
    """How a call cuts its array.

    NOTE lanes. A rank's channels do the same with equal parts of the array, so they are simulated
    in few groups, the lanes. Channels begin together and share links evenly: in the first round all
    wait at the same time, as one lane does. With every further round they drift apart, until one
    uses a link while another waits for flags: hence a lane more for each round, up to MOST_LANES. A
    chain hides its waits without that, so it has one.

    Attributes:
        nbytes: of one rank's array.
        step_bytes: what all channels of a rank together move in a step: one chunk each.
        lanes: groups of channels.
        wide: bytes of a partial for each byte of an element.
        phase_steps: steps of each phase of a ring; None: as many as it has.
        depth: of hierarchical, chunks under way across nodes at once.
    """

    nbytes: float
    step_bytes: float
    lanes: int = 1
    wide: float = 1.0
    phase_steps: int | None = None
    depth: int = 0

    def lane_bytes(self) -> list[float]:
        """Bytes of the array that each lane handles."""
        return [self.nbytes / self.lanes] * self.lanes


def lanes_for(rounds: float) -> int:
    """See NOTE lanes."""
    return max(1, min(MOST_LANES, math.ceil(rounds - 1e-9)))


def of_plan(plan: Plan, wide: float) -> Geometry:
    """The geometry of a plan: what its algorithm, chunks and channels come to."""
    request, config = plan.request, plan.config
    chunk = max(config.chunk_count * request.dtype.itemsize, LEAST_CHUNK_BYTES)
    step_bytes = float(chunk * config.nchannels)
    sliced = config.algorithm == "two_shot" or (config.algorithm, request.order) == ("ring", "any")
    rounds = request.nbytes / step_bytes / (request.nranks if sliced else 1)
    lanes = 1 if (config.algorithm, request.order) == ("ring", "rank") else lanes_for(rounds)
    return Geometry(float(request.nbytes), step_bytes, min(lanes, config.nchannels), wide)


def pieces(nbytes: float, each: float) -> list[float]:
    """Bytes cut in pieces of ``each`` and a rest; nothing is one empty piece, as in the kernels."""
    count = max(1, math.ceil(nbytes / each - 1e-9)) if each > 0 else 1
    return [each] * (count - 1) + [nbytes - each * (count - 1)]
