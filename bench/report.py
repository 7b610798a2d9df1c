"""The table, as nccl-tests prints it, with columns of ours at the end of the rows.

Pure: knows nothing of how rows came to be, nor where lines go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .measure import Timing, busbw_factor

__all__ = [
    "Device",
    "Mode",
    "Row",
    "average_busbw_gbps",
    "columns",
    "failures",
    "float_text",
    "footer",
    "heading",
    "rate_gbps",
    "row_text",
    "useful_gbps",
]

PROGRAM = "all_reduce_perf"
HOST_NOTE = "HOST DEVICES: memory copies, not NVLink"


@dataclass(frozen=True)
class Device:
    """What one rank runs on."""

    rank: int
    pid: int
    hostname: str
    number: int
    info: str
    bus: str = "0000:00:00"
    uuid: str | None = None

    @property
    def text(self) -> str:
        """nccl-tests' line; a host device has no bus address."""
        return (
            f"#  Rank {self.rank:2d} Group {0:2d} Pid {self.pid:6d} on {self.hostname:>10} device "
            f"{self.number:2d} [{self.bus}] {self.info}"
        )


@dataclass(frozen=True)
class Mode:
    """One row out of place or in place.

    Attributes:
        ours: how long we took.
        nwrong: wrong elements on all ranks; None: not checked.
        algorithm, access, order: what ran.
        peers: how long others took; None: they cannot do it.
        peers_nwrong: their wrong elements.
        bytes_within, bytes_between: what a rank sends inside its node and to other nodes.
    """

    ours: Timing
    nwrong: int | None
    algorithm: str
    access: str
    order: str
    peers: dict[str, Timing | None]
    peers_nwrong: dict[str, int | None]
    bytes_within: int = 0
    bytes_between: int = 0


@dataclass(frozen=True)
class Row:
    """One size of one dtype and operator."""

    nbytes: int
    count: int
    dtype: str
    op: str
    nranks: int
    out_of_place: Mode
    in_place: Mode

    @property
    def modes(self) -> tuple[Mode, Mode]:
        """Out of place, in place."""
        return self.out_of_place, self.in_place

    def algbw_gbps(self, time_us: float) -> float:
        """Bytes of one rank's array over time."""
        return rate_gbps(self.nbytes, time_us)

    def busbw_gbps(self, time_us: float) -> float:
        """What a link would have to carry."""
        return self.algbw_gbps(time_us) * busbw_factor("all_reduce", self.nranks)


def rate_gbps(nbytes: float, time_us: float) -> float:
    """Bytes over time."""
    return nbytes / 1e3 / time_us if time_us > 0 else 0.0


def useful_gbps(row: Row, time_us: float) -> float:
    """Bytes that any all-reduce must read and write, 2 p n for p arrays of n bytes, over time."""
    return 2 * row.nranks * row.algbw_gbps(time_us)


def average_busbw_gbps(rows: Sequence[Row]) -> float:
    """Plain mean over all rows and both modes."""
    values = [row.busbw_gbps(mode.ours.time_us) for row in rows for mode in row.modes]
    return sum(values) / len(values) if values else 0.0


def failures(rows: Sequence[Row]) -> int:
    """Rows and modes with wrong values."""
    return sum(bool(mode.nwrong) for row in rows for mode in row.modes)


def float_text(value: float, width: int) -> str:
    """Two decimals if they fit the width, else one, none, or an exponent."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text.rjust(width)
    return f"{value:.{1 if width >= 7 else 0}e}".rjust(width)


@dataclass(frozen=True)
class Column:
    """One of our columns: three lines of heading, and its text in a row."""

    heading: tuple[str, str, str]
    width: int
    text: Callable[[Row], str]


def columns(
    *,
    latency: bool,
    peers: Sequence[str],
    memory_limit_gbps: float | None,
    nodes: int = 1,
) -> list[Column]:
    """Our columns: the algorithm always comes first; several nodes have what is sent in and between
    them.
    """
    result = [Column(("", "algorithm", ""), 12, _algorithm)]
    if nodes > 1:
        result += _sent_columns()
    if latency:
        result += _both("latency", "(us)", 7, lambda row, mode: _us(mode.ours.latency_us))
    if memory_limit_gbps is not None:
        result += _both(
            "memory",
            "(%)",
            6,
            lambda row, mode: (
                f"{100 * useful_gbps(row, mode.ours.time_us) / memory_limit_gbps:.1f}"
            ),
        )
    for peer in peers:
        result += _peer_columns(peer, "time", lambda timing: timing.time_us)
        if latency:
            result += _peer_columns(peer, "latency", lambda timing: timing.latency_us)
    return result


def _peer_columns(peer: str, what: str, value: Callable[[Timing], float | None]) -> list[Column]:
    def text(row: Row, mode: Mode) -> str:
        theirs = mode.peers.get(peer)
        return _us(None if theirs is None else value(theirs))

    def ratio(row: Row, mode: Mode) -> str:
        theirs = mode.peers.get(peer)
        ours, other = value(mode.ours), None if theirs is None else value(theirs)
        return f"{other / ours:.2f}" if ours and other else "N/A"

    label = peer if what == "time" else f"{peer} lat"
    out_time, in_time = _both(label, "(us)", 7, text)
    out_ratio, in_ratio = _both("/ours", "", 6, ratio)
    return [out_time, out_ratio, in_time, in_ratio]


def _sent_columns() -> list[Column]:
    """Bytes are the same out of place and in place."""
    within = _both("within", "(GB/s)", 7, lambda _, mode: _rate(mode.bytes_within, mode))
    between = _both("between", "(GB/s)", 7, lambda _, mode: _rate(mode.bytes_between, mode))
    return [
        Column(("", "within", "(B)"), 12, lambda row: str(row.out_of_place.bytes_within)),
        Column(("", "between", "(B)"), 12, lambda row: str(row.out_of_place.bytes_between)),
        *(columns[side] for side in (0, 1) for columns in (within, between)),
    ]


def _rate(nbytes: int, mode: Mode) -> str:
    return float_text(rate_gbps(nbytes, mode.ours.time_us), 7)


def _both(title: str, unit: str, width: int, text: Callable[[Row, Mode], str]) -> list[Column]:
    return [
        Column(("out", title, unit), width, lambda row: text(row, row.out_of_place)),
        Column(("in", title, unit), width, lambda row: text(row, row.in_place)),
    ]


def _algorithm(row: Row) -> str:
    names = dict.fromkeys(mode.algorithm for mode in row.modes)
    return "|".join(names)


def _us(value: float | None) -> str:
    return "N/A" if value is None else float_text(value, 7)


def heading(extra: Sequence[Column]) -> list[str]:
    """The lines above the rows."""
    titles = ("time", "algbw", "busbw", "#wrong")
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    blank = f"# {'':10}  {'':12}  {'':8}  {'':6}  {'':6}"
    lines = [f"{blank}{'':11}out-of-place{'':23}in-place"]
    for names, values in (
        (("size", "count", "type", "redop", "root"), titles),
        (("(B)", "(elements)", "", "", ""), units),
    ):
        line = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}".format(*names)
        lines.append(line + 2 * "  {:>7}  {:>6}  {:>6}  {:>6}".format(*values))
    end = max(map(len, lines))
    for i, line in enumerate(lines):
        lines[i] = line.ljust(end) + "".join(f"  {c.heading[i]:>{c.width}}" for c in extra)
    return ["#", *(line.rstrip() for line in lines)]


def row_text(row: Row, extra: Sequence[Column]) -> str:
    """One line of data."""
    text = f"{row.nbytes:12d}  {row.count:12d}  {row.dtype:>8}  {row.op:>6}  {-1:6d}"
    for mode in row.modes:
        time_us = mode.ours.time_us
        wrong = "N/A" if mode.nwrong is None else f"{float(mode.nwrong):g}"
        text += (
            f"  {float_text(time_us, 7)}  {float_text(row.algbw_gbps(time_us), 6)}"
            f"  {float_text(row.busbw_gbps(time_us), 6)}  {wrong:>6}"
        )
    return text + "".join(f"  {column.text(row):>{column.width}}" for column in extra)


def footer(rows: Sequence[Row]) -> list[str]:
    """The lines below the rows."""
    wrong = failures(rows)
    return [
        f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {average_busbw_gbps(rows):g}",
        "#",
        f"# Collective test concluded: {PROGRAM}",
    ]
