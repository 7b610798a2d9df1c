"""Estimates and checks as tables and plain data.

Knows nothing of how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpuallreduce.simulation.machine import PRESETS, Machine
from gpuallreduce.simulation.model import Estimate, best
from gpuallreduce.simulation.published import UNITS, Measured
from gpuallreduce.simulation.view import SYMMETRIES

__all__ = [
    "check_as_plain",
    "check_as_text",
    "estimates_as_plain",
    "estimates_as_text",
    "presets_as_text",
]

Checked = Sequence[tuple[Measured, float]]

_HEADER = (
    f"#{'size':>11}  {'algorithm':<13} {'order':<5}  {'time':>11}  {'algbw':>8}  {'busbw':>8}  "
    f"{'bound':>11}  {'of it':>6}  bottleneck"
)
_UNITS = (
    f"#{'(B)':>11}  {'':<13} {'':<5}  {'(us)':>11}  {'(GB/s)':>8}  {'(GB/s)':>8}  {'(us)':>11}"
    f"  {'(%)':>6}"
)
_LEGEND = (
    "# * fastest of order rank, + of order any",
    "# bound: time of the busiest link for its bytes; bottleneck: that link, or latency where it",
    "# is busy less than half of the time",
)


def estimates_as_text(machine: Machine, rows: Sequence[Estimate], title: str) -> str:
    """A line for each size and algorithm, and what to know about them."""
    lines = [f"# simulated, not measured: {title}", f"# {machine.describe()}", "#"]
    lines += [_HEADER, _UNITS]
    for nbytes in dict.fromkeys(row.nbytes for row in rows):
        own = [row for row in rows if row.nbytes == nbytes]
        marks = {id(best(own, order)): mark for order, mark in (("any", "+"), ("rank", "*"))}
        lines += [_line(row, marks.get(id(row), " ")) for row in own]
    ways = {
        (row.algorithm, row.order): f"{SYMMETRIES[row.symmetry]}, {_how(rows, row)}" for row in rows
    }
    lines += ["#", *_LEGEND]
    lines += [f"# {name} ({order}): {text}" for (name, order), text in ways.items()]
    return "\n".join(lines)


def _how(rows: Sequence[Estimate], row: Estimate) -> str:
    played = {
        each.played for each in rows if (each.algorithm, each.order) == (row.algorithm, row.order)
    }
    if played == {"whole"}:
        return "every step is played"
    return "a part is played and the rest extrapolated" + (
        " (large sizes)" if "whole" in played else ""
    )


def _line(row: Estimate, mark: str) -> str:
    return (
        f"{row.nbytes:>12}  {row.algorithm:<13} {row.order:<5}{mark} {row.time_us:>11.2f}  "
        f"{row.algbw_gbps:>8.2f}  {row.busbw_gbps:>8.2f}  {row.bound_us:>11.2f}  "
        f"{100 * row.fraction:>6.1f}  {row.bottleneck}"
    )


def estimates_as_plain(machine: Machine, rows: Sequence[Estimate], dtype: str) -> dict[str, Any]:
    """The same as plain data."""
    results = [
        {
            "bytes": row.nbytes,
            "algorithm": row.algorithm,
            "order": row.order,
            "time_us": row.time_us,
            "algbw_gbps": row.algbw_gbps,
            "busbw_gbps": row.busbw_gbps,
            "bound_us": row.bound_us,
            "fraction_of_bound": row.fraction,
            "bottleneck": row.bottleneck,
            "busiest_link": row.busiest,
            "chunk_bytes": row.chunk_bytes,
            "symmetry": row.symmetry,
            "played": row.played,
        }
        for row in rows
    ]
    return {
        "simulated": True,
        "machine": asdict(machine),
        "nranks": machine.nranks,
        "dtype": dtype,
        "results": results,
    }


def presets_as_text() -> str:
    """A line for each preset."""
    width = max(map(len, PRESETS))
    return "\n".join(f"{name:<{width}}  {each.describe()}" for name, each in PRESETS.items())


def check_as_text(checked: Checked) -> str:
    """A line for each measurement, its source below."""
    lines = [
        f"# {'measured by others':<58} {'size':>11}  {'measured':>13} {'simulated':>9}"
        f"{'error':>13}",
    ]
    for each, simulated in checked:
        size = str(each.nbytes) if each.nbytes else ""
        error = each.error_percent(simulated)
        name = each.algorithm if each.unit != "switch" else "one_shot, two_shot"
        lines.append(
            f"  {each.what:<58} {size:>11}  {_range(each):>13} {simulated:>9.1f} "
            f"{UNITS[each.unit]:<5} {error:>+6.1f} %"
        )
        lines.append(f"    as {name}; {each.source}" + (f"; {each.note}" if each.note else ""))
    errors = [abs(each.error_percent(simulated)) for each, simulated in checked]
    fair = [abs(each.error_percent(simulated)) for each, simulated in checked if not each.note]
    lines.append(
        f"# {len(checked)} measurements: error {_mean(errors):.1f} % on average, "
        f"{max(errors):.1f} % at most; {len(fair)} without a note: {_mean(fair):.1f} % and "
        f"{max(fair):.1f} %"
    )
    return "\n".join(lines)


def _range(each: Measured) -> str:
    return f"{each.low:g}" if each.low == each.high else f"{each.low:g}-{each.high:g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def check_as_plain(checked: Checked) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {
            "what": each.what,
            "algorithm": each.algorithm,
            "order": each.order,
            "bytes": each.nbytes,
            "unit": f"{each.unit} ({UNITS[each.unit]})",
            "measured": [each.low, each.high],
            "simulated": simulated,
            "error_percent": each.error_percent(simulated),
            "recorded_error_percent": each.within,
            "source": each.source,
            "note": each.note,
        }
        for each, simulated in checked
    ]
