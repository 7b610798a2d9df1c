"""The processes of a job: started, watched and ended together, with all that they started.

Knows nothing of rank variables or cores beyond passing them on.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuallreduce.bootstrap.interrupts import Interrupts
from gpuallreduce.bootstrap.output import Printer

__all__ = ["Job"]

_DRAIN_SECONDS = 0.5
_POLL_SECONDS = 0.05  # only for kernels that cannot tell of a child's end (before Linux 5.3)
_TIMED_OUT = 124  # as timeout(1)
_HERE = Path(__file__).parent
_INTERPRETER = [sys.executable, "-I", "-S"]  # isolated and bare: starts in milliseconds


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


def _others(ranks: int) -> str:
    return "rank" if ranks == 1 else f"{ranks} ranks"


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@dataclass
class _Child:
    """The process of one rank. ``status`` as in ``Popen.returncode``, None while it runs."""

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int | None
    status: int | None = None

    def look(self) -> bool:
        """Whether it has just ended.

        It is not reaped: while it is there, its number cannot become that of another process
        group, so that a signal to the group only reaches what this rank started.
        """
        if self.status is not None:
            return False
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        result = os.waitid(os.P_PID, self.process.pid, options)
        if result is None:
            return False
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else -result.si_status
        return True

    def signal_group(self, number: int) -> None:
        """Sends a signal to it and to what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class Job:
    """The processes of all ranks."""

    def __init__(self, interrupts: Interrupts, grace: float) -> None:
        """Starts none yet.

        Args:
            interrupts: signals that are passed on to the ranks.
            grace: seconds between asking them to end and killing them.
        """
        self.verdict = ""
        self._interrupts = interrupts
        self._grace = grace
        self._children: list[_Child] = []
        self._result = 0
        self._kill_at: float | None = None
        self._ending = False
        self._printer = Printer()
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts, selectors.EVENT_READ)
        self._selector.register(self._printer, selectors.EVENT_READ)
        self._guard = subprocess.Popen(
            [*_INTERPRETER, str(_HERE / "guard.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        core: int | None,
        prefix: bool,
        targets: tuple[int, int],
    ) -> None:
        """Starts the next rank, on one core, with its output and errors going to ``targets``."""
        rank = len(self._children)
        starter = [*_INTERPRETER, str(_HERE / "child.py"), str(os.getpid()), str(core).lower()]
        pipes = [os.pipe(), os.pipe()] if prefix else []
        try:
            process = subprocess.Popen(
                [*starter, *command],
                env=environ,
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=pipes[0][1] if prefix else targets[0],
                stderr=pipes[1][1] if prefix else targets[1],
                start_new_session=True,
            )
        finally:
            for (pipe, end), target in zip(pipes, targets, strict=False):
                os.close(end)
                self._printer.add(pipe, rank=rank, target=target)
        child = _Child(rank, process, None)
        self._children.append(child)
        self._tell_guard(f"{process.pid}\n")
        with contextlib.suppress(AttributeError, OSError):
            child.pidfd = os.pidfd_open(process.pid)
            self._selector.register(child.pidfd, selectors.EVENT_READ)

    def wait(self, timeout: float | None) -> int:
        """Waits for all; returns the status of the whole job."""
        end = None if timeout is None else time.monotonic() + timeout
        while running := [child for child in self._children if child.status is None]:
            times = [at - time.monotonic() for at in (end, self._kill_at) if at is not None]
            times += [_POLL_SECONDS] if any(child.pidfd is None for child in running) else []
            self._selector.select(max(0.0, min(times)) if times else None)
            self._printer.read()
            for number in self._interrupts.take():
                self._interrupted(number)
            for child in [child for child in running if child.look()]:
                self._ended(child)
            now = time.monotonic()
            if end is not None and now >= end:
                end = None
                self._time_is_up(timeout or 0.0)
            if self._kill_at is not None and now >= self._kill_at:
                self._end_all(signal.SIGKILL)
        self._end_all(signal.SIGKILL)  # what the ranks started and left behind
        self._printer.drain(_DRAIN_SECONDS)
        return self._result

    def close(self) -> None:
        """Ends and reaps whatever is left, and closes all descriptors."""
        self._end_all(signal.SIGKILL)
        for child in self._children:
            child.process.wait()
            if child.pidfd is not None:
                os.close(child.pidfd)
        self._tell_guard(".\n")
        with contextlib.suppress(OSError):
            self._guard.communicate()
        self._guard.wait()
        self._printer.close()
        self._selector.close()

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        # If somebody killed the guard, the ranks run on: it only matters if we are killed too.
        with contextlib.suppress(OSError, ValueError):
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()

    def _ended(self, child: _Child) -> None:
        if child.pidfd is not None:
            self._selector.unregister(child.pidfd)
        status = child.status or 0
        if status == 0 or self._ending:
            return
        self._result = status if status > 0 else 128 - status
        how = f"exited with status {status}"
        if status < 0:
            how = f"was ended by {_signal_name(-status)}"
        left = [other for other in self._children if other.status is None]
        if len(self._children) == 1:
            self.verdict = f"rank {child.rank} {how}" if status < 0 else ""
        elif len(left) == len(self._children) - 1:
            self.verdict = f"rank {child.rank} {how} first; ended the other {_others(len(left))}"
        else:
            self.verdict = f"rank {child.rank} {how} first; ended {_count(len(left))} still running"
        self._end_all(signal.SIGTERM)

    def _time_is_up(self, timeout: float) -> None:
        if self._ending:
            return
        left = [str(child.rank) for child in self._children if child.status is None]
        if not left:
            return
        self._result = _TIMED_OUT
        self.verdict = (
            f"the time of {timeout:g} s was up; ended rank{'' if len(left) == 1 else 's'} "
            f"{', '.join(left)}"
        )
        self._end_all(signal.SIGTERM)

    def _interrupted(self, number: int) -> None:
        if self._ending:  # asked twice: no more patience
            self._end_all(signal.SIGKILL)
            return
        self._result = 128 + number
        self._end_all(number)

    def _end_all(self, number: int) -> None:
        self._ending = True
        self._kill_at = None if number == signal.SIGKILL else time.monotonic() + self._grace
        for child in self._children:
            child.signal_group(number)
