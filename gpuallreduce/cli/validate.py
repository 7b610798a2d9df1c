"""``gpuallreduce validate``: checks on this machine that results are right to the bit.

Knows nothing of how: the work is done by ``validation``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpuallreduce.devices.cuda_runtime import cupy_module, device_count
from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.locals import check_devices
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS, Case, enumerate_cases

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "main"]

T = TypeVar("T")

_DESCRIPTION = """\
Check on this machine that results are right, to the bit, for every dtype and operator.

Each case is called with inputs that reduce without rounding in any order, and with inputs that
round: the result must have the bits of an independent reference, the same on all ranks and in
repeated calls, and lie within a proven bound of the real value; nothing may be written outside
an array, nor into an input that is not the output. Pairs without a meaning must be refused.
Kernels are compiled on first use, so the first run takes longer.

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
    from gpuallreduce import __version__
    from gpuallreduce.validation import report
    from gpuallreduce.validation.summary import validate

    level = "quick" if args.quick else "full" if args.full else "default"
    if args.against is not None:
        return _against_nccl(args, level)
    runner, nranks = _runner(args)
    chosen = enumerate_cases(nranks, level, dtypes=args.dtype, ops=args.op, variants=args.algorithm)
    summary = _with_bar(
        chosen, lambda tick: validate(runner, chosen, level=level, seed=args.seed, tick=tick)
    )
    _show(
        args,
        lambda: report.as_text(summary, __version__),
        lambda: report.as_json(summary, __version__),
    )
    return 0 if summary.succeeded else 1


def _show(
    args: argparse.Namespace, text: Callable[[], str], data: Callable[[], dict[str, Any]]
) -> None:
    if args.json != "-":
        print(text())
    if args.json is None:
        return
    document = json.dumps(data(), indent=2)
    if args.json == "-":
        print(document)
    else:
        Path(args.json).write_text(document + "\n", encoding="utf-8")


def _runner(args: argparse.Namespace) -> tuple[Any, int]:
    """Where to run, and on how many ranks."""
    from gpuallreduce.validation import runners

    if args.processes:
        if args.device == "host":
            return runners.ProcessRunner(args.processes, args.seed), args.processes
        cupy_module()  # one error, not one of every rank
        return runners.CudaProcessRunner(args.processes, args.seed), args.processes
    devices = _devices_of(args)
    if devices[0] == "host":
        return runners.ThreadRunner(len(devices), args.seed), len(devices)
    return runners.CudaRunner(devices, args.seed), len(devices)


def _devices_of(args: argparse.Namespace) -> list[str]:
    """A device for each rank of this process."""
    if args.devices is not None:
        return list(args.devices)
    if args.device == "host":
        return ["host"] * (args.ranks or 4)
    count = device_count()
    return [f"cuda:{rank % count}" for rank in range(args.ranks or max(2, count))]


def _against_nccl(args: argparse.Namespace, level: str) -> int:
    from gpuallreduce import Communicator, __version__
    from gpuallreduce.fabric.nccl import Nccl
    from gpuallreduce.validation import against
    from gpuallreduce.validation.places import place_of
    from gpuallreduce.validation.runners import CALL_TIMEOUT_S

    devices = _devices_of(args)
    if args.processes or devices[0] == "host":
        raise InvalidArgument(
            "--against nccl compares on GPUs of one process: use --device cuda or --devices "
            "cuda:0,cuda:1"
        )
    reason = Nccl.available()
    if reason is not None:
        raise NotSupported(f"--against nccl: {reason}")
    every = enumerate_cases(len(devices), level, dtypes=args.dtype, ops=args.op)
    cases = against.comparable(every)
    with Communicator(devices, timeout=CALL_TIMEOUT_S) as communicator:
        place = place_of(communicator, shared=False)
        found = _with_bar(
            cases,
            lambda tick: against.compare(communicator, place, cases, seed=args.seed, tick=tick),
        )
    title = f"NCCL {Nccl.version()}: ranks on {', '.join(devices)}; {level}, seed {args.seed}"
    _show(
        args,
        lambda: f"# gpuallreduce {__version__} validate against {title}\n" + against.as_text(found),
        lambda: {"version": __version__, "nccl": Nccl.version(), **against.as_json(found)},
    )
    return 0 if found.succeeded else 1


def _with_bar(cases: Sequence[Case], run: Callable[[Callable[[Case], None]], T]) -> T:
    """Runs cases; a bar on standard error shows how far, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"validating {len(cases)} cases", total=len(cases))

        def tick(case: Case) -> None:
            progress.update(bar, advance=1, description=" ".join(case.group))

        return run(tick)


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
