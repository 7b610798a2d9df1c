"""``gpuallreduce info``: what there is on this machine, and what would run at each size.

Knows nothing of how to find out; what is missing is said, and is no error.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpuallreduce.cli import choices, gpus, machine
from gpuallreduce.topology import host_topology
from gpuallreduce.types import DTYPES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

_DESCRIPTION = """\
Show what there is on this machine, and which algorithm all-reduce would take at each size.

The table of host ranks is of sums with a process each: "plain" are arrays of any origin, "empty"
those from comm.empty, which peers can address. Where there are GPUs, another table is of ranks of
one process on all of them: there peers can address "plain" arrays too, but not "pooled" ones, which
come from CUDA's memory pools or managed memory. For each algorithm it shows the estimated time in
microseconds; only their ratios matter.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command to the command line's parser."""
    parser = subparsers.add_parser(
        "info",
        help="what there is on this machine, and what would run at each size",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-g",
        "--ranks",
        type=_ranks,
        default=None,
        metavar="N",
        help="ranks of the table (default: one per available core, at least 2)",
    )
    parser.add_argument(
        "-d",
        "--dtype",
        choices=list(DTYPES),
        default="float32",
        metavar="NAME",
        help="of the table",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="try by kernels whether GPUs really reach each other's memory, and keep the verdict",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.set_defaults(main=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Prints it; returns 0."""
    facts, dtype = machine.facts(), DTYPES[args.dtype]
    cuda = gpus.facts(dtype, nranks=args.ranks, probe=args.probe)
    facts["devices"] += [f"cuda:{gpu['ordinal']}" for gpu in cuda["gpus"]]
    cores = facts["cores"]["available"]
    nranks = args.ranks or max(2, cores)
    rows = choices.table(host_topology(nranks, cores=cores, one_process=False), dtype)
    if args.json:
        found = {**facts, "nranks": nranks, "dtype": args.dtype, "choices": rows, "cuda": cuda}
        print(json.dumps(found, indent=2))
        return 0
    print(machine.as_text(facts), gpus.as_text(cuda, args.dtype), sep="\n\n")
    print(f"\nall-reduce of {args.dtype} over {nranks} host ranks, a process each\n")
    print(choices.as_text(rows))
    return 0


def _ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 1):
        raise argparse.ArgumentTypeError(f"expected a number of at least 2, found {text!r}")
    return int(text)
