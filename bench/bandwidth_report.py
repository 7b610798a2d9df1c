"""What bandwidth tests say: nvbandwidth's matrices and JSON, and beside them what the links can.

Pure: knows nothing of how figures came to be, nor where they go. Lines of ours begin with #, so
that programs that read nvbandwidth's output find what they know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Matrix", "Outcome", "document", "lines_of", "matrix_lines", "total"]

Cells = tuple[tuple[float | None, ...], ...]
NOT_THERE = "N/A"
UNKNOWN = "unknown"
WIDTH = 10


@dataclass(frozen=True)
class Matrix:
    """One matrix.

    Attributes:
        key: nvbandwidth's name of it: the test's, with a part where a test has several.
        title: the line above.
        columns, rows: labels.
        cells: by row and column; None: cannot be measured here.
        limits: what the links between the same ends can, GB/s; None: not known.
        limits_of: what these limits are, in words; empty: nothing can be said.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: Cells
    limits: Cells = ()
    limits_of: str = ""

    @property
    def fractions(self) -> Cells:
        """Of the limit, what was reached."""
        pairs = [zip(cells, limits, strict=True) for cells, limits in self._rows()]
        return tuple(tuple(a / b if a and b else None for a, b in row) for row in pairs)

    def _rows(self) -> Any:
        return zip(self.cells, self.limits, strict=True)


@dataclass(frozen=True)
class Outcome:
    """One test.

    Attributes:
        name: the test's.
        status: nvbandwidth's word: ``Passed``, ``Waived`` or ``Error``.
        reason: why it is not passed.
        matrices: what was measured.
        notes: what the reader should know, such as smaller buffers.
        facts: plain data for the key ``gpuallreduce``.
    """

    name: str
    status: str
    reason: str = ""
    matrices: tuple[Matrix, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def total(cells: Cells) -> float:
    """The sum of what was measured."""
    return sum(value for row in cells for value in row if value is not None)


def _table(matrix: Matrix, cells: Cells, missing: Cells | None) -> list[str]:
    """Header and rows. Where ``missing`` has a figure and ``cells`` none, it is unknown."""
    label = max(2, *map(len, matrix.rows))
    lines = [" " * label + "".join(f"{name:>{WIDTH}}" for name in matrix.columns)]
    for i, (name, row) in enumerate(zip(matrix.rows, cells, strict=True)):
        text = f"{name:>{label}}"
        for j, value in enumerate(row):
            there = missing is not None and missing[i][j] is not None
            word = UNKNOWN if there else NOT_THERE
            text += f"{value:>{WIDTH}.2f}" if value is not None else f"{word:>{WIDTH}}"
        lines.append(text)
    return lines


def matrix_lines(matrix: Matrix) -> list[str]:
    """nvbandwidth's matrix and sum, then the limits and the fractions reached."""
    lines = [matrix.title, *_table(matrix, matrix.cells, None), ""]
    lines += [f"SUM {matrix.key} {total(matrix.cells):.2f}", ""]
    if matrix.limits_of:
        shown = tuple(
            tuple(b if a is not None else None for a, b in zip(*rows, strict=True))
            for rows in zip(matrix.cells, matrix.limits, strict=True)
        )
        ours = [f"{matrix.limits_of} (GB/s)", *_table(matrix, shown, matrix.cells)]
        ours += ["fraction reached", *_table(matrix, matrix.fractions, matrix.cells)]
        lines += [*(f"# {line}" for line in ours), ""]
    return lines


def lines_of(outcome: Outcome) -> list[str]:
    """What is printed once a test has ended; its name was printed when it began."""
    lines = [f"NOTE: {note}" for note in outcome.notes]
    for matrix in outcome.matrices:
        lines += matrix_lines(matrix)
    if outcome.status != "Passed":
        lines += [f"{outcome.status}: {outcome.name}: {outcome.reason}", ""]
    return lines


def document(
    outcomes: Sequence[Outcome], machine: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """nvbandwidth's JSON, with a key ``gpuallreduce`` at the root and in each test.

    Args:
        outcomes: the tests.
        machine: nvbandwidth's keys about the machine and its version.
        ours: what else a reader should know.
    """
    tests = [_test(outcome) for outcome in outcomes]
    return {"nvbandwidth": {**machine, "testcases": tests}, "gpuallreduce": dict(ours)}


def _test(outcome: Outcome) -> dict[str, Any]:
    """As nvbandwidth has it: of several matrices all rows one below the other, the last one's title
    and sum.
    """
    found: dict[str, Any] = {"name": outcome.name, "status": outcome.status}
    if outcome.matrices:
        rows = [row for matrix in outcome.matrices for row in matrix.cells]
        last = outcome.matrices[-1]
        found |= {
            "bandwidth_description": last.title,
            "bandwidth_matrix": [[_text(value) for value in row] for row in rows],
            "sum": total(last.cells),
        }
    if outcome.status == "Error":
        found["error"] = outcome.reason
    if outcome.notes:
        found["warning"] = " ".join(outcome.notes)
    matrices = [_matrix(matrix) for matrix in outcome.matrices]
    reason = {"reason": outcome.reason} if outcome.reason else {}
    return {**found, "gpuallreduce": {**reason, **outcome.facts, "matrices": matrices}}


def _text(value: float | None) -> str:
    return NOT_THERE if value is None else f"{value:g}"


def _matrix(matrix: Matrix) -> dict[str, Any]:
    return {
        "key": matrix.key,
        "columns": matrix.columns,
        "rows": matrix.rows,
        "values": matrix.cells,
        "limits_of": matrix.limits_of or None,
        "limits_gbps": matrix.limits or None,
        "fractions": matrix.fractions if matrix.limits else None,
    }
