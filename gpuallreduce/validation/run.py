"""Runs one case on a communicator and says what was wrong with it.

Knows nothing of which cases there are, of processes or of how findings are shown.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce.checks import Deviation, first_difference, worst_deviation
from gpuallreduce.communicator import Communicator
from gpuallreduce.errors import Error, NotSupported
from gpuallreduce.types import DTYPES
from gpuallreduce.validation.buffers import Buffers
from gpuallreduce.validation.cases import VARIANTS, Case
from gpuallreduce.validation.oracle import Expectation, Oracle
from gpuallreduce.validation.places import HostPlace, Place

__all__ = ["Finding", "Outcome", "refused_because", "run_case"]

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
        left_out: why the case cannot be run on these ranks; empty if it was.
    """

    findings: list[Finding] = field(default_factory=list)
    deviation: Deviation = NO_DEVIATION
    digest: str | None = None
    broken: bool = False
    left_out: str = ""

    def note(self, check: str, message: str | None, *, rank: int | None = None) -> None:
        """Adds a finding unless there is no message or the check has one."""
        if message is not None and all(finding.check != check for finding in self.findings):
            where = "" if rank is None else f"rank {rank}: "
            self.findings.append(Finding(check, where + message))


def run_case(
    communicator: Communicator, case: Case, oracle: Oracle, place: Place | None = None
) -> Outcome:
    """Makes the case's calls and looks at everything they left behind.

    Args:
        communicator: where to run; every rank of it runs the same cases in the same order.
        case: what to run.
        oracle: for as many ranks.
        place: where arrays lie; None: in host memory of this process.
    """
    outcome = Outcome()
    place = HostPlace(communicator, shared=False) if place is None else place
    if VARIANTS[case.variant].access == "direct" and not (case.refused or place.direct):
        return Outcome(left_out="no rank can address another's arrays")
    try:
        if case.refused:
            if not refused_because(communicator, case, place):
                outcome.note("refusal", "the call was made; NotSupported was expected")
        elif case.collective == "barrier":
            communicator.barrier()
        else:
            _Trial(communicator, case, outcome, place).run(oracle)
    except Error as error:
        outcome.note("raised", f"{type(error).__name__}: {error}")
        outcome.broken = True
    return outcome


def refused_because(communicator: Communicator, case: Case, place: Place) -> str:
    """Makes a case's call, whose result is not looked at: why it is refused, empty if it is not."""
    count = case.count * (communicator.nranks if case.collective == "reduce_scatter" else 1)
    dtype, nlocal = DTYPES[case.dtype].numpy, len(communicator.ranks)
    arrays = [place.blank(local, count, dtype) for local in range(nlocal)]
    try:
        _call(communicator, case, arrays, None, place.keywords)
        communicator.synchronize()
    except NotSupported as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _Trial:
    """One case that is to give results."""

    communicator: Communicator
    case: Case
    outcome: Outcome
    place: Place

    def run(self, oracle: Oracle) -> None:
        """Three calls, one after the other without a look in between: inputs that do not round,
        inputs that do, and these again.
        """
        case, outcome, ranks = self.case, self.outcome, self.communicator.ranks
        self.place.begin(shared=VARIANTS[case.variant].access == "direct")
        exact = oracle.exact(case) if case.reduces else None
        random = oracle.random(case)
        given = [each for each in (exact, random, random) if each is not None]
        rounds = [Buffers(case, each.inputs, ranks, self.place) for each in given]
        self.place.bring()
        for buffers in rounds:
            _call(self.communicator, case, *buffers.given(), self.place.keywords)
        self.place.fetch()
        for buffers in rounds:
            self._look_around(buffers)
        if exact is not None:
            _compare(rounds[0], exact, "exact", outcome)
        *_, first, again = rounds
        _compare(first, random, "reference", outcome)
        _deviate(first, random, outcome)
        results = first.results()
        if case.collective in ("allreduce", "allreduce_many", "all_gather", "broadcast"):
            for rank, result in zip(ranks[1:], results[1:], strict=True):
                outcome.note("ranks", first_difference(result, results[0]), rank=rank)
            outcome.digest = hashlib.blake2b(results[0].tobytes(), digest_size=8).hexdigest()
        for rank, result, before in zip(ranks, again.results(), results, strict=True):
            outcome.note("repeat", first_difference(result, before), rank=rank)

    def _look_around(self, buffers: Buffers) -> None:
        """What must not change."""
        for rank, message in buffers.overwritten():
            self.outcome.note("guard", message, rank=rank)
        for rank, message in buffers.modified():
            self.outcome.note("input", message, rank=rank)


def _call(
    communicator: Communicator,
    case: Case,
    arrays: list[Any],
    outs: list[Any] | None,
    keywords: Mapping[str, Any],
) -> None:
    """The call itself, without a keyword that neither the case nor the place of its arrays forces:
    the short way is one too.
    """
    one = len(communicator.ranks) == 1
    given: Any = arrays[0] if one else arrays
    out: Any = outs if outs is None or not one else outs[0]
    if case.collective == "allreduce":
        variant = VARIANTS[case.variant]
        forced = {"chunk_bytes": case.chunk_bytes, "nchannels": case.nchannels, **vars(variant)}
        forced = {name: value for name, value in forced.items() if value is not None}
        communicator.allreduce(given, out, op=case.op, **forced, **keywords)
    elif case.collective == "allreduce_many":
        parts = [_parts(array) for array in arrays]
        communicator.allreduce_many(parts[0] if one else parts, op=case.op, **keywords)
    elif case.collective == "reduce":
        communicator.reduce(given, out, root=case.root, op=case.op, **keywords)
    elif case.collective == "reduce_scatter":
        communicator.reduce_scatter(given, out, op=case.op, **keywords)
    elif case.collective == "all_gather":
        communicator.all_gather(given, out, **keywords)
    else:
        communicator.broadcast(given, root=case.root, **keywords)


def _parts(array: Any) -> list[Any]:
    """An array in parts of many sizes, one of them empty."""
    count = len(array)
    ends = (0, *(min(end, count) for end in (1, 1, 6)), max(min(6, count), count // 3), count)
    return [array[start:end] for start, end in itertools.pairwise(ends)]


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
