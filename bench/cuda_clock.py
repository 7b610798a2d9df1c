"""Times calls on GPUs: back to back by CUDA events, one by one by a host that waits for each.

Knows nothing of dtypes, libraries or tables.

Back to back (throughput interval): after an untimed call, which no rank leaves before all have
come, every rank's stream gets an event, the calls, and another event. The interval between calls
counts, whether the GPU or the host that enqueues them is what limits it.

One by one (latency of a dependent chain): the host enqueues a call and waits for its stream before
it enqueues the next. So the time contains the launch and the way back to the host.

With graphs, calls are captured once for each rank and replayed. NOTE graphs of one process. Ranks
wait for each other on the GPU, and launching a graph may wait for its own GPU; so each rank's graph
is launched from a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module

from .cuda_place import CudaPlace
from .measure import Timed
from .ranks import Ranks

__all__ = ["CudaClock"]

Launch = Callable[[], Any]


class CudaClock:
    """See measure.Clock. Keeps the graphs of its cases, so it should last no longer than they."""

    def __init__(self, ranks: Ranks, place: CudaPlace, *, graph_calls: int) -> None:
        """A clock.

        Args:
            ranks: who is timed.
            place: their GPUs.
            graph_calls: calls of one graph; 0: no graphs. Iterations are a multiple of it.
        """
        self._ranks, self._place, self._graph_calls = ranks, place, graph_calls
        self._cupy = cupy_module()
        self._graphs: dict[tuple[int, int], list[Any]] = {}

    def back_to_back(self, case: Timed, iterations: int) -> float:
        """See Clock."""
        self._begin(case)
        with self._place.entered():
            if self._graph_calls:
                graphs = self._captured(case, self._graph_calls)
                intervals = self._launched(graphs, iterations // self._graph_calls)
            else:
                intervals = self._enqueued(case, iterations)
        self._place.wait()
        seconds = max(self._cupy.cuda.get_elapsed_time(*each) for each in intervals) / 1e3
        return float(self._ranks.slowest(np.array([seconds / iterations]))[0])

    def one_by_one(self, case: Timed, calls: int) -> list[float]:
        """See Clock."""
        self._begin(case)
        seconds = np.zeros((len(self._place.streams), calls))
        with self._place.entered():
            if self._graph_calls:
                graphs = self._captured(case, 1)

                def chain(local: int) -> None:
                    stream = self._place.streams[local]
                    self._chain(lambda: graphs[local].launch(stream), [stream], seconds[local])

                self._on_each_rank(chain)
            else:
                self._chain(case.call, self._place.streams, seconds[0])
        self._place.wait()
        return [float(slowest) for slowest in self._ranks.slowest(seconds.max(axis=0))]

    def _begin(self, case: Timed) -> None:
        self._place.wait()
        case.write()
        self._ranks.barrier()

    def _enqueued(self, case: Timed, iterations: int) -> list[tuple[Any, Any]]:
        """Events of each local rank around calls that this thread enqueues."""
        call = case.call
        call()
        starts = [self._event(local) for local in range(len(self._place.streams))]
        for _ in range(iterations):
            call()
        stops = [self._event(local) for local in range(len(self._place.streams))]
        return list(zip(starts, stops, strict=True))

    def _launched(self, graphs: list[Any], launches: int) -> list[tuple[Any, Any]]:
        """The same around launches of graphs; the untimed one is a whole graph."""
        intervals: list[Any] = [None] * len(graphs)

        def run(local: int) -> None:
            graph, stream = graphs[local], self._place.streams[local]
            graph.launch(stream)
            start = self._event(local)
            for _ in range(launches):
                graph.launch(stream)
            intervals[local] = (start, self._event(local))

        self._on_each_rank(run)
        return intervals

    def _chain(self, launch: Launch, streams: list[Any], seconds: np.ndarray[Any, Any]) -> None:
        for i in range(-1, len(seconds)):
            start = time.perf_counter()
            launch()
            for stream in streams:
                stream.synchronize()
            if i >= 0:  # the first lets ranks meet
                seconds[i] = time.perf_counter() - start

    def _event(self, local: int) -> Any:
        with self._cupy.cuda.Device(self._place.ordinals[local]):
            event = self._cupy.cuda.Event()
            event.record(self._place.streams[local])
        return event

    def _on_each_rank(self, run: Callable[[int], None]) -> None:
        """Runs it for every local rank, in a thread each; see NOTE graphs of one process."""
        problems: list[BaseException] = []

        def guarded(local: int) -> None:
            try:
                with (
                    cuda_errors("launching graphs"),
                    self._cupy.cuda.Device(self._place.ordinals[local]),
                ):
                    run(local)
            except BaseException as error:
                problems.append(error)

        threads = [
            threading.Thread(target=guarded, args=(local,))
            for local in range(1, len(self._place.streams))
        ]
        for thread in threads:
            thread.start()
        guarded(0)
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def _captured(self, case: Timed, calls: int) -> list[Any]:
        """A graph of so many calls for each local rank. The case must have been called before."""
        key = (id(case), calls)
        if key not in self._graphs:
            streams, begun = self._place.streams, 0
            with cuda_errors("capturing a graph"):
                try:
                    for local, stream in enumerate(streams):
                        with self._cupy.cuda.Device(self._place.ordinals[local]):
                            stream.begin_capture()
                        begun += 1
                    for _ in range(calls):
                        case.call()
                except BaseException:
                    for stream in streams[:begun]:
                        with contextlib.suppress(Exception):
                            stream.end_capture()
                    raise
                self._graphs[key] = [stream.end_capture() for stream in streams]
        return self._graphs[key]
