"""The command line's options of a benchmark, and back from options to a command line.

Knows nothing of what the options mean together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.bootstrap.launch_nodes import parse_nodes
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.plan import ORDERS
from gpuallreduce.types import OPS

from .options import (
    DEVICE_KINDS,
    PEERS,
    Options,
    parse_bytes,
    parse_devices,
    parse_dtypes,
    parse_ops,
    parse_peers,
)

__all__ = ["add_arguments", "options_of", "to_argv"]


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise InvalidArgument(f"expected a whole number of at least {least}, found {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidArgument(f"expected a number above 0, found {text!r}")
    return value


def _positive_bytes(text: str) -> int:
    if (nbytes := parse_bytes(text)) == 0:
        raise InvalidArgument("a step of 0 bytes never ends")
    return nbytes


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse shows the text of this error only."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@dataclass(frozen=True)
class _Flag:
    """One option of the command line and the field of Options that it sets."""

    names: tuple[str, ...]
    field: str
    parse: Callable[[str], Any] | None
    metavar: str
    help: str
    choices: Sequence[str] | None = None


_FLAGS = (
    _Flag(("-b", "--minbytes"), "min_bytes", parse_bytes, "SIZE", "first size (default: 32M)"),
    _Flag(("-e", "--maxbytes"), "max_bytes", parse_bytes, "SIZE", "last size (default: 32M)"),
    _Flag(("-f", "--stepfactor"), "step_factor", whole_number(2), "F", "sizes grow by this factor"),
    _Flag(
        ("-i", "--stepbytes"),
        "step_bytes",
        _positive_bytes,
        "SIZE",
        "sizes grow by this (default: 1M)",
    ),
    _Flag(
        ("-n", "--iters"),
        "iterations",
        whole_number(1),
        "N",
        "least calls a round (default: 20)",
    ),
    _Flag(
        ("-w", "--warmup_iters"),
        "warmup",
        whole_number(0),
        "N",
        "calls before timing starts (default: 5)",
    ),
    _Flag(
        ("-c", "--check"),
        "checks",
        whole_number(0),
        "N",
        "checks of results (default: 1; 0: none)",
    ),
    _Flag(("-o", "--op"), "ops", parse_ops, "OP", f"{', '.join(OPS)} or all (default: sum)"),
    _Flag(
        ("-d", "--datatype"),
        "dtypes",
        parse_dtypes,
        "TYPE",
        "float, half, bfloat16, double, int8 ... or all (default: float)",
    ),
    _Flag(
        ("-g", "--ngpus"),
        "ranks",
        whole_number(1),
        "N",
        "ranks of this one process: threads on cores, or GPUs (default: all, at least 2 ranks)",
    ),
    _Flag(
        ("--device",),
        "device",
        None,
        "KIND",
        "what ranks run on: %(choices)s (default: host)",
        DEVICE_KINDS,
    ),
    _Flag(
        ("--devices",),
        "devices",
        parse_devices,
        "LIST",
        "a device for each rank, such as cuda:0,cuda:0: several ranks may share a GPU",
    ),
    _Flag(
        ("-T", "--timeout"),
        "timeout_s",
        positive,
        "S",
        "seconds a wait may last (default: 60)",
    ),
    _Flag(("-J", "--output_file"), "json_path", None, "FILE", "also write results as JSON"),
    _Flag(
        ("-G", "--cudagraph"),
        "graph_launches",
        whole_number(0),
        "N",
        "CUDA: capture -n calls as a graph and launch it a multiple of N times a round",
    ),
    _Flag(
        ("--processes",),
        "processes",
        whole_number(1),
        "N",
        "one process per rank, each with a core or GPU: how programs run in earnest",
    ),
    _Flag(
        ("--nodes",),
        "nodes",
        parse_nodes,
        "LIST",
        "ranks of each node, such as 4,4: plays several nodes on this machine, through mpirun",
    ),
    _Flag(("--algorithm",), "algorithm", None, "NAME", "force: %(choices)s", tuple(ALGORITHMS)),
    _Flag(("--order",), "order", None, "ORDER", "order of the sum: %(choices)s", ORDERS),
    _Flag(
        ("--rounds",), "rounds", whole_number(1), "N", "timed rounds: shows medians (default: 5)"
    ),
    _Flag(
        ("--round-ms",),
        "round_ms",
        positive,
        "MS",
        "repeat the calls of a round until it lasts about this long (default: 5)",
    ),
    _Flag(("--plot",), "plot_path", None, "FILE.png", "draw bandwidth and latency against size"),
)
_SWITCHES = (
    ("--symmetric", "symmetric", "arrays from comm.empty, which peers address without staging"),
    (
        "--latency",
        "latency",
        "more columns: time of one call after a barrier, input just written",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all options to a parser; ``options_of`` reads what it returns."""
    defaults = Options()
    for flag in _FLAGS:
        parser.add_argument(
            *flag.names,
            dest=flag.field,
            type=_typed(flag.parse) if flag.parse else str,
            choices=flag.choices,
            default=getattr(defaults, flag.field),
            metavar=flag.metavar,
            help=flag.help,
        )
    for name, field, text in _SWITCHES:
        parser.add_argument(name, dest=field, action="store_true", help=text)
    parser.add_argument(
        "--peer",
        dest="peers",
        type=_typed(parse_peers),
        default=(),
        metavar="PEER",
        help=f"measure another library in the same processes, taking turns: {', '.join(PEERS)}",
    )


def options_of(args: argparse.Namespace) -> Options:
    """The options that were parsed.

    Raises:
        InvalidArgument: they contradict each other.
    """
    return Options(**{field.name: getattr(args, field.name) for field in fields(Options)})


def to_argv(options: Options) -> list[str]:
    """Arguments that parse to the same options: what a launched process is started with."""
    defaults, argv = Options(), []
    for flag in _FLAGS:
        value = getattr(options, flag.field)
        if value == getattr(defaults, flag.field):
            continue
        if flag.field in ("devices", "nodes"):
            value = ",".join(map(str, value))
        elif isinstance(value, tuple):
            value = value[0] if len(value) == 1 else "all"
        argv += [flag.names[-1], str(value)]
    argv += [name for name, field, _ in _SWITCHES if getattr(options, field)]
    for peer in options.peers:
        argv += ["--peer", peer]
    return argv
