"""Records when the stages of calls ran, in the format of Chrome's and Perfetto's trace viewers.

Knows nothing of what the stages do.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuallreduce.errors import InvalidArgument, NotSupported

__all__ = ["FOLDER", "Trace", "check_traced", "trace_file", "trace_of", "trace_of_node"]

FOLDER = "GPUALLREDUCE_TRACE"
MOST_EVENTS = 1 << 20  # about 300 MiB; older ones are dropped
LOCK_S = 10.0  # that another rank may take to write
_HEAD, _BETWEEN, _TAIL = b'{"displayTimeUnit": "ns", "traceEvents": [\n', b",\n", b"\n]}\n"

_instances = itertools.count()


def trace_file(trace: str | os.PathLike[str] | None) -> Path | None:
    """The file that ranks are to write their stages to, by the argument ``trace``; emptied.

    Every rank calls this before the ranks meet, so that all have emptied it before one writes.

    Raises:
        InvalidArgument: it is no path, or cannot be written.
    """
    if trace is None:
        return None
    if not isinstance(trace, str | os.PathLike) or not os.fspath(trace):
        raise InvalidArgument(f"trace must be the path of a file to write, found {trace!r}")
    path = Path(trace).absolute()
    try:
        path.write_bytes(b"")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(
            f"trace={str(trace)!r} cannot be written: {reason}; name a file in a folder that is "
            "there and writable"
        ) from None
    return path


def trace_of(
    environ: Mapping[str, str],
    *,
    node: int,
    node_name: str,
    rank: int,
    file: Path | None = None,
) -> Trace | None:
    """A trace of one rank, if one is asked for; else None.

    Args:
        environ: ``GPUALLREDUCE_TRACE`` may name a folder; then each rank has a file of its own.
        node, node_name, rank: whose stages these are.
        file: from ``trace_file``; wins.
    """
    if file is not None:
        return Trace(file, node=node, node_name=node_name, rank=rank, shared=True)
    folder = environ.get(FOLDER)
    if not folder:
        return None
    path = Path(folder) / f"rank-{rank}.{next(_instances)}.json"
    return Trace(path, node=node, node_name=node_name, rank=rank)


def check_traced(device: str, trace: object) -> None:
    """Whether calls on one node can be recorded, where that is asked for.

    Raises:
        NotSupported: they cannot.
    """
    if trace is not None and device != "host":
        raise NotSupported(
            f"trace= with {device}: calls on GPUs of one node return once they are launched, so "
            "when they ran is not known here; use Nsight Systems, or host devices"
        )


def trace_of_node(file: Path | None, ranks: Sequence[int]) -> Trace | None:
    """A trace of calls on one node, if one is asked for; else None.

    Args:
        file: from ``trace_file``.
        ranks: of this process. Several make their calls together, so they share a line.
    """
    if file is None:
        return None
    title = None if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    name = socket.gethostname()
    return Trace(file, node=0, node_name=name, rank=ranks[0], title=title, shared=True)


class Trace:
    """What one rank did: stages of its own thread, and messages under way beside them.

    A viewer shows nodes as processes and ranks as threads. Stages follow each other or nest (events
    "X"); messages overlap in any way (events "b" and "e"). Times are of the machine's clock, so
    files of several machines fit as well as their clocks do.
    """

    def __init__(
        self,
        path: Path,
        *,
        node: int,
        node_name: str,
        rank: int,
        title: str | None = None,
        shared: bool = False,
    ) -> None:
        """Records from now on; the file is written by ``write``.

        Args:
            path: of the file.
            node, node_name, rank: whose stages these are.
            title: what a viewer calls the rank.
            shared: whether other ranks write to the file too.
        """
        self._path, self._shared = path, shared
        self._where = {"pid": node, "tid": rank}
        self._names = {"process_name": f"node {node_name}", "thread_name": title or f"rank {rank}"}
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

    def add(self, name: str, start_ns: int, end_ns: int, *, message: bool, **values: int) -> None:
        """Records what ran elsewhere, by this process's ``time.perf_counter_ns``."""
        number = next(self._messages) if message else None
        self._found.append((name, start_ns, end_ns, number, values))

    def watch(self, request: Any, name: str, **values: int) -> None:
        """Records a request of an engine, as a message that ends once it has gone well."""
        request.finish = functools.partial(
            _both, self.message(name, **values), request.finish or _nothing
        )

    def write(self) -> None:
        """Writes what was recorded; if that fails, says so on standard error.

        NOTE one file of several ranks. Ranks end when they like and wait for nobody, so each adds
        its events to the file when it ends, under a lock. Where the file system has no locks, or
        somebody holds one for too long, it writes a file of its own beside it.
        """
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": name, "args": {"name": text}, **self._where}
            for name, text in self._names.items()
        ]
        for found in list(self._found):
            events += self._events(*found)
        lines = _BETWEEN.join(json.dumps(event).encode() for event in events)
        try:
            if self._shared and _added(self._path, lines):
                return
            path = self._path
            if self._shared:
                path = path.with_name(f"{path.stem}.rank-{self._where['tid']}{path.suffix}")
                print(
                    f"gpuallreduce: {self._path} cannot be added to; wrote {path}", file=sys.stderr
                )
            _replaced(path, _HEAD + lines + _TAIL)
        except OSError as error:
            print(f"gpuallreduce: no trace was written: {error}", file=sys.stderr)

    def _events(
        self, name: str, start: int, end: int, number: int | None, values: dict[str, int]
    ) -> list[dict[str, Any]]:
        begin_us, end_us = ((self._zero_ns + at) / 1e3 for at in (start, end))
        common = {"name": name, "args": values, **self._where}
        if number is None:
            return [{"ph": "X", "ts": begin_us, "dur": end_us - begin_us, **common}]
        common |= {"cat": "message", "id2": {"local": f"{self._where['tid']}.{number}"}}
        return [{"ph": "b", "ts": begin_us, **common}, {"ph": "e", "ts": end_us, **common}]


def _added(path: Path, lines: bytes) -> bool:
    """Adds events to a file of several ranks; False if it cannot be locked, or holds other text."""
    end = time.monotonic() + LOCK_S
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        while not _locked(file.fileno()):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        length = file.seek(0, os.SEEK_END)
        if length == 0:
            file.write(_HEAD + lines + _TAIL)
            return True
        file.seek(max(0, length - len(_TAIL)))
        if file.read() != _TAIL:
            return False
        file.seek(length - len(_TAIL))
        file.write(_BETWEEN + lines + _TAIL)
        return True  # closing the file writes it out, then unlocks it


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _replaced(path: Path, text: bytes) -> None:
    """Writes a file at once; a folder that is missing is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(text)
    temporary.replace(path)


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _nothing() -> None:
    pass
