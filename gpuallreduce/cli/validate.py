"""``gpuallreduce validate``: checks on this machine that results are right to the bit.

Knows nothing of how: the work is done by ``validation``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuallreduce.bootstrap.launch_nodes import parse_nodes
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.locals import check_devices
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

_DESCRIPTION = """\
Check on this machine that results are right, to the bit, for every dtype and operator.

Each case is called with inputs that reduce without rounding in any order, and with inputs that
round: the result must have the bits of an independent reference, the same on all ranks and in
repeated calls, and lie within a proven bound of the real value; nothing may be written outside
an array, nor into an input that is not the output. Pairs without a meaning must be refused.
Kernels are compiled on first use, so the first run takes longer.

Where a launcher makes this process one of several ranks (mpirun, torchrun, srun, gpuallreduce run),
on one machine or several, each of them is a rank, and rank 0 prints the result. --nodes starts
such a job on this machine, by mpirun, as if it were several.

--against nccl gives the same inputs to NCCL instead, on the same GPUs: results must be equal where
nothing rounds; where it does, both errors are shown side by side.
"""
_EPILOG = """\
examples:
  gpuallreduce validate
  gpuallreduce validate --processes 2 --quick
  gpuallreduce validate --device cuda
  gpuallreduce validate --device cuda --processes 4
  gpuallreduce validate --devices cuda:0,cuda:0 -d float32
  gpuallreduce validate --device cuda --against nccl
  gpuallreduce validate --nodes 4,4 --quick
  mpirun -n 8 --host node0:4,node1:4 --map-by slot gpuallreduce validate

Exit status: 0 if all is right, 1 if anything is wrong.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command to the command line's parser."""
    parser = subparsers.add_parser(
        "validate",
        help="check on this machine that results are right to the bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-g",
        "--ranks",
        type=_positive,
        metavar="N",
        help="ranks of one process (default: 4; with --device cuda one for each GPU, at least 2)",
    )
    where.add_argument(
        "--processes", type=_positive, metavar="N", help="ranks, as one process each, instead"
    )
    where.add_argument(
        "--devices",
        type=_devices,
        metavar="LIST",
        help="a device for each rank of one process, such as cuda:0,cuda:0: ranks may share a GPU",
    )
    where.add_argument(
        "--nodes",
        type=_nodes,
        metavar="N,...",
        help="so many ranks on each node, played on this machine: 4,4 or 3,1; needs mpirun, mpi4py",
    )
    parser.add_argument(
        "--device",
        choices=("host", "cuda"),
        default="host",
        help="what ranks run on: %(choices)s (default: host)",
    )
    _add_filters(parser)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="fewer counts and algorithms")
    level.add_argument(
        "--full", action="store_true", help="all counts for every algorithm, dtype and operator"
    )
    parser.add_argument("--seed", type=_natural, default=0, metavar="N", help="seed of the inputs")
    parser.add_argument(
        "--against", choices=("nccl",), help="compare with NCCL instead; GPUs of one process"
    )
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
    from gpuallreduce.cli import validate_run  # not for --help: it compiles the reference

    return validate_run.run(args)


def _nodes(text: str) -> tuple[int, ...]:
    try:
        return parse_nodes(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _devices(text: str) -> tuple[str, ...]:
    try:
        return tuple(check_devices(text.split(",")))
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
