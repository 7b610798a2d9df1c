"""The public API beside all-reduce: its halves, and what comes with them.

Knows nothing of a communicator's life: it checks arguments and hands bound arrays on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gpuallreduce.arrays import Bound
from gpuallreduce.calls import Calls, Options
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.locals import LocalRanks, check_timeout

__all__ = ["Collectives"]


class Collectives:
    """The calls that Communicator has beside all-reduce; see there for what they have in common."""

    nranks: int
    ranks: Sequence[int]
    _calls: Calls
    _locals: LocalRanks

    def _entered(self, stream: Any = None) -> AbstractContextManager[None]:
        """Holds the lock for a call on a stream, if one can be made."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits until the calls of this process have ended."""
        raise NotImplementedError

    def reduce(
        self,
        arrays: Any,
        out: Any = None,
        *,
        root: int = 0,
        op: str = "sum",
        stream: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """As allreduce, but only the root gets the result; other ranks' arrays stay as they are.

        Args:
            arrays: as in allreduce.
            out: as in allreduce; looked at for the root only.
            root: the rank that gets the result.
            op: as in allreduce.
            stream: as in allreduce.
            timeout: as in allreduce.
        """
        root = self._locals.check_root(root)
        options = Options(op, root=root, timeout=check_timeout(timeout))
        with self._entered(stream):
            pairs = self._locals.pairs(arrays, out, reads_out=lambda rank: rank == root)
            kind = self._locals.arrays
            bounds = [
                kind.bind_in_c_order(array, to, i) if rank == root else kind.bind_input(array, i)
                for i, (rank, array, to) in enumerate(pairs)
            ]
            self._calls.run("reduce", self._locals.check_equal(bounds), options)
        return arrays if out is None else out

    def reduce_scatter(
        self,
        arrays: Any,
        out: Any = None,
        *,
        op: str = "sum",
        stream: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Rank r ends with block r, along the first axis, of what allreduce would give.

        Args:
            arrays: shape (nranks * k, ...).
            out: shape (k, ...); made if None.
            op: as in allreduce.
            stream: as in allreduce.
            timeout: as in allreduce.

        Returns:
            The blocks: one array, or a list with one per local rank.
        """
        options = Options(op, blocks=self.nranks, timeout=check_timeout(timeout))
        with self._entered(stream):
            bounds = []
            for local, (rank, array, to) in enumerate(self._locals.pairs(arrays, out)):
                if array.ndim == 0 or array.shape[0] % self.nranks:
                    raise InvalidArgument(
                        f"the array of rank {rank} has shape {array.shape}; its first axis must "
                        f"be a multiple of the {self.nranks} ranks"
                    )
                shape = (array.shape[0] // self.nranks, *array.shape[1:])
                bounds.append(self._locals.arrays.bind_blocks(array, to, shape, local))
            self._calls.run("reduce_scatter", self._locals.check_equal(bounds), options)
        return self._locals.give([bound.result for bound in bounds])

    def all_gather(
        self, arrays: Any, out: Any = None, *, stream: Any = None, timeout: float | None = None
    ) -> Any:
        """Every rank ends with all ranks' arrays, one after the other along the first axis.

        Args:
            arrays: shape (k, ...), or 0-d.
            out: shape (nranks * k, ...), for 0-d (nranks,); made if None.
            stream: as in allreduce.
            timeout: as in allreduce.

        Returns:
            The gathered arrays: one, or a list with one per local rank.
        """
        options = Options(timeout=check_timeout(timeout))
        with self._entered(stream):
            bounds: list[Bound] = []
            for local, (_, array, to) in enumerate(self._locals.pairs(arrays, out)):
                shape = (self.nranks * (array.shape[0] if array.ndim else 1), *array.shape[1:])
                bounds.append(self._locals.arrays.bind_blocks(array, to, shape, local))
            self._calls.run("all_gather", self._locals.check_equal(bounds), options)
        return self._locals.give([bound.result for bound in bounds])

    def broadcast(
        self, arrays: Any, *, root: int = 0, stream: Any = None, timeout: float | None = None
    ) -> Any:
        """Every rank's array becomes the root's, in place."""
        options = Options(root=self._locals.check_root(root), timeout=check_timeout(timeout))
        with self._entered(stream):
            self._calls.run("broadcast", self._locals.bind(arrays, None), options)
        return arrays

    def barrier(self, *, timeout: float | None = None) -> None:
        """Returns when every rank has come."""
        options = Options(timeout=check_timeout(timeout))
        with self._entered():
            kind = self._locals.arrays
            nothing = [kind.empty((0,), np.dtype(np.uint8), i) for i in range(len(self.ranks))]
            bounds = [kind.bind(each, None, i) for i, each in enumerate(nothing)]
            self._calls.run("barrier", bounds, options)
            self.synchronize()
