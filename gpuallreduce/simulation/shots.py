"""one_shot and two_shot as schedules: what the kernels of these names move, fold and wait for.

Knows nothing of machines but through a View, nor of how a call's geometry was decided.
"""

from __future__ import annotations

from collections.abc import Collection

from gpuallreduce.simulation.geometry import Geometry, pieces
from gpuallreduce.simulation.view import View

__all__ = ["one_shot", "two_shot", "two_shot_direct"]

Pushes = dict[int, dict[int, int]]  # by actor, then by peer: a task


def push(
    view: View,
    actor: int,
    nbytes: float,
    *,
    local: bool = False,
    reads: float = 1.0,
    after: Collection[int] = (),
    sent: Collection[int] = (),
    delay_us: float = 0.0,
) -> dict[int, int]:
    """An actor stores something of ``nbytes`` to each of its peers; for each stored byte its memory
    reads ``reads`` bytes.
    """
    return {
        peer: view.schedule.task(
            [
                view.memory(actor, nbytes * many * reads),
                *view.way(actor, peer, nbytes * many),
                view.memory(peer, nbytes * many),
            ],
            after=after,
            sent=sent,
            delay_us=delay_us,
        )
        for peer, many in view.peers(actor, local=local)
    }


def arrivals(view: View, pushes: Pushes) -> dict[int, list[int]]:
    """What each of the actors that push to each other waits for when it waits for all of them."""
    found: dict[int, list[int]] = {actor: [] for actor in pushes}
    for tasks in pushes.values():
        for peer, task in tasks.items():
            found[view.seat(peer)[0]].append(task)
    return found


def one_shot(view: View, geometry: Geometry) -> None:
    """Stage chunk i + 1 at every peer, then fold chunk i of all (``exchange`` in one_shot.cuh)."""
    machine, schedule = view.machine, view.schedule
    p = machine.nranks
    for lane_bytes in geometry.lane_bytes():
        sizes = pieces(lane_bytes, geometry.step_bytes / geometry.lanes)
        stages = [
            {a: push(view, a, sizes[0], delay_us=machine.launch_us) for a in view.actors},
        ]
        folds: dict[int, list[int]] = {a: [] for a in view.actors}
        for i, size in enumerate(sizes):
            if i + 1 < len(sizes):
                stages.append(
                    {
                        a: push(view, a, sizes[i + 1], after=folds[a], sent=stages[i][a].values())
                        for a in view.actors
                    }
                )
            came = arrivals(view, stages[i])
            folds = {
                a: [
                    schedule.task(
                        [view.memory(a, (p + 1) * size)],
                        after=[*came[a], *folds[a]],
                        sent=stages[-1][a].values(),
                    )
                ]
                for a in view.actors
            }


def two_shot(view: View, geometry: Geometry) -> None:
    """Stage slices i + 1, fold slice i into all slots, gather slices i - 1 (two_shot.cuh)."""
    machine, schedule = view.machine, view.schedule
    p = machine.nranks
    reads = (p + 1) / (p - 1)  # of p inputs, and the own output's write, for p - 1 pushes
    for lane_bytes in geometry.lane_bytes():
        slices = [each / p for each in pieces(lane_bytes, p * geometry.step_bytes / geometry.lanes)]
        rounds = len(slices)
        stages = [{a: push(view, a, slices[0], delay_us=machine.launch_us) for a in view.actors}]
        folds: list[Pushes] = []
        gathers: dict[int, list[int]] = {a: [] for a in view.actors}
        for i in range(rounds + 1):
            if i + 1 < rounds:
                stages.append(
                    {
                        a: push(
                            view, a, slices[i + 1], after=gathers[a], sent=stages[i][a].values()
                        )
                        for a in view.actors
                    }
                )
            if i < rounds:
                came = arrivals(view, stages[i])
                folds.append(
                    {
                        a: push(
                            view,
                            a,
                            slices[i],
                            reads=reads,
                            after=[*came[a], *gathers[a]],
                            sent=stages[-1][a].values(),
                        )
                        for a in view.actors
                    }
                )
            if i > 0:
                came = arrivals(view, folds[i - 1])
                gathers = {
                    a: [
                        schedule.task(
                            [view.memory(a, 2 * (p - 1) * slices[i - 1])],
                            after=[*came[a], *gathers[a]],
                            sent=folds[-1][a].values(),
                        )
                    ]
                    for a in view.actors
                }


def two_shot_direct(view: View, geometry: Geometry) -> None:
    """Meet, load slices of all inputs and store the fold to all outputs as it comes, meet."""
    machine, schedule = view.machine, view.schedule
    p = machine.nranks
    met_us = machine.launch_us + (machine.net_us if machine.nodes > 1 else machine.hop_us)
    for lane_bytes in geometry.lane_bytes():
        # The fold streams; eight parts are enough for loads and stores to overlap.
        for part in pieces(lane_bytes / p, lane_bytes / p / 8):
            for a in view.actors:
                # Loads come while earlier packs are stored: their latency is not waited for again.
                loads = [
                    schedule.task(
                        [view.memory(peer, part * many), *view.way(peer, a, part * many)],
                        delay_us=met_us,
                    )
                    for peer, many in view.peers(a, local=False)
                ]
                for peer, many in view.peers(a, local=False):
                    schedule.task(
                        [*view.way(a, peer, part * many), view.memory(peer, part * many)],
                        sent=loads,
                    )
