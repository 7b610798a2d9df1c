"""ring as schedules: order any (one ring, or rings that leave nodes by all GPUs), rank order as a
chain.

Knows nothing of machines but through a View, nor of how a call's geometry was decided.
"""

from __future__ import annotations

from gpuallreduce.simulation.geometry import Geometry, pieces
from gpuallreduce.simulation.machine import Machine
from gpuallreduce.simulation.view import View

__all__ = ["chain", "ring"]

Sends = dict[tuple[int, int], int]  # by actor and lane: its last task


def _before_and_next(machine: Machine, rank: int, lane: int, rotated: bool) -> tuple[int, int]:
    """A rank's neighbours in the ring of a lane. Rotated: lane k enters each node at GPU k + 1 and
    leaves it at GPU k.
    """
    m, g = machine.nodes, machine.gpus
    node, local = divmod(rank, g)
    first = (lane + 1) % g if rotated else 0
    place = (local - first) % g
    before = (node, (local - 1) % g) if place > 0 else ((node - 1) % m, (first - 1) % g)
    following = (node, (local + 1) % g) if place < g - 1 else ((node + 1) % m, first)
    return before[0] * g + before[1], following[0] * g + following[1]


def _meet_us(machine: Machine) -> float:
    """Until a rank has seen that all have entered the call."""
    return machine.launch_us + (machine.net_us if machine.nodes > 1 else machine.hop_us)


def ring(view: View, geometry: Geometry) -> None:
    """Patarasuk & Yuan's ring, step by step as in ring.cuh: send, recv_reduce_send,
    recv_reduce_copy_send, recv_copy_send, recv. Slots are taken to be enough.
    """
    machine, schedule = view.machine, view.schedule
    p, lanes = machine.nranks, geometry.lanes
    steps = p - 1 if geometry.phase_steps is None else geometry.phase_steps
    seats = [(actor, lane) for actor in view.actors for lane in range(lanes)]
    ways = {
        (actor, lane): _before_and_next(machine, actor, lane, view.rotated) for actor, lane in seats
    }
    before = {seat: view.seat(ways[seat][0], seat[1]) for seat in seats}
    last: dict[tuple[int, int], list[int]] = {seat: [] for seat in seats}
    for size in pieces(geometry.nbytes / lanes, p * geometry.step_bytes / lanes):
        chunk = size / p
        came: Sends = {}
        for j in range(2 * steps):
            # What its memory does beside sending: reads of slot and input, the output's write.
            local = 1 if j == 0 else 2 if j < steps else 3 if j == steps else 2
            sends: Sends = {}
            for actor, lane in seats:
                seat = actor, lane
                target = ways[seat][1]
                sends[seat] = schedule.task(
                    [
                        view.memory(actor, local * chunk),
                        *view.way(actor, target, chunk),
                        view.memory(target, chunk),
                    ],
                    after=[came[before[seat]]] if came else last[seat],
                    sent=[came[seat]] if came else (),
                    delay_us=0.0 if came or last[seat] else _meet_us(machine),
                )
            came = sends
        last = {
            seat: [
                schedule.task(
                    [view.memory(seat[0], 2 * chunk)], after=[came[before[seat]]], sent=[came[seat]]
                )
            ]
            for seat in seats
        }


def chain(view: View, geometry: Geometry) -> None:
    """Partials from rank 0 to the last, results on round: ring_in_rank_order in ring.cuh. A block
    reduces chunk i, then passes on the result of chunk i - nranks. Slots are taken to be enough.
    """
    p = view.machine.nranks
    for lane_bytes in geometry.lane_bytes():
        sizes = pieces(lane_bytes, geometry.step_bytes / geometry.lanes)
        partials: dict[tuple[int, int], int] = {}
        results: dict[tuple[int, int], int] = {}
        block: list[int | None] = [None] * p
        for i in range(len(sizes) + p):
            if i < len(sizes):
                for rank in range(p):
                    task = _reduce(
                        view, geometry, rank, sizes[i], partials.get((rank - 1, i)), block
                    )
                    (results if rank == p - 1 else partials)[rank, i] = task
            if 0 <= (k := i - p) < len(sizes):
                for rank in range(p - 1):
                    results[rank, k] = _pass_on(
                        view, rank, sizes[k], results[(rank - 1) % p, k], block
                    )


def _reduce(
    view: View,
    geometry: Geometry,
    rank: int,
    size: float,
    partial: int | None,
    block: list[int | None],
) -> int:
    """One hop of partials; the last rank's is the first of results."""
    p, wide = view.machine.nranks, geometry.wide
    last = rank == p - 1
    reads = size + (wide * size if rank > 0 else 0.0) + (size if last else 0.0)
    moved = size if last else wide * size
    previous = block[rank]
    block[rank] = view.schedule.task(
        [view.memory(rank, reads), *view.way(rank, (rank + 1) % p, moved)],
        after=[] if partial is None else [partial],
        sent=[] if previous is None else [previous],
        delay_us=_meet_us(view.machine) if previous is None and partial is None else 0.0,
    )
    return block[rank]  # type: ignore[return-value]


def _pass_on(view: View, rank: int, size: float, result: int, block: list[int | None]) -> int:
    """A result arrives, is kept and goes on; rank p - 2 is the last to get it."""
    way = view.way(rank, rank + 1, size) if rank + 2 < view.machine.nranks else []
    previous = block[rank]
    assert previous is not None
    block[rank] = view.schedule.task(
        [view.memory(rank, 2 * size), *way], after=[result], sent=[previous]
    )
    return block[rank]  # type: ignore[return-value]
