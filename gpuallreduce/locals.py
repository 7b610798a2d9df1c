"""The arguments of a call on the ranks of this process: one array each, alike on all of them.

Knows nothing of plans or of how a call runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuallreduce.arrays import Array, Bound, bind, check_array
from gpuallreduce.errors import InvalidArgument, NotSupported

__all__ = ["LocalRanks", "check_devices", "check_timeout"]


def check_devices(devices: Sequence[str]) -> list[str]:
    """One device name per rank.

    Raises:
        InvalidArgument: no list, an empty one, or a name that does not exist.
        NotSupported: CUDA devices.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise InvalidArgument(
            f'devices={devices!r}: give a list with one device per rank, such as ["host"] * 4'
        )
    for name in devices:
        if isinstance(name, str) and name.startswith("cuda"):
            raise NotSupported(f"device {name!r}: this version runs on host devices only")
        if name != "host":
            raise InvalidArgument(f'device {name!r} does not exist; there is "host"')
    return list(devices)


def check_timeout(timeout: float | None) -> float | None:
    """Seconds above 0, or None."""
    if timeout is not None and not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r}: give seconds above 0, or None for the default")
    return timeout


class LocalRanks:
    """Sorts arguments by local rank: one value where there is one rank, else a list of values."""

    def __init__(self, ranks: Sequence[int], nranks: int) -> None:
        self.ranks = ranks
        self.nranks = nranks

    def split(self, values: Any, what: str) -> list[Any]:
        """The value of each local rank.

        Raises:
            InvalidArgument: not one per local rank.
        """
        if len(self.ranks) == 1:
            return [values]
        listed = isinstance(values, Sequence) and not isinstance(values, np.ndarray)
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

    def pairs(self, arrays: Any, out: Any) -> list[tuple[int, Array, Array | None]]:
        """(rank, array, out or None) for each local rank, all of them arrays."""
        count = len(self.ranks)
        outs = [None] * count if out is None else self.split(out, "out arrays")
        return [
            (
                rank,
                check_array(array, f"the array of rank {rank}"),
                None if to is None else check_array(to, f"out of rank {rank}"),
            )
            for rank, array, to in zip(self.ranks, self.split(arrays, "arrays"), outs, strict=True)
        ]

    def bind(self, arrays: Any, out: Any) -> list[Bound]:
        """Binds inputs to outputs of the same shape; see arrays.bind.

        Raises:
            InvalidArgument: an array cannot be used, or local ranks' arrays differ.
        """
        return self.check_equal([bind(array, to) for _, array, to in self.pairs(arrays, out)])

    def bind_columns(self, arrays: Any) -> list[list[Bound]]:
        """Binds a list of arrays per rank, in place: for each array its bound on every rank."""
        per_rank = [list(each) for each in self.split(arrays, "lists of arrays")]
        lengths = [len(each) for each in per_rank]
        if len(set(lengths)) > 1:
            raise InvalidArgument(
                f"local ranks brought {lengths} arrays; bring as many on every rank"
            )
        return [self.bind(self.give(list(column)), None) for column in zip(*per_rank, strict=True)]

    def check_equal(self, bounds: list[Bound]) -> list[Bound]:
        """The bounds themselves, if all local ranks brought the same count, dtype and layout."""
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
                    "np.ascontiguousarray(x)"
                )
        return bounds

    def check_root(self, root: int) -> None:
        """Raises InvalidArgument if there is no such rank."""
        if not 0 <= root < self.nranks:
            raise InvalidArgument(
                f"root={root} is not a rank; there are ranks 0 to {self.nranks - 1}"
            )
