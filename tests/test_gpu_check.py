"""The check of a machine with GPUs: whole on emulated ones, and what becomes of parts that fail."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpus
import pytest
from gpuallreduce.bench import check
from gpuallreduce.bench.check_child import Done, run_child
from gpuallreduce.bench.check_parts import Part, Reading, parts_of
from gpuallreduce.bench.check_report import Result, default_path, table

from gpuallreduce.bootstrap.python import module_command

pytest.importorskip("cupy_backends", reason="GPUs need CuPy: install .[test,cuda13]")

LIMIT_S = 170.0
RIGHT = """
import cupy, numpy as np
def test_right():
    assert cupy.asarray(np.arange(3)).get()[2] == 2
"""
WRONG = """
def test_wrong():
    assert 1 == 2
"""
ENDLESS = """
import signal
def test_without_end():
    signal.pause()
"""


def run_check(*argv: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = module_command("gpuallreduce.bench.gpu_check", "--seconds", "160", "--quick", *argv)
    variables = {**os.environ, **gpus.variables(gpus=2)} if environ is None else environ
    options = {"capture_output": True, "cwd": "/", "text": True, "check": False, "env": variables}
    return subprocess.run(command, timeout=LIMIT_S, **options)


def make_tests(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "test_small_cuda.py").write_text(text)
    return str(folder)


def test_every_part_reports_and_is_written_down(tmp_path: Path) -> None:
    out, tests = tmp_path / "x.json", make_tests(tmp_path / "tests", RIGHT)
    done = run_check("--tests", tests, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    names = [part["name"] for part in result["parts"]]
    assert names == [
        "tests",
        "validate",
        "validate, against NCCL",
        "bench, one process",
        "bench, one process, graphs",
        "bench, processes",
        "bench, processes, graphs",
        "bandwidth",
        "roofline",
    ]
    for part in result["parts"]:
        assert part["status"] == "passed", part
        assert part["figures"], part["name"]
        assert part["seconds"] <= part["limit_s"]
    assert result["passed"] is True
    assert result["seconds"] < result["budget_s"] == 160
    assert result["parts"][0]["figures"]["passed"] == 1
    bench = result["parts"][3]["figures"]
    assert all(row["in_place"]["peers"]["nccl"]["time_ratio"] > 0 for row in bench["results"])
    assert len(result["machine"]["gpus"]) >= 1
    lines = done.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("# part "))
    assert [line.split("  ")[1] for line in lines[begin + 1 : begin + 1 + len(names)]] == names


def test_a_part_that_fails_is_shown_and_hides_no_other(tmp_path: Path) -> None:
    out, tests = tmp_path / "x.json", make_tests(tmp_path / "tests", RIGHT + WRONG)
    argv = ("--tests", tests, "--out", str(out), "--parts", "tests,roofline")
    done = run_check(*argv)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(out.read_text())
    first, last = result["parts"]
    assert (first["name"], first["status"]) == ("tests", "failed")
    assert "1 passed, 1 failed" in first["text"]
    assert "test_wrong" in first["text"]
    assert first["exit_status"] == 1
    assert (last["name"], last["status"]) == ("roofline", "passed")
    assert result["passed"] is False
    assert "assert 1 == 2" in done.stdout


def test_tests_that_hang_leave_what_was_found_before(tmp_path: Path) -> None:
    tests = Path(make_tests(tmp_path / "tests", WRONG + ENDLESS))
    facts = {"gpus": [{"name": "x"}] * 2, "nccl": None, "nccl_missing": "no NCCL"}
    part, *_ = parts_of(facts, tmp_path, tests, quick=True, thorough=False)
    result = check.run_part(part, 8.0, {**os.environ, **gpus.variables(gpus=2)})
    assert result.status == "out of time"
    assert "1 failed" in result.text
    assert "passed" not in result.text
    assert result.text.endswith("test_small_cuda.py::test_without_end")


def test_without_a_gpu_there_is_one_error(tmp_path: Path) -> None:
    if gpus.are_real():
        pytest.skip("this machine has a GPU")
    environ = {key: value for key, value in os.environ.items() if "EMULATED" not in key}
    done = run_check("--out", str(tmp_path / "x.json"), environ=environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu_check: CUDA devices need an NVIDIA GPU")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert check.main(["--parts", "tests,moon"]) == 2
    assert "there is no 'moon'; there are tests, validate" in capsys.readouterr().err
    assert check.main(["--out", str(tmp_path / "none" / "x.json")]) == 2
    assert "not a folder" in capsys.readouterr().err


# ---- parts that misbehave ------------------------------------------------------------------------


def part_of(*command: str, read: Any = lambda done: Reading("well", {}), **more: Any) -> Part:
    return Part("x", "tests", 1, command, read, **more)


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or does so soon: one that is killed needs a moment."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 20.0)[0])
    finally:
        os.close(fd)


def test_a_part_that_hangs_is_ended_in_time_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"""
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open({str(mark)!r}, "w").write(str(child.pid))
print("half way", flush=True)
signal.pause()
"""
    result = check.run_part(part_of(*python(code)), 3.0, os.environ)
    assert result.seconds < 3.0 + 5.0
    assert (result.status, result.exit_status, result.bad) == ("out of time", None, True)
    assert "half way" in result.output_tail
    assert has_ended(int(mark.read_text()))


def test_a_part_is_interrupted_first_so_that_it_can_leave_what_it_has(tmp_path: Path) -> None:
    left = tmp_path / "left"
    code = f"""
import signal
try:
    signal.pause()
except KeyboardInterrupt:
    open({str(left)!r}, "w").write("partial")
"""

    def read(done: Done) -> Reading:
        return Reading(left.read_text(), {"is": "there"})

    result = check.run_part(part_of(*python(code), read=read), 4.0, os.environ)
    assert result.status == "out of time"
    assert result.text.endswith("partial")
    assert result.figures == {"is": "there"}


def test_a_part_that_leaves_nothing_has_failed_whatever_it_says() -> None:
    def read(done: Done) -> Reading:
        raise ValueError("nothing there")

    result = check.run_part(part_of(*python("print('fine')"), read=read), 20.0, os.environ)
    assert (result.status, result.text) == ("failed", "fine")


def test_a_part_that_fails_is_run_without_what_may_be_at_fault_and_stays_failed() -> None:
    bad, good = python("import sys; sys.exit('no NCCL')"), python("print('figures')")

    def read(done: Done) -> Reading:
        if "figures" not in done.stdout:
            raise ValueError
        return Reading("12 GB/s", {"rate": 12})

    result = check.run_part(part_of(*bad, read=read, retry=good), 20.0, os.environ)
    assert result.status == "failed"
    assert result.text == "no NCCL; without NCCL: 12 GB/s"
    assert result.figures == {"rate": 12}


def test_what_is_not_there_is_left_out_and_no_failure() -> None:
    result = check.run_part(part_of(left_out="no tests here"), 5.0, os.environ)
    assert (result.status, result.text, result.bad) == ("left out", "no tests here", False)


def test_parts_share_the_time_and_get_what_earlier_ones_left() -> None:
    watch = check.Watch(103.0)
    parts = [part_of("x"), part_of("y"), part_of(left_out="why"), part_of("z")]
    assert watch.limit_s(parts[0], parts[1:]) == pytest.approx(100 / 3, abs=1)
    assert watch.limit_s(parts[3], []) == pytest.approx(100, abs=1)
    assert check.run_part(part_of("x"), 0.1, os.environ).status == "out of time"


def test_output_comes_back_however_much_it_is() -> None:
    done = run_child(python("print('x' * 3000000)"), limit_s=30, environ=os.environ)
    assert (done.status, len(done.stdout)) == (0, 3000001)


def test_the_file_is_named_by_device_and_date_and_the_table_lines_up() -> None:
    facts = {"gpus": [{"name": "NVIDIA H200"}] * 2}
    assert Path(default_path(facts)).name == f"2x-nvidia-h200-{time.strftime('%Y-%m-%d')}.json"
    results = [Result("a", "passed", 1.0, 2.0, "fine"), Result("bcd", "failed", 1e4, 2.0, "")]
    _, _, first, second = table(results)
    assert first.index("passed") == second.index("failed")
