"""Runs one case on a communicator and says what was wrong with it.

Knows nothing of which cases there are, of processes or of how findings are shown.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce.checks import Deviation, first_difference, worst_deviation
from gpuallreduce.communicator import Communicator
from gpuallreduce.errors import Error, NotSupported
from gpuallreduce.validation.buffers import Arena, Buffers
from gpuallreduce.validation.cases import VARIANTS, Case
from gpuallreduce.validation.oracle import Expectation, Oracle

__all__ = ["Finding", "Outcome", "run_case"]

NO_DEVIATION = Deviation(0.0, 0.0, 0.0)

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Finding:
    """One thing that was wrong.

    Attributes:
        check: ``exact`` (inputs that reduce without rounding), ``reference`` (bits of inputs that
            round), ``ranks`` (bits differ between ranks), ``repeat`` (bits differ between calls),
            ``error`` (beyond its bound), ``guard`` (written outside), ``input`` (modified),
            ``refusal`` (not refused) or ``raised``.
        message: what and where.
    """

    check: str
    message: str


@dataclass
class Outcome:
    """What a case showed.

    Attributes:
        findings: at most one for each check.
        deviation: the worst error beside its bound.
        digest: of the result on the local rank, which must be that of all ranks; None where ranks
            get different results.
        broken: whether the communicator may be unusable now.
    """

    findings: list[Finding] = field(default_factory=list)
    deviation: Deviation = NO_DEVIATION
    digest: str | None = None
    broken: bool = False

    def note(self, check: str, message: str | None, *, rank: int | None = None) -> None:
        """Adds a finding unless there is no message or the check has one."""
        if message is not None and all(finding.check != check for finding in self.findings):
            where = "" if rank is None else f"rank {rank}: "
            self.findings.append(Finding(check, where + message))


def run_case(
    communicator: Communicator, case: Case, oracle: Oracle, arena: Arena | None = None
) -> Outcome:
    """Makes the case's calls and looks at everything they left behind.

    Args:
        communicator: where to run; every rank of it runs the same cases in the same order.
        case: what to run.
        oracle: for as many ranks.
        arena: memory that peers can address, for direct access between processes.
    """
    outcome = Outcome()
    try:
        if case.refused:
            _refusal(communicator, case, outcome)
        elif case.collective == "barrier":
            communicator.barrier()
        else:
            _results(communicator, case, oracle, outcome, arena)
    except Error as error:
        outcome.note("raised", f"{type(error).__name__}: {error}")
        outcome.broken = True
    return outcome


def _refusal(communicator: Communicator, case: Case, outcome: Outcome) -> None:
    count = case.count * (communicator.nranks if case.collective == "reduce_scatter" else 1)
    arrays = [np.zeros(count, case.dtype) for _ in communicator.ranks]
    with contextlib.suppress(NotSupported):
        _call(communicator, case, arrays, None)
        outcome.note("refusal", "the call was made; NotSupported was expected")


def _results(
    communicator: Communicator, case: Case, oracle: Oracle, outcome: Outcome, arena: Arena | None
) -> None:
    if case.reduces:
        expected = oracle.exact(case)
        buffers = _round(communicator, case, expected, outcome, arena)
        _compare(buffers, expected, "exact", outcome)
    expected = oracle.random(case)
    buffers = _round(communicator, case, expected, outcome, arena)
    _compare(buffers, expected, "reference", outcome)
    _deviate(buffers, expected, outcome)
    first = [x.copy() for x in buffers.results()]
    if case.collective in ("allreduce", "all_gather", "broadcast"):
        for rank, result in zip(communicator.ranks[1:], first[1:], strict=True):
            outcome.note("ranks", first_difference(result, first[0]), rank=rank)
        outcome.digest = hashlib.blake2b(first[0].tobytes(), digest_size=8).hexdigest()
    buffers = _round(communicator, case, expected, outcome, arena)
    for rank, result, before in zip(communicator.ranks, buffers.results(), first, strict=True):
        outcome.note("repeat", first_difference(result, before), rank=rank)


def _round(
    communicator: Communicator,
    case: Case,
    expected: Expectation,
    outcome: Outcome,
    arena: Arena | None,
) -> Buffers:
    """One call; what must not change is checked here."""
    buffers = Buffers(case, expected.inputs, communicator.ranks, arena)
    _call(communicator, case, buffers.inputs(), None if case.in_place else buffers.results())
    for rank, message in buffers.overwritten():
        outcome.note("guard", message, rank=rank)
    for rank, message in buffers.modified():
        outcome.note("input", message, rank=rank)
    return buffers


def _call(
    communicator: Communicator, case: Case, arrays: list[Array], outs: list[Array] | None
) -> None:
    """The call itself, without a keyword that the case does not force: the short way is one too."""
    one = len(communicator.ranks) == 1
    given: Any = arrays[0] if one else arrays
    out: Any = outs if outs is None or not one else outs[0]
    if case.collective == "allreduce":
        variant = VARIANTS[case.variant]
        keywords = {"chunk_bytes": case.chunk_bytes, "nchannels": case.nchannels, **vars(variant)}
        forced = {name: value for name, value in keywords.items() if value is not None}
        communicator.allreduce(given, out, op=case.op, **forced)
    elif case.collective == "reduce":
        communicator.reduce(given, out, root=case.root, op=case.op)
    elif case.collective == "reduce_scatter":
        communicator.reduce_scatter(given, out, op=case.op)
    elif case.collective == "all_gather":
        communicator.all_gather(given, out)
    else:
        communicator.broadcast(given, root=case.root)


def _compare(buffers: Buffers, expected: Expectation, check: str, outcome: Outcome) -> None:
    """Bits of every local result against what they are to be, where that is known."""
    for rank, result, right in buffers.expected(expected.result):
        if right is not None:
            outcome.note(check, first_difference(result, right), rank=rank)


def _deviate(buffers: Buffers, expected: Expectation, outcome: Outcome) -> None:
    """Errors against the real value."""
    if expected.value is None or expected.bound is None:
        return
    values = buffers.expected(expected.value)
    bounds = buffers.expected(expected.bound)
    for (rank, result, value), (_, _, bound) in zip(values, bounds, strict=True):
        assert value is not None
        assert bound is not None
        deviation = worst_deviation(result, value, bound)
        if deviation.fraction > outcome.deviation.fraction:
            outcome.deviation = deviation
        if deviation.fraction > 1:
            message = f"error {deviation.error:.3g}, bound {deviation.bound:.3g}"
            outcome.note("error", message, rank=rank)
