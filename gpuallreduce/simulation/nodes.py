"""hierarchical as schedules: reduce-scatter inside each node, the exchange of shards across nodes,
all-gather inside; chunk by chunk.

Knows nothing of machines but through a View, nor of how a call's geometry was decided.
"""

from __future__ import annotations

from gpuallreduce.simulation.geometry import Geometry, pieces
from gpuallreduce.simulation.shots import Pushes, arrivals, push
from gpuallreduce.simulation.view import View

__all__ = ["hierarchical_any", "hierarchical_rank"]

Tasks = dict[int, list[int]]  # by actor


def _scatter(view: View, shard: float, previous: Pushes) -> Pushes:
    """Every rank hands each of its node's ranks the shard that it folds."""
    return {
        a: push(
            view,
            a,
            shard,
            local=True,
            sent=previous[a].values() if previous else (),
            delay_us=0.0 if previous else view.machine.launch_us,
        )
        for a in view.actors
    }


def _gather(view: View, shard: float, results: Tasks) -> None:
    """Every rank hands its node's ranks the result of its shard; each copies them to its output."""
    g = view.machine.gpus
    pushes = {a: push(view, a, shard, local=True, after=results[a]) for a in view.actors}
    came = arrivals(view, pushes)
    for a in view.actors:
        view.schedule.task(
            [view.memory(a, 2 * (g - 1) * shard)],
            after=[*came[a], *results[a]],
        )


def hierarchical_any(view: View, geometry: Geometry) -> None:
    """Order any: across nodes a ring all-reduce of each shard, 2 (m - 1) steps of 1/m of it. The
    engine's calls follow each other on one stream, so a chunk's begins when the last one's has
    ended everywhere.
    """
    machine, schedule = view.machine, view.schedule
    m, g = machine.nodes, machine.gpus
    scattered: Pushes = {}
    engine: Tasks = {a: [] for a in view.actors}
    for size in pieces(geometry.nbytes, geometry.step_bytes):
        shard = size / g
        scattered = _scatter(view, shard, scattered)
        came = arrivals(view, scattered)
        folded = {
            a: schedule.task(
                [view.memory(a, (g + 1) * shard)],
                after=came[a],
                delay_us=0.0 if g > 1 else machine.launch_us,
            )
            for a in view.actors
        }
        if m > 1:
            engine = _ring_of_nodes(view, shard / m, folded, engine)
        _gather(view, shard, engine if m > 1 else {a: [folded[a]] for a in view.actors})


def _ring_of_nodes(view: View, part: float, folded: dict[int, int], engine: Tasks) -> Tasks:
    machine, schedule = view.machine, view.schedule
    m, g, p = machine.nodes, machine.gpus, machine.nranks
    came: dict[int, int] = {}
    for j in range(2 * (m - 1)):
        came = {
            a: schedule.task(
                [
                    view.memory(a, (2 if j < m - 1 else 1) * part),
                    *view.way(a, (a + g) % p, part),
                    view.memory((a + g) % p, part),
                ],
                after=[came[view.seat((a - g) % p)[0]]] if came else [folded[a], *engine[a]],
                sent=[came[a]] if came else (),
                delay_us=0.0 if came else machine.engine_us,
            )
            for a in view.actors
        }
    return {a: [came[view.seat((a - g) % p)[0]]] for a in view.actors}


def hierarchical_rank(view: View, geometry: Geometry) -> None:
    """Rank order: a shard's partial goes from node to node, each folds its ranks onto it, and the
    result goes back the same way.
    """
    machine = view.machine
    scattered: Pushes = {}
    for size in pieces(geometry.nbytes, geometry.step_bytes):
        shard = size / machine.gpus
        scattered = _scatter(view, shard, scattered)
        _gather(view, shard, _there_and_back(view, shard, geometry.wide, scattered))


def _there_and_back(view: View, shard: float, wide: float, scattered: Pushes) -> Tasks:
    machine, schedule = view.machine, view.schedule
    m, g = machine.nodes, machine.gpus
    came = arrivals(view, scattered)
    partial: dict[int, int] = {}
    results: Tasks = {}
    for a in view.actors:  # by node, so a - g has been seen to
        node = a // g
        last = node == m - 1
        reads = g * shard + (wide * shard if node else 0.0) + (shard if last else 0.0)
        moved = [] if last else view.way(a, a + g, wide * shard)
        task = schedule.task(
            [view.memory(a, reads), *moved],
            after=[*came[a], *([partial[a - g]] if node else [])],
            delay_us=0.0 if g > 1 or node else machine.launch_us,
        )
        partial[a] = task
        if last:
            results[a] = [task]
    for a in reversed(view.actors):
        if a // g > 0:
            back = [view.memory(a, shard), *view.way(a, a - g, shard), view.memory(a - g, shard)]
            results[a - g] = [schedule.task(back, after=results[a])]
    return results
