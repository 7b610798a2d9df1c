"""Turns the reports that ranks leave when they give up into errors that people can act on.

Knows nothing of how a call runs; it reads what the kernels wrote.
"""

from __future__ import annotations

from gpuallreduce.algorithms import BY_NAME
from gpuallreduce.args import (
    ABORTED,
    CALL,
    CLOSED,
    CREDIT,
    LOST,
    MISMATCH,
    TIMED_OUT,
    GarHeader,
    GarReport,
)
from gpuallreduce.bootstrap.peers import Labels
from gpuallreduce.errors import Aborted, Error, MismatchError, Timeout
from gpuallreduce.memory import LINE_BYTES, Segments
from gpuallreduce.plan import decode_header
from gpuallreduce.transport import Transport

__all__ = ["explain"]

# What came first hides behind what it caused: a mismatch makes others time out, a dead peer makes
# others abort.
_PRIORITY = (MISMATCH, LOST, CLOSED, ABORTED, TIMED_OUT)


def _call(header: GarHeader) -> str:
    fields = decode_header(header, tuple(BY_NAME))
    collective = fields.pop("collective")
    sequence = fields.pop("sequence")
    return f"call {sequence}: {collective}({', '.join(f'{k}={v}' for k, v in fields.items())})"


def _differences(mine: GarHeader, theirs: GarHeader) -> str:
    a = decode_header(mine, tuple(BY_NAME))
    b = decode_header(theirs, tuple(BY_NAME))
    # Calls of different kinds have different fields.
    return ", ".join(name for name in a if a[name] != b.get(name)) or "order of the calls"


_HINTS = {
    "access": "arrays from comm.empty must be used on every rank or on none",
    "arrangement": "it stands for the memory layout (C or Fortran order, ...), the offset in a "
    "comm.empty buffer, and the counts of arrays fused in one call",
}


def _hints(names: str) -> str:
    hints = [f"\n{name}: {hint}" for name, hint in _HINTS.items() if name in names]
    return "".join(hints)


def _mismatch(reporter: int, report: GarReport, labels: Labels) -> Error:
    names = _differences(report.mine, report.theirs)
    return MismatchError(
        f"the ranks did not make the same call; they differ in {names}:\n"
        f"  {labels.rank(reporter)}: {_call(report.mine)}\n"
        f"  {labels.rank(report.peer)}: {_call(report.theirs)}\n"
        "make the same calls with the same arguments in the same order on every rank"
        f"{_hints(names)}"
    )


def _absent(report: GarReport, waiting: int, segments: Segments) -> list[int]:
    """Ranks that have not entered the call that `waiting` is in (its channel's call lines tell)."""
    layout, sequence = segments.layout, report.mine.sequence
    absent = []
    for peer in range(layout.nranks):
        if peer == waiting:
            continue
        number = (report.channel * 2 + (sequence & 1)) * layout.nranks + peer
        seen = segments.word(waiting, layout.calls + number * LINE_BYTES)
        if (seen - sequence) % (1 << 64) >= 1 << 63:
            absent.append(peer)
    return absent


def _waiting(reporter: int, report: GarReport, segments: Segments, labels: Labels) -> str:
    absent = _absent(report, reporter, segments) if report.word == CALL else []
    where = f"{labels.rank(reporter)} was in {_call(report.mine)}, channel {report.channel}"
    if report.word == CALL:
        missing = absent or [int(report.peer)]
        return f"{where}; {labels.names(missing)} did not make this call"
    what = "a free slot (credit)" if report.word == CREDIT else "data (ready)"
    return (
        f"{where}; it waited for {what} of step {report.step} from {labels.rank(report.peer)}: "
        f"expected {report.expected}, last seen {report.seen}"
    )


def explain(
    reports: dict[int, GarReport], segments: Segments, transport: Transport, labels: Labels
) -> Error:
    """The error that says best why the ranks gave up.

    Args:
        reports: by reporting rank, as found in a local rank's segment.
        segments: to read who has entered the call.
        transport: knows which processes are gone.
        labels: what people call the ranks.
    """
    gone = list(transport.lost())
    fate = f" The process of {labels.names(gone)} is gone." if gone else ""
    for code in _PRIORITY:
        for reporter, report in reports.items():
            marked = code in (LOST, CLOSED) and report.mine.sequence == 0  # a mark, not a report
            if report.code != code or marked:
                continue
            waiting = _waiting(reporter, report, segments, labels)
            if code == MISMATCH:
                return _mismatch(reporter, report, labels)
            if code in (LOST, CLOSED):
                end = (
                    "has closed its communicator"
                    if code == CLOSED
                    else "is gone: its process has ended"
                )
                return Aborted(f"{labels.rank(report.peer)} {end}; {waiting}")
            if code == ABORTED and report.mine.sequence == 0:
                return Aborted(f"{labels.rank(reporter)} aborted the communicator.{fate}")
            if code == ABORTED:
                return Aborted(f"{labels.rank(reporter)} was interrupted: {waiting}.{fate}")
            return Timeout(
                f"gave up after {report.elapsed_ns / 1e9:.3g} s: {waiting}.{fate} "
                "If the rank is only slow, raise timeout="
            )
    return Aborted(f"a rank gave up without a report.{fate}")
