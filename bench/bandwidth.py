"""The bandwidth benchmark: from options to matrices, JSON, picture and exit status.

Knows nothing of how to copy, time or format: it puts together what does.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from typing import Any

import gpuallreduce
from gpuallreduce.devices.cuda_runtime import Gpu, cupy_module, device_count, gpu_of
from gpuallreduce.errors import CompileError, Error, InvalidArgument, NotSupported

from . import heatmap, roofline
from .bandwidth_report import Outcome, document, lines_of
from .bandwidth_run import Bench, Settings
from .bandwidth_tests import ROOFLINE, chosen_tests, list_lines
from .document import check_folder
from .gpu_buffers import MIB
from .numba_copy import check_numba
from .plot import check_matplotlib

__all__ = ["add_arguments", "command", "main"]

FORMAT = "0.8"  # of nvbandwidth, whose tests and output these are


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it with command line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="p2p_bandwidth", allow_abbrev=False)
    add_arguments(parser)
    return command(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options: nvbandwidth's, then ours."""
    add = parser.add_argument
    add(
        *("-t", "--testcase"),
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tests to run, by name or number (default: all)",
    )
    add("-l", "--list", action="store_true", help="list the tests")
    add("-j", "--json", action="store_true", help="print JSON instead of text")
    add("-i", "--testSamples", dest="samples", type=_positive, default=3, metavar="N")
    add("-b", "--bufferSize", dest="mib", type=_positive, default=512, metavar="MiB")
    add(
        *("-s", "--skip-verification", "--skipVerification"),
        dest="skip",
        action="store_true",
        help="do not check what copies bring",
    )
    add(
        "--loopCount",
        dest="copies",
        type=_positive,
        default=16,
        metavar="N",
        help="timed copies in a sample",
    )
    add("--devices", metavar="0,1", help="GPUs to use (default: all)")
    add("--plot", metavar="FILE.png", help="draw the matrices as heat maps")
    add(
        "--instrument",
        choices=("kernels", "numba"),
        default="kernels",
        help="whose copy kernel _sm tests run: ours, or the same compiled by numba-cuda",
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)


def command(args: argparse.Namespace) -> int:
    """Runs it with parsed arguments.

    Returns:
        0; 1 if a test failed; 2 if it cannot run as asked.
    """
    try:
        if args.list:
            print("\n".join(list_lines()))
            return 0
        names = chosen_tests(args.testcase)
        _check_outputs(args)
        gpus = _gpus(args.devices)
        bench = Bench(gpus, _settings(args))
        try:
            return _run(args, names, bench)
        finally:
            bench.close()
    except Error as error:
        print(f"gpuallreduce bandwidth: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument | NotSupported | CompileError) else 1


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        nbytes=args.mib * MIB,
        samples=args.samples,
        copies=args.copies,
        verify=not args.skip,
        instrument=args.instrument,
    )


def _check_outputs(args: argparse.Namespace) -> None:
    if args.instrument == "numba":
        check_numba()
    if args.plot is None:
        return
    if not args.plot.endswith(".png"):
        raise InvalidArgument(f"--plot {args.plot}: the file's name must end in .png")
    check_folder(args.plot, "--plot")
    check_matplotlib()


def _gpus(text: str | None) -> list[Gpu]:
    """The GPUs of ``--devices``, or all.

    Raises:
        NotSupported: CuPy, the driver or a GPU is missing.
        InvalidArgument: there is no such GPU, or one is named twice.
    """
    if text is None:
        return [gpu_of(ordinal) for ordinal in range(device_count())]
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise InvalidArgument(f"--devices {text}: expected different numbers of GPUs such as 0,1")
    return [gpu_of(int(part)) for part in parts]


def _run(args: argparse.Namespace, names: Sequence[str], bench: Bench) -> int:
    def say(*lines: str) -> None:
        if lines and not args.json:
            print("\n".join(lines), flush=True)

    say(*_preamble(bench))
    outcomes = []
    for name in names:
        outcome = _one(name, bench, say)
        say(*lines_of(outcome))
        outcomes.append(outcome)
    if args.json:
        ours = {"version": gpuallreduce.__version__, "instrument": args.instrument}
        print(json.dumps(document(outcomes, _machine(bench), ours), indent=2))
    if args.plot is not None:
        matrices = [matrix for outcome in outcomes for matrix in outcome.matrices]
        names_of_gpus = ", ".join(dict.fromkeys(gpu.name for gpu in bench.gpus))
        heatmap.draw_matrices(
            args.plot, matrices, subtitle=f"{socket.gethostname()}: {names_of_gpus}"
        )
        say(f"# Plot written to {args.plot}")
    return 1 if any(outcome.status == "Error" for outcome in outcomes) else 0


def _one(name: str, bench: Bench, say: Any) -> Outcome:
    """One test; what fails in it is its outcome, and the next one runs."""
    try:
        if name == ROOFLINE:
            say(f"Running {name}.")
            return _roofline(bench, say)
        nbytes, notes, reason = bench.plan(name)
        if reason:
            return Outcome(name, "Waived", reason)
        say(*(f"# NOTE: {note}" for note in notes), f"Running {name}.")
        return bench.run(name, nbytes, notes)
    except Error as error:
        return Outcome(name, "Error", str(error))


def _roofline(bench: Bench, say: Any) -> Outcome:
    """A table of each GPU."""
    facts = {}
    for gpu in bench.gpus:
        copy, rows = roofline.on_gpu(gpu, bench.settings, bench.gate)
        say(*roofline.lines_of(rows, copy, gpu))
        facts[str(gpu.ordinal)] = roofline.as_data(rows, copy)
    return Outcome(ROOFLINE, "Passed", facts={"gpus": facts})


def _preamble(bench: Bench) -> list[str]:
    facts = _machine(bench)
    lines = [
        f"gpuallreduce bandwidth {gpuallreduce.__version__}: tests and output of nvbandwidth "
        f"{FORMAT}",
        "",
        *(f"{key}: {facts[key]}" for key in ("CUDA Runtime Version", "CUDA Driver Version")),
        f"Driver Version: {facts['Driver Version']}",
        "",
        socket.gethostname(),
    ]
    return [*lines, *(f"Device {_described(gpu)}" for gpu in bench.gpus), ""]


def _described(gpu: Gpu) -> str:
    domain, _, rest = gpu.bus_id.partition(":")
    return f"{gpu.ordinal}: {gpu.name} ({int(domain, 16):08x}:{rest.rpartition('.')[0].lower()})"


def _machine(bench: Bench) -> dict[str, Any]:
    """nvbandwidth's keys."""
    runtime, host = cupy_module().cuda.runtime, socket.gethostname()
    return {
        "version": FORMAT,
        "git_version": f"gpuallreduce {gpuallreduce.__version__}",
        "CUDA Runtime Version": int(runtime.runtimeGetVersion()),
        "CUDA Driver Version": int(runtime.driverGetVersion()),
        "Driver Version": bench.driver or "unknown",
        "GPU Device list": [f"{_described(gpu)}: ({host})" for gpu in bench.gpus],
    }


if __name__ == "__main__":
    sys.exit(main())
