"""Runs what ``gpuallreduce validate`` was asked for, where it was asked to, and shows the result.

Knows nothing of how cases run, nor of how options are written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpuallreduce import Communicator, __version__
from gpuallreduce.bootstrap.environment import Identity
from gpuallreduce.bootstrap.launch_nodes import launch_nodes
from gpuallreduce.bootstrap.python import module_command
from gpuallreduce.devices.cuda_runtime import cupy_module, device_count
from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.fabric.nccl import Nccl
from gpuallreduce.validation import against, report, runners
from gpuallreduce.validation.cases import Case, enumerate_cases
from gpuallreduce.validation.job import JobRunner, this_rank
from gpuallreduce.validation.places import place_of
from gpuallreduce.validation.summary import Summary, validate

__all__ = ["run"]

T = TypeVar("T")


def run(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    level = "quick" if args.quick else "full" if args.full else "default"
    identity = this_rank(os.environ)
    if identity is not None:
        return _as_rank(args, identity, level)
    if args.nodes is not None:
        gpus = device_count() if args.device == "cuda" else 0
        command = module_command("gpuallreduce", "validate", *_again(args))
        return launch_nodes(args.nodes, command, gpus=gpus)
    if args.against is not None:
        return _against_nccl(args, level)
    runner, nranks = _runner(args)
    summary = _summary(args, level, runner, _chosen(args, level, nranks))
    _report(args, summary)
    return 0 if summary.succeeded else 1


def _chosen(
    args: argparse.Namespace, level: str, nranks: int, nodes: Sequence[int] = ()
) -> list[Case]:
    return enumerate_cases(
        nranks, level, dtypes=args.dtype, ops=args.op, variants=args.algorithm, nodes=nodes
    )


def _summary(
    args: argparse.Namespace,
    level: str,
    runner: runners.Runner,
    cases: Sequence[Case],
    *,
    bar: bool = True,
) -> Summary:
    return _with_bar(
        cases,
        lambda tick: validate(runner, cases, level=level, seed=args.seed, tick=tick),
        shown=bar,
    )


def _report(args: argparse.Namespace, summary: Summary) -> None:
    _show(
        args,
        lambda: report.as_text(summary, __version__),
        lambda: report.as_json(summary, __version__),
    )


def _as_rank(args: argparse.Namespace, identity: Identity, level: str) -> int:
    """This process's part in a launcher's job."""
    for name in ("ranks", "processes", "devices", "nodes", "against"):
        if getattr(args, name) is not None:
            option = "-g" if name == "ranks" else f"--{name}"
            raise InvalidArgument(
                f"this process is rank {identity.rank} of {identity.nranks} ({identity.source}), "
                f"and {option} asks for other ranks: leave it out, or start no job"
            )
    names = ("device", "dtype", "op", "algorithm", "seed")
    asked = {"level": level, **{name: _plain(getattr(args, name)) for name in names}}
    with JobRunner(identity, device=args.device, seed=args.seed, asked=asked) as job:
        cases = _chosen(args, level, job.nranks, job.nodes)
        summary = _summary(args, level, job, cases, bar=job.rank == 0)
        if job.rank == 0:
            _report(args, summary)
            sys.stdout.flush()
        elif job.alone:
            print(f"gpuallreduce validate: rank {job.rank}: {job.ended}", file=sys.stderr)
        job.finish()
    return 0 if summary.succeeded else 1


def _plain(value: Any) -> Any:
    """As JSON brings it back."""
    return list(value) if isinstance(value, tuple) else value


def _again(args: argparse.Namespace) -> list[str]:
    """The options that the ranks of a job are started with."""
    options = ["--device", args.device, "--seed", str(args.seed)]
    for name in ("dtype", "op", "algorithm"):
        if getattr(args, name):
            options += [f"--{name}", ",".join(getattr(args, name))]
    options += [f"--{name}" for name in ("quick", "full") if getattr(args, name)]
    for name in ("against", "json"):
        if getattr(args, name) is not None:
            options += [f"--{name}", getattr(args, name)]
    return options


def _show(
    args: argparse.Namespace, text: Callable[[], str], data: Callable[[], dict[str, Any]]
) -> None:
    if args.json != "-":
        print(text())
    if args.json is None:
        return
    document = json.dumps(data(), indent=2)
    if args.json == "-":
        print(document)
    else:
        Path(args.json).write_text(document + "\n", encoding="utf-8")


def _runner(args: argparse.Namespace) -> tuple[Any, int]:
    """Where to run, and on how many ranks."""
    if args.processes:
        if args.device == "host":
            return runners.ProcessRunner(args.processes, args.seed), args.processes
        cupy_module()  # one error, not one of every rank
        return runners.CudaProcessRunner(args.processes, args.seed), args.processes
    devices = _devices_of(args)
    if devices[0] == "host":
        return runners.ThreadRunner(len(devices), args.seed), len(devices)
    return runners.CudaRunner(devices, args.seed), len(devices)


def _devices_of(args: argparse.Namespace) -> list[str]:
    """A device for each rank of this process."""
    if args.devices is not None:
        return list(args.devices)
    if args.device == "host":
        return ["host"] * (args.ranks or 4)
    count = device_count()
    return [f"cuda:{rank % count}" for rank in range(args.ranks or max(2, count))]


def _against_nccl(args: argparse.Namespace, level: str) -> int:
    devices = _devices_of(args)
    if args.processes or devices[0] == "host":
        raise InvalidArgument(
            "--against nccl compares on GPUs of one process: use --device cuda or --devices "
            "cuda:0,cuda:1"
        )
    reason = Nccl.available()
    if reason is not None:
        raise NotSupported(f"--against nccl: {reason}")
    every = enumerate_cases(len(devices), level, dtypes=args.dtype, ops=args.op)
    cases = against.comparable(every)
    with Communicator(devices, timeout=runners.CALL_TIMEOUT_S) as communicator:
        place = place_of(communicator, shared=False)
        found = _with_bar(
            cases,
            lambda tick: against.compare(communicator, place, cases, seed=args.seed, tick=tick),
        )
    title = f"NCCL {Nccl.version()}: ranks on {', '.join(devices)}; {level}, seed {args.seed}"
    _show(
        args,
        lambda: f"# gpuallreduce {__version__} validate against {title}\n" + against.as_text(found),
        lambda: {"version": __version__, "nccl": Nccl.version(), **against.as_json(found)},
    )
    return 0 if found.succeeded else 1


def _with_bar(
    cases: Sequence[Case], run: Callable[[Callable[[Case], None]], T], *, shown: bool = True
) -> T:
    """Runs cases; a bar on standard error shows how far, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = not (shown and console.is_terminal)
    with Progress(console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task(f"validating {len(cases)} cases", total=len(cases))

        def tick(case: Case) -> None:
            progress.update(bar, advance=1, description=" ".join(case.group))

        return run(tick)
