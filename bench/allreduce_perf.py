"""The all-reduce benchmark: from options to table, JSON, picture and exit status.

Knows nothing of how to time, compare or format: it puts together what does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import gpuallreduce
from gpuallreduce.communicator import DEFAULT_TIMEOUT_S, Communicator
from gpuallreduce.errors import CompileError, Error, InvalidArgument, NotSupported
from gpuallreduce.topology import available_cores

from . import document, peers, plot, report
from .arguments import add_arguments, options_of
from .membw import MemoryLimits, measure_memory
from .options import Options
from .preamble import devices_of, notes, preamble, processor
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
        others = [peers.connect(name, ranks.nranks) for name in options.peers]
        try:
            return _measure(options, ranks, others, out or sys.stdout)
        except BaseException as error:
            if others and not ranks.together:
                print(f"gpuallreduce bench: rank {comm.rank}: {error}", file=sys.stderr, flush=True)
                others[0].abort()
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
    say(*notes(options, ranks, peers=versions, limits=limits, skipped=sweep.skipped))
    extra = report.columns(
        latency=options.latency,
        peers=list(versions),
        memory_limit_gbps=limits.add_gbps if limits is not None and options.symmetric else None,
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
        run_facts = document.Facts(os.environ, start_time, _extra(options, ranks, versions), limits)
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
    where = "threads of one process" if ranks.together else "one process each"
    arrays = "arrays from comm.empty" if options.symmetric else "ordinary arrays"
    subtitle = f"{ranks.nranks} ranks, {where}  ·  {arrays}  ·  {processor()}"
    plot.draw(str(options.plot_path), rows, subtitle=subtitle, limits=limits)


def _extra(options: Options, ranks: Ranks, versions: dict[str, str]) -> dict[str, object]:
    return {
        "version": gpuallreduce.__version__,
        "device_kind": "host",
        "note": report.HOST_NOTE,
        "nranks": ranks.nranks,
        "processes": 1 if ranks.together else ranks.nranks,
        "symmetric": options.symmetric,
        "rounds": options.rounds,
        "round_ms": options.round_ms,
        "peers": versions,
    }


def _connect(options: Options) -> Communicator:
    timeout = DEFAULT_TIMEOUT_S if options.timeout_s is None else options.timeout_s
    if in_processes(options, os.environ):
        return gpuallreduce.init(timeout=timeout)
    nranks = options.ranks or max(2, available_cores())
    return Communicator(["host"] * nranks, timeout=timeout)


def _check_outputs(options: Options) -> None:
    document.check_folder(options.json_path, "-J")
    document.check_folder(options.plot_path, "--plot")
    if options.plot_path is not None:
        plot.check_matplotlib()


if __name__ == "__main__":
    sys.exit(main())
