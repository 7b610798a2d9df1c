"""Who am I? Rank, number of ranks and meeting point, from arguments or a launcher's variables.

Knows nothing of sockets in use: it opens none and looks at no other process.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuallreduce.bootstrap import address as addresses
from gpuallreduce.errors import InvalidArgument, NotSupported

__all__ = ["ADDRESS", "LOCAL_RANK", "NRANKS", "RANK", "SECRET", "Identity", "identify"]

RANK = "GPUALLREDUCE_RANK"
NRANKS = "GPUALLREDUCE_NRANKS"
LOCAL_RANK = "GPUALLREDUCE_LOCAL_RANK"
ADDRESS = "GPUALLREDUCE_ADDRESS"
SECRET = "GPUALLREDUCE_SECRET"


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
    """

    rank: int
    nranks: int
    local_rank: int
    local_nranks: int
    address: str
    secret: bytes = field(repr=False)
    source: str


@dataclass(frozen=True)
class _Launcher:
    """How one launcher names things; ``job`` is the same text in all processes of one job only."""

    source: str
    rank: str
    nranks: str
    local_rank: str
    local_nranks: str
    job: tuple[str, ...]
    needs: str | None = None


# In order of precedence. A launcher has started this process if its rank variable is there: number
# variables alone also appear where nothing was launched (SLURM_NTASKS in an allocation's shell).
_LAUNCHERS = (
    _Launcher("gpuallreduce run", RANK, NRANKS, LOCAL_RANK, NRANKS, ()),
    _Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        # The port is torchrun's own: it names the job, and is never bound here.
        ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher("MPICH/PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ()),
    _Launcher(
        "SLURM",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        # A batch script is task 0 of many and nobody starts the others: only srun makes a step.
        needs="SLURM_STEP_ID",
    ),
)


def identify(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    nranks: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    instance: int = 0,
    parent_pid: int | None = None,
) -> Identity:
    """Finds out which rank this process is and where the ranks meet.

    Each of the following wins over those after it: the arguments; ``GPUALLREDUCE_RANK``,
    ``_NRANKS``, ``_ADDRESS`` and ``_SECRET`` (set by ``gpuallreduce run``, or by hand); torchrun;
    Open MPI; MPICH and other PMI launchers; SLURM's srun; else rank 0 of 1. Variables of a second
    launcher are ignored, so mpirun inside a SLURM job is Open MPI.

    Without an address the ranks meet at an abstract Unix socket named after the user, the
    launcher's job (else the parent process, which the ranks then have in common) and ``instance``.

    Args:
        environ: ``os.environ``.
        rank: this process's rank; together with ``nranks``.
        nranks: number of processes; together with ``rank``.
        address: ``unix:NAME`` or ``HOST:PORT``, the same for all ranks.
        secret: the same for all ranks. On Unix sockets the kernel names the user at the other end,
            so a value derived from the job is enough; over TCP it is required.
        instance: how many communicators this process made before.
        parent_pid: for tests; the process that started this one.

    Raises:
        InvalidArgument: a value is missing, no integer, out of range or malformed.
        NotSupported: the ranks are spread over machines and no address was given.
    """
    if (rank is None) != (nranks is None):
        given, missing = ("rank", "nranks") if nranks is None else ("nranks", "rank")
        raise InvalidArgument(f"{given}= was given without {missing}=: pass both, or neither")
    launcher = None if rank is not None else _launched_by(environ)
    if rank is not None and nranks is not None:
        source, local = "arguments", (rank, nranks)
    elif launcher is not None:
        source = launcher.source
        rank, nranks, local = _numbers(environ, launcher)
    else:
        source, rank, nranks, local = "single process", 0, 1, (0, 1)
    _check_range(rank, nranks, *local, source=source)
    job = _job(environ, launcher, parent_pid)
    address = address or _address(environ, job, instance, spread=local[1] < nranks)
    addresses.parse(address)
    return Identity(
        rank, nranks, *local, address, _secret(environ, secret, address, nranks), source
    )


def _launched_by(environ: Mapping[str, str]) -> _Launcher | None:
    for launcher in _LAUNCHERS:
        if launcher.rank in environ and (launcher.needs is None or launcher.needs in environ):
            return launcher
    if NRANKS in environ:
        raise InvalidArgument(f"{NRANKS} is set and {RANK} is not: set both, or neither")
    return None


def _numbers(environ: Mapping[str, str], launcher: _Launcher) -> tuple[int, int, tuple[int, int]]:
    if launcher.nranks not in environ:
        raise InvalidArgument(
            f"{launcher.rank} is set ({launcher.source}) and {launcher.nranks} is not: set both, "
            "or neither"
        )
    rank = _integer(environ, launcher.rank)
    nranks = _integer(environ, launcher.nranks)
    if launcher.local_rank not in environ:
        return rank, nranks, (rank, nranks)
    local_nranks = nranks
    if launcher.source == "SLURM":
        local_nranks = _slurm_local_nranks(environ, launcher.local_nranks, nranks)
    elif launcher.local_nranks in environ:
        local_nranks = _integer(environ, launcher.local_nranks)
    return rank, nranks, (_integer(environ, launcher.local_rank), local_nranks)


def _slurm_local_nranks(environ: Mapping[str, str], name: str, nranks: int) -> int:
    """The tasks of this node out of a list like ``4(x2),3``: two nodes of 4 and one of 3."""
    per_node: list[int] = []
    for group in environ.get(name, str(nranks)).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is None:
            raise InvalidArgument(f"{name} must look like 4(x2),3, found {environ[name]!r}")
        per_node += [int(match[1])] * int(match[2] or 1)
    node = _integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return per_node[node] if 0 <= node < len(per_node) else nranks


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise InvalidArgument(f"{name} must be an integer, found {environ[name]!r}") from None


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


def _job(environ: Mapping[str, str], launcher: _Launcher | None, parent_pid: int | None) -> str:
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
