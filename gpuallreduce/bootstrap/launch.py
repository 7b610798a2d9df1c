"""Starts a job's processes on this machine, one per rank, and ends all of them together.

Knows nothing of what they do, nor of how they meet beyond the variables it sets.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence

from gpuallreduce.bootstrap.environment import ADDRESS, LOCAL_RANK, NRANKS, RANK, SECRET
from gpuallreduce.bootstrap.interrupts import Interrupts
from gpuallreduce.bootstrap.job import Job
from gpuallreduce.errors import InvalidArgument

__all__ = ["launch"]


def launch(
    nranks: int,
    command: Sequence[str],
    *,
    bind: bool | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
    prefix: bool | None = None,
    grace: float = 5.0,
    stdout: int = 1,
    stderr: int = 2,
) -> int:
    """Runs ``command`` once per rank and waits for all.

    Each process finds its rank in the ``GPUALLREDUCE_*`` variables that ``identify`` reads, and is
    the leader of a session of its own. When one fails, when the time is up or when this process
    gets SIGINT, SIGTERM or SIGHUP, all are ended, with what they started; when this process is
    killed, the kernel and a guard process do it. Rank 0 has this process's standard input.

    Args:
        nranks: number of processes.
        command: program and arguments.
        bind: give each rank a core of its own; by default where there are enough.
        environ: variables of the ranks; by default this process's.
        timeout: seconds until all are ended.
        prefix: put ``[rank] `` before every line; by default with more than one rank. Python ranks
            then do not buffer their output, unless ``PYTHONUNBUFFERED`` is set to the empty text.
        grace: seconds between asking the ranks to end and killing them.
        stdout: descriptor for what the ranks print.
        stderr: descriptor for their errors, and for one line on who failed first.

    Returns:
        0 if all succeeded; the status of the rank that failed first, 128 + n for signal n (also
        one that this process got); 124 when the time was up.

    Raises:
        InvalidArgument: no command, no rank, or more ranks than cores with ``bind=True``.
    """
    if isinstance(nranks, bool) or not isinstance(nranks, int) or nranks < 1:
        raise InvalidArgument(f"nranks must be an integer of at least 1, found {nranks!r}")
    if not command:
        raise InvalidArgument("there is no command to run")
    cores = _cores(nranks, bind)
    variables = dict(os.environ if environ is None else environ)
    variables[ADDRESS] = f"unix:gpuallreduce-run-{secrets.token_hex(16)}"
    variables[SECRET] = secrets.token_hex(32)
    if prefix is None:
        prefix = nranks > 1
    if prefix:
        variables.setdefault("PYTHONUNBUFFERED", "1")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # what we printed before comes first
    with Interrupts() as interrupts, contextlib.closing(Job(interrupts, grace)) as job:
        for rank, core in enumerate(cores):
            own = {RANK: str(rank), NRANKS: str(nranks), LOCAL_RANK: str(rank)}
            targets = (stdout, stderr)
            job.start(command, {**variables, **own}, core=core, prefix=prefix, targets=targets)
        try:
            status = job.wait(timeout)
        except BrokenPipeError:  # nobody reads our output any more
            return 128 + signal.SIGPIPE
    if job.verdict:
        with contextlib.suppress(OSError):
            os.write(stderr, f"gpuallreduce run: {job.verdict}\n".encode())
    return status


def _cores(nranks: int, bind: bool | None) -> list[int | None]:
    available = sorted(os.sched_getaffinity(0))
    if bind is False or (bind is None and nranks > len(available)):
        return [None] * nranks
    if nranks > len(available):
        raise InvalidArgument(
            f"{nranks} ranks cannot have a core each: {len(available)} are available; start fewer "
            "ranks or do not bind"
        )
    return list(available[:nranks])
