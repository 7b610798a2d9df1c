"""The all-reduce benchmark: from options to table, JSON, picture and exit status.

Knows nothing of how to time, compare or format: it puts together what does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TextIO

import gpuallreduce
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.communicator import DEFAULT_TIMEOUT_S, Communicator
from gpuallreduce.devices.cuda_runtime import cupy_module, device_count
from gpuallreduce.errors import CompileError, Error, InvalidArgument, NotSupported
from gpuallreduce.plan import Plan
from gpuallreduce.topology import available_cores

from . import document, gpu_facts, peers, plot, report
from .arguments import add_arguments, options_of
from .membw import MemoryLimits, measure_memory
from .options import Options
from .places import processor
from .preamble import devices_of, note_of, notes, preamble, where_text
from .progress import Reporter
from .ranks import Ranks
from .start import in_processes, must_start, start
from .sweep import Sweep, defined_pairs

__all__ = ["command", "main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it with command line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gpuallreduce.bench.allreduce_perf", allow_abbrev=False
    )
    add_arguments(parser)
    return command(parser.parse_args(argv))


def command(args: argparse.Namespace) -> int:
    """Runs it with parsed arguments.

    Returns:
        0; 1 if values were wrong or a call failed; 2 if it cannot run as asked.
    """
    try:
        options = options_of(args)
        _check_outputs(options)
        defined_pairs(options)
        if must_start(options, os.environ):
            _check_devices(options)
            return start(options)
        return run(options)
    except Error as error:
        print(f"gpuallreduce bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument | NotSupported | CompileError) else 1


def run(
    options: Options,
    *,
    connect: Callable[[Options], Communicator] | None = None,
    out: TextIO | None = None,
) -> int:
    """Measures in this process and prints on rank 0; returns 1 if values were wrong, else 0.

    Args:
        options: what to measure.
        connect: makes the communicator; by default of ranks of this process, or of processes where
            a launcher has started this one.
        out: where the table goes; by default standard output.
    """
    with (connect or _connect)(options) as comm:
        ranks = Ranks(comm)
        others = [peers.connect(name, ranks) for name in options.peers]
        try:
            status = _measure(options, ranks, others, out or sys.stdout)
            for peer in others:
                peer.close()
            return status
        except BaseException as error:
            if options.needs_mpi and not ranks.together:  # MPI ends this process before it can tell
                print(f"gpuallreduce bench: rank {comm.rank}: {error}", file=sys.stderr, flush=True)
            for peer in others:
                peer.abort()
            raise


def _measure(options: Options, ranks: Ranks, others: Sequence[peers.Peer], out: TextIO) -> int:
    def say(*lines: str) -> None:
        if ranks.leads:
            print("\n".join(lines), file=out, flush=True)

    start_time = document.now()
    devices = devices_of(ranks)
    say(*preamble(options, devices))
    limits = measure_memory(ranks) if options.wants_memory_limits else None
    sweep = Sweep(options, ranks, others)
    versions = {peer.name: peer.version for peer in others}
    plan = sweep.plan()
    say(*notes(options, ranks, peers=versions, limits=limits, skipped=sweep.skipped, plan=plan))
    extra = report.columns(
        latency=options.shows_latency,
        peers=list(versions),
        memory_limit_gbps=limits.add_gbps if limits is not None and options.symmetric else None,
        nodes=len(ranks.layout),
    )
    say(*report.heading(extra))
    rows = []
    with Reporter(len(sweep) * options.rounds, shown=ranks.leads) as progress:
        for row in sweep.rows(begin=progress.begin, round_done=progress.step):
            progress.end()
            say(report.row_text(row, extra))
            rows.append(row)
    say(*report.footer(rows))
    if not ranks.leads:
        return 0  # rank 0 answers for all: a launcher ends the others when one of them fails
    if options.json_path is not None:
        facts = _extra(options, ranks, versions, plan)
        nccl = versions.get("nccl", "").removeprefix("NCCL ") or None
        run_facts = document.Facts(os.environ, start_time, facts, limits, nccl)
        result = document.document(options, rows, devices, run_facts)
        say(f"# JSON output written to {document.write(options.json_path, result)}")
    if options.plot_path is not None:
        _draw(options, rows, ranks, limits)
        say(f"# Plot written to {options.plot_path}")
    return 1 if report.failures(rows) else 0


def _draw(
    options: Options,
    rows: Sequence[report.Row],
    ranks: Ranks,
    limits: MemoryLimits | None,
) -> None:
    arrays = "arrays from comm.empty" if options.symmetric else "ordinary arrays"
    model = processor() if ranks.place.kind == "host" else ranks.place.describe()[0]["info"]
    subtitle = f"{where_text(ranks)}  ·  {arrays}  ·  {model}"
    note = note_of(ranks)
    plot.draw(str(options.plot_path), rows, subtitle=subtitle, limits=limits, note=note)


def _extra(
    options: Options, ranks: Ranks, versions: dict[str, str], plan: Plan
) -> dict[str, object]:
    extra: dict[str, object] = {
        "version": gpuallreduce.__version__,
        "device_kind": ranks.place.kind,
        "note": note_of(ranks),
        "nranks": ranks.nranks,
        "processes": 1 if ranks.together else ranks.nranks,
        "nodes": [{"name": name, "nranks": nranks} for name, nranks in ranks.layout],
        "symmetric": options.symmetric,
        "rounds": options.rounds,
        "round_ms": options.round_ms,
        "peers": versions,
        "transport": plan.transport,
        "order": plan.order,
    }
    if ranks.place.kind == "cuda":
        extra["cuda"] = {**gpu_facts.facts(), "topology": asdict(ranks.comm.topology)}
    return extra


def _connect(options: Options) -> Communicator:
    timeout = DEFAULT_TIMEOUT_S if options.timeout_s is None else options.timeout_s
    _check_devices(options)
    if in_processes(options, os.environ):
        rank = identify(os.environ, across=True).rank
        device = options.devices[rank] if options.devices else options.device
        return gpuallreduce.init(device=device, timeout=timeout)
    return Communicator(_devices(options), timeout=timeout)


def _devices(options: Options) -> list[str]:
    """A device for each rank of this process."""
    if options.devices:
        return list(options.devices)
    if options.kind == "host":
        return ["host"] * (options.ranks or max(2, available_cores()))
    count = device_count()
    if options.ranks is not None and options.ranks > count:
        raise InvalidArgument(
            f"-g {options.ranks}, and this process sees {count} GPUs: several ranks can share one, "
            "--devices cuda:0,cuda:0"
        )
    return [f"cuda:{rank % count}" for rank in range(options.ranks or max(2, count))]


def _check_devices(options: Options) -> None:
    """One error for all ranks, before any of them starts."""
    if options.kind == "cuda":
        cupy_module()
    peers.check(options.peers)


def _check_outputs(options: Options) -> None:
    document.check_folder(options.json_path, "-J")
    document.check_folder(options.plot_path, "--plot")
    if options.plot_path is not None:
        plot.check_matplotlib()


if __name__ == "__main__":
    sys.exit(main())
