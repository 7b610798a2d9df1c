"""The launchers whose jobs we know: what their variables say of a process's rank.

Knows nothing of addresses and secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuallreduce.errors import InvalidArgument

__all__ = ["LOCAL_RANK", "NRANKS", "RANK", "Launcher", "integer", "launched_by", "numbers"]

RANK = "GPUALLREDUCE_RANK"
NRANKS = "GPUALLREDUCE_NRANKS"
LOCAL_RANK = "GPUALLREDUCE_LOCAL_RANK"


@dataclass(frozen=True)
class Launcher:
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
    Launcher("gpuallreduce run", RANK, NRANKS, LOCAL_RANK, NRANKS, ()),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        # The port is torchrun's own: it names the job, and is never bound here.
        ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("MPICH/PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ()),
    Launcher(
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


def launched_by(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process, if one did."""
    for launcher in _LAUNCHERS:
        if launcher.rank in environ and (launcher.needs is None or launcher.needs in environ):
            return launcher
    if NRANKS in environ:
        raise InvalidArgument(f"{NRANKS} is set and {RANK} is not: set both, or neither")
    return None


def numbers(environ: Mapping[str, str], launcher: Launcher) -> tuple[int, int, tuple[int, int]]:
    """Rank, number of ranks, and both among the ranks of this machine."""
    if launcher.nranks not in environ:
        raise InvalidArgument(
            f"{launcher.rank} is set ({launcher.source}) and {launcher.nranks} is not: set both, "
            "or neither"
        )
    rank = integer(environ, launcher.rank)
    nranks = integer(environ, launcher.nranks)
    if launcher.local_rank not in environ:
        return rank, nranks, (rank, nranks)
    local_nranks = nranks
    if launcher.source == "SLURM":
        local_nranks = _slurm_local_nranks(environ, launcher.local_nranks, nranks)
    elif launcher.local_nranks in environ:
        local_nranks = integer(environ, launcher.local_nranks)
    return rank, nranks, (integer(environ, launcher.local_rank), local_nranks)


def _slurm_local_nranks(environ: Mapping[str, str], name: str, nranks: int) -> int:
    """The tasks of this node out of a list like ``4(x2),3``: two nodes of 4 and one of 3."""
    per_node: list[int] = []
    for group in environ.get(name, str(nranks)).split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is None:
            raise InvalidArgument(f"{name} must look like 4(x2),3, found {environ[name]!r}")
        per_node += [int(match[1])] * int(match[2] or 1)
    node = integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return per_node[node] if 0 <= node < len(per_node) else nranks


def integer(environ: Mapping[str, str], name: str) -> int:
    """The integer that a variable holds; raises InvalidArgument if it holds none."""
    try:
        return int(environ[name])
    except ValueError:
        raise InvalidArgument(f"{name} must be an integer, found {environ[name]!r}") from None
