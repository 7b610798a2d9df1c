"""The command line: which command runs, what it imports, and how errors end; and ``info``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from gpuallreduce import NotSupported, __version__
from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.cli import choices, machine, main, run
from gpuallreduce.errors import CompileError
from gpuallreduce.jit import host_compiler
from gpuallreduce.topology import host_topology
from gpuallreduce.types import DTYPES

COMMANDS = ("info", "validate", "bench", "bandwidth", "simulate", "run")


def test_version_and_help_name_the_commands(capsys):
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as caught:
            main([option])
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"gpuallreduce {__version__}\n")
    assert all(re.search(rf"\n    {name}\s", out) for name in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["info", "--unknown"], ["info", "-g", "1"]])
def test_calls_without_a_meaning_end_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: gpuallreduce {command} ")


@pytest.mark.parametrize(
    ("raised", "status", "printed"),
    [
        (NotSupported("no such thing"), 2, "gpuallreduce: error: no such thing\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_a_status(capsys, monkeypatch, raised, status, printed):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(run, "launch", fail)
    assert main(["run", "-n", "1", "true"]) == status
    assert capsys.readouterr().err == printed


def test_faults_of_the_program_are_not_hidden(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(run, "launch", fail)
    with pytest.raises(ZeroDivisionError):
        main(["run", "-n", "1", "true"])


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize("command", [["info"], ["run", "-n", "1", "true"]])
def test_a_command_imports_nothing_that_it_does_not_need(command):
    heavy = [
        "numba",
        "rich",
        "matplotlib",
        "sklearn",
        "gpuallreduce.bench",
        "gpuallreduce.reference",
    ]
    code = f"import sys; from gpuallreduce.cli import main; main({command})"
    done = python("-c", f"{code}; print([m for m in {heavy} if m in sys.modules], file=sys.stderr)")
    assert done.stderr == "[]\n"


def test_module_runs_as_a_program_and_bears_a_reader_that_leaves():
    assert python("-m", "gpuallreduce", "--version").stdout == f"gpuallreduce {__version__}\n"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "gpuallreduce", "info"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


# ---- info ----------------------------------------------------------------------------------------


def info(capsys, *arguments):
    assert main(["info", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_info_shows_the_machine_and_a_choice_for_each_size(capsys):
    found = info(capsys, "-g", "4")
    assert found["version"] == __version__
    assert found["devices"][0] == "host"
    assert found["cores"]["available"] == len(os.sched_getaffinity(0))
    assert found["nranks"] == 4
    rows = found["choices"]
    assert len({(row["bytes"], row["arrays"], row["in_place"]) for row in rows}) == len(rows)
    assert {row["bytes"] for row in rows} >= {1 << 10, 1 << 28}
    for row in rows:
        numbers = {k: v for k, v in row["costs_us"].items() if isinstance(v, float)}
        assert row["algorithm"] == min(numbers, key=numbers.get)
        assert row["arrays"] == "empty" or row["access"] == "staged"


def test_info_text_has_all_facts_and_all_algorithms(capsys):
    assert main(["info", "-g", "2", "-d", "bool"]) == 0
    out = capsys.readouterr().out
    for name in ("version", "devices", "processor", "pack", "compiler", "cache", "launcher"):
        assert f"{name} " in out
    assert all(f" {name}" in out for name in ALGORITHMS)
    assert "256 MiB" in out


@pytest.mark.parametrize("name", DTYPES)
def test_table_lists_equal_rows_once(name):
    rows = choices.table(host_topology(3, cores=2, one_process=False), DTYPES[name])
    text = choices.as_text(rows)
    assert len(text.splitlines()) < len(rows)
    assert " either " in text


def test_info_says_what_is_missing_and_succeeds(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler-anywhere")
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GPUALLREDUCE_RANK", "1")
    monkeypatch.delenv("GPUALLREDUCE_NRANKS", raising=False)
    found = info(capsys)
    assert "no-such-compiler-anywhere" in found["compiler"]["error"]
    assert found["cache"]["error"].startswith("not there yet")
    assert "GPUALLREDUCE_NRANKS is not" in found["launcher"]["error"]
    assert main(["info"]) == 0
    assert "no-such-compiler-anywhere" in capsys.readouterr().out


def test_info_bears_a_compiler_without_a_version_and_a_cache_that_is_a_file(
    capsys, monkeypatch, tmp_path
):
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexit 1\n")
    mute.chmod(0o755)
    monkeypatch.setenv("CXX", str(mute))
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(mute))
    found = info(capsys)
    assert found["compiler"]["version"] == "its version cannot be found out"
    assert found["cache"]["error"].startswith("cannot be read")


def test_info_counts_the_cache_and_sees_a_launcher(capsys, monkeypatch, tmp_path):
    (tmp_path / "kernel.so").write_bytes(b"12345")
    (tmp_path / ".new-1").write_bytes(b"unfinished")
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(tmp_path))
    monkeypatch.setenv("GPUALLREDUCE_RANK", "1")
    monkeypatch.setenv("GPUALLREDUCE_NRANKS", "3")
    found = info(capsys)
    assert (found["cache"]["entries"], found["cache"]["bytes"]) == (1, 5)
    place = {"source": "gpuallreduce run", "rank": 1, "nranks": 3, "error": None}
    assert found["launcher"] == place
    assert main(["info"]) == 0
    assert "gpuallreduce run: rank 1 of 3" in capsys.readouterr().out


def test_pack_is_the_one_that_the_compiler_chooses(tmp_path):
    try:
        compiler = host_compiler()
    except CompileError:
        pytest.skip("there is no C++ compiler")
    source = tmp_path / "pack.cpp"
    source.write_text(
        '#include "platform.cuh"\nstatic_assert(gar::kPackBytes == EXPECTED, "pack");\n'
    )
    expected = machine.facts()["pack_bytes"]
    from gpuallreduce.jit import kernels_folder

    command = [*compiler.command, "-std=c++17", "-march=native", "-fsyntax-only"]
    command += [f"-DEXPECTED={expected}", f"-I{kernels_folder()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
