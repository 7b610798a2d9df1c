"""``gpuallreduce validate``: checks on this machine that results are right to the bit.

Knows nothing of how: the work is done by ``validation``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS, Case, enumerate_cases

if TYPE_CHECKING:
    from gpuallreduce.validation.summary import Summary

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

_DESCRIPTION = """\
Check on this machine that results are right, to the bit, for every dtype and operator.

Each case is called with inputs that reduce without rounding in any order, and with inputs that
round: the result must have the bits of an independent reference, the same on all ranks and in
repeated calls, and lie within a proven bound of the real value; nothing may be written outside
an array, nor into an input that is not the output. Pairs without a meaning must be refused.
Kernels are compiled on first use, so the first run takes longer.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command to the command line's parser."""
    parser = subparsers.add_parser(
        "validate",
        help="check on this machine that results are right to the bit",
        description=_DESCRIPTION,
        epilog="Exit status: 0 if all is right, 1 if anything is wrong.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-g",
        "--ranks",
        type=_positive,
        default=4,
        metavar="N",
        help="ranks, as threads (default: 4)",
    )
    where.add_argument(
        "--processes", type=_positive, metavar="N", help="ranks, as one process each, instead"
    )
    _add_filters(parser)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="fewer counts and algorithms")
    level.add_argument(
        "--full", action="store_true", help="all counts for every algorithm, dtype and operator"
    )
    parser.add_argument("--seed", type=_natural, default=0, metavar="N", help="seed of the inputs")
    parser.add_argument(
        "--json", metavar="FILE", help="write the result there (-: to standard output, alone)"
    )
    parser.set_defaults(main=main)
    return parser


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-d", "--dtype", type=_names(DTYPES), default=(), metavar="NAME,...", help="only these"
    )
    parser.add_argument(
        "-o", "--op", type=_names(OPS), default=(), metavar="NAME,...", help="only these operators"
    )
    parser.add_argument(
        "--algorithm",
        type=_names(VARIANTS),
        default=(),
        metavar="NAME,...",
        help=f"each pair of dtype and operator with these, all-reduce only: {', '.join(VARIANTS)}",
    )


def main(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    from gpuallreduce import __version__
    from gpuallreduce.validation import report, runners

    level = "quick" if args.quick else "full" if args.full else "default"
    nranks = args.processes or args.ranks
    kind = runners.ProcessRunner if args.processes else runners.ThreadRunner
    chosen = enumerate_cases(nranks, level, dtypes=args.dtype, ops=args.op, variants=args.algorithm)
    summary = _with_progress(kind(nranks, args.seed), chosen, level, args.seed)
    if args.json != "-":
        print(report.as_text(summary, __version__))
    if args.json is not None:
        text = json.dumps(report.as_json(summary, __version__), indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0 if summary.succeeded else 1


def _with_progress(runner: Any, cases: Sequence[Case], level: str, seed: int) -> Summary:
    """Runs the cases; a bar on standard error shows how far, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from gpuallreduce.validation.summary import validate

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"validating {len(cases)} cases", total=len(cases))

        def tick(case: Case) -> None:
            progress.update(bar, advance=1, description=" ".join(case.group))

        return validate(runner, cases, level=level, seed=seed, tick=tick)


def _names(known: Any) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"there is no {name!r}; there are {', '.join(known)}"
                )
        return names

    return parse


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)
