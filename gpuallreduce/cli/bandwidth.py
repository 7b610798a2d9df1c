"""``gpuallreduce bandwidth``: nvbandwidth's tests of the links between GPUs and to the host.

Knows nothing of copying or measuring; the work is done by ``gpuallreduce.bench``.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

_DESCRIPTION = """\
Measure copies between GPUs and between GPUs and the host, by copy engines (ce) and by kernels (sm),
check what they bring, and print nvbandwidth's matrices.

Below each matrix stands what the links between the same ends can by the numbers on the box, and how
much of it was reached; these lines begin with #. The exit status is 1 if a copy brought wrong data
or a test failed.
"""
_EPILOG = """\
examples:
  gpuallreduce bandwidth -l
  gpuallreduce bandwidth -t device_to_device_memcpy_read_sm device_to_device_memcpy_write_sm
  gpuallreduce bandwidth --devices 0,1 -t device_to_device_latency_sm --plot latency.png
  gpuallreduce bandwidth -t fused_reduce_roofline
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command to the command line's parser."""
    parser = subparsers.add_parser(
        "bandwidth",
        help="measure the links between GPUs, as nvbandwidth does",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # By name: in a checkout the folder lies beside this package, where type checkers do not look.
    import_module("gpuallreduce.bench.bandwidth").add_arguments(parser)
    parser.set_defaults(main=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Runs it; returns the exit status: 0, 1 if a test failed, 2 if it cannot run as asked."""
    return int(import_module("gpuallreduce.bench.bandwidth").command(args))
