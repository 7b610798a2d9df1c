"""Other libraries that can all-reduce in the same processes. To add one: a class, and its name.

Knows nothing of tables or time. Names are listed in ``options.PEERS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gpuallreduce.bootstrap.launch_nodes import HOW_TO_INSTALL
from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.fabric.nccl import Nccl as NcclEngine
from gpuallreduce.types import Dtype, Op

from .places import Array
from .ranks import Ranks

__all__ = ["Peer", "check", "connect"]


class Peer(Protocol):
    """A library to compare with, on the ranks of this process."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    @property
    def version(self) -> str:
        """Which library really runs, in one line."""

    def supports(self, dtype: Dtype, op: Op) -> bool:
        """Whether it can do this. A collective; all ranks get the same answer."""

    def call(
        self, sources: Sequence[Array], results: Sequence[Array], dtype: Dtype, op: Op
    ) -> Callable[[], object]:
        """A call without arguments that all-reduces arrays of the local ranks; in place if sources
        and results are the same.
        """

    def abort(self) -> None:
        """Ends what ranks of other processes may be waiting for."""

    def close(self) -> None:
        """Gives back what it holds; a collective."""


def check(names: Sequence[str]) -> None:
    """Fails before any process is started.

    Raises:
        NotSupported: a library that can be looked for by now is not installed.
    """
    if "nccl" in names and (reason := NcclEngine.available()) is not None:
        raise NotSupported(f"--peer nccl: {reason}")


def connect(name: str, ranks: Ranks) -> Peer:
    """Joins a library with the ranks that this job has. A collective.

    Raises:
        InvalidArgument: there is no such peer, or its ranks are not those of the job.
        NotSupported: it is not installed; says what to install.
    """
    if name == "mpi":
        return Mpi(ranks.nranks)
    if name == "nccl":
        return Nccl(ranks)
    raise InvalidArgument(f"peer {name!r} does not exist; there are mpi, nccl")


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
            self.call([one], [np.empty_like(one)], dtype, op)()
        except (self._mpi.Exception, KeyError, ValueError, TypeError):
            return False
        return True

    def call(
        self, sources: Sequence[Array], results: Sequence[Array], dtype: Dtype, op: Op
    ) -> Callable[[], object]:
        """See Peer. Every process holds one rank."""
        sent = self._mpi.IN_PLACE if sources[0] is results[0] else sources[0]
        return functools.partial(self._world.Allreduce, sent, results[0], self._ops[op.name])

    def abort(self) -> None:
        """Otherwise MPI would wait for the others when this process ends."""
        if self._world.size > 1:
            self._world.Abort(1)

    def close(self) -> None:
        """mpi4py does it at exit."""


class Nccl:
    """NCCL through CuPy, on the streams and GPUs of our own calls: no barrier of ours before it."""

    name = "nccl"

    def __init__(self, ranks: Ranks) -> None:
        """A collective. Ranks of other processes are met over our communicator."""
        from .cuda_place import CudaPlace

        place = ranks.place
        if not isinstance(place, CudaPlace):
            raise InvalidArgument("--peer nccl reduces GPU memory: use it with --device cuda")
        self._streams = [stream.ptr for stream in place.streams]
        self._engine = NcclEngine(
            place.ordinals,
            ranks=ranks.local,
            nranks=ranks.nranks,
            exchange=None if ranks.together else ranks.exchange,
        )

    @property
    def version(self) -> str:
        """NCCL's number."""
        return f"NCCL {self._engine.version()}"

    def supports(self, dtype: Dtype, op: Op) -> bool:
        """Whether this version has the pair: the same on all ranks, or NCCL would not start."""
        try:
            self._engine.check_pair(dtype, op)
        except NotSupported:
            return False
        return True

    def call(
        self, sources: Sequence[Array], results: Sequence[Array], dtype: Dtype, op: Op
    ) -> Callable[[], object]:
        """See Peer. Enqueues on the ranks' streams."""
        return self._engine.prepared(
            [array.data.ptr for array in sources],
            [array.data.ptr for array in results],
            sources[0].size,
            dtype=dtype,
            op=op,
            streams=self._streams,
        )

    def abort(self) -> None:
        """See Peer."""
        self._engine.abort()

    def close(self) -> None:
        """See Peer."""
        self._engine.close()
