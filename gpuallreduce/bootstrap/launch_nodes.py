"""Starts a job of several nodes on this machine, through mpirun: each rank is told a node's name.

Knows nothing of what the ranks do, nor of nodes that are machines: those have launchers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from gpuallreduce.bootstrap.environment import NODE
from gpuallreduce.bootstrap.interrupts import Interrupts
from gpuallreduce.bootstrap.job import Job
from gpuallreduce.errors import InvalidArgument, NotSupported

__all__ = ["HOW_TO_INSTALL", "find_mpirun", "launch_nodes", "node_names", "parse_nodes"]

HOW_TO_INSTALL = (
    "pip install mpi4py (or gpuallreduce[mpi]), and an MPI library (Debian and Ubuntu: apt install "
    "openmpi-bin libopenmpi-dev; conda: conda install openmpi)"
)
# Ranks share this machine's cores, so whoever waits lets the others run; some run as root in
# containers. Other MPI libraries than Open MPI do not look at these.
_SETTINGS = {"OMPI_MCA_mpi_yield_when_idle": "1"}
_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
VISIBLE = "CUDA_VISIBLE_DEVICES"
_GRACE_S = 5.0


def parse_nodes(text: str) -> tuple[int, ...]:
    """Ranks of each node, from text such as ``4,4``.

    Raises:
        InvalidArgument: it is no list of whole numbers of at least 1.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) >= 1 for part in parts):
        raise InvalidArgument(f"expected the ranks of each node, such as 4,4, found {text!r}")
    return tuple(map(int, parts))


def node_names(sizes: Sequence[int]) -> list[str]:
    """What the nodes of ``launch_nodes`` are called."""
    return [f"node{number}" for number in range(len(sizes))]


def launch_nodes(sizes: Sequence[int], command: Sequence[str], *, gpus: int = 0) -> int:
    """Runs ``command`` once per rank and waits for all. Ranks are numbered node by node.

    The ranks find their nodes in ``GPUALLREDUCE_NODE``: node0, node1 and so on. Rank 0 has this
    process's standard input. All are ended when this process gets SIGINT, SIGTERM or SIGHUP, or is
    killed.

    Args:
        sizes: ranks of each node.
        command: program and arguments.
        gpus: GPUs that this process sees. Each node sees its share of them, one for a rank (again
            the first after the last), and NCCL takes it for a machine.

    Returns:
        mpirun's status: 0 if all ranks succeeded.

    Raises:
        InvalidArgument: no node, a node without ranks, or no command.
        NotSupported: mpirun or mpi4py is missing; says what to install.
    """
    if not sizes or min(sizes) < 1 or not command:
        raise InvalidArgument(
            f"expected at least one node, ranks on each and a command, found nodes {list(sizes)} "
            f"and command {list(command)}"
        )
    words = _mpirun(sizes, command, gpus)
    variables = {**_SETTINGS, **os.environ}
    if os.geteuid() == 0:
        variables |= dict.fromkeys(_AS_ROOT, "1")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()  # what we printed before comes first
    with Interrupts() as interrupts, contextlib.closing(Job(interrupts, _GRACE_S)) as job:
        job.start(words, variables, core=None, prefix=False, targets=(1, 2))
        return job.wait(None)


def find_mpirun(what: str) -> tuple[str, bool]:
    """Where mpirun is, and whether it is Open MPI's.

    Args:
        what: what needs it, for messages.

    Raises:
        NotSupported: mpirun or mpi4py is missing; says what to install.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise NotSupported(f"{what} needs mpi4py, which is not installed: {HOW_TO_INSTALL}")
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    if mpirun is None:
        raise NotSupported(
            f"{what} needs mpirun, and there is none on {os.environ.get('PATH', 'PATH')}: "
            f"{HOW_TO_INSTALL}"
        )
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    version = done.stdout + done.stderr
    return mpirun, any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE"))


def _mpirun(sizes: Sequence[int], command: Sequence[str], gpus: int) -> list[str]:
    """mpirun with one part of its command line for each node."""
    mpirun, open_mpi = find_mpirun("a job of several nodes")
    # Other launchers take more ranks than cores as they are.
    words = [mpirun, *(["--oversubscribe", "--bind-to", "none"] if open_mpi else [])]
    first = 0
    for number, (size, name) in enumerate(zip(sizes, node_names(sizes), strict=True)):
        words += [":"] if number else []
        words += ["-n", str(size), "env", f"{NODE}={name}"]
        if gpus:
            words += [f"NCCL_HOSTID={name}", f"{VISIBLE}={','.join(_share(first, size, gpus))}"]
        words += command
        first += size
    return words


def _share(first: int, size: int, gpus: int) -> list[str]:
    """The GPUs of ``size`` ranks from rank ``first`` on, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(VISIBLE)
    visible = named.split(",") if named else [str(number) for number in range(gpus)]
    return list(dict.fromkeys(visible[rank % gpus] for rank in range(first, first + size)))
