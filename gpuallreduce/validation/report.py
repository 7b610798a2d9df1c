"""Shows a summary to people and to programs.

Pure formatting: knows nothing of how cases run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from gpuallreduce.checks import Deviation
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS, Case
from gpuallreduce.validation.run import Outcome
from gpuallreduce.validation.summary import Failure, Summary

__all__ = ["as_json", "as_text"]


def as_text(summary: Summary, version: str) -> str:
    """A table of dtypes and operators, the other collectives, all failures, and totals."""
    lines = [
        f"# gpuallreduce {version} validate: {summary.ranks}; {summary.level} cases, seed "
        f"{summary.seed}",
        *_table(summary),
        *_lists(summary),
    ]
    for failure in summary.failures:
        lines += _failure(failure)
    failed = sum(bool(outcome.findings) for _, outcome in summary.results)
    totals = f"# {len(summary.results)} cases, {failed} failed"
    left_out = [outcome.left_out for _, outcome in summary.results if outcome.left_out]
    if left_out:
        totals += f", {len(left_out)} left out ({left_out[0]})"
    if summary.not_run:
        totals += f", {summary.not_run} not run"
    lines.append(f"{totals}; {summary.seconds:.1f} s: {'OK' if summary.succeeded else 'FAILED'}")
    return "\n".join(lines)


def as_json(summary: Summary, version: str) -> dict[str, Any]:
    """The same as data."""
    cells = _cells(summary)
    return {
        "version": version,
        "ranks": summary.ranks,
        "level": summary.level,
        "seed": summary.seed,
        "succeeded": summary.succeeded,
        "seconds": round(summary.seconds, 3),
        "cases": len(summary.results),
        "failed": sum(bool(outcome.findings) for _, outcome in summary.results),
        "left_out": sum(bool(outcome.left_out) for _, outcome in summary.results),
        "not_run": summary.not_run,
        "allreduce": {
            dtype: {op: cells[d, op] for d, op in cells if d == dtype} for dtype, _ in cells
        },
        "worst_error": {dtype: _plain(worst) for dtype, worst in _worst(summary).items()},
        "collectives": _collectives(summary),
        "variants": _variants(summary),
        "failures": [
            {
                "ncases": failure.ncases,
                "smallest": dataclasses.asdict(failure.case),
                "findings": [dataclasses.asdict(found) for found in failure.outcome.findings],
            }
            for failure in summary.failures
        ],
        "digests": _digests(summary),
    }


def _digests(summary: Summary) -> dict[str, str]:
    """The bits of results that the numeric contract fixes, by what was asked: the same for any
    layout of as many ranks.
    """
    return {
        " ".join((case.collective, case.dtype, case.op, str(case.count), str(case.root))): (
            outcome.digest
        )
        for case, outcome in summary.results
        if outcome.digest is not None and VARIANTS[case.variant].order != "any"
    }


def _plain(worst: Deviation) -> dict[str, float | str]:
    """JSON has no infinity."""
    return {name: x if math.isfinite(x) else str(x) for name, x in worst._asdict().items()}


def _cells(summary: Summary) -> dict[tuple[str, str], str]:
    """``ok``, ``refused`` or ``FAIL`` for each pair of dtype and operator that was all-reduced."""
    cells: dict[tuple[str, str], str] = {}
    for case, outcome in summary.results:
        if case.collective == "allreduce" and not outcome.left_out:
            pair = case.dtype, case.op
            if outcome.findings or cells.get(pair) == "FAIL":
                cells[pair] = "FAIL"
            else:
                cells[pair] = "refused" if case.refused else "ok"
    return cells


def _worst(summary: Summary) -> dict[str, Deviation]:
    """For each dtype the error that came nearest to its bound."""
    worst: dict[str, Deviation] = {}
    for case, outcome in summary.results:
        if case.reduces and not case.refused:
            known = worst.setdefault(case.dtype, outcome.deviation)
            if outcome.deviation.fraction > known.fraction:
                worst[case.dtype] = outcome.deviation
    return worst


def _collectives(summary: Summary) -> dict[str, dict[str, int]]:
    return _count(
        (case.collective, outcome)
        for case, outcome in summary.results
        if not (case.refused or outcome.left_out)
    )


def _variants(summary: Summary) -> dict[str, dict[str, int]]:
    """All-reduces only: the other collectives have no choice."""
    counts = _count(
        (case.variant, outcome)
        for case, outcome in summary.results
        if case.collective == "allreduce" and not (case.refused or outcome.left_out)
    )
    return {name: counts[name] for name in VARIANTS if name in counts}


def _count(outcomes: Iterable[tuple[str, Outcome]]) -> dict[str, dict[str, int]]:
    """How many cases of each name were run, and failed."""
    counts: dict[str, dict[str, int]] = {}
    for name, outcome in outcomes:
        count = counts.setdefault(name, {"cases": 0, "failed": 0})
        count["cases"] += 1
        count["failed"] += bool(outcome.findings)
    return counts


def _table(summary: Summary) -> Iterator[str]:
    cells, worst = _cells(summary), _worst(summary)
    dtypes = [dtype for dtype in DTYPES if any(dtype == row for row, _ in cells)]
    ops = [op for op in OPS if any(op == column for _, column in cells)]
    if not cells:
        return
    yield f"# {'dtype':<13}" + "".join(f"{op:>8}" for op in ops) + "   worst error / its bound"
    for dtype in dtypes:
        row = "".join(f"{cells.get((dtype, op), '-'):>8}" for op in ops)
        yield f"  {dtype:<13}{row}   {_error(worst.get(dtype))}".rstrip()


def _error(worst: Deviation | None) -> str:
    if worst is None:
        return ""
    if worst.fraction == 0:
        return "exact"
    return f"{worst.error:.2e} / {worst.bound:.2e} = {worst.fraction:.3f}"


def _lists(summary: Summary) -> Iterator[str]:
    for title, counts in (
        ("cases by collective", _collectives(summary)),
        ("all-reduce by variant", _variants(summary)),
    ):
        parts = []
        for name, count in counts.items():
            bad = f" ({count['failed']} FAIL)" if count["failed"] else ""
            parts.append(f"{name} {count['cases']}{bad}")
        if parts:
            yield f"# {title}: {', '.join(parts)}"


def _failure(failure: Failure) -> Iterator[str]:
    case = failure.case
    what = case.collective + (f" {case.op}" if case.reduces else "") + f" {case.dtype}"
    if case.collective == "allreduce" and not case.refused:
        what += f" {case.variant}"
    cases = "1 case" if failure.ncases == 1 else f"{failure.ncases} cases"
    yield f"FAIL {what}: {cases}; the smallest known: {_describe(case)}"
    for finding in failure.outcome.findings:
        first, *rest = finding.message.splitlines()
        yield f"     {finding.check}: {first}" + (f" [and {len(rest)} lines]" if rest else "")


def _describe(case: Case) -> str:
    parts = [f"count={case.count}", "in place" if case.in_place else "out of place"]
    parts += [f"offset={case.offset}"] if case.offset else []
    parts += [f"stride={case.stride}"] if case.stride != 1 else []
    parts += [f"chunk_bytes={case.chunk_bytes}"] if case.chunk_bytes is not None else []
    parts += [f"nchannels={case.nchannels}"] if case.nchannels is not None else []
    parts += [f"root={case.root}"] if case.collective in ("reduce", "broadcast") else []
    return ", ".join(parts)
