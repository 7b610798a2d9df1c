"""The parts of the check of a machine with GPUs: which commands, and what their results say.

Knows nothing of time limits, nor of how commands are run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpuallreduce.bootstrap.python import module_command
from gpuallreduce.fabric.nccl_types import code_of_version

from .check_child import Done
from .plot import byte_text

__all__ = ["NAMES", "Part", "Reading", "parts_of"]

NAMES = ("tests", "validate", "bench", "bandwidth", "roofline")
SHARING_NCCL = "2.30"  # the first NCCL that takes several ranks on one GPU
ROOFLINE = "fused_reduce_roofline"
BANDWIDTHS = ("device_to_device_memcpy_write_sm", "device_local_copy", "host_to_device_memcpy_ce")


@dataclass(frozen=True)
class Reading:
    """What a part found.

    Attributes:
        text: for people, in a line.
        figures: plain data.
    """

    text: str
    figures: Any = None


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        name: of the part.
        group: which of NAMES it belongs to.
        weight: its share of the time.
        command: what is run; empty: nothing, for the reason in ``left_out``.
        read: makes sense of what the command left; may raise ValueError, KeyError or OSError.
        left_out: why it is not run.
        retry: what is run if the command fails, to have figures even so.
        cwd: where it is run.
    """

    name: str
    group: str
    weight: float
    command: Sequence[str]
    read: Callable[[Done], Reading]
    left_out: str = ""
    retry: Sequence[str] = ()
    cwd: Path | None = None


def parts_of(
    facts: Mapping[str, Any], folder: Path, tests: Path, *, quick: bool, thorough: bool
) -> list[Part]:
    """All parts for a machine.

    Args:
        facts: as gpu_facts prints them.
        folder: for files that parts write.
        tests: where the tests are, if they are.
        quick: little of everything.
        thorough: there is time for more than the usual.
    """
    return [
        _tests(tests),
        *_validate(facts, folder, quick=quick, level="" if thorough else "--quick"),
        *_bench(facts, folder, quick=quick),
        _bandwidth(quick=quick),
        _roofline(quick=quick),
    ]


def _command(*arguments: str) -> list[str]:
    return module_command("gpuallreduce", *arguments)


def _devices(facts: Mapping[str, Any]) -> list[str]:
    """A GPU for each rank; a single one has two."""
    count = len(facts["gpus"])
    return [f"cuda:{rank % count}" for rank in range(max(2, count))]


def _without_nccl(facts: Mapping[str, Any]) -> str:
    """Why NCCL takes no part; empty if it does."""
    if facts["nccl"] is None:
        return str(facts["nccl_missing"])
    if len(facts["gpus"]) > 1 or code_of_version(facts["nccl"]) >= code_of_version(SHARING_NCCL):
        return ""
    return f"NCCL {facts['nccl']} takes no two ranks on one GPU; {SHARING_NCCL} does"


# ---- the CUDA tests ------------------------------------------------------------------------------


def _tests(tests: Path) -> Part:
    files = sorted(str(path) for path in tests.glob("test_*cuda*.py"))
    reason = ""
    if not files:
        reason = f"there are no tests in {tests}: run it from a checkout"
    elif find_spec("pytest") is None:
        reason = "pytest is not installed: pip install 'gpuallreduce[test]'"
    command = module_command("pytest", "-v", "--no-header", "-p", "no:cacheprovider", *files)
    command = command if not reason else []
    return Part("tests", "tests", 30, command, _read_tests, left_out=reason, cwd=tests.parent)


def _read_tests(done: Done) -> Reading:
    """Counts from the lines of tests, which are there even if pytest was ended."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed, running = [], ""
    for line in done.stdout.splitlines():
        if (begun := re.match(r"(\S+\.py::.+?)(?: +([A-Z]+) .*| *)$", line)) is None:
            continue
        name, verdict = begun[1], begun[2]
        running = name if verdict is None else ""
        if verdict in ("FAILED", "ERROR"):
            failed.append(name)
        if verdict is not None:
            kinds = {"FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}
            counts[kinds.get(verdict, "passed")] += 1
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no tests"
    text += f"; first {failed[0]}" if failed else ""
    text += f"; ended in {running}" if running and done.status is None else ""
    return Reading(text, {**counts, "failures": failed})


# ---- validate ------------------------------------------------------------------------------------


def _validate(facts: Mapping[str, Any], folder: Path, *, quick: bool, level: str) -> list[Part]:
    """To the bit, and the same inputs beside NCCL."""
    reports = folder / "validate.json", folder / "against-nccl.json"
    command = _command("validate", "--devices", ",".join(_devices(facts)), *level.split())
    command += ["-d", "float32", "-o", "sum"] if quick else []
    missing = _without_nccl(facts)
    against = [] if missing else [*command, "--json", str(reports[1]), "--against", "nccl"]
    return [
        Part(
            "validate",
            "validate",
            15,
            [*command, "--json", str(reports[0])],
            lambda done: _read_validate(reports[0]),
        ),
        Part(
            "validate, against NCCL",
            "validate",
            6,
            against,
            lambda done: _read_against(reports[1]),
            left_out=missing,
        ),
    ]


def _read_validate(report: Path) -> Reading:
    found = json.loads(report.read_text())
    right = found["cases"] - found["failed"]
    return Reading(f"{right} of {found['cases']} cases right to the bit", found)


def _read_against(report: Path) -> Reading:
    found = json.loads(report.read_text())
    rows = found["dtypes"].values()
    compared, unequal = sum(row["exact"] for row in rows), sum(len(row["unequal"]) for row in rows)
    text = f"{compared - unequal} of {compared} exact cases equal in {len(rows)} dtypes"
    return Reading(f"{text}, NCCL {found['nccl']}", found)


# ---- bench ---------------------------------------------------------------------------------------


def _bench(facts: Mapping[str, Any], folder: Path, *, quick: bool) -> list[Part]:
    """In one process and in several, with and without graphs."""
    devices, missing = _devices(facts), _without_nccl(facts)
    shared = len(set(devices)) < len(devices)
    parts = []
    for in_processes in (False, True):
        for graphs in (False, True):
            where = "processes" if in_processes else "one process"
            name = f"bench, {where}" + (", graphs" if graphs else "")
            report = folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"
            # Processes take turns on a GPU that they share: what is slow then is the GPU's turns.
            small = quick or (in_processes and shared)
            reason = missing
            if in_processes and shared:
                reason = reason or "not asked, for processes on one GPU"
            command = ["bench", "--devices", ",".join(devices), "-J", str(report)]
            command += ["-b", "1K", "-e", "256K" if small else "256M", "-f", "16" if small else "4"]
            command += ["-n", "3", "-w", "1", "--rounds", "2", "--round-ms", "1"] if small else []
            command += ["-G", "2"] if graphs else []
            command += ["--processes", str(len(devices))] if in_processes else []
            peer = [] if reason else ["--peer", "nccl"]
            parts.append(
                Part(
                    name,
                    "bench",
                    8,
                    _command(*command, *peer),
                    _bench_reader(report, reason),
                    retry=_command(*command) if peer else (),
                )
            )
    return parts


def _bench_reader(report: Path, missing: str) -> Callable[[Done], Reading]:
    return lambda done: _read_bench(report, missing)


def _read_bench(report: Path, missing: str) -> Reading:
    found = json.loads(report.read_text())
    modes = [row[side] for row in found["results"] for side in ("out_of_place", "in_place")]
    last = found["results"][-1]
    best = last["out_of_place"]
    text = f"{byte_text(last['size'])}: {best['bus_bw']:.4g} GB/s bus"
    ratios = []
    for mode in modes:
        peer = mode["peers"].get("nccl")
        if peer is not None and peer["time_ratio"]:
            ratios.append(peer["time_ratio"])
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text += f", NCCL {best['peers']['nccl']['bus_bw']:.4g}; NCCL's time / ours {mean:.2f}"
        text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    else:
        text += f"; without NCCL: {missing or 'see above'}"
    return Reading(text, found)


# ---- bandwidth and roofline ----------------------------------------------------------------------


def _bandwidth(*, quick: bool) -> Part:
    few = ("-b", "4", "-i", "1", "--loopCount", "2", "-t", *BANDWIDTHS)
    command = _command("bandwidth", "-j", *(few if quick else ("-b", "128")))
    return Part("bandwidth", "bandwidth", 10, command, _read_bandwidth)


def _read_bandwidth(done: Done) -> Reading:
    found = _json_in(done.stdout)
    tests = found["nvbandwidth"]["testcases"]
    counts = {
        status: sum(test["status"] == status for test in tests)
        for status in ("Passed", "Waived", "Error")
    }
    parts = [f"{count} {status.lower()}" for status, count in counts.items() if count]
    sums = {test["name"]: test["sum"] for test in tests if "sum" in test}
    shown = next((name for name in BANDWIDTHS if name in sums), None)
    text = ", ".join(parts)
    return Reading(text + (f"; {shown} {sums[shown]:.4g} GB/s in all" if shown else ""), found)


def _roofline(*, quick: bool) -> Part:
    size = ("-b", "1", "-i", "1", "--loopCount", "2") if quick else ("-b", "256")
    command = _command("bandwidth", "-t", ROOFLINE, "-j", "--devices", "0", *size)
    return Part("roofline", "roofline", 8, command, _read_roofline)


def _read_roofline(done: Done) -> Reading:
    found = _json_in(done.stdout)
    (test,) = found["nvbandwidth"]["testcases"]
    if test["status"] != "Passed":
        raise ValueError(f"{test['status']}: {test.get('error', test['gpuallreduce'])}")
    (gpu,) = test["gpuallreduce"]["gpus"].values()
    best = max(gpu["rows"], key=lambda row: row["fraction"])
    text = (
        f"{best['nranks']} ranks of {byte_text(best['nbytes'])}: {best['moved_gbps']:.4g} GB/s, "
        f"{100 * best['fraction']:.0f} % of a copy's {gpu['device_local_copy_gbps']:.4g}"
    )
    return Reading(text, found)


def _json_in(text: str) -> Any:
    begin = text.find("{")
    if begin < 0:
        raise ValueError("it printed no JSON")
    return json.loads(text[begin:])
