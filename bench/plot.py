"""Draws results: bus bandwidth and time of a call against size.

Knows nothing of how they were measured. Needs matplotlib, and loads it only to draw.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpuallreduce.errors import NotSupported

from .measure import Timing
from .membw import MemoryLimits
from .report import HOST_NOTE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["byte_text", "check_matplotlib", "draw", "dress"]

COLORS = ("#1f5fa8", "#2a8f5b", "#7a4fa3", "#b0762a", "#3f8f9e", "#a8456b")
PEER_COLORS = ("#d1495b", "#8a8a8a")
MODES = (("out of place", "-", "o"), ("in place", "--", "s"))
LIMIT = "limit of large arrays: memory"
LABELLED_PAIRS = 4  # of dtype and operator in the title before it says how many


def check_matplotlib() -> None:
    """Fails before anything is measured.

    Raises:
        NotSupported: matplotlib is not installed; says how to.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise NotSupported("--plot needs matplotlib: pip install matplotlib (gpuallreduce[plot])")


def byte_text(nbytes: float) -> str:
    """A size as people write it: 8 B, 4 KiB, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:g} {unit}"
        nbytes /= 1024
    raise AssertionError


def draw(
    path: str,
    rows: Sequence[Row],
    *,
    subtitle: str,
    limits: MemoryLimits | None = None,
    note: str = HOST_NOTE,
) -> None:
    """Writes a PNG.

    Args:
        path: where to.
        rows: what was measured; empty arrays are left out.
        subtitle: ranks, arrays and machine in a line.
        limits: draws what memory can do, if measured.
        note: what figures of this kind of device tell.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    shown = [row for row in rows if row.nbytes > 0]
    latency = all(mode.ours.latency_us for row in shown for mode in row.modes)

    def busbw(row: Row, timing: Timing) -> float:
        return row.busbw_gbps(timing.time_us)

    def time(row: Row, timing: Timing) -> float:
        return (timing.latency_us if latency else timing.time_us) or float("nan")

    _lines(left, shown, busbw)
    _lines(right, shown, time)
    if limits is not None and shown:
        _limit(left, shown[0].nranks, limits)
    dress(left, [row.nbytes for row in shown], "Bus bandwidth, calls back to back", "GB/s")
    what = "Latency: one call at a time" if latency else "Time of a call, back to back"
    dress(right, [row.nbytes for row in shown], what, "µs")
    # Peers are drawn first, to lie below, and named last.
    entries = sorted(zip(*left.get_legend_handles_labels(), strict=True), key=_legend_rank)
    handles, labels = [list(each) for each in zip(*entries, strict=True)] if entries else ([], [])
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5) or 1)
    figure.suptitle(f"all-reduce of {_pairs_text(shown)}  ·  {note}\n{subtitle}", fontsize=11)
    figure.savefig(path, format="png")


def _legend_rank(entry: tuple[Any, str]) -> int:
    return 0 if entry[1].startswith("gpuallreduce") else 2 if entry[1] == LIMIT else 1


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.dtype, row.op) for row in rows))


def _pairs_text(rows: Sequence[Row]) -> str:
    pairs = _pairs(rows)
    if len(pairs) > LABELLED_PAIRS:
        return f"{len(pairs)} pairs of type and operator"
    return ", ".join(" ".join(pair) for pair in pairs) or "nothing"


def _lines(axes: Axes, rows: Sequence[Row], value: Callable[[Row, Timing], float]) -> None:
    """A line for each pair, library and mode."""
    pairs = _pairs(rows)
    for i, pair in enumerate(pairs):
        own = [row for row in rows if (row.dtype, row.op) == pair]
        suffix = f" {' '.join(pair)}" if len(pairs) > 1 else ""
        for which, (mode_name, style, marker) in enumerate(MODES):
            look: dict[str, Any] = {"linestyle": style, "marker": marker, "markersize": 3.5}
            for j, peer in enumerate(own[0].modes[which].peers):
                _line(
                    axes,
                    own,
                    lambda row, w=which, p=peer: row.modes[w].peers[p],  # type: ignore[misc]
                    value,
                    label=f"{peer}{suffix}, {mode_name}",
                    color=PEER_COLORS[j % len(PEER_COLORS)],
                    linewidth=1.3,
                    **look,
                )
            _line(
                axes,
                own,
                lambda row, w=which: row.modes[w].ours,  # type: ignore[misc]
                value,
                label=f"gpuallreduce{suffix}, {mode_name}",
                color=COLORS[i % len(COLORS)],
                linewidth=1.8,
                **look,
            )


def _line(
    axes: Axes,
    rows: Sequence[Row],
    timing: Callable[[Row], Timing | None],
    value: Callable[[Row, Timing], float],
    **look: Any,
) -> None:
    points = [(row.nbytes, value(row, found)) for row in rows if (found := timing(row)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **look)


def _limit(axes: Axes, nranks: int, limits: MemoryLimits) -> None:
    """The bus bandwidth of a call that moves 2 p n bytes as fast as memory adds."""
    busbw = limits.add_gbps * (nranks - 1) / nranks**2
    if busbw > 0:
        axes.axhline(busbw, color="#555555", linestyle=":", linewidth=1.2, label=LIMIT)


def dress(axes: Axes, sizes: Sequence[int], title: str, unit: str) -> None:
    """Titles, scales and ticks of a panel over sizes in bytes."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("bytes of one rank's array")
    axes.set_ylabel(unit)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted(set(sizes))
    ticks = ticks[:: -(-len(ticks) // 10)] if ticks else []
    axes.set_xticks(ticks, [byte_text(nbytes) for nbytes in ticks], rotation=35, ha="right")
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.grid(True, which="minor", axis="y", color="#eeeeee", linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
