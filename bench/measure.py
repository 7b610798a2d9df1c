"""Times calls, back to back and one by one, in rounds that take turns between libraries.

Knows nothing of dtypes, libraries or tables.

Back to back (throughput): every process writes its input, meets the others at a barrier, makes one
untimed call (so that leaving the barrier is not timed), then times many calls in a row. In place,
each call's input is the last one's output, so this is also the time of a dependent chain.

One by one (latency): every process writes its input, meets the others and times a single call. So
it contains how far apart the ranks leave the barrier, and the data are in their writer's cache, as
they are after real work.

Either way the slowest rank's time counts, and the median over all rounds. This is how host devices
are timed; CUDA devices have a clock of their own.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from .ranks import Ranks

__all__ = [
    "Clock",
    "HostClock",
    "Settings",
    "Timed",
    "Timing",
    "busbw_factor",
    "calls_per_round",
    "measure",
    "summary",
]

LATENCY_CALLS = (5, 200)  # least and most in a round


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        warmup: untimed calls at first.
        iterations: a round has a multiple of this many calls.
        rounds: timed rounds.
        round_s: a round lasts at least about this many seconds.
        latency: whether to measure it.
    """

    warmup: int
    iterations: int
    rounds: int
    round_s: float
    latency: bool


@dataclass(frozen=True)
class Timing:
    """What was measured of one library, out of place or in place.

    Attributes:
        time_us: of one call, back to back: median over rounds of the slowest rank's time.
        rounds_us: that time in every round.
        iterations: calls of a round.
        latency_us: of one call that the host waits for: median over all calls of the slowest rank's
            time.
        latency_min_us, latency_p99_us: the fastest call, and what 99 of 100 calls do not exceed.
    """

    time_us: float
    rounds_us: tuple[float, ...]
    iterations: int
    latency_us: float | None = None
    latency_min_us: float | None = None
    latency_p99_us: float | None = None


class Timed(Protocol):
    """Something to time."""

    @property
    def call(self) -> Callable[[], Any]:
        """Makes one call."""

    def write(self) -> None:
        """Writes this process's inputs anew."""


class Clock(Protocol):
    """How calls of one kind of device are timed; see the module for the two ways."""

    def back_to_back(self, case: Timed, iterations: int) -> float:
        """Seconds of one of many calls in a row, on the slowest rank. A collective."""

    def one_by_one(self, case: Timed, calls: int) -> list[float]:
        """Seconds of each of some calls, on the slowest rank. A collective."""


def busbw_factor(collective: str, nranks: int) -> float:
    """What turns algbw into a figure to compare with a link's rate, for any number of ranks."""
    factors = {
        "all_reduce": 2 * (nranks - 1) / nranks,
        "reduce_scatter": (nranks - 1) / nranks,
        "all_gather": (nranks - 1) / nranks,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    return factors[collective]


def calls_per_round(seconds_per_call: float, settings: Settings) -> int:
    """The least multiple of ``iterations`` that lasts a round."""
    batch = max(seconds_per_call, 1e-9) * settings.iterations
    return settings.iterations * max(1, math.ceil(settings.round_s / batch))


def latency_calls(seconds_per_call: float, settings: Settings) -> int:
    """Latency calls in a round: about as long as its other half."""
    least, most = LATENCY_CALLS
    return min(most, max(least, math.ceil(settings.round_s / max(seconds_per_call, 1e-9))))


def summary(rounds_s: Sequence[float], iterations: int, latencies_s: Sequence[float]) -> Timing:
    """Medians and extremes of what the slowest rank needed, in microseconds."""
    rounds_us = tuple(1e6 * seconds for seconds in rounds_s)
    time_us = float(np.median(rounds_us))
    if len(latencies_s) == 0:
        return Timing(time_us, rounds_us, iterations)
    latencies_us = 1e6 * np.asarray(latencies_s)
    return Timing(
        time_us,
        rounds_us,
        iterations,
        latency_us=float(np.median(latencies_us)),
        latency_min_us=float(latencies_us.min()),
        latency_p99_us=float(np.percentile(latencies_us, 99)),
    )


def measure(
    cases: Sequence[Timed],
    clock: Clock,
    settings: Settings,
    *,
    round_done: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Times all cases in turn, round after round, so that a disturbance meets all of them.

    A collective: all processes call it with the same cases.
    """
    with _no_garbage_collection():
        paces = [_pace(case, clock, settings) for case in cases]
        times: list[list[float]] = [[] for _ in cases]
        latencies: list[list[float]] = [[] for _ in cases]
        for _ in range(settings.rounds):
            for i, (case, pace) in enumerate(zip(cases, paces, strict=True)):
                times[i].append(clock.back_to_back(case, calls_per_round(pace, settings)))
                if settings.latency:
                    latencies[i] += clock.one_by_one(case, latency_calls(pace, settings))
            round_done()
    return [
        summary(times[i], calls_per_round(pace, settings), latencies[i])
        for i, pace in enumerate(paces)
    ]


def _pace(case: Timed, clock: Clock, settings: Settings) -> float:
    """Seconds of one call, roughly; the same on all ranks, so that they make equally many."""
    case.write()
    for _ in repeat(None, settings.warmup):
        case.call()
    return clock.back_to_back(case, settings.iterations)


class HostClock:
    """Calls that are complete on return, timed by the processor's clock."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def back_to_back(self, case: Timed, iterations: int) -> float:
        """See Clock."""
        call = case.call
        case.write()
        self._ranks.barrier()
        call()
        start = time.perf_counter()
        for _ in repeat(None, iterations):
            call()
        stop = time.perf_counter()
        return float(self._ranks.slowest(np.array([(stop - start) / iterations]))[0])

    def one_by_one(self, case: Timed, calls: int) -> list[float]:
        """See Clock."""
        seconds = np.empty(calls)
        for i in range(calls):
            case.write()
            self._ranks.barrier()
            start = time.perf_counter()
            case.call()
            seconds[i] = time.perf_counter() - start
        return [float(slowest) for slowest in self._ranks.slowest(seconds)]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
