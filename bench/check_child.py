"""Runs a command for a limited time, and brings back what it said.

Knows nothing of what it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Done", "run_child"]

GRACE_S = 5.0  # from asking it to end to ending it
LAST_S = 2.0  # for the system to end it; one inside a driver may not go


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        status: its exit status, negative for a signal; None: its time ran out.
        seconds: how long it ran.
        stdout, stderr: what it said.
    """

    status: int | None
    seconds: float
    stdout: str
    stderr: str


def run_child(
    command: Sequence[str], *, limit_s: float, environ: Mapping[str, str], cwd: Path | None = None
) -> Done:
    """Runs a command in a session of its own. It never lasts much longer than its limit.

    Args:
        command: program and arguments.
        limit_s: seconds until it is ended. It is interrupted a little before, as by Ctrl-C, so that
            it can write what it has.
        environ: its variables.
        cwd: its working folder.
    """
    grace = min(GRACE_S, limit_s / 5)
    start = time.monotonic()
    # Files, not pipes: grandchildren may hold them open, and nobody has to read on.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**environ, "PYTHONUNBUFFERED": "1"},  # what it said when it is ended is here
            cwd=cwd,
            start_new_session=True,
        )
        try:
            status = _wait(process, limit_s - grace)
            if status is None:
                _signal(process, signal.SIGINT)
                _wait(process, grace)
        finally:
            _signal(process, signal.SIGKILL)  # what it started as well
            _wait(process, LAST_S)
        seconds = time.monotonic() - start
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Done(status, seconds, *texts)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
