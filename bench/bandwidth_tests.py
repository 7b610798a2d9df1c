"""The bandwidth tests by nvbandwidth's names: which copies run at the same time in each cell of a
test's matrix, and which of them count.

Pure: knows nothing of CUDA, memory or time. GPUs are places, 0 to n - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gpuallreduce.errors import InvalidArgument

__all__ = ["ROOFLINE", "TESTS", "Copy", "Test", "chosen_tests", "list_lines", "possible"]

ROOFLINE = "fused_reduce_roofline"


@dataclass(frozen=True)
class Copy:
    """One of the copies that run at the same time.

    Attributes:
        source, target: the GPU whose memory it is; None: pinned host memory.
        runner: the GPU whose engine or kernel copies.
        share: its buffers are this many times as large as asked, so that a copy that only disturbs
            lasts longer than the one that is measured.
    """

    source: int | None
    target: int | None
    runner: int
    share: int = 1

    @property
    def between(self) -> tuple[int, int] | None:
        """The two GPUs, if there are two."""
        if self.source is None or self.target is None or self.source == self.target:
            return None
        return self.source, self.target


Cell = Callable[[int, int, int], Sequence[Copy]]  # row, column, GPUs


@dataclass(frozen=True)
class Test:
    """One test.

    Attributes:
        name: nvbandwidth's.
        title: nvbandwidth's line above the matrix; ``{part}`` is which of several matrices it is.
        description: what is measured, for people.
        engine: ``ce`` (copy engines), ``sm`` (kernels) or ``latency``.
        rows: ``host`` (one row) or ``gpus`` (a row for each).
        cell: the copies of a cell; none on the diagonal.
        counts: ``first`` (the first copy alone), ``all`` (all bytes over the time of the last to
            end) or ``each`` (a matrix for each of two copies, and one for their sum).
        parts: names of the matrices where there are several.
    """

    __test__ = False  # pytest

    name: str
    title: str
    description: str
    engine: str
    rows: str
    cell: Cell
    counts: str = "first"
    parts: tuple[str, ...] = ("",)


def _mirrored(copy: Copy) -> Copy:
    return Copy(copy.target, copy.source, copy.runner, share=2)


def _host(to_gpu: bool, both_ways: bool, everyone: bool) -> Cell:
    def copy(gpu: int, share: int) -> Copy:
        return Copy(None, gpu, gpu, share) if to_gpu else Copy(gpu, None, gpu, share)

    def cell(_row: int, column: int, gpus: int) -> Sequence[Copy]:
        others = [gpu for gpu in range(gpus) if gpu != column] if everyone else []
        copies = [copy(column, 1), *(copy(gpu, 2) for gpu in others)]
        opposite = [_mirrored(each) for each in copies] if both_ways else []
        return [copies[0], *opposite, *copies[1:]]

    return cell


def _pair(read: bool, both_ways: bool) -> Cell:
    """The row's GPU reads from, or writes to, the column's."""

    def cell(row: int, column: int, _gpus: int) -> Sequence[Copy]:
        if row == column:
            return []
        if not both_ways:
            return [Copy(column, row, row)] if read else [Copy(row, column, row)]
        runners = (row, column) if read else (column, row)
        return [Copy(column, row, runners[0]), Copy(row, column, runners[1])]

    return cell


def _star(inbound: bool, peers_run: bool) -> Cell:
    def cell(_row: int, column: int, gpus: int) -> Sequence[Copy]:
        copies = []
        for other in range(gpus):
            if other != column:
                ends = (other, column) if inbound else (column, other)
                copies.append(Copy(*ends, runner=other if peers_run else column))
        return copies

    return cell


ENGINES = {"ce": "a copy engine", "sm": "a kernel"}
_BUSY = " while all other GPUs do the same; only the column's copy counts"


def _host_tests(engine: str, everyone: bool) -> list[Test]:
    tests = []
    for both_ways in (False, True):
        for to_gpu in (True, False):
            ends = ("host", "all" if everyone else "device")
            ends = ends if to_gpu else (ends[1], ends[0])
            arrow = "<->" if both_ways else "->" if to_gpu else "<-"
            how = f"{ends[0]} to {ends[1]} by {ENGINES[engine]}, pinned host memory"
            if both_ways:
                how += ", while a copy runs the other way; only the first counts"
            tests.append(
                Test(
                    name=f"{ends[0]}_to_{ends[1]}{'_bidirectional' * both_ways}_memcpy_{engine}",
                    title=f"memcpy {engine.upper()} CPU(row) {arrow} GPU(column) bandwidth (GB/s)",
                    description=how + _BUSY * everyone,
                    engine=engine,
                    rows="host",
                    cell=_host(to_gpu, both_ways, everyone),
                )
            )
    if everyone:  # nvbandwidth's order: first to the host, both ways, then from the host
        tests = [tests[1], tests[3], tests[0], tests[2]]
    return tests


def _pair_tests(engine: str) -> list[Test]:
    tests = []
    for both_ways in (False, True):
        for verb, arrow in (("read", "->"), ("write", "<-")):
            name = f"device_to_device{'_bidirectional' * both_ways}_memcpy_{verb}_{engine}"
            who = f"the row's GPU {verb}s the column's memory by {ENGINES[engine]}"
            title = f"memcpy {engine.upper()} GPU(row) {arrow} GPU(column) bandwidth (GB/s)"
            if both_ways:
                title = (
                    f"memcpy {engine.upper()} GPU(row) <-> GPU(column) {{part}} bandwidth (GB/s)"
                )
                who = f"two GPUs {verb} each other's memory by {ENGINES[engine]} at the same time"
            tests.append(
                Test(
                    name=name,
                    title=title,
                    description=who,
                    engine=engine,
                    rows="gpus",
                    cell=_pair(verb == "read", both_ways),
                    counts="each" if both_ways else "first",
                    parts=(f"{verb}1", f"{verb}2", "total") if both_ways else ("",),
                )
            )
    return tests


def _star_tests(engine: str) -> list[Test]:
    """nvbandwidth's name says who runs the copies: ``all`` in all_to_one, ``one`` in one_to_all."""
    tests = []
    for who, runner in (("all_to_one", "the peers {}"), ("one_to_all", "the column's GPU {}s")):
        for verb in ("write", "read"):
            inbound = (who == "all_to_one") == (verb == "write")
            arrow, way = ("<-", "into") if inbound else ("->", "out of")
            tests.append(
                Test(
                    name=f"{who}_{verb}_{engine}",
                    title=f"memcpy {engine.upper()} GPU(row) {arrow} GPU(column) bandwidth (GB/s)",
                    description=f"all bytes {way} the column's GPU, from or to all its peers at "
                    f"once: {runner.format(verb)} by {ENGINES[engine]} for each peer",
                    engine=engine,
                    rows="host",
                    cell=_star(inbound, peers_run=who == "all_to_one"),
                    counts="all",
                )
            )
    return tests


def _latency(host: bool) -> Test:
    place = "CPU(row)" if host else "GPU(row)"
    return Test(
        name="host_device_latency_sm" if host else "device_to_device_latency_sm",
        title=f"memory latency SM {place} <-> GPU(column) (ns)"
        if host
        else f"Device to Device Latency SM {place} <-> GPU(column) (ns)",
        description="one load after the other by one thread of "
        + ("the column's GPU in pinned host memory" if host else "the row's GPU in the column's")
        + ", a ring of 2 MiB",
        engine="latency",
        rows="host" if host else "gpus",
        cell=(lambda _row, column, _gpus: [Copy(None, None, column)])
        if host
        else (lambda row, column, _gpus: [Copy(column, row, row)] if row != column else []),
    )


def _local() -> Test:
    return Test(
        name="device_local_copy",
        title="memcpy local GPU(column) bandwidth (GB/s)",
        description="copies within each GPU's own memory; every byte counts once",
        engine="ce",
        rows="host",
        cell=lambda _row, column, _gpus: [Copy(column, column, column)],
    )


def _all_tests() -> list[Test]:
    """In nvbandwidth's order, so that its numbers name the same tests."""
    tests: list[Test] = []
    for engine in ("ce", "sm"):
        tests += _host_tests(engine, everyone=False) + _pair_tests(engine)
        tests += _host_tests(engine, everyone=True) + _star_tests(engine)
    return [*tests, _latency(host=True), _latency(host=False), _local()]


TESTS = {test.name: test for test in _all_tests()}


def chosen_tests(asked: Sequence[str]) -> list[str]:
    """The names of the tests that were asked for, by name or number; all of nvbandwidth's if none.

    Raises:
        InvalidArgument: there is no such test.
    """
    known = [*TESTS, ROOFLINE]
    names = []
    for each in asked:
        number = int(each) if each.isascii() and each.isdigit() else -1
        name = known[number] if 0 <= number < len(known) else each
        if name not in known:
            raise InvalidArgument(
                f"-t {each}: there is no such test; -l lists their names and numbers"
            )
        names.append(name)
    return names or list(TESTS)


def list_lines() -> list[str]:
    """nvbandwidth's list."""
    described = {test.name: test.description for test in TESTS.values()}
    described[ROOFLINE] = (
        "all-reduce of several ranks on one GPU (two_shot, direct) against a copy in its memory; "
        "runs only when asked for"
    )
    lines = ["Index, Name:", "\tDescription", "======================="]
    for number, (name, text) in enumerate(described.items()):
        lines += [f"{number}, {name}:", f"\t{text}", ""]
    return lines


def possible(
    test: Test, row: int, column: int, gpus: int, peers: Collection[tuple[int, int]]
) -> Sequence[Copy]:
    """The copies of a cell that can run; none if the cell cannot.

    Copy engines reach every GPU, at worst through the host. Kernels need peer access.

    Args:
        test: the test.
        row, column: of the cell.
        gpus: how many GPUs there are.
        peers: (a, b) where a addresses b's memory and b a's.
    """
    copies = test.cell(row, column, gpus)
    if test.engine == "ce":
        return copies
    able = [copy for copy in copies if copy.between is None or copy.between in peers]
    return able if test.counts == "all" or len(able) == len(copies) else []
