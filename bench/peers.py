"""Other libraries that can all-reduce in the same processes. To add one: a class, and its name.

Knows nothing of tables or time. Names are listed in ``options.PEERS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.types import Dtype, Op

__all__ = ["Peer", "connect"]

Array = np.ndarray[Any, Any]
HOW_TO_INSTALL = (
    "pip install mpi4py (or gpuallreduce[mpi]), and an MPI library (Debian and Ubuntu: apt install "
    "openmpi-bin libopenmpi-dev; conda: conda install openmpi)"
)


class Peer(Protocol):
    """A library to compare with; every process holds one rank."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    @property
    def version(self) -> str:
        """Which library really runs, in one line."""

    def supports(self, dtype: Dtype, op: Op) -> bool:
        """Whether it can do this. A collective; all ranks get the same answer."""

    def call(self, source: Array, result: Array, op: Op) -> Callable[[], object]:
        """A call without arguments that all-reduces; in place if both arrays are the same one."""

    def abort(self) -> None:
        """Ends the processes of all ranks: the others may be waiting for this one."""


def connect(name: str, nranks: int) -> Peer:
    """Joins a library with the ranks that this job has.

    Raises:
        InvalidArgument: there is no such peer, or its ranks are not those of the job.
        NotSupported: it is not installed; says what to install.
    """
    if name != "mpi":
        raise InvalidArgument(f"peer {name!r} does not exist; there is mpi")
    return Mpi(nranks)


class Mpi:
    """MPI through mpi4py, called as programs call it: with NumPy arrays.

    Naming the datatype as well takes mpi4py longer, so this is its fastest way.
    """

    name = "mpi"

    def __init__(self, nranks: int) -> None:
        """Joins MPI's world.

        Args:
            nranks: how many processes must be in it.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise NotSupported(f"--peer mpi cannot load MPI ({error}): {HOW_TO_INSTALL}") from None
        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        if self._world.size != nranks:
            raise InvalidArgument(
                f"MPI counts {self._world.size} processes and this job has {nranks} ranks: start "
                "it with the mpirun of the library that mpi4py was built with"
            )
        self._ops = {
            "sum": MPI.SUM,
            "prod": MPI.PROD,
            "max": MPI.MAX,
            "min": MPI.MIN,
            "band": MPI.BAND,
            "bor": MPI.BOR,
            "bxor": MPI.BXOR,
        }

    @property
    def version(self) -> str:
        """The library's own name and number."""
        return self._mpi.Get_library_version().split(", package")[0].splitlines()[0].strip("\0 ")

    def supports(self, dtype: Dtype, op: Op) -> bool:
        """Tries it, since libraries differ. Only NumPy's own types have names there."""
        if op.name not in self._ops or dtype.numpy.isbuiltin != 1:
            return False
        one = np.ones(1, dtype.numpy)
        try:
            self.call(one, np.empty_like(one), op)()
        except (self._mpi.Exception, KeyError, ValueError, TypeError):
            return False
        return True

    def call(self, source: Array, result: Array, op: Op) -> Callable[[], object]:
        """See Peer."""
        sent = self._mpi.IN_PLACE if source is result else source
        return functools.partial(self._world.Allreduce, sent, result, self._ops[op.name])

    def abort(self) -> None:
        """Otherwise MPI would wait for the others when this process ends."""
        if self._world.size > 1:
            self._world.Abort(1)
