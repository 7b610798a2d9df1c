"""Records when the stages of calls ran, in the format of Chrome's and Perfetto's trace viewers.

Knows nothing of what the stages do.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "Trace", "trace_of"]

FOLDER = "GPUALLREDUCE_TRACE"
MOST_EVENTS = 1 << 20  # about 300 MiB; older ones are dropped

_instances = itertools.count()


def trace_of(environ: Mapping[str, str], *, node: int, node_name: str, rank: int) -> Trace | None:
    """A trace of one rank, if ``GPUALLREDUCE_TRACE`` names a folder for it; else None."""
    folder = environ.get(FOLDER)
    if not folder:
        return None
    path = Path(folder) / f"rank-{rank}.{next(_instances)}.json"
    return Trace(path, node=node, node_name=node_name, rank=rank)


class Trace:
    """What one rank did: stages of its own thread, and messages under way beside them.

    A viewer shows nodes as processes and ranks as threads. Stages follow each other or nest (events
    "X"); messages overlap in any way (events "b" and "e"). Times are of the machine's clock, so
    files of several machines fit as well as their clocks do.
    """

    def __init__(self, path: Path, *, node: int, node_name: str, rank: int) -> None:
        """Records from now on; the file is written by ``write``."""
        self._path = path
        self._where = {"pid": node, "tid": rank}
        self._names = {"process_name": f"node {node_name}", "thread_name": f"rank {rank}"}
        self._zero_ns = time.time_ns() - time.perf_counter_ns()
        self._messages = itertools.count()
        # Appended by several threads, which a deque allows; made events when written.
        self._found: deque[tuple[str, int, int, int | None, dict[str, int]]] = deque(
            maxlen=MOST_EVENTS
        )

    @contextlib.contextmanager
    def span(self, name: str, **values: int) -> Iterator[None]:
        """Records the block as a stage."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._found.append((name, start, time.perf_counter_ns(), None, values))

    def message(self, name: str, **values: int) -> Callable[[], None]:
        """Starts a message; the call that it returns ends it, from any thread."""
        start, number = time.perf_counter_ns(), next(self._messages)

        def ended() -> None:
            self._found.append((name, start, time.perf_counter_ns(), number, values))

        return ended

    def watch(self, request: Any, name: str, **values: int) -> None:
        """Records a request of an engine, as a message that ends once it has gone well."""
        request.finish = functools.partial(
            _both, self.message(name, **values), request.finish or _nothing
        )

    def write(self) -> None:
        """Writes the file; a folder that is missing is made."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": name, "args": {"name": text}, **self._where}
            for name, text in self._names.items()
        ]
        for found in list(self._found):
            events += self._events(*found)
        document = {"traceEvents": events, "displayTimeUnit": "ns"}
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(self._path)

    def _events(
        self, name: str, start: int, end: int, number: int | None, values: dict[str, int]
    ) -> list[dict[str, Any]]:
        begin_us, end_us = ((self._zero_ns + at) / 1e3 for at in (start, end))
        common = {"name": name, "args": values, **self._where}
        if number is None:
            return [{"ph": "X", "ts": begin_us, "dur": end_us - begin_us, **common}]
        common |= {"cat": "message", "id2": {"local": f"{self._where['tid']}.{number}"}}
        return [{"ph": "b", "ts": begin_us, **common}, {"ph": "e", "ts": end_us, **common}]


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _nothing() -> None:
    pass
