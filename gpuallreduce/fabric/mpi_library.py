"""MPI's library as mpi4py finds it: there or why not, its world, communicators over parts of it.

Knows nothing of messages. The only importer of mpi4py in the product.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuallreduce.bootstrap.peers import Labels
from gpuallreduce.errors import NotSupported
from gpuallreduce.fabric.mpi_requests import LOCK, error_of

__all__ = ["Exchange", "agree", "communicator", "mpi_module", "mpi_version", "unavailable"]

Exchange = Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]

INSTALL = (
    "pip install 'gpuallreduce[mpi]', and an MPI (Debian and Ubuntu: apt install openmpi-bin; "
    "conda: conda install openmpi)"
)
_STARTED_BY = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")


@functools.cache
def mpi_module() -> Any:
    """mpi4py's MPI; starts MPI.

    Raises:
        NotSupported: there is no mpi4py, or no library that it can load.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise NotSupported(f"MPI cannot be loaded ({error}): {INSTALL}") from None
    return MPI


def mpi_version() -> str:
    """The library's own name and number; raises as ``mpi_module``."""
    text = str(mpi_module().Get_library_version())
    return text.split(", package")[0].splitlines()[0].strip("\0 ")


def unavailable(*, concurrent: bool) -> str | None:
    """None if MPI can be used here, else why not; as ``Mpi.available``."""
    running = "mpi4py.MPI" in sys.modules  # then the program knows what it does
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    if not running and not any(name in os.environ for name in _STARTED_BY):
        return (
            "this process was not started by an MPI launcher: start all ranks by mpirun (or "
            "srun --mpi=pmix)"
        )
    try:
        mpi = mpi_module()
    except NotSupported as error:
        return str(error)
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return "MPI is not running: call MPI.Init_thread() before, and MPI.Finalize() after"
    level = mpi.Query_thread()
    needed, name = mpi.THREAD_SERIALIZED, "MPI_THREAD_SERIALIZED"
    if concurrent:
        needed, name = mpi.THREAD_MULTIPLE, "MPI_THREAD_MULTIPLE"
    if level < needed:
        return (
            f"{name} is needed and MPI runs at a lower level ({level} of {needed}): leave "
            "mpi4py.rc.thread_level alone, or pass it to MPI.Init_thread()"
        )
    return None


def agree(
    exchange: Exchange, *, rank: int, nranks: int, labels: Labels, concurrent: bool
) -> list[int]:
    """The number in MPI's world of each rank of the job; a collective.

    Raises:
        NotSupported: on every rank, if one cannot use MPI or is in another world.
    """
    reason = unavailable(concurrent=concurrent)
    mine: dict[str, Any] = {"rank": rank, "reason": reason, "world": -1, "name": ""}
    if reason is None:
        mine["world"] = mpi_module().COMM_WORLD.rank
        mine["name"] = os.environ.get("PMIX_NAMESPACE", "")
    found = {int(each["rank"]): each for each in exchange(mine)}
    for each in sorted(found):
        if found[each]["reason"] is not None:
            raise NotSupported(f"{labels.rank(each)} cannot use MPI: {found[each]['reason']}")
    worlds = [int(found[each]["world"]) for each in sorted(found)]
    names = {each["name"] for each in found.values()}
    if sorted(found) != list(range(nranks)) or len(set(worlds)) < nranks or len(names) > 1:
        raise NotSupported(
            f"the {nranks} ranks are not in one MPI world (their numbers there: {worlds}): "
            "start all of them by one mpirun"
        )
    return worlds


def communicator(parent: Any, ranks: Sequence[int], tag: int, what: str) -> Any:
    """A communicator over some ranks of another, in that order."""
    mpi = mpi_module()
    # It waits inside MPI: others of our threads may be in MPI meanwhile where that is allowed.
    alone = mpi.Query_thread() < mpi.THREAD_MULTIPLE
    try:
        with LOCK if alone else contextlib.nullcontext():
            everybody = parent.Get_group()
            group = everybody.Incl(list(ranks))
            comm = parent.Create_group(group, tag)
            group.Free()
            everybody.Free()
    except mpi.Exception as error:
        raise error_of(mpi, error, what) from error
    return comm
