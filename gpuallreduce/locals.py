"""The arguments of a call on the ranks of this process: one array each, alike on all of them.

Knows nothing of plans or of how a call runs.
"""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from gpuallreduce.arrays import Array, Arrays, Bound
from gpuallreduce.errors import InvalidArgument

__all__ = ["LocalRanks", "check_devices", "check_integer", "check_shape", "check_timeout"]

LONGEST_S = 1e9  # about 30 years


def check_devices(devices: Sequence[str]) -> list[str]:
    """One device name per rank, all of one kind.

    Raises:
        InvalidArgument: no list, an empty one, a name that does not exist, or both kinds.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise InvalidArgument(
            f'devices={devices!r}: give a list with one device per rank, such as ["host"] * 4'
        )
    for name in devices:
        if not isinstance(name, str) or not re.fullmatch(r"host|cuda(:\d+)?", name):
            raise InvalidArgument(
                f'device {name!r} does not exist; there are "host", "cuda" (the current GPU) and '
                '"cuda:N"'
            )
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise InvalidArgument(f"devices={list(devices)}: all ranks must be on the same kind")
    return list(devices)


def check_timeout(timeout: float | None) -> float | None:
    """Seconds above 0, or None; at most what 64 bits hold in nanoseconds.

    Raises:
        InvalidArgument: it is no number above 0.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise InvalidArgument(
            f"timeout={timeout!r}: give seconds above 0 (None: the default, or no limit)"
        )
    return float(min(timeout, LONGEST_S))


def check_integer(value: Any, name: str) -> int:
    """An integer of any kind.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name}={value!r} is not an integer") from None


def check_shape(shape: Any) -> tuple[int, ...]:
    """A shape from an integer or integers, none negative."""
    sizes = shape if isinstance(shape, list | tuple) else (shape,)
    checked = tuple(check_integer(size, "shape") for size in sizes)
    if any(size < 0 for size in checked):
        raise InvalidArgument(f"shape={shape!r} has a negative size")
    return checked


class LocalRanks:
    """Sorts arguments by local rank: one value where there is one rank, else a list of values."""

    def __init__(self, ranks: Sequence[int], nranks: int, arrays: Arrays) -> None:
        self.ranks = ranks
        self.nranks = nranks
        self.arrays = arrays

    def split(self, values: Any, what: str) -> list[Any]:
        """The value of each local rank.

        Raises:
            InvalidArgument: not one per local rank.
        """
        if len(self.ranks) == 1:
            return [values]
        listed = isinstance(values, Sequence)
        if not listed or len(values) != len(self.ranks):
            found = str(len(values)) if listed else f"a {type(values).__name__}"
            raise InvalidArgument(
                f"this communicator has {len(self.ranks)} ranks in this process and takes a list "
                f"of {what}, one per rank; it got {found}"
            )
        return list(values)

    def give(self, values: list[Any]) -> Any:
        """The inverse of split."""
        return values[0] if len(self.ranks) == 1 else values

    def pairs(
        self, arrays: Any, out: Any, *, reads_out: Callable[[int], bool] = lambda rank: True
    ) -> list[tuple[int, Array, Array | None]]:
        """(rank, array, out or None) for each local rank, all of them arrays.

        Args:
            arrays: the inputs.
            out: the outputs, or None.
            reads_out: tells whether a rank's output is looked at.
        """
        count = len(self.ranks)
        outs = [None] * count if out is None else self.split(out, "out arrays")
        found = []
        for i, (array, to) in enumerate(zip(self.split(arrays, "arrays"), outs, strict=True)):
            rank, check = self.ranks[i], self.arrays.check
            wanted = to is not None and reads_out(rank)
            target = check(to, f"out of rank {rank}", i) if wanted else None
            source = target if array is to and wanted else None
            if source is None:
                source = check(array, f"the array of rank {rank}", i)
            found.append((rank, source, target))
        return found

    def bind(self, arrays: Any, out: Any) -> list[Bound]:
        """Binds inputs to outputs of the same shape; see Arrays.bind.

        Raises:
            InvalidArgument: an array cannot be used, or local ranks' arrays differ.
        """
        pairs = self.pairs(arrays, out)
        bind = self.arrays.bind
        return self.check_equal([bind(array, to, i) for i, (_, array, to) in enumerate(pairs)])

    def columns(self, arrays: Any) -> list[list[Array]]:
        """Turns a list of arrays per rank into one list per array, with that of each local rank.

        Raises:
            InvalidArgument: ranks brought different numbers of arrays, or a rank brought arrays
                that share memory, which cannot be reduced together.
        """
        per_rank = [list(each) for each in self.split(arrays, "lists of arrays")]
        lengths = [len(each) for each in per_rank]
        if len(set(lengths)) > 1:
            raise InvalidArgument(
                f"local ranks brought {lengths} arrays; bring as many on every rank"
            )
        checked = [
            [
                self.arrays.check(array, f"array {i} of rank {rank}", local)
                for i, array in enumerate(each)
            ]
            for local, (rank, each) in enumerate(zip(self.ranks, per_rank, strict=True))
        ]
        self._check_apart([array for each in checked for array in each])
        return [list(column) for column in zip(*checked, strict=True)]

    def _check_apart(self, arrays: list[Array]) -> None:
        """Raises InvalidArgument if two arrays share an element; sorts, so many cost little."""
        spans = sorted(
            (*self.arrays.span(array), i) for i, array in enumerate(arrays) if array.size
        )
        reach: list[tuple[int, int]] = []  # (end, array) of spans that may still meet the next
        for low, high, i in spans:
            reach = [(end, j) for end, j in reach if end > low]
            if any(self.arrays.overlap(arrays[i], arrays[j]) for _, j in reach):
                raise InvalidArgument(
                    "two of the arrays share memory, so one call cannot reduce both; bring every "
                    "array once (tied weights too)"
                )
            reach.append((high, i))

    def check_fusible(self, column: list[Array]) -> None:
        """Raises InvalidArgument if local ranks' arrays differ or cannot be written."""
        for rank, array in zip(self.ranks, column, strict=True):
            self.arrays.check_writeable(array, f"an array of rank {rank}")
            if array.size != column[0].size or array.dtype != column[0].dtype:
                raise InvalidArgument(
                    f"rank {rank} brought {array.size} x {array.dtype} where rank {self.ranks[0]} "
                    f"brought {column[0].size} x {column[0].dtype}; bring the same on every rank"
                )

    def check_equal(self, bounds: list[Bound]) -> list[Bound]:
        """The bounds themselves, if all local ranks brought the same count, dtype and layout.

        Raises:
            InvalidArgument: they differ, or what one rank writes belongs to another as well.
        """
        first = bounds[0]
        for rank, bound in zip(self.ranks, bounds, strict=True):
            if bound.count != first.count or bound.result.dtype != first.result.dtype:
                raise InvalidArgument(
                    f"rank {rank} brought {bound.count} x {bound.result.dtype}, rank "
                    f"{self.ranks[0]} {first.count} x {first.result.dtype}; bring the same count "
                    "and dtype on every rank"
                )
            if bound.layout != first.layout:
                raise InvalidArgument(
                    f"ranks {self.ranks[0]} and {rank} brought arrays of different memory layouts "
                    "(such as C and Fortran order); bring the same layout on every rank, or "
                    "ascontiguousarray(x)"
                )
        self._check_ranks_apart(bounds)
        return bounds

    def _check_ranks_apart(self, bounds: list[Bound]) -> None:
        for i, one in enumerate(bounds):
            for j, other in enumerate(bounds):
                if i == j or not one.written:
                    continue
                shares = self.arrays.overlap
                if shares(one.result, other.source) or shares(one.result, other.result):
                    raise InvalidArgument(
                        f"the result of rank {self.ranks[i]} shares memory with an array of rank "
                        f"{self.ranks[j]}; give every rank arrays of its own"
                    )

    def check_root(self, root: int) -> int:
        """A rank.

        Raises:
            InvalidArgument: there is no such rank.
        """
        checked = check_integer(root, "root")
        if not 0 <= checked < self.nranks:
            raise InvalidArgument(
                f"root={root} is not a rank; there are ranks 0 to {self.nranks - 1}"
            )
        return checked
