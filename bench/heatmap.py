"""Draws matrices of bandwidth or latency as heat maps.

Knows nothing of how they were measured. Needs matplotlib, and loads it only to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .bandwidth_report import Matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_matrices"]

COLUMNS = 3  # of matrices in the picture
CELL_INCHES = 0.75


def draw_matrices(path: str, matrices: Sequence[Matrix], *, subtitle: str) -> None:
    """Writes a PNG with a heat map for each matrix; beside a figure stands its part of the limit.

    Args:
        path: where to.
        matrices: what was measured.
        subtitle: the machine in a line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(COLUMNS, max(1, len(matrices)))
    down = max(1, math.ceil(len(matrices) / across))
    widest = max((len(matrix.columns) for matrix in matrices), default=1)
    tallest = max((len(matrix.rows) for matrix in matrices), default=1)
    size = (max(4.8, widest * CELL_INCHES + 1.6), max(1.4, tallest * 0.55) + 1.1)
    figure = Figure(figsize=(across * size[0], down * size[1] + 0.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(down, across, squeeze=False).ravel()
    for axes, matrix in zip(places, matrices, strict=False):
        _heat(axes, matrix)
    for axes in places[len(matrices) :]:
        axes.set_axis_off()
    figure.suptitle(subtitle, fontsize=10)
    figure.savefig(path, format="png")


def _heat(axes: Axes, matrix: Matrix) -> None:
    values = [[math.nan if one is None else one for one in row] for row in matrix.cells]
    known = [one for row in values for one in row if not math.isnan(one)]
    top = max(known, default=1.0)
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=top or 1.0, aspect="auto")
    for i, row in enumerate(values):
        for j, one in enumerate(row):
            dark = not math.isnan(one) and one < 0.6 * top
            color = "white" if dark else "black"
            text = _label(matrix, i, j)
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
    axes.set_title(f"{matrix.key}\n{matrix.title}", fontsize=7)
    axes.set_xticks(range(len(matrix.columns)), matrix.columns, fontsize=7)
    axes.set_yticks(range(len(matrix.rows)), matrix.rows, fontsize=7)
    axes.figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)


def _label(matrix: Matrix, i: int, j: int) -> str:
    value = matrix.cells[i][j]
    if value is None:
        return "N/A"
    fraction = matrix.fractions[i][j] if matrix.limits else None
    return f"{value:.4g}" + (f"\n{fraction:.0%}" if fraction is not None else "")
