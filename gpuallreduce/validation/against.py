"""Gives the same inputs to this library and to NCCL on the same GPUs, and compares what comes out.

Knows nothing of NCCL beyond the name under which a communicator offers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce.accuracy import exact
from gpuallreduce.checks import Deviation, first_difference, worst_deviation
from gpuallreduce.communicator import Communicator
from gpuallreduce.errors import NotSupported
from gpuallreduce.inputs import exact_inputs, random_inputs
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.buffers import Buffers
from gpuallreduce.validation.cases import Case
from gpuallreduce.validation.places import Place

__all__ = ["Comparison", "Row", "as_json", "as_text", "comparable", "compare"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

NO_ERROR = Deviation(0.0, 0.0, 0.0)
NCCL: dict[str, Any] = {"algorithm": "nccl", "order": "any"}


@dataclass
class Row:
    """What was compared for one dtype.

    Attributes:
        cases: all-reduces.
        exact: of these, cases whose inputs reduce without rounding, in NCCL's way too.
        unequal: of these, cases where values differ; with where.
        ours, theirs: the worst errors beside the bound of ours; inputs that round only.
        agree: whether all of NCCL's ranks held the same bits.
        repeats: whether a second call of NCCL gave the same bits.
    """

    cases: int = 0
    exact: int = 0
    unequal: list[str] = field(default_factory=list)
    ours: Deviation = NO_ERROR
    theirs: Deviation = NO_ERROR
    agree: bool = True
    repeats: bool = True


@dataclass
class Comparison:
    """A whole comparison.

    Attributes:
        rows: by dtype.
        lacking: by dtype the operators that NCCL does not have for it, and we do.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    lacking: dict[str, list[str]] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether results were equal where they must be."""
        return not any(row.unequal for row in self.rows.values())


def comparable(cases: Iterable[Case]) -> list[Case]:
    """One all-reduce for each dtype, operator and count among cases."""
    found = {
        replace(case, in_place=False, offset=0): None
        for case in cases
        if case.collective == "allreduce" and case.variant == "auto" and not case.refused
    }
    return list(found)


def compare(
    communicator: Communicator,
    place: Place,
    cases: Iterable[Case],
    *,
    seed: int,
    tick: Callable[[Case], None] = lambda case: None,
) -> Comparison:
    """Runs cases by us and by NCCL.

    Args:
        communicator: all ranks of this process, on CUDA devices.
        place: of its arrays.
        cases: see ``comparable``.
        seed: of the inputs.
        tick: called after each case.
    """
    comparison = Comparison()
    for case in cases:
        if case.op not in comparison.lacking.get(case.dtype, ()):
            try:
                _Pair(communicator, place, case, seed).run(comparison)
            except NotSupported:
                comparison.lacking.setdefault(case.dtype, []).append(case.op)
        tick(case)
    return comparison


@dataclass(frozen=True)
class _Pair:
    """One case, by us and by NCCL."""

    communicator: Communicator
    place: Place
    case: Case
    seed: int

    def run(self, comparison: Comparison) -> None:
        """Adds to a comparison.

        Raises:
            NotSupported: NCCL lacks the pair of dtype and operator.
        """
        case, nranks = self.case, self.communicator.nranks
        dtype, op = DTYPES[case.dtype], OPS[case.op]
        # NCCL rounds partial sums to elements, and divides every input before it adds.
        like = OPS["sum"] if case.op == "avg" else op
        plain = exact_inputs(dtype, like, case.count, nranks, self.seed)
        theirs, ours, _ = self._calls(plain)
        row = comparison.rows.setdefault(case.dtype, Row())
        row.cases += 1
        if case.op != "avg" or nranks & (nranks - 1) == 0:
            row.exact += 1
            for result in (*theirs, *ours[1:]):
                if not np.array_equal(result, ours[0]):
                    row.unequal.append(
                        f"{case.op}, {case.count} elements: {first_difference(result, ours[0])}"
                    )
                    break
        if dtype.kind not in ("float", "complex"):
            return
        inputs = random_inputs(dtype, op, case.count, nranks, self.seed)
        theirs, ours, again = self._calls(inputs)
        value, bound = exact(inputs, case.op)
        row.ours = max(row.ours, worst_deviation(ours[0], value, bound))
        row.theirs = max(row.theirs, *(worst_deviation(each, value, bound) for each in theirs))
        row.agree &= all(first_difference(each, theirs[0]) is None for each in theirs)
        pairs = zip(theirs, again, strict=True)
        row.repeats &= all(first_difference(one, two) is None for one, two in pairs)

    def _calls(self, inputs: list[Array]) -> tuple[list[Array], list[Array], list[Array]]:
        """What NCCL gives, what we give, and what NCCL gives again: on every rank."""
        place, ranks = self.place, self.communicator.ranks
        place.begin(shared=False)
        rounds = [Buffers(self.case, inputs, ranks, place) for _ in range(3)]
        place.bring()
        for buffers, how in zip(rounds, (NCCL, {}, NCCL), strict=True):
            arrays, outs = buffers.given()
            self.communicator.allreduce(arrays, outs, op=self.case.op, **how, **place.keywords)
        place.fetch()
        first, second, third = ([x.copy() for x in each.results()] for each in rounds)
        return first, second, third


def as_text(comparison: Comparison) -> str:
    """A table of dtypes, what is unequal, and what NCCL lacks."""
    lines = [
        f"# {'':<13}  {'':>5}  {'inputs that do not round':^24}  "
        f"{'inputs that round: worst error / our bound':^44}",
        f"# {'dtype':<13}  {'cases':>5}  {'compared':>12}{'unequal':>12}  "
        f"{'ours':>10}{'NCCL':>10}{'ranks agree':>13}{'repeats':>11}",
    ]
    for dtype, row in comparison.rows.items():
        line = f"  {dtype:<13}  {row.cases:>5}  {row.exact:>12}{len(row.unequal):>12}"
        if DTYPES[dtype].kind in ("float", "complex"):
            line += f"  {row.ours.fraction:>10.3g}{row.theirs.fraction:>10.3g}"
            line += f"{_yes(row.agree):>13}{_yes(row.repeats):>11}"
        lines.append(line)
    for dtype, row in comparison.rows.items():
        if row.unequal:
            lines.append(f"FAIL {dtype}: {len(row.unequal)} unequal; {row.unequal[0]}")
    if comparison.lacking:
        count = sum(map(len, comparison.lacking.values()))
        parts = [f"{dtype} ({' '.join(ops)})" for dtype, ops in comparison.lacking.items()]
        lines.append(f"# {count} pairs of dtype and operator NCCL lacks: {', '.join(parts)}")
    return "\n".join(lines)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The same as data."""
    return {
        "succeeded": comparison.succeeded,
        "dtypes": {
            dtype: {
                "cases": row.cases,
                "exact": row.exact,
                "unequal": row.unequal,
                "ours": _plain(row.ours),
                "nccl": _plain(row.theirs),
                "nccl_ranks_agree": row.agree,
                "nccl_repeats": row.repeats,
            }
            for dtype, row in comparison.rows.items()
        },
        "lacking": comparison.lacking,
    }


def _plain(worst: Deviation) -> dict[str, float | str]:
    """JSON has no infinity."""
    return {name: x if np.isfinite(x) else str(x) for name, x in worst._asdict().items()}


def _yes(value: bool) -> str:
    return "yes" if value else "no"
