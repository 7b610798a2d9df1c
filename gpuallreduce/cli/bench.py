"""``gpuallreduce bench``: the all-reduce benchmark, with nccl-tests' options and table.

Knows nothing of measuring; the work is done by ``gpuallreduce.bench``.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

_DESCRIPTION = """\
Time all-reduce over a range of sizes, check its results and print nccl-tests' table.

Ranks are threads on processor cores, or GPUs with --device cuda; of one process each with
--processes. Under mpirun or srun they may be on several machines; --nodes plays several on this
one. Then rows also have the bytes that a rank sends inside its node and between nodes.

Sizes count bytes of one rank's array; K, M and G are powers of 1024. Out of place and in place are
both measured. The exit status is 1 if any value was wrong.
"""
_EPILOG = """\
examples:
  gpuallreduce bench -b 1K -e 64M -f 4
  gpuallreduce bench -b 1K -e 64M -f 4 --processes 2 --symmetric
  gpuallreduce bench -b 1K -e 64M -f 4 --processes 2 --peer mpi --latency --plot bench.png
  gpuallreduce bench -b 1K -e 64M -f 4 --nodes 4,4 --peer mpi
  mpirun -n 8 --host node0:4,node1:4 --map-by slot gpuallreduce bench -b 1K -e 64M -f 4
  gpuallreduce bench -b 1K -e 1G -f 4 --device cuda --peer nccl
  gpuallreduce bench -b 1K -e 1G -f 4 --device cuda --processes 8 --peer nccl -G 10
  gpuallreduce bench -b 1K -e 64M -f 4 --devices cuda:0,cuda:0
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command to the command line's parser."""
    parser = subparsers.add_parser(
        "bench",
        help="time all-reduce, as nccl-tests' all_reduce_perf does",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # By name: in a checkout the folder lies beside this package, where type checkers do not look.
    import_module("gpuallreduce.bench.arguments").add_arguments(parser)
    parser.set_defaults(main=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status: 0, 1 if values were wrong, 2 if it cannot run as asked."""
    return int(import_module("gpuallreduce.bench.allreduce_perf").command(args))
