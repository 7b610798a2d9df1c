"""What reduce and reduce_scatter are made of between nodes: an all-reduce into memory of the call,
of which a rank keeps its part.

Knows nothing of nodes, nor of how an all-reduce is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuallreduce.arrays import Arrays, Bound
from gpuallreduce.plan import Request

__all__ = ["Whole", "whole_of"]


@dataclass(frozen=True)
class Whole:
    """The all-reduce of a call.

    Attributes:
        bound: of the all-reduce.
        kept: what of its result goes to the call's own output; None: nothing is to be copied.
    """

    bound: Bound
    kept: Bound | None = None


def whole_of(asked: Request, bound: Bound, arrays: Arrays, rank: int) -> Whole:
    """How a rank's call is made from an all-reduce.

    Where the rank keeps all of the result, it is put where the call wants it. Else it goes to
    memory of as many bytes as the input has, which is given back when the call ends (on a GPU, when
    the call's stream gets there).

    Args:
        asked: the call.
        bound: this rank's array in it.
        arrays: makes memory, and copies.
        rank: this rank.
    """
    scatters = asked.collective == "reduce_scatter"
    if not scatters and (asked.collective != "reduce" or rank == asked.root):
        return Whole(bound)
    room = arrays.empty((bound.count,), asked.dtype.numpy, 0)
    at = arrays.address(room)
    whole = replace(bound, output=at, in_place=False, result=room, finish=None, keep=(bound, room))
    if not scatters:
        return Whole(whole)
    mine = at + rank * asked.nbytes
    return Whole(whole, replace(bound, input=mine, count=asked.count, in_place=False))
