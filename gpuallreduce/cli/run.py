"""``gpuallreduce run``: starts a program once per rank on this machine.

Knows nothing of devices; the work is done by ``bootstrap.launch``.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from gpuallreduce.bootstrap.launch import launch
from gpuallreduce.errors import InvalidArgument

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

_DESCRIPTION = """\
Start a program once per rank on this machine, and end all of them together.

Each process learns its rank from GPUALLREDUCE_RANK and GPUALLREDUCE_NRANKS, so that
gpuallreduce.init() needs no arguments. When one fails, the others are ended and the first failure
is reported. A target that ends in .py is run with this Python; anything else is a command.
"""
_EPILOG = """\
examples:
  gpuallreduce run -n 4 train.py --epochs 3
  gpuallreduce run -n 2 -m package.module arguments
  gpuallreduce run -n 8 --bind none --timeout 60 ./program
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command to the command line's parser."""
    parser = subparsers.add_parser(
        "run",
        help="start a program once per rank on this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n",
        "--nranks",
        type=_positive_integer,
        default=None,
        metavar="N",
        help="number of ranks (default: one per available core)",
    )
    parser.add_argument(
        "--bind",
        choices=("core", "none"),
        default=None,
        help="core: one core for each rank, an error if there are too few; none: let the system "
        "choose (default: core if there are enough, else none)",
    )
    parser.add_argument(
        "--timeout",
        type=_positive_seconds,
        default=None,
        metavar="S",
        help="end all ranks after S seconds, with exit status 124 (default: no limit)",
    )
    parser.add_argument(
        "--no-prefix",
        action="store_true",
        help="pass output on untouched, without [rank] in front of each line",
    )
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="the target is the name of a Python module, run as by python -m",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="target ...",
        help="a Python script, a module (with -m) or any command, and its arguments",
    )
    parser.set_defaults(main=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status: 0, or that of the rank that failed first."""
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.module:
        command = [sys.executable, "-m", *command] if command else []
    elif command and command[0].endswith(".py"):
        command = [sys.executable, *command]
    try:
        return launch(
            args.nranks or len(os.sched_getaffinity(0)),
            command,
            bind={"core": True, "none": False, None: None}[args.bind],
            timeout=args.timeout,
            prefix=False if args.no_prefix else None,
        )
    except InvalidArgument as error:
        print(f"gpuallreduce run: {error}", file=sys.stderr)
        return 2


def _positive_integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)


def _positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds greater than 0, found {text!r}")
    return seconds
