"""When stages on the streams of one GPU began and ended, for a trace.

Knows nothing of what the stages do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module, on_device
from gpuallreduce.tracing import Trace

__all__ = ["Stamps"]

MOST_PENDING = 1 << 16  # older stages are dropped; each holds two events


class Stamps:
    """Records stages by CUDA events; the host waits for nothing while they run.

    NOTE times of a GPU. Events are timed from one that was recorded while the host looked at its
    clock. CUDA tells milliseconds as a float32, so that one is renewed whenever all work has ended:
    within a minute of it times are good to 4 us. A graph's events have no time of their own, so its
    stages are not to be recorded.
    """

    def __init__(self, trace: Trace, ordinal: int) -> None:
        """For streams of one GPU."""
        self._trace, self._ordinal = trace, ordinal
        self._cupy = cupy_module()
        with on_device(ordinal), cuda_errors("making a stream"):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._pending: deque[tuple[Any, Any, str, bool, dict[str, int]]] = deque(
            maxlen=MOST_PENDING
        )
        self._renew()

    def _renew(self) -> None:
        with on_device(self._ordinal), cuda_errors("recording an event"):
            self._base = self._cupy.cuda.Event()
            self._base.record(self._stream)
            self._base.synchronize()
        self._base_ns = time.perf_counter_ns()

    @contextmanager
    def stage(self, stream: Any, name: str, *, message: bool, **values: int) -> Iterator[None]:
        """Records what the block enqueues on a stream.

        Args:
            stream: where.
            name: of the stage.
            message: it may overlap others in any way.
            values: what a viewer shows of it.
        """
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(stream)
        yield
        end.record(stream)
        self._pending.append((begin, end, name, message, values))

    def settle(self) -> None:
        """Hands what was recorded to the trace; all of it has ended, or never will."""
        elapsed = self._cupy.cuda.get_elapsed_time
        with on_device(self._ordinal), cuda_errors("reading when stages ran"):
            while self._pending:
                begin, end, name, message, values = self._pending.popleft()
                if end.done:
                    at = [self._base_ns + int(elapsed(self._base, e) * 1e6) for e in (begin, end)]
                    self._trace.add(name, at[0], at[1], message=message, **values)
        self._renew()
