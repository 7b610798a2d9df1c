"""Draws simulated all-reduce: bus bandwidth and time against size, a line for each algorithm.

Knows nothing of how it was simulated. Needs matplotlib, and loads it only to draw.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuallreduce.simulation import Estimate, Machine

from .plot import COLORS, dress

__all__ = ["draw"]

GREY = "#8a8a8a"  # of what is only to compare with


def draw(path: str, machine: Machine, rows: Sequence[Estimate], title: str) -> None:
    """Writes a PNG.

    Args:
        path: where to.
        machine: where it would run.
        rows: estimates, in any order.
        title: of the whole.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    pairs = list(dict.fromkeys((row.algorithm, row.order) for row in rows))
    names = list(dict.fromkeys(name for name, _ in pairs))
    for name, order in pairs:
        own = [row for row in rows if (row.algorithm, row.order) == (name, order)]
        color = GREY if name == "nccl_ring" else COLORS[names.index(name) % len(COLORS)]
        for axes, values in (
            (left, [row.busbw_gbps for row in own]),
            (right, [row.time_us for row in own]),
        ):
            axes.plot(
                [row.nbytes for row in own],
                values,
                label=f"{name}, order {order}",
                color=color,
                linestyle="-" if order == "rank" else "--",
                marker="o" if order == "rank" else "s",
                markersize=3.5,
                linewidth=1.8,
            )
    sizes = [row.nbytes for row in rows]
    dress(left, sizes, "Bus bandwidth", "GB/s")
    dress(right, sizes, "Time of a call", "µs")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4) or 1)
    figure.suptitle(f"simulated, not measured: {title}\n{machine.describe()}", fontsize=11)
    figure.savefig(path, format="png")
