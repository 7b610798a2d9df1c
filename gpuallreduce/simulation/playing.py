"""How much of a schedule is played: one rank for all that are alike, and few rounds, steps or nodes
where the rest follows from them.

Knows nothing of plans, estimates or measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gpuallreduce.across.chunks import depth_of, turns_of
from gpuallreduce.simulation.engine import run
from gpuallreduce.simulation.geometry import Geometry
from gpuallreduce.simulation.machine import Machine
from gpuallreduce.simulation.nodes import hierarchical_any, hierarchical_rank
from gpuallreduce.simulation.rings import chain, ring
from gpuallreduce.simulation.shots import one_shot, two_shot, two_shot_direct
from gpuallreduce.simulation.view import View

__all__ = ["Found", "play_chain", "play_hierarchical", "play_ring", "play_shots"]
# NOTE affine. A schedule of equal rounds soon falls into a pattern that repeats, so its time grows
# by the same amount with every further round (or ring step, or node of a chain together with its
# share of chunks). So two sizes at which the pattern has set in give the rest of the line.
ROUNDS = 12
TASKS = 24000  # of a chain: what is played at most

Found = dict[str, float]  # `time`, and for each kind of link how long its busiest was busy


def _play(build: Callable[[View, Geometry], None], view: View, cut: Geometry) -> Found:
    build(view, cut)
    outcome = run(view.schedule)
    found: Found = {"time": outcome.time_us}
    for link, busy_us in outcome.busy_us.items():
        kind: str = link.kind  # type: ignore[attr-defined]
        found[kind] = max(found.get(kind, 0.0), busy_us)
    return found


def _line(x: float, low: float, at_low: Found, high: float, at_high: Found) -> Found:
    """See NOTE affine."""
    slope = (x - high) / (high - low)
    return {key: value + slope * (value - at_low[key]) for key, value in at_high.items()}


def _by_rounds(
    play: Callable[[Geometry], Found], cut: Geometry, round_bytes: float, most: int, whole: bool
) -> tuple[Found, str]:
    """All rounds, or a line through fewer that end in the same rest."""
    rounds = cut.nbytes / round_bytes
    if whole or rounds <= most:
        return play(cut), "whole"
    rest = rounds - math.floor(rounds)
    low, high = math.ceil(most / 2) + rest, most + rest
    at = [play(replace(cut, nbytes=x * round_bytes)) for x in (low, high)]
    return _line(rounds, low, at[0], high, at[1]), "extrapolated"


def play_shots(
    machine: Machine, cut: Geometry, whole: bool, algorithm: str, access: str
) -> tuple[Found, str, str]:
    """All ranks are alike: each talks to all others."""
    build = {"one_shot": one_shot, "two_shot": two_shot}[algorithm]
    symmetry = "none" if whole else "ranks"
    if access == "direct":
        return _play(two_shot_direct, View(machine, symmetry), cut), "whole", symmetry
    round_bytes = cut.step_bytes * (1 if algorithm == "one_shot" else machine.nranks)
    found, played = _by_rounds(
        lambda each: _play(build, View(machine, symmetry), each), cut, round_bytes, ROUNDS, whole
    )
    return found, played, symmetry


def play_ring(
    machine: Machine, cut: Geometry, whole: bool, *, rotated: bool
) -> tuple[Found, str, str]:
    """Nodes are alike; so are ranks, where rings are turned so that each leaves its node once, or
    there is nothing to leave.
    """
    symmetry = "ranks" if rotated or machine.nodes * machine.switches == 1 else "nodes"
    if rotated and machine.switches > 1:
        symmetry = "nodes"
    symmetry = "none" if whole else symmetry
    steps = machine.nranks - 1
    wide_node = symmetry != "none" and machine.gpus > 16
    if wide_node and not rotated and symmetry == "nodes":
        cut = replace(cut, lanes=1)
    least = machine.gpus if symmetry == "nodes" or rotated else 8
    low, high = (least, 2 * least) if wide_node else (2 * least, 4 * least)
    extrapolated = not whole and steps > high

    def play(each: Geometry) -> Found:
        def at(phase_steps: int) -> Found:
            view = View(machine, symmetry, rotated=rotated)
            return _play(ring, view, replace(each, phase_steps=phase_steps))

        if not extrapolated:
            return at(steps)
        return _line(steps, low, at(low), high, at(high))

    most = 2 if machine.gpus > 16 or extrapolated else 4
    found, played = _by_rounds(play, cut, cut.step_bytes * machine.nranks, most, whole)
    return found, "extrapolated" if extrapolated else played, symmetry


def play_chain(machine: Machine, cut: Geometry, whole: bool) -> tuple[Found, str, str]:
    """No two ranks are alike; a long chain is scaled down with its chunks."""
    p = machine.nranks

    def play(each: Geometry, nodes: int = machine.nodes) -> Found:
        return _play(chain, View(replace(machine, nodes=nodes), "none"), each)

    rounds = cut.nbytes / cut.step_bytes
    tasks = 2 * p * max(1.0, rounds)
    if whole or tasks <= TASKS or (machine.nodes < 4 and rounds <= 4 * p):
        return play(cut), "whole", "none"
    if machine.nodes < 4 or rounds > 16 * p:
        return *_by_rounds(play, cut, cut.step_bytes, 4 * p, whole), "none"
    return *_by_nodes(play, machine, cut, tasks), "none"


def _by_nodes(
    play: Callable[[Geometry, int], Found],
    machine: Machine,
    cut: Geometry,
    tasks: float,
    least: int = 1,
) -> tuple[Found, str]:
    """Fewer nodes, ``least`` or more, with as much less to do: what keeps a chain waiting is the
    ratio of the two.
    """
    m = machine.nodes
    high = min(m - 1, max(least + 1, math.ceil(m * math.sqrt(TASKS / tasks))))
    low = max(least, high // 2)
    at = [play(replace(cut, nbytes=cut.nbytes * x / m), x) for x in (low, high)]
    return _line(m, low, at[0], high, at[1]), "extrapolated"


def play_hierarchical(
    machine: Machine, order: str, cut: Geometry, whole: bool
) -> tuple[Found, str, str]:
    """Local ranks are alike; in order any nodes too."""
    symmetry = "none" if whole else "ranks" if order == "any" else "local"
    build = hierarchical_any if order == "any" else hierarchical_rank
    chunks = cut.nbytes / cut.step_bytes

    def play(each: Geometry, nodes: int = machine.nodes) -> Found:
        turns = turns_of(cut.depth, machine.nodes)
        depth = depth_of(nodes, turns) if order == "rank" else cut.depth
        view = View(replace(machine, nodes=nodes), symmetry)
        return _play(build, view, replace(each, depth=depth))

    tasks = 5.0 * machine.nodes * chunks
    if whole or tasks <= TASKS:
        return play(cut), "whole", symmetry
    if order == "any" or machine.nodes <= 4:
        return *_by_rounds(play, cut, cut.step_bytes, ROUNDS + 4 * cut.depth, whole), symmetry
    return *_by_nodes(play, machine, cut, tasks, least=2), symmetry
