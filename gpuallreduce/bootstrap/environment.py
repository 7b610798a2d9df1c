"""Who am I? Rank, number of ranks and meeting point, from arguments or a launcher's variables.

Knows nothing of sockets in use: it opens none and looks at no other process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuallreduce.bootstrap import address as addresses
from gpuallreduce.bootstrap.interfaces import INTERFACE
from gpuallreduce.bootstrap.launchers import (
    LOCAL_RANK,
    NRANKS,
    RANK,
    Launcher,
    integer,
    launched_by,
    numbers,
)
from gpuallreduce.errors import InvalidArgument, NotSupported

__all__ = ["ADDRESS", "LOCAL_RANK", "NODE", "NRANKS", "RANK", "SECRET", "Identity", "identify"]

ADDRESS = "GPUALLREDUCE_ADDRESS"
SECRET = "GPUALLREDUCE_SECRET"
NODE = "GPUALLREDUCE_NODE"
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_LONGEST_NODE = 64


@dataclass(frozen=True)
class Identity:
    """One process among the ranks of a job.

    Attributes:
        rank: 0 to nranks - 1.
        nranks: processes in the job.
        local_rank: the rank among those of this machine.
        local_nranks: processes on this machine.
        address: where rank 0 listens: ``unix:NAME`` or ``HOST:PORT``.
        secret: what all ranks of the job know and nobody else.
        source: where rank and nranks came from.
        node: what this rank's node is called by whoever started it.
        interface: which address of this machine rank 0 listens at, if HOST does not say.
    """

    rank: int
    nranks: int
    local_rank: int
    local_nranks: int
    address: str
    secret: bytes = field(repr=False)
    source: str
    node: str | None = None
    interface: str | None = None


def identify(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    nranks: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    instance: int = 0,
    parent_pid: int | None = None,
    across: bool = False,
) -> Identity:
    """Finds out which rank this process is and where the ranks meet.

    Each of the following wins over those after it: the arguments; ``GPUALLREDUCE_RANK``,
    ``_NRANKS``, ``_ADDRESS`` and ``_SECRET`` (set by ``gpuallreduce run``, or by hand); torchrun;
    Open MPI; MPICH and other PMI launchers; SLURM's srun; else rank 0 of 1. Variables of a second
    launcher are ignored, so mpirun inside a SLURM job is Open MPI.

    Without an address the ranks meet at an abstract Unix socket named after the user, the
    launcher's job (else the parent process, which the ranks then have in common) and ``instance``.
    With ``across``, ranks that the launcher spread over machines meet at MASTER_ADDR (set by
    torchrun, or by hand for mpirun and srun), at the port after MASTER_PORT, which may be in use.

    ``GPUALLREDUCE_NODE`` names this rank's node (by default, ranks that can share memory are on
    one), so that several nodes can be tried on one machine. ``GPUALLREDUCE_INTERFACE`` says which
    of its addresses rank 0 listens at (see ``interfaces``); by default, that which HOST stands for
    there. It is needed where rank 0's machine takes its own name for 127.0.1.1.

    Args:
        environ: ``os.environ``.
        rank: this process's rank; together with ``nranks``.
        nranks: number of processes; together with ``rank``.
        address: ``unix:NAME`` or ``HOST:PORT``, the same for all ranks.
        secret: the same for all ranks. On Unix sockets the kernel names the user at the other end,
            so a value derived from the job is enough; over TCP it is required.
        instance: how many communicators this process made before.
        parent_pid: for tests; the process that started this one.
        across: whether ranks may be on several machines.

    Raises:
        InvalidArgument: a value is missing, no integer, out of range or malformed.
        NotSupported: the ranks are spread over machines and no address was given.
    """
    if (rank is None) != (nranks is None):
        given, missing = ("rank", "nranks") if nranks is None else ("nranks", "rank")
        raise InvalidArgument(f"{given}= was given without {missing}=: pass both, or neither")
    launcher = None if rank is not None else launched_by(environ)
    if rank is not None and nranks is not None:
        source, local = "arguments", (rank, nranks)
    elif launcher is not None:
        source = launcher.source
        rank, nranks, local = numbers(environ, launcher)
    else:
        source, rank, nranks, local = "single process", 0, 1, (0, 1)
    _check_range(rank, nranks, *local, source=source)
    job = _job(environ, launcher, parent_pid)
    spread = local[1] < nranks
    if across and spread and not environ.get(ADDRESS):
        address = address or _master(environ)
    address = address or _address(environ, job, instance, spread=spread)
    addresses.parse(address)
    return Identity(
        rank,
        nranks,
        *local,
        address,
        _secret(environ, secret, address, nranks),
        source,
        _node(environ),
        environ.get(INTERFACE) or None,
    )


def _check_range(
    rank: int, nranks: int, local_rank: int, local_nranks: int, *, source: str
) -> None:
    for name, value in (("rank", rank), ("nranks", nranks)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{name} must be an integer, found {value!r} ({source})")
    if nranks < 1 or not 0 <= rank < nranks:
        raise InvalidArgument(
            f"rank {rank} of {nranks} ({source}): expected 0 <= rank < nranks, nranks at least 1"
        )
    if not 0 <= local_rank < local_nranks <= nranks:
        raise InvalidArgument(
            f"local rank {local_rank} of {local_nranks} among {nranks} ranks ({source}): expected "
            "0 <= local rank < local number <= nranks"
        )


def _job(environ: Mapping[str, str], launcher: Launcher | None, parent_pid: int | None) -> str:
    names = [name for name in launcher.job if name in environ] if launcher else []
    if launcher and names:
        return " ".join([launcher.source, *(f"{name}={environ[name]}" for name in names)])
    if parent_pid is not None:
        return f"parent {parent_pid}"
    try:  # two containers can share a network, and so abstract names, but not their numbering
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"parent {os.getppid()} {space}"


def _address(environ: Mapping[str, str], job: str, instance: int, *, spread: bool) -> str:
    given = environ.get(ADDRESS)
    if given:
        # HOST:PORT serves all instances: rank 0 stops listening before any rank goes on.
        return f"{given}-{instance}" if instance and addresses.is_unix(given) else given
    if spread:
        raise NotSupported(
            "the ranks are spread over several machines and meet at a Unix socket by default: "
            f"start all ranks on one machine, or set {ADDRESS} or address= to HOST:PORT of rank 0"
        )
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    return f"unix:gpuallreduce-{os.getuid()}-{digest}-{instance}"


def _master(environ: Mapping[str, str]) -> str | None:
    """HOST:PORT by the launcher's variables, if it set them."""
    host, port = (environ.get(name) for name in _MASTER)
    if not host or not port:
        return None
    number = integer(environ, _MASTER[1]) + 1
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def _node(environ: Mapping[str, str]) -> str | None:
    node = environ.get(NODE)
    if node and not (node.isprintable() and len(node.encode()) <= _LONGEST_NODE):
        raise InvalidArgument(
            f"{NODE} must be printable text of at most {_LONGEST_NODE} bytes, found {node!r:.100}"
        )
    return node or None


def _secret(
    environ: Mapping[str, str], secret: str | bytes | None, address: str, nranks: int
) -> bytes:
    given = secret if secret is not None else environ.get(SECRET)
    if given:
        return given.encode() if isinstance(given, str) else given
    if not addresses.is_unix(address) and nranks > 1:
        raise InvalidArgument(
            f"address {address} is TCP, where anybody can connect, and there is no secret: set "
            f"{SECRET} or pass secret=, the same for all ranks"
        )
    # Not secret at all: over Unix sockets the kernel says who connects (SO_PEERCRED).
    return hashlib.sha256(f"gpuallreduce {address}".encode()).digest()
