"""What a whole run showed: failures brought together, each with the smallest case that shows it.

Knows nothing of where cases run or of how a summary is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuallreduce.validation.cases import Case, smaller
from gpuallreduce.validation.run import Outcome
from gpuallreduce.validation.runners import Runner

__all__ = ["Failure", "Summary", "validate"]

_SHRUNK_FAILURES = 10  # a broken machine fails everywhere, and a few small cases tell as much


@dataclass(frozen=True)
class Failure:
    """Cases of one collective, dtype, operator and variant that failed.

    Attributes:
        ncases: how many of the run's cases.
        case: the smallest that is known to fail.
        outcome: what it showed.
    """

    ncases: int
    case: Case
    outcome: Outcome


@dataclass(frozen=True)
class Summary:
    """What a run showed.

    Attributes:
        ranks: what they were, in words.
        level, seed: as asked.
        results: each case that was run, and its outcome.
        not_run: cases that were not run because the ranks ended.
        failures: one for each group of cases.
        seconds: how long it took.
    """

    ranks: str
    level: str
    seed: int
    results: Sequence[tuple[Case, Outcome]]
    not_run: int
    failures: Sequence[Failure]
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether everything was run and right."""
        return not self.failures and not self.not_run


def validate(
    runner: Runner,
    cases: Sequence[Case],
    *,
    level: str,
    seed: int,
    tick: Callable[[Case], None] = lambda case: None,
) -> Summary:
    """Runs cases, looks for smaller ones that fail too, and sums up.

    Args:
        runner: where to run.
        cases: what to run.
        level, seed: what the cases and the runner were made for.
        tick: called after each case.
    """
    begin = time.monotonic()
    results: list[tuple[Case, Outcome]] = []
    for case, outcome in zip(cases, runner.run(cases), strict=False):
        results.append((case, outcome))
        tick(case)
    failures = _failures(runner, results)
    return Summary(
        ranks=runner.describe(),
        level=level,
        seed=seed,
        results=results,
        not_run=len(cases) - len(results),
        failures=failures,
        seconds=time.monotonic() - begin,
    )


def _failures(runner: Runner, results: Sequence[tuple[Case, Outcome]]) -> list[Failure]:
    groups: dict[tuple[str, ...], list[tuple[Case, Outcome]]] = {}
    for case, outcome in results:
        if outcome.findings:
            groups.setdefault(case.group, []).append((case, outcome))
    failures = []
    for index, members in enumerate(groups.values()):
        found = min(members, key=lambda member: member[0].count)
        if index < _SHRUNK_FAILURES and not found[0].refused:
            found = _smallest(runner, *found)
        failures.append(Failure(len(members), *found))
    return failures


def _smallest(runner: Runner, case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    candidates = list(smaller(case))
    for candidate, shown in zip(candidates, runner.run(candidates), strict=False):
        if shown.findings:
            return candidate, shown
    return case, outcome
