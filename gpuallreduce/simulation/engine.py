"""The discrete-event model: tasks that pass links in turn, each link a server with a rate and a
latency.

Knows nothing of GPUs, ranks or algorithms.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Outcome", "Schedule", "run"]

Visit = tuple[int, float]  # a link and the bytes that pass it


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule.

    Attributes:
        time_us: when the last task ended.
        ends_us: when each task ended: its last byte has arrived.
        busy_us: how long each link was busy, by its key.
    """

    time_us: float
    ends_us: list[float]
    busy_us: dict[Hashable, float]


class Schedule:
    """Links and tasks with what they wait for. Tasks are added after those they wait for."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.us_per_byte: list[float] = []
        self.latency_us: list[float] = []
        self.way_us: list[float] = []
        self.visits: list[Sequence[Visit]] = []
        self.delay_us: list[float] = []
        self.waits: list[int] = []
        self.after_end: list[list[int]] = []
        self.after_sent: list[list[int]] = []

    def link(self, key: Hashable, gbps: float, latency_us: float) -> int:
        """Adds a link; returns its number."""
        self.keys.append(key)
        self.us_per_byte.append(1e-3 / gbps)
        self.latency_us.append(latency_us)
        return len(self.keys) - 1

    def task(
        self,
        visits: Sequence[Visit] = (),
        *,
        after: Iterable[int] = (),
        sent: Iterable[int] = (),
        delay_us: float = 0.0,
    ) -> int:
        """Adds a task; returns its number.

        Args:
            visits: the links that its bytes pass, in order.
            after: tasks that must have ended.
            sent: tasks whose bytes must have left: their latency is not waited for.
            delay_us: from then until it begins.
        """
        number = len(self.visits)
        self.visits.append(visits)
        self.way_us.append(sum([self.latency_us[link] for link, _ in visits]))
        self.delay_us.append(delay_us)
        self.after_end.append([])
        self.after_sent.append([])
        count = 0
        for each in after:
            self.after_end[each].append(number)
            count += 1
        for each in sent:
            self.after_sent[each].append(number)
            count += 1
        self.waits.append(count)
        return number


def run(schedule: Schedule) -> Outcome:
    """Plays a schedule.

    NOTE cut-through, first come first served. A task's first byte reaches its next link as soon as
    the link before begins with it; its last byte leaves a link when that link has served it and the
    link before has let it go; the latencies of all its links pass before it has ended. A link
    serves tasks whole, in the order in which their first bytes come, and is never idle while one
    waits; so many equal tasks share a link fairly over time, and a link's total is exact whatever
    the order.
    """
    us_per_byte, way_us = schedule.us_per_byte, schedule.way_us
    free, busy = [0.0] * len(us_per_byte), [0.0] * len(us_per_byte)
    waits, ready = list(schedule.waits), [0.0] * len(schedule.waits)
    ends = [0.0] * len(waits)
    # (when, task, how many links it has passed, when its last byte left the last of them)
    events = [(schedule.delay_us[i], i, 0, 0.0) for i, count in enumerate(waits) if count == 0]
    heapq.heapify(events)
    push, pop = heapq.heappush, heapq.heappop
    while events:
        now, task, passed, tail = pop(events)
        visits, sent = schedule.visits[task], now
        if visits:
            link, amount = visits[passed]
            begin = max(now, free[link])
            service = amount * us_per_byte[link]
            free[link] = begin + service
            busy[link] += service
            sent = max(begin + service, tail)
            if passed + 1 < len(visits):
                push(events, (begin, task, passed + 1, sent))
                continue
        ends[task] = sent + way_us[task]
        for followers, when in (
            (schedule.after_end[task], ends[task]),
            (schedule.after_sent[task], sent),
        ):
            for follower in followers:
                waits[follower] -= 1
                if when > ready[follower]:
                    ready[follower] = when
                if waits[follower] == 0:
                    push(events, (ready[follower] + schedule.delay_us[follower], follower, 0, 0.0))
    return Outcome(max(ends, default=0.0), ends, dict(zip(schedule.keys, busy, strict=True)))
