"""``gpuallreduce simulate``: what all-reduce would take on a machine that is not here.

Knows nothing of simulating; turns options into a machine and sizes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpuallreduce.errors import InvalidArgument
from gpuallreduce.plan import ORDERS
from gpuallreduce.simulation import ALGORITHMS, PRESETS, Machine, estimate
from gpuallreduce.simulation.model import why_not
from gpuallreduce.types import DTYPES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

_DESCRIPTION = """\
Estimate all-reduce on machines of up to thousands of GPUs, without any.

The steps of each algorithm's plan are played on a model of the machine's links: the time, the bus
bandwidth, what the busiest link allows at best, and what holds a call back. hierarchical is what
runs between nodes; one_shot, two_shot and ring run on one node only and are shown beyond it to
compare; nccl_ring is what NCCL's rings do. --check compares the model with published measurements.
"""
_EPILOG = """\
examples:
  gpuallreduce simulate --preset dgx-h100
  gpuallreduce simulate --nodes 16 --gpus 8 --nvlink 370 --net 50 --latency 10 --plot h100x128.png
  gpuallreduce simulate --preset gb200-nvl72 --algorithm two_shot -b 64K -e 1G -f 4
  gpuallreduce simulate --list
  gpuallreduce simulate --check
"""
_DEFAULT = "dgx-h100"
# Option, field of Machine, kind of value, help.
_MACHINE: tuple[tuple[str, str, type, str], ...] = (
    ("--nodes", "nodes", int, "nodes"),
    ("--gpus", "gpus", int, "GPUs of a node"),
    ("--nvlink", "link_gbps", float, "usable GB/s that a GPU sends over NVLink"),
    ("--pcie", "link_gbps", float, "usable GB/s that a GPU sends over PCIe, without NVLink"),
    ("--hop", "hop_us", float, "us until a GPU of the node sees what another stored"),
    ("--memory", "memory_gbps", float, "usable GB/s of a GPU's memory"),
    ("--net", "net_gbps", float, "usable GB/s of a network card"),
    ("--nics", "nics", int, "network cards of a node"),
    ("--latency", "net_us", float, "us until a GPU of another node sees what one sent"),
    ("--switches", "switches", int, "PCIe switches of a node"),
    ("--uplink", "uplink_gbps", float, "usable GB/s between a PCIe switch and the others"),
    ("--channels", "channels", int, "blocks of a rank at most"),
)


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command to the command line's parser."""
    parser = subparsers.add_parser(
        "simulate",
        help="estimate all-reduce on machines that are not here",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset",
        choices=list(PRESETS),
        default=_DEFAULT,
        metavar="NAME",
        help=f"machine to start from, see --list (default: {_DEFAULT})",
    )
    for option, _, kind, text in _MACHINE:
        parser.add_argument(option, type=kind, default=None, metavar="N", help=text)
    sizes = _typed(import_module("gpuallreduce.bench.options").parse_bytes)
    parser.add_argument(
        "-b", "--minbytes", type=sizes, default=1 << 10, metavar="SIZE", help="first (default: 1K)"
    )
    parser.add_argument(
        "-e", "--maxbytes", type=sizes, default=1 << 30, metavar="SIZE", help="last (default: 1G)"
    )
    parser.add_argument(
        "-f", "--stepfactor", type=int, default=8, metavar="F", help="sizes grow by it (default: 8)"
    )
    parser.add_argument(
        "-d", "--dtype", choices=list(DTYPES), default="float32", metavar="NAME", help="of elements"
    )
    parser.add_argument(
        "--algorithm",
        choices=list(dict.fromkeys(name for name, _ in ALGORITHMS)),
        default=None,
        metavar="NAME",
        help="only this one: %(choices)s",
    )
    parser.add_argument("--order", choices=ORDERS, default=None, help="only this order")
    parser.add_argument(
        "--symmetric", action="store_true", help="arrays that peers of a node address directly"
    )
    parser.add_argument("--plot", metavar="FILE.png", default=None, help="draw it (matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument("--list", action="store_true", help="show the presets and end")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the model with published measurements; status 1 if an error has grown",
    )
    parser.set_defaults(main=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Prints it; returns 0, or 1 if a check's error is larger than recorded."""
    report = import_module("gpuallreduce.simulation.report")
    if args.list:
        print(report.presets_as_text())
        return 0
    if args.check:
        return _check(report, as_json=args.json)
    options = import_module("gpuallreduce.bench.options")
    if args.stepfactor < 2:
        raise InvalidArgument(f"-f {args.stepfactor}: sizes grow by a factor of at least 2")
    asked = options.Options(
        min_bytes=args.minbytes,
        max_bytes=args.maxbytes,
        step_factor=args.stepfactor,
        plot_path=args.plot,
    )
    if args.plot:
        import_module("gpuallreduce.bench.plot").check_matplotlib()
    machine, dtype = _machine(args), DTYPES[args.dtype]
    if args.minbytes < dtype.itemsize:
        raise InvalidArgument(f"-b {args.minbytes}: {dtype.name} takes {dtype.itemsize} bytes")
    pairs = _pairs(args, machine)
    rows = [
        estimate(
            machine,
            name,
            order,
            nbytes // dtype.itemsize * dtype.itemsize,
            dtype=dtype,
            direct=args.symmetric,
        )
        for nbytes in options.sizes(asked)
        for name, order in pairs
    ]
    title = f"all-reduce of {args.dtype} on {machine.nranks} ranks, {machine.name}"
    if args.plot:
        import_module("gpuallreduce.bench.simulation_plot").draw(args.plot, machine, rows, title)
    if args.json:
        print(json.dumps(report.estimates_as_plain(machine, rows, args.dtype), indent=2))
    else:
        print(report.estimates_as_text(machine, rows, title))
    return 0


def _check(report: Any, *, as_json: bool) -> int:
    measured = import_module("gpuallreduce.simulation.published").MEASURED
    checked = [(each, each.simulated()) for each in measured]
    if as_json:
        print(json.dumps(report.check_as_plain(checked), indent=2))
    else:
        print(report.check_as_text(checked))
    grown = [each for each, found in checked if abs(each.error_percent(found)) > each.within]
    return 1 if grown else 0


def _machine(args: argparse.Namespace) -> Machine:
    """The preset with what the options change."""
    preset = PRESETS[args.preset]
    if args.nvlink is not None and args.pcie is not None:
        raise InvalidArgument("--nvlink and --pcie were both given: GPUs of a node use one of them")
    changed: dict[str, Any] = {
        field: value
        for option, field, _, _ in _MACHINE
        if (value := getattr(args, option[2:])) is not None
    }
    if args.nvlink is not None:
        changed.update(link="NVLink")
    if args.pcie is not None:
        changed.update(link="PCIe")
    gpus = changed.get("gpus", preset.gpus)
    if "nics" not in changed and gpus >= 1:
        own = preset.nics == preset.gpus
        changed["nics"] = gpus if own else math.gcd(preset.nics, gpus)
    found = replace(preset, **changed)
    same = replace(found, nodes=preset.nodes) == preset
    return found if same else replace(found, name=f"{preset.name}, changed")


def _pairs(args: argparse.Namespace, machine: Machine) -> list[tuple[str, str]]:
    """Algorithms and orders to show."""
    asked = [
        (name, order)
        for name, order in ALGORITHMS
        if args.algorithm in (None, name) and args.order in (None, order)
    ]
    if not asked:
        raise InvalidArgument(f"{args.algorithm} has no order {args.order!r}: leave --order out")
    shown = [pair for pair in asked if why_not(machine, pair[0]) is None]
    if not shown:
        raise InvalidArgument(f"{why_not(machine, asked[0][0])}: give --nodes")
    return shown


def _typed(parse: Callable[[str], int]) -> Callable[[str], int]:
    """argparse shows the text of this error only."""

    def convert(text: str) -> int:
        try:
            return parse(text)
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
