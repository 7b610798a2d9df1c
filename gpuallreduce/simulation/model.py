"""Estimates of all-reduce on a described machine: from the product's plan to time and bottleneck.

Knows nothing of the command line or of measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuallreduce import tuner
from gpuallreduce.across.pace import Pace, Ways, pace
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.plan import Plan, Request
from gpuallreduce.simulation import geometry as geometries
from gpuallreduce.simulation import playing
from gpuallreduce.simulation.geometry import Geometry
from gpuallreduce.simulation.machine import KINDS, Machine
from gpuallreduce.topology import Topology, cuda_topology
from gpuallreduce.types import DTYPES, OPS, Dtype

__all__ = [
    "ALGORITHMS",
    "Estimate",
    "best",
    "estimate",
    "pace_of",
    "plan_of",
    "topology_of",
    "ways_of",
    "why_not",
]

# Algorithm and order, in the order of tables. `nccl_ring` is what NCCL's rings do, to compare with:
# chunks of 512 KiB in 16 channels or more, each node left by all its GPUs.
ALGORITHMS = (
    ("one_shot", "rank"),
    ("two_shot", "rank"),
    ("ring", "any"),
    ("ring", "rank"),
    ("hierarchical", "any"),
    ("hierarchical", "rank"),
    ("nccl_ring", "any"),
)
NCCL_CHUNK_BYTES = 512 << 10
NCCL_CHANNELS = 16


@dataclass(frozen=True)
class Estimate:
    """What a call would take.

    Attributes:
        algorithm, order: what was simulated.
        nbytes, nranks: of one rank's array; of the machine.
        time_us: of one call.
        bound_us: what the busiest link needs for its bytes alone: no schedule of the same bytes is
            faster.
        busiest: that link, for people.
        symmetry: a key of view.SYMMETRIES.
        played: ``whole``, or ``extrapolated`` from part of the rounds, steps or nodes.
        chunk_bytes: what one step of all channels of a rank moves; of hierarchical, a chunk of the
            array.
    """

    algorithm: str
    order: str
    nbytes: int
    nranks: int
    time_us: float
    bound_us: float
    busiest: str
    symmetry: str
    played: str
    chunk_bytes: int

    @property
    def algbw_gbps(self) -> float:
        """Bytes over time."""
        return self.nbytes / self.time_us / 1e3

    @property
    def busbw_gbps(self) -> float:
        """As nccl-tests has it."""
        return self.algbw_gbps * 2 * (self.nranks - 1) / self.nranks

    @property
    def fraction(self) -> float:
        """Of the bound."""
        return self.bound_us / self.time_us

    @property
    def bottleneck(self) -> str:
        """The busiest link if it is busy most of the time, else the waits between steps."""
        return self.busiest if self.fraction >= 0.5 else "latency"


def topology_of(machine: Machine) -> Topology:
    """A machine as the tuner sees it: as if all ranks were on one node."""
    return cuda_topology(
        machine.nranks,
        one_process=False,
        path="nvlink" if machine.link == "NVLink" else "pcie",
        max_channels=machine.channels,
        link_gbps=machine.link_gbps,
    )


def plan_of(
    machine: Machine, algorithm: str, order: str, nbytes: int, dtype: Dtype, *, direct: bool
) -> Plan:
    """The product's own plan of a call."""
    request = Request(
        collective="allreduce",
        dtype=dtype,
        op=OPS["max" if dtype.kind == "bool" else "sum"],
        count=nbytes // dtype.itemsize,
        nranks=machine.nranks,
        order=order,
        direct=direct,
    )
    access = ("direct" if direct else "staged") if algorithm == "two_shot" else None
    forced = tuner.Forced(algorithm=algorithm, access=access)
    return tuner.decide(request, topology_of(machine), forced, transport="")


def ways_of(machine: Machine) -> Ways:
    """A machine as hierarchical's pace sees it."""
    return Ways(
        nnodes=machine.nodes,
        nshards=machine.gpus,
        nlocal=machine.gpus,
        net_gbps=machine.net_gbps * machine.nics / machine.gpus,
        card_gbps=machine.net_gbps,
        net_us=machine.net_us,
        message_us=machine.engine_us,
        link_gbps=_inside_gbps(machine),
        memory_gbps=machine.memory_gbps,
        hop_us=machine.hop_us,
        launch_us=machine.launch_us,
        messages=machine.messages,
        net_through_link=machine.link != "NVLink",
        least_turns=machine.least_turns,
    )


def _inside_gbps(machine: Machine) -> float:
    """What a GPU sends to its node's together, when all do: those behind another switch share the
    way there.
    """
    if machine.switches == 1:
        return machine.link_gbps
    each = machine.gpus // machine.switches
    beyond = each * (machine.gpus - each) / max(1, machine.gpus - 1)
    return min(machine.link_gbps, machine.uplink_gbps / beyond)


def pace_of(machine: Machine, order: str, nbytes: int, dtype: Dtype) -> Pace:
    """The product's own chunks and depth of hierarchical, and its estimate."""
    wide = DTYPES[dtype.accumulator].itemsize
    return pace(order, nbytes, dtype.itemsize, wide, ways_of(machine))


def why_not(machine: Machine, algorithm: str) -> str | None:
    """Why an algorithm has nothing to show on a machine; None if it has."""
    if algorithm == "hierarchical" and machine.nodes == 1:
        return "hierarchical needs 2 nodes or more"
    return None


def estimate(
    machine: Machine,
    algorithm: str,
    order: str,
    nbytes: int,
    *,
    dtype: Dtype = DTYPES["float32"],
    direct: bool = False,
    whole: bool = False,
) -> Estimate:
    """Simulates one call.

    Args:
        machine: where.
        algorithm, order: a pair of ALGORITHMS.
        nbytes: of one rank's array; at least one element.
        dtype: of its elements.
        direct: peers address the arrays themselves (of one node), as those of ``comm.empty``.
        whole: every rank, round and step is played, however long that takes.

    Raises:
        InvalidArgument: there is no such algorithm, or it has nothing to show on this machine.
    """
    if (algorithm, order) not in ALGORITHMS:
        known = ", ".join(f"{name} ({each})" for name, each in ALGORITHMS)
        raise InvalidArgument(f"{algorithm!r} in order {order!r} is none of {known}")
    if reason := why_not(machine, algorithm):
        raise InvalidArgument(f"{machine.name} with {machine.nodes} node: {reason}")
    if nbytes < dtype.itemsize:
        raise InvalidArgument(f"{nbytes} bytes hold no {dtype.name}: ask for {dtype.itemsize}")
    wide = DTYPES[dtype.accumulator].itemsize / dtype.itemsize
    if algorithm == "hierarchical":
        chosen = pace_of(machine, order, nbytes, dtype)
        step_bytes = min(chosen.chunk_count * dtype.itemsize, nbytes)
        cut = Geometry(float(nbytes), float(step_bytes), wide=wide, depth=chosen.depth)
        found, played, symmetry = playing.play_hierarchical(machine, order, cut, whole)
    elif algorithm == "nccl_ring":
        channels = math.lcm(machine.gpus, NCCL_CHANNELS) if machine.gpus <= 16 else machine.gpus
        rotated = machine.nodes > 1
        round_bytes = NCCL_CHUNK_BYTES * channels * machine.nranks
        lanes = machine.gpus if rotated else geometries.lanes_for(nbytes / round_bytes)
        cut = Geometry(float(nbytes), float(NCCL_CHUNK_BYTES * channels), lanes)
        found, played, symmetry = playing.play_ring(machine, cut, whole, rotated=rotated)
    else:
        plan = plan_of(
            machine, algorithm, order, nbytes, dtype, direct=direct and machine.nodes == 1
        )
        cut = geometries.of_plan(plan, wide)
        if algorithm == "ring" and order == "any":
            found, played, symmetry = playing.play_ring(machine, cut, whole, rotated=False)
        elif algorithm == "ring":
            found, played, symmetry = playing.play_chain(machine, cut, whole)
        else:
            found, played, symmetry = playing.play_shots(
                machine, cut, whole, algorithm, plan.config.access
            )
    busiest = max(KINDS, key=lambda kind: found.get(kind, 0.0))
    return Estimate(
        algorithm,
        order,
        nbytes,
        machine.nranks,
        found["time"],
        found.get(busiest, 0.0),
        machine.title(busiest),
        symmetry,
        played,
        round(cut.step_bytes),
    )


def best(estimates: list[Estimate], order: str | None = None) -> Estimate:
    """The fastest of the product's (of an order)."""
    ours = [x for x in estimates if x.algorithm != "nccl_ring" and order in (None, x.order)]
    return min(ours or estimates, key=lambda each: each.time_us)
