"""Puts each rank in a process of its own: by our launcher, or by mpirun where MPI takes part.

Knows nothing of what they measure.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.bootstrap.launch import launch
from gpuallreduce.bootstrap.launch_nodes import find_mpirun, launch_nodes
from gpuallreduce.bootstrap.python import module_command
from gpuallreduce.devices.cuda_runtime import device_count
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.topology import available_cores

from .arguments import to_argv
from .options import Options

__all__ = ["in_processes", "mpirun_command", "must_start", "start"]

MODULE = "gpuallreduce.bench.allreduce_perf"
WITHOUT_MPI = ("gpuallreduce run", "torchrun")


def must_start(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether processes are asked for and this one is not yet one of them.

    Raises:
        InvalidArgument: a launcher has started this process, and not as the options say.
    """
    here = identify(environ, across=True)
    if here.source == "single process":
        return bool(options.nodes) or options.processes is not None or options.needs_mpi
    if options.nodes and sum(options.nodes) != here.nranks:
        raise InvalidArgument(
            f"--nodes {','.join(map(str, options.nodes))} has {sum(options.nodes)} ranks, but "
            f"{here.source} started {here.nranks}: leave --nodes out, or the launcher"
        )
    if options.processes not in (None, here.nranks):
        raise InvalidArgument(
            f"--processes {options.processes}, but {here.source} started {here.nranks}: leave "
            "--processes out, or the launcher"
        )
    if options.devices and len(options.devices) != here.nranks:
        raise InvalidArgument(
            f"--devices has {len(options.devices)} devices, but {here.source} started "
            f"{here.nranks} processes: give one for each"
        )
    if options.ranks is not None and here.nranks > 1:
        raise InvalidArgument(
            f"-g {options.ranks} counts ranks of one process, but {here.source} started "
            f"{here.nranks}, one rank each: leave -g out"
        )
    if options.needs_mpi and here.source in WITHOUT_MPI:
        raise InvalidArgument(
            f"--peer mpi, but {here.source} started this process: leave the launcher out (then "
            "mpirun is called), or use mpirun"
        )
    return False


def in_processes(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether this process holds one rank of several processes (or of one, if asked for)."""
    here = identify(environ, across=True)
    asked = bool(options.nodes) or options.processes is not None or options.needs_mpi
    return here.nranks > 1 or (here.source != "single process" and asked)


def start(options: Options) -> int:
    """Runs the benchmark in processes; returns the status of the whole.

    Raises:
        NotSupported: MPI is needed and is not there; says what to install.
    """
    nranks = options.processes or max(2, available_cores())
    command = module_command(MODULE, *to_argv(options))
    if options.nodes:
        gpus = device_count() if options.device == "cuda" and not options.devices else 0
        return launch_nodes(options.nodes, command, gpus=gpus)
    if not options.needs_mpi:
        return launch(nranks, command, prefix=False)
    mpirun, open_mpi = find_mpirun("--peer mpi")
    wrapped = mpirun_command(mpirun, nranks, available_cores(), open_mpi=open_mpi)
    sys.stdout.flush()
    return subprocess.run([*wrapped, *command], check=False).returncode


def mpirun_command(mpirun: str, nranks: int, cores: int, *, open_mpi: bool) -> list[str]:
    """mpirun and its options: a core for each rank where there are enough."""
    command = [mpirun, "-n", str(nranks)]
    if nranks <= cores:
        return [*command, "--bind-to" if open_mpi else "-bind-to", "core"]
    # Other launchers take more ranks than cores as they are.
    return [*command, "--oversubscribe", "--bind-to", "none"] if open_mpi else command
