"""hierarchical as schedules: in turns, ranks fold chunk t by shards inside their node and gather a
chunk that was folded before, while others travel across nodes.

Knows nothing of machines but through a View, nor of how a call's geometry was decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuallreduce.across.chunks import lag_of, turns_of
from gpuallreduce.simulation.geometry import Geometry, pieces
from gpuallreduce.simulation.shots import arrivals, push
from gpuallreduce.simulation.view import View

__all__ = ["hierarchical_any", "hierarchical_rank"]

Tasks = dict[int, int]  # by actor: a task


class _Kernels:
    """What the ranks of a node run, one kernel after another on each: its stream."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.stream: Tasks = {}

    def reduce(self, actors: Sequence[int], shard: float, fold: float, seeds: Tasks) -> Tasks:
        """Every rank hands each of its node's ranks the shard that it folds, then folds its own.

        Args:
            actors: the ranks.
            shard: bytes of a shard.
            fold: bytes that a fold reads and writes.
            seeds: what must have come before, by actor.
        """
        return self._run(actors, shard, fold, seeds)

    def gather(self, actors: Sequence[int], shard: float, keep: float, results: Tasks) -> None:
        """Every rank hands its node's ranks the result of its shard; each copies them out.

        Args:
            actors: the ranks.
            shard: bytes of a shard.
            keep: bytes that a rank reads and writes at the end.
            results: what must have come before, by actor.
        """
        self._run(actors, shard, keep, results)

    def _run(self, actors: Sequence[int], shard: float, end: float, came: Tasks) -> Tasks:
        view, launch_us = self.view, self.view.machine.launch_us
        after = {a: self._behind(a, came) for a in actors}
        alone = view.machine.gpus == 1
        pushes = {
            a: {} if alone else push(view, a, shard, local=True, after=after[a], delay_us=launch_us)
            for a in actors
        }
        seen = arrivals(view, pushes)
        done = {
            a: view.schedule.task(
                [view.memory(a, end)],
                after=[*after[a], *seen[a]],
                sent=pushes[a].values(),
                delay_us=launch_us if alone else 0.0,
            )
            for a in actors
        }
        self.stream.update(done)
        return done

    def _behind(self, actor: int, came: Mapping[int, int]) -> list[int]:
        return [tasks[actor] for tasks in (self.stream, came) if actor in tasks]


def _overhead(view: View) -> tuple[float, float]:
    """What a message costs on its own: us before it begins; or, where each follows the others as
    soon as it can, as bytes, since its cost holds up all that go the same way.
    """
    machine = view.machine
    if not machine.messages:
        return machine.engine_us, 0.0
    share_gbps = machine.net_gbps * machine.nics / machine.gpus
    return 0.0, machine.engine_us * share_gbps * 1e3


class _Ways:
    """Messages between nodes; an engine's follow each other on each rank's stream of a way."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.stream: dict[tuple[int, int], int] = {}

    def send(self, actor: int, target: int, nbytes: float, after: Sequence[int]) -> int:
        """What arrives at another node."""
        view, key = self.view, (actor, 1 if target > actor else -1)
        follows = key in self.stream and not view.machine.messages
        before = [self.stream[key]] if follows else []
        delay_us, more = _overhead(view)
        self.stream[key] = view.schedule.task(
            [view.memory(actor, nbytes), *view.way(actor, target, nbytes + more)],
            after=after,
            sent=before,
            delay_us=delay_us,
        )
        return self.stream[key]


def hierarchical_rank(view: View, geometry: Geometry) -> None:
    """Rank order: a shard's partial goes from node to node, each folds its ranks onto it, and the
    result goes back the same way. In turn t node j folds chunk t and gathers chunk t - lag. An
    engine passes a result on when it comes, a rank that sends messages when it gathers it.
    """
    m, g, wide = view.machine.nodes, view.machine.gpus, geometry.wide
    sizes = pieces(geometry.nbytes, geometry.step_bytes)
    kernels, ways = _Kernels(view), _Ways(view)
    turns = turns_of(geometry.depth, m)
    members = [[a for a in view.actors if a // g == node] for node in range(m)]
    seeds: list[dict[int, Tasks]] = [{} for _ in range(m)]
    results: list[dict[int, Tasks]] = [{} for _ in range(m)]

    def back(actors: Sequence[int], shard: float, came: Tasks) -> Tasks:
        own = kernels.stream if view.machine.messages else {}  # their sender runs kernels too
        return {
            a - g: ways.send(a, a - g, shard, [came[a], *([own[a]] if own else [])]) for a in actors
        }

    for turn in range(len(sizes) + lag_of(0, m, turns)):
        for node, actors in enumerate(members):  # by node, so the node before has been seen to
            if turn < len(sizes):
                shard = sizes[turn] / g
                fold = (g + 2 * wide) * shard
                folded = kernels.reduce(actors, shard, fold, seeds[node].pop(turn, {}))
                if node + 1 < m:
                    seeds[node + 1][turn] = {
                        a + g: ways.send(a, a + g, wide * shard, [folded[a]]) for a in actors
                    }
                else:
                    results[node][turn] = folded
                    results[node - 1][turn] = back(actors, shard, folded)
                    for behind in range(node - 1, 0, -1) if not view.machine.messages else ():
                        came = results[behind][turn]
                        results[behind - 1][turn] = back(members[behind], shard, came)
            old = turn - lag_of(node, m, turns)
            if 0 <= old < len(sizes):
                shard, came = sizes[old] / g, results[node].pop(old)
                if 0 < node < m - 1 and view.machine.messages:
                    results[node - 1][old] = back(actors, shard, came)
                kernels.gather(actors, shard, 2 * max(1, g - 1) * shard, came)


def hierarchical_any(view: View, geometry: Geometry) -> None:
    """Order any: across nodes a ring all-reduce of each shard, 2 (m - 1) steps of 1/m of it, or of
    two nodes a swap. An engine's calls follow each other on one stream, so a chunk's begins when
    the last one's has ended everywhere; messages do not wait for each other.
    """
    machine = view.machine
    g = machine.gpus
    sizes = pieces(geometry.nbytes, geometry.step_bytes)
    kernels = _Kernels(view)
    swaps = machine.messages and machine.nodes == 2
    members = [
        [a for a in view.actors if a // g == node]
        for node in dict.fromkeys(a // g for a in view.actors)
    ]
    engine: Tasks = {}
    summed: dict[int, Tasks] = {}
    for turn in range(len(sizes) + geometry.depth):
        if turn < len(sizes):
            shard = sizes[turn] / g
            folded: Tasks = {}
            for actors in members:
                folded |= kernels.reduce(actors, shard, (g + 1) * shard, {})
            engine = _ring_of_nodes(view, shard, folded, engine, swaps=swaps)
            summed[turn] = engine
        if (old := turn - geometry.depth) >= 0:
            shard = sizes[old] / g
            keep = (2 * max(1, g - 1) + (3 if swaps else 0)) * shard
            for actors in members:
                kernels.gather(actors, shard, keep, summed[old])


def _ring_of_nodes(view: View, shard: float, folded: Tasks, engine: Tasks, *, swaps: bool) -> Tasks:
    """What each actor's shard ends with."""
    machine, schedule = view.machine, view.schedule
    m, g, p = machine.nodes, machine.gpus, machine.nranks
    steps, part = (1, shard) if swaps else (2 * (m - 1), shard / m)
    came: Tasks = {}
    sent: Tasks = {}
    delay_us, more = _overhead(view)
    for j in range(steps):
        arriving: Tasks = {}
        for a in view.actors:
            first = [folded[a]]
            if engine and not machine.messages:
                first.append(engine[a])
            arriving[a] = schedule.task(
                [
                    view.memory(a, (2 if j < m - 1 else 1) * part),
                    *view.way(a, (a + g) % p, part + (0.0 if came else more)),
                    view.memory((a + g) % p, part),
                ],
                after=[came[a]] if came else first,
                sent=[sent[a]] if sent else (),
                delay_us=0.0 if came else delay_us,
            )
        sent = arriving
        came = {a: arriving[view.seat((a - g) % p)[0]] for a in view.actors}
    return came
