"""``launch`` and ``gpuallreduce run``: real processes, ended together and without trace."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpuallreduce.bootstrap.launch import launch
from gpuallreduce.bootstrap.output import LinePrefixer
from gpuallreduce.cli import run
from gpuallreduce.errors import InvalidArgument

ROOT = Path(__file__).parents[1]
LIMIT = 20.0  # no wait in this file is longer; none comes near it
MAIN = """
import argparse, sys
from gpuallreduce.cli import run
parser = argparse.ArgumentParser()
run.add_parser(parser.add_subparsers())
args = parser.parse_args()
sys.exit(args.main(args))
"""
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "run", *arguments],
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def finish(launcher: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Status, sorted output lines, errors."""
    out, err = launcher.communicate(timeout=LIMIT)
    return launcher.returncode, sorted(out.splitlines()), err


def command(*arguments: str) -> tuple[int, list[str], str]:
    return finish(start(*arguments))


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    launcher = start(*arguments)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate(timeout=LIMIT)


def read_pids(launcher: subprocess.Popen[str], count: int) -> list[int]:
    """The numbers that the ranks print, once all are there."""
    assert launcher.stdout is not None
    return [int(re.findall(r"\d+", launcher.stdout.readline())[-1]) for _ in range(count)]


def watch(pids: Sequence[int]) -> list[int]:
    return [os.pidfd_open(pid) for pid in pids]


def assert_ended(pidfds: Sequence[int]) -> None:
    """A pidfd is readable once its process has ended, and never another's."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], LIMIT)[0], "a process lives on"
        os.close(pidfd)


FAIL_IN_2 = 'if [ "$GPUALLREDUCE_RANK" = 2 ]; then %s; else sleep 60; fi'
# Prints its number and that of a process of its own, then waits.
FAMILY = "sleep 60 & echo $!; echo $$; wait"


# ---------------------------------------------------------------------------- output


def test_every_line_carries_its_rank_and_keeps_its_order() -> None:
    script = "import os\nfor i in range(300): print(os.environ['GPUALLREDUCE_RANK'], i, 'x' * 200)"
    launcher = start("-n", "3", sys.executable, "-c", script)
    out, err = launcher.communicate(timeout=LIMIT)
    assert (launcher.returncode, err) == (0, "")
    lines = out.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank} {i} {'x' * 200}" for i in range(300)]
    assert len(lines) == 900


def test_errors_stay_errors_and_a_last_line_without_end_is_whole() -> None:
    status, out, err = command("-n", "2", "sh", "-c", "printf out; printf err >&2")
    assert (status, out) == (0, ["[0] out", "[1] out"])
    assert sorted(err.splitlines()) == ["[0] err", "[1] err"]


def test_without_prefix_output_is_untouched() -> None:
    status, out, _ = command("-n", "2", "--no-prefix", "echo", "a line")
    assert (status, out) == (0, ["a line"] * 2)
    assert command("-n", "1", "echo", "a line")[1] == ["a line"]


def test_lines_are_the_same_however_they_were_cut() -> None:
    data = b"one\n\ntwo\r\nthree"
    whole = b"[7] one\n[7] \n[7] two\r\n[7] three\n"
    for step in range(1, len(data) + 1):
        prefixer = LinePrefixer(7)
        pieces = [prefixer.feed(data[i : i + step]) for i in range(0, len(data), step)]
        assert b"".join(pieces) + prefixer.finish() == whole
        assert all(piece.endswith(b"\n") for piece in pieces if piece)


def test_a_line_without_end_does_not_fill_memory() -> None:
    prefixer = LinePrefixer(0)
    cut = prefixer.feed(b"x" * (3 << 20))
    assert len(cut) > 3 << 20
    assert prefixer.finish() == b""


def test_output_that_nobody_reads_ends_the_ranks() -> None:
    with started("-n", "2", "yes") as launcher:
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.wait(LIMIT) == 128 + signal.SIGPIPE


# ---------------------------------------------------------------------------- what a rank sees


def test_each_rank_gets_its_number_one_address_and_one_secret() -> None:
    _, first, _ = command("-n", "2", "env")
    _, second, _ = command("-n", "2", "env")
    for lines in (first, second):
        assert "[1] GPUALLREDUCE_RANK=1" in lines
        assert "[1] GPUALLREDUCE_LOCAL_RANK=1" in lines
        assert "[0] GPUALLREDUCE_NRANKS=2" in lines
    found = re.findall(r"GPUALLREDUCE_(?:ADDRESS|SECRET)=(.*)", "\n".join(first + second))
    assert sorted(Counter(found).values()) == [2, 2, 2, 2]


def test_the_ranks_meet(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(
        "import os\n"
        "from gpuallreduce.bootstrap.environment import identify\n"
        "from gpuallreduce.bootstrap.rendezvous import Rendezvous\n"
        "identity = identify(os.environ)\n"
        "with Rendezvous.join(identity, timeout=20) as rendezvous:\n"
        "    parts = rendezvous.exchange('hello', {'rank': identity.rank})\n"
        "print(identity.source, [part.payload['rank'] for part in parts])\n"
    )
    status, out, err = command("-n", "3", str(script))
    assert (status, err) == (0, "")
    assert out == [f"[{rank}] gpuallreduce run [0, 1, 2]" for rank in range(3)]


def test_a_script_gets_its_arguments_even_those_that_look_like_ours(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    expected = ["[0] ['-n', '7', '--timeout', '-m']", "[1] ['-n', '7', '--timeout', '-m']"]
    target = [str(script), "-n", "7", "--timeout", "-m"]
    assert command("-n", "2", *target)[1] == expected
    assert command("-n", "2", "--", *target)[1] == expected


def test_a_module_is_run_with_its_arguments() -> None:
    status, out, _ = command("-n", "2", "-m", "calendar", "-t", "text", "2026", "11")
    assert status == 0
    assert sum("November 2026" in line for line in out) == 2


def test_only_rank_0_reads_standard_input() -> None:
    launcher = start("-n", "2", "cat", stdin=subprocess.PIPE)
    out, _ = launcher.communicate("text\n", timeout=LIMIT)
    assert out == "[0] text\n"


def test_the_default_number_of_ranks_is_that_of_the_cores() -> None:
    status, out, _ = command("--no-prefix", "echo", "x")
    assert (status, len(out)) == (0, len(os.sched_getaffinity(0)))


def test_signals_that_the_starter_ignores_are_not_ignored_in_the_ranks() -> None:
    _, out, _ = command("-n", "1", "grep", "SigIgn", "/proc/self/status")
    assert not int(out[0].split()[1], 16) & 1 << (signal.SIGPIPE - 1)


AFFINITY = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


def test_ranks_are_bound_to_a_core_each_where_there_are_enough() -> None:
    cores = sorted(os.sched_getaffinity(0))
    nranks = min(2, len(cores))
    _, out, _ = command("-n", str(nranks), *AFFINITY)
    prefixes = [f"[{rank}] " if nranks > 1 else "" for rank in range(nranks)]
    assert out == [f"{prefixes[rank]}[{cores[rank]}]" for rank in range(nranks)]
    _, out, _ = command("-n", str(nranks), "--bind", "none", *AFFINITY)
    assert out == [f"{prefix}{cores}" for prefix in prefixes]


def test_more_ranks_than_cores_are_not_bound_unless_that_was_asked_for() -> None:
    cores = sorted(os.sched_getaffinity(0))
    too_many = len(cores) + 1
    status, out, _ = command("-n", str(too_many), *AFFINITY)
    assert (status, out) == (0, sorted(f"[{rank}] {cores}" for rank in range(too_many)))
    status, _, err = command("-n", str(too_many), "--bind", "core", *AFFINITY)
    assert status == 2
    assert f"{len(cores)} are available" in err


# ---------------------------------------------------------------------------- how it ends


def test_the_first_failure_is_reported_and_the_others_ended() -> None:
    status, _, err = command("-n", "4", "sh", "-c", FAIL_IN_2 % "exit 7")
    assert status == 7
    assert err == "gpuallreduce run: rank 2 exited with status 7 first; ended the other 3 ranks\n"


def test_a_rank_that_a_signal_ends_is_reported_with_the_signal() -> None:
    status, _, err = command("-n", "3", "sh", "-c", FAIL_IN_2 % "kill -SEGV $$")
    assert status == 128 + signal.SIGSEGV
    assert "rank 2 was ended by SIGSEGV first; ended the other 2 ranks" in err


def test_what_failed_ranks_print_comes_before_the_report() -> None:
    _, _, err = command("-n", "3", "sh", "-c", FAIL_IN_2 % "echo reason >&2; exit 1")
    assert err.splitlines()[0] == "[2] reason"


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    # Rank 1 fails only once rank 0 ignores the signal.
    script = (
        "if [ $GPUALLREDUCE_RANK = 0 ]; then trap '' TERM; echo ready > $0; "
        "while :; do sleep 60; done; else read line < $0; exit 5; fi"
    )
    started = time.monotonic()
    with open(os.devnull, "w") as nowhere:
        fd = nowhere.fileno()
        command = ["sh", "-c", script, str(fifo)]
        assert launch(2, command, grace=0.1, stdout=fd, stderr=fd) == 5
    assert time.monotonic() - started < LIMIT


def test_a_command_that_does_not_exist_is_a_clear_error() -> None:
    status, _, err = command("-n", "1", "no-such-command")
    assert status == 127
    assert "cannot run no-such-command: No such file" in err


def test_when_the_time_is_up_all_are_ended() -> None:
    status, _, err = command("-n", "2", "--timeout", "0.3", "sleep", "60")
    assert status == 124
    assert err == "gpuallreduce run: the time of 0.3 s was up; ended ranks 0, 1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_and_nothing_is_left(number: signal.Signals) -> None:
    with started("-n", "2", "sh", "-c", FAMILY) as launcher:
        pidfds = watch(read_pids(launcher, 4))
        launcher.send_signal(number)
        assert launcher.wait(LIMIT) == 128 + number
        assert_ended(pidfds)


def test_killing_the_launcher_ends_the_ranks_and_what_they_started() -> None:
    with started("-n", "2", "sh", "-c", FAMILY) as launcher:
        pidfds = watch(read_pids(launcher, 4))
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(LIMIT)
        assert_ended(pidfds)


def test_what_a_rank_leaves_behind_is_ended() -> None:
    # It holds our pipe open: reading to the end returns because it is gone.
    status, out, _ = command("-n", "2", "--no-prefix", "sh", "-c", "sleep 60 & echo started")
    assert (status, out) == (0, ["started"] * 2)


def test_launch_leaves_no_child_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull, "w") as nowhere:
        for program, status in (("true", 0), ("false", 1)):
            fd = nowhere.fileno()
            assert launch(2, [program], stdout=fd, stderr=fd) == status
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_launch_puts_signal_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    launch(1, ["true"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# ---------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("nranks", "program", "text"), [(0, ["true"], "at least 1"), (1, [], "no command")]
)
def test_what_cannot_be_launched_is_refused(nranks: int, program: list[str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        launch(nranks, program)


@pytest.mark.parametrize(
    "arguments",
    [["-n", "0", "x"], ["-n", "x", "x"], ["--timeout", "0", "x"], ["--timeout", "nan", "x"]],
)
def test_bad_options_are_refused_by_the_parser(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["run", *arguments])


def test_without_a_target_it_says_so() -> None:
    status, _, err = command("-n", "2")
    assert status == 2
    assert "no command" in err
