"""The ways to a communicator that need none at hand: one process per rank, and one call for a list
of arrays.

Knows nothing of how calls run.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuallreduce.across.calls import CallsAcross
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.bootstrap.nodes import Nodes, meet
from gpuallreduce.communicator import DEFAULT_TIMEOUT_S, Communicator
from gpuallreduce.errors import Error, InvalidArgument, NotSupported
from gpuallreduce.locals import check_devices
from gpuallreduce.placement import joined_rank, local_ranks
from gpuallreduce.tracing import check_traced, trace_file
from gpuallreduce.version import VERSION

__all__ = ["allreduce", "init"]

_instances = itertools.count()


def init(
    *,
    rank: int | None = None,
    nranks: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    device: str = "host",
    timeout: float | None = DEFAULT_TIMEOUT_S,
    trace: str | os.PathLike[str] | None = None,
) -> Communicator:
    """Makes this process one rank of a job. A collective: every process calls it, equally often.

    Without arguments it finds its place in the launcher's variables: ``gpuallreduce run``,
    torchrun, mpirun, srun. A process that no launcher started is rank 0 of 1.

    Args:
        rank, nranks: this process's place, where there is no launcher.
        address: where rank 0 listens: ``unix:NAME`` (a name without a file) or ``HOST:PORT``.
        secret: shared by all ranks; needed with HOST:PORT (or in GPUALLREDUCE_SECRET).
        device: what this rank runs on: ``"host"``, ``"cuda:1"``, or ``"cuda"`` for the GPU whose
            number is the rank among those of this machine (modulo the GPUs that it sees). A GPU
            also becomes CuPy's current device.
        timeout: seconds until all ranks must have come, and the default limit of later waits.
        trace: a file for Chrome's and Perfetto's trace viewers, which shows when the stages of
            calls ran: between nodes each chunk's folding, travelling and gathering, on one node
            each call. It is emptied now, and every rank adds its stages when its communicator is
            closed. So ranks that see one file system get one file, and wait for nobody; machines
            without a common one have a file each. One communicator a file.

    Raises:
        InvalidArgument: the place is not described completely; or ``trace`` cannot be written on
            some rank.
        Timeout: ranks are missing; names them.
        MismatchError: ranks disagree on nranks, version or secret, or two claim one rank.
        DeviceError: a rank failed to start; every rank raises and names it.
        NotSupported: CUDA devices where CuPy or a GPU is missing; says which. Or with ``trace`` on
            one node.
    """
    (name,) = check_devices([device])
    identity = identify(
        os.environ,
        rank=rank,
        nranks=nranks,
        address=address,
        secret=secret,
        instance=next(_instances),
        across=True,
    )
    if identity.nranks == 1:
        check_traced(name, trace)
        file = trace_file(trace)
        return Communicator.over(local_ranks([name]), timeout=timeout, trace=file)
    file, failure = _traced(trace)
    nodes = meet(identity, timeout=timeout or 1e9, version=VERSION)
    _check_trace(nodes, name, trace, failure)
    if len(nodes.sizes) == 1:
        placement = joined_rank(nodes.node, name, local_rank=identity.local_rank)
        return Communicator.over(placement, timeout=timeout, trace=file)
    return _over_nodes(nodes, name, timeout, file)


def _traced(trace: str | os.PathLike[str] | None) -> tuple[Path | None, Error | None]:
    """The file of the stages, or why it cannot be: for all ranks to raise once they have met."""
    try:
        return trace_file(trace), None
    except InvalidArgument as error:
        return None, error


def _check_trace(nodes: Nodes, device: str, trace: object, failure: Error | None) -> None:
    """Raises on all ranks if one cannot have the trace that it was asked for. A collective."""
    try:
        if failure is None and len(nodes.sizes) == 1:
            check_traced(device, trace)
    except NotSupported as error:
        failure = error
    told = None if failure is None else [type(failure).__name__, str(failure)]
    parts = nodes.everyone.exchange("trace", {"failure": told})
    for rank, part in enumerate(parts):
        if part.payload["failure"] is not None:
            nodes.close()
            kind, text = part.payload["failure"]
            raise {"NotSupported": NotSupported}.get(kind, InvalidArgument)(f"rank {rank}: {text}")


def _over_nodes(
    nodes: Nodes, device: str, timeout: float | None, trace: Path | None
) -> Communicator:
    """One rank of a job on several machines."""
    found = [
        part.payload["device"] for part in nodes.everyone.exchange("devices", {"device": device})
    ]
    if len({name.partition(":")[0] for name in found}) > 1:
        nodes.close()
        raise NotSupported(
            f"the ranks are on {len(nodes.names)} machines ({', '.join(nodes.names)}), and their "
            f"devices are of different kinds: {found}. NCCL connects GPUs, MPI connects host "
            "ranks: give all ranks devices of one kind"
        )
    try:
        placement = joined_rank(nodes.node, device, local_rank=nodes.local_rank)
        return Communicator.over(
            placement,
            timeout=timeout,
            connect=lambda placed, limit: CallsAcross(nodes, placed, timeout=limit, trace=trace),
        )
    except BaseException:
        nodes.close()
        raise


_communicators: dict[tuple[str, ...], Communicator] = {}
_keeping = threading.RLock()  # threads that come at once share one


def _kept(devices: tuple[str, ...]) -> Communicator:
    """The communicator of these devices; a new one after a fork, or once it cannot be used."""
    with _keeping:
        communicator = _communicators.get(devices)
        if communicator is None or not communicator.usable:
            communicator = _communicators[devices] = Communicator(devices)
        return communicator


def _device_of(array: Any) -> str:
    """The device of the rank that an array is for."""
    offers = ("__dlpack_device__", "__cuda_array_interface__")
    if isinstance(array, np.ndarray) or not any(hasattr(array, name) for name in offers):
        return "host"
    from gpuallreduce.devices.cuda_arrays import gpu_with

    return gpu_with(array)


def allreduce(arrays: Sequence[Any], out: Sequence[Any] | None = None, **options: Any) -> Any:
    """All-reduces a list of arrays, one per rank of this process; the communicator is kept for the
    next call.

    Args:
        arrays: arrays of equal count and dtype: all of NumPy, or each on a GPU, whose ranks then
            run there.
        out, options: as in ``Communicator.allreduce``.
    """
    if not isinstance(arrays, Sequence) or not arrays:
        raise InvalidArgument(
            "give a list of arrays, one per rank; in a job of processes use gpuallreduce.init()"
        )
    communicator = _kept(tuple(_device_of(array) for array in arrays))
    if len(arrays) == 1:
        return [communicator.allreduce(arrays[0], None if out is None else out[0], **options)]
    return communicator.allreduce(arrays, out, **options)
