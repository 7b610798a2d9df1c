"""The check of a machine with GPUs: its parts one after the other, each in its time, then a table.

Knows nothing of what parts do: each is a command, and a part that fails or hangs ends alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpuallreduce
from gpuallreduce.bootstrap.python import module_command
from gpuallreduce.errors import Error, InvalidArgument, NotSupported
from gpuallreduce.fabric.nccl_start import SHARED_GPU

from .arguments import positive
from .check_child import Done, run_child
from .check_parts import NAMES, Part, Reading, parts_of
from .check_report import Result, default_path, heading, table
from .document import check_folder, now, write

__all__ = ["Watch", "main", "run_part"]

DEFAULT_S = 300.0
FACTS_S = 60.0  # a driver that needs longer to say what there is hangs
MARGIN_S = 3.0  # to write results
THOROUGH_S = 900.0
LEAST_S = 1.0
TAIL = 6000  # characters of a part's output that are kept
SHOWN_LINES = 12  # of a failed part's output


class Watch:
    """Shares the time that is left among the parts to come."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds - min(MARGIN_S, seconds / 10)

    def left_s(self) -> float:
        """Until everything must have ended."""
        return max(0.0, self._end - time.monotonic())

    def limit_s(self, part: Part, later: Sequence[Part]) -> float:
        """What a part may take so that the later ones have their shares."""
        total = part.weight + sum(each.weight for each in later if each.command)
        return self.left_s() * part.weight / total


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it with command line arguments.

    Returns:
        0; 1 if a part failed or ran out of time; 2 if it cannot run as asked.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    args = _parser().parse_args(argv)
    start, start_time = time.monotonic(), now()
    try:
        check_folder(args.out, "--out")
        names = _names(args.parts)
        environ = {**os.environ, SHARED_GPU: os.environ.get(SHARED_GPU, "1")}
        facts = _facts(environ, min(FACTS_S, args.seconds))
    except Error as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    watch = Watch(args.seconds - (time.monotonic() - start))
    _say(*heading(facts, args.seconds))
    with tempfile.TemporaryDirectory(prefix="gpuallreduce-check-") as folder:
        thorough = args.seconds >= THOROUGH_S
        tests = Path(args.tests) if args.tests else Path(__file__).parents[1] / "tests"
        parts = parts_of(facts, Path(folder), tests, quick=args.quick, thorough=thorough)
        parts = [part for part in parts if part.group in names]
        results = _run(parts, watch, environ)
    _say(*table(results))
    passed = not any(result.bad for result in results)
    path = args.out or default_path(facts)
    document = {
        "version": gpuallreduce.__version__,
        "start_time": start_time,
        "end_time": now(),
        "seconds": round(time.monotonic() - start, 1),
        "budget_s": args.seconds,
        "quick": args.quick,
        "passed": passed,
        "machine": facts,
        "parts": [asdict(result) for result in results],
    }
    try:
        _say(f"# written to {write(path, document)}")
    except Error as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    return 0 if passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Check and measure everything on this machine's GPUs: the CUDA tests, "
        "validate, bench beside NCCL, bandwidth and the roofline, each in its share of the time.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=DEFAULT_S,
        metavar="S",
        help="everything has ended by then (default: 300)",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="JSON (default: bench/results/<device>-<date>.json)"
    )
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument(
        "--parts", metavar="LIST", default=",".join(NAMES), help="only these (default: %(default)s)"
    )
    parser.add_argument(
        "--tests", metavar="FOLDER", help="of the CUDA tests (default: those beside this checkout)"
    )
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            raise InvalidArgument(
                f"--parts {text}: there is no {name!r}; there are {', '.join(NAMES)}"
            )
    return names


def _facts(environ: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """What the machine has.

    Raises:
        NotSupported: no GPU.
    """
    command = module_command("gpuallreduce.bench.gpu_facts")
    done = run_child(command, limit_s=limit_s, environ=environ)
    if done.status is None:
        raise NotSupported(f"the driver did not say in {limit_s:.0f} s what GPUs there are")
    if done.status != 0:
        raise NotSupported(_last_line(done) or f"asking for GPUs ended with {done.status}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _run(parts: Sequence[Part], watch: Watch, environ: Mapping[str, str]) -> list[Result]:
    results = []
    for i, part in enumerate(parts):
        limit_s = watch.limit_s(part, parts[i + 1 :])
        if part.command:
            _say(f"# {part.name}: at most {limit_s:.0f} s")
        result = run_part(part, limit_s, environ)
        _say(f"# {part.name}: {result.status}, {result.text}")
        if result.status == "failed":
            _say(*(f"#   | {line}" for line in result.output_tail.splitlines()[-SHOWN_LINES:]))
        results.append(result)
    return results


def run_part(part: Part, limit_s: float, environ: Mapping[str, str]) -> Result:
    """Runs a part within a limit; whatever it does is its result."""
    if not part.command:
        return Result(part.name, "left out", 0.0, 0.0, part.left_out)
    if limit_s < LEAST_S:
        return Result(part.name, "out of time", 0.0, limit_s, "no time was left to start it")
    done = run_child(part.command, limit_s=limit_s, environ=environ, cwd=part.cwd)
    status = {0: "passed", None: "out of time"}.get(done.status, "failed")
    reading = _read(part, done)
    if done.status == 0 and reading.figures is None:
        status = "failed"  # it claims to be well and has left nothing
    text, seconds = reading.text, done.seconds
    if status == "failed" and part.retry and limit_s - seconds >= LEAST_S:
        second = run_child(part.retry, limit_s=limit_s - seconds, environ=environ, cwd=part.cwd)
        again = _read(part, second)
        seconds += second.seconds
        if again.figures is not None:
            text, reading = f"{_last_line(done)}; without NCCL: {again.text}", again
    if status == "out of time":
        text = f"ended after {limit_s:.0f} s" + (f"; {text}" if reading.figures else "")
    tail = (done.stdout + done.stderr)[-TAIL:]
    return Result(
        part.name, status, round(seconds, 1), limit_s, text, reading.figures, done.status, tail
    )


def _read(part: Part, done: Done) -> Reading:
    """What the part makes of what was left, or else what was said last."""
    try:
        return part.read(done)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Reading(_last_line(done) or f"{type(error).__name__}: {error}")


def _last_line(done: Done) -> str:
    for text in (done.stderr, done.stdout):
        lines = text.strip().splitlines()
        if lines:
            return lines[-1].strip()
    return ""


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())
