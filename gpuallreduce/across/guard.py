"""Ends the calls of a CUDA rank that cannot go on, and keeps the reason: nothing on a GPU waits
with a limit for another node.

Knows nothing of what calls move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gpuallreduce.across.cuda_moves import CudaMoves
from gpuallreduce.across.in_step import GRACE_S, InStep
from gpuallreduce.across.line import Line
from gpuallreduce.across.progress import Progress
from gpuallreduce.across.watch import Watch
from gpuallreduce.args import GarHeader
from gpuallreduce.errors import Aborted, DeviceError, Error, MismatchError, Timeout
from gpuallreduce.fabric.nccl_ending import Endable, abort_together
from gpuallreduce.orchestrator import Orchestrator

__all__ = ["Guard"]

PAUSE_S = 0.01


class Guard:
    """Watches over the calls of one rank, on a thread of its own.

    NOTE the end of calls. On a GPU a message waits for its peer for ever, and kernels behind it
    never begin, so their limits do not count. This thread sees how far the GPU has come, what other
    ranks told, and what NCCL found. It first tells NCCL to end (NOTE aborts of NCCL), then ends the
    node's ranks, then lets the GPU go on (NOTE halts of nodes.cuh).

    Attributes:
        connecting: whether the rank's host waits for others, with a limit of its own.
    """

    def __init__(
        self,
        in_step: InStep,
        orchestrator: Orchestrator,
        *,
        line: Line | None,
        moves: CudaMoves,
        progress: Progress,
        explain: Callable[[int, GarHeader, GarHeader], str],
        awaited: str,
        interrupt: Callable[[], None],
        busy: Callable[[], bool],
    ) -> None:
        """For a rank.

        Args:
            in_step: what others told, and to tell others.
            orchestrator: of this node's ranks.
            line: of a rank that owns a shard.
            moves: all ranks' connection.
            progress: of this rank.
            explain: what to say of a neighbour's call that differs: number 0 or 1, this rank's
                header and its.
            awaited: names of the ranks that this one waits for.
            interrupt: makes this rank's host wait for others no more.
            busy: whether calls that were enqueued have not ended.
        """
        self._timeout: float | None = 0.0  # shorter than any
        self._busy = busy
        self.connecting = False
        self._in_step, self._orchestrator = in_step, orchestrator
        self._line, self._moves, self._progress = line, moves, progress
        self._explain, self._awaited, self._interrupt = explain, awaited, interrupt
        self._failure: Error | None = None
        self._failing = threading.RLock()
        self._ended = False
        self._state: tuple[int, ...] = ()
        self._since = time.monotonic()
        self._watch = Watch(self.look)
        orchestrator.reason = self._reason

    def set_timeout(self, timeout: float | None) -> None:
        """Seconds that one wait of the next call may last; None: no limit. While others run, what
        they were given holds too, if it is longer.
        """
        longer = self._timeout is None or (timeout is not None and timeout < self._timeout)
        if longer and timeout is not None and self._busy():
            return
        self._timeout = timeout

    def start(self) -> None:
        """Begins to watch. Idempotent."""
        self._watch.start()

    def stop(self) -> None:
        """Ends it; no call may be running."""
        self._watch.stop()

    def fail(self, error: BaseException) -> None:
        """Ends the calls of all ranks. Idempotent; from any thread."""
        with self._failing:
            if isinstance(error, Error):
                self._failure = self._failure or error
            if self._ended:
                return
            self._ended = True
            self._in_step.give_up(error)
            self._interrupt()
            self._progress.stop()
            connections: list[Endable] = [self._moves]
            if self._line is not None:
                connections.append(self._line)
            abort_together(connections, self._let_go)

    def _let_go(self) -> None:
        if not self._orchestrator.aborted:
            self._orchestrator.abort()
        self._progress.halt()

    def conclude(self, error: Error) -> Error:
        """Ends the calls of all ranks after a call could not be enqueued; why, as far as known."""
        with self._failing:
            known = self._failure
            if known is None and isinstance(error, DeviceError):
                known = self.better(error)
            elif known is None and isinstance(error, Aborted) and self._orchestrator.aborted:
                known = self._orchestrator.diagnose()
            known = known or error
            self.fail(known)
        return known

    def _reason(self, error: Error) -> Error:
        """What this thread knows, or other ranks told, says more than that a call ended."""
        if self._failure is not None and isinstance(error, Aborted):
            return self._failure
        return self._in_step.reason(error)

    def look(self) -> bool:
        """Ends the calls if they cannot go on; False: they have been ended. From any thread."""
        with self._failing:
            try:
                self._in_step.listen()
                if self._orchestrator.aborted:
                    self.fail(self._orchestrator.diagnose())
                    return False
                self._look_at_nccl()
                self._look_at(self._progress)
            except Error as error:
                self.fail(error)
                return False
            except Exception as error:  # what nobody thought of must not leave ranks waiting
                self.fail(DeviceError(f"looking after calls failed: {error!r}"))
                return False
        return True

    def _look_at_nccl(self) -> None:
        try:
            if self._line is not None:
                self._line.check()
            self._moves.check()
        except DeviceError as error:
            raise self.better(error) from error

    def better(self, error: Error) -> Error:
        """What is known otherwise of a fault that NCCL has found: often a rank that is gone, before
        news of it come.
        """
        end = time.monotonic() + 2 * GRACE_S
        self._in_step.starts_to_wait()
        while time.monotonic() < end:
            try:
                self._in_step.look()
            except Error as known:
                return known
            time.sleep(PAUSE_S)
        return error

    def _look_at(self, progress: Progress) -> None:
        found = progress.differing()
        if found is not None:
            raise MismatchError(self._explain(*found))
        state, now = progress.state(), time.monotonic()
        if state != self._state or not progress.waiting():
            self._state, self._since = state, now
            self._in_step.starts_to_wait()
            return
        self._in_step.look()
        if self._timeout is None or self.connecting:
            return
        begun, met, folded, gathered, _ = state
        # See NOTE who gives up first.
        limit = self._timeout + (GRACE_S if met < begun else 0)
        if self._line is None or progress.meeting():
            limit = 2 * self._timeout + GRACE_S
        if now - self._since <= limit:
            return
        if met < begun:
            raise Timeout(f"waited {limit:g} s for {self._awaited} to make the same call")
        if progress.meeting():
            raise Timeout(f"waited {limit:g} s for all ranks to make the same call")
        others = f"a message from {self._awaited}" if self._awaited else "the other ranks"
        raise Timeout(
            f"waited {limit:g} s for {others}: of the present call this node has folded {folded} "
            f"chunks, and {gathered} have come finished"
        )
