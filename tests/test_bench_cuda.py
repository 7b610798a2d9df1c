"""The benchmark on GPUs, from end to end and in its parts. No time is asserted but least ones."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpus
import numpy as np
import pytest
from gpuallreduce.bench import allreduce_perf, peers
from gpuallreduce.bench.arguments import add_arguments, options_of
from gpuallreduce.bench.options import Options
from gpuallreduce.bench.ranks import Ranks

from gpuallreduce import Communicator
from gpuallreduce.bootstrap.python import module_command
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.fabric.nccl import Nccl

pytest.importorskip("cupy_backends", reason="GPUs need CuPy: install .[test,cuda13]")

LIMIT_S = 100.0
QUICK = ["-n", "2", "-w", "1", "--rounds", "2", "--round-ms", "0.01"]
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def parse(*argv: str) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return options_of(parser.parse_args(argv))


def run_bench(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if "RANK" not in name}
    environ |= {**gpus.variables(), **SHARING}
    return subprocess.run(
        module_command("gpuallreduce.bench.allreduce_perf", *argv, *QUICK),
        capture_output=True,
        cwd="/",
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={
            name: value for name, value in environ.items() if "RANK" not in name or "NCCL" in name
        },
    )


def names(nranks: int) -> str:
    return ",".join(gpus.devices(nranks))


def data_lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def needs_nccl(nranks: int) -> None:
    gpus.start()
    reason = Nccl.available()
    shared = len(set(gpus.devices(nranks))) < nranks
    if reason is None and shared and Nccl.version().split(".") < ["2", "30"]:
        reason = "this NCCL takes no two ranks on one GPU"
    if reason is not None:
        pytest.skip(reason)


# ---- from end to end ----------------------------------------------------------------------------


def test_gpus_of_one_process_are_measured_beside_nccl(tmp_path: Path) -> None:
    needs_nccl(2)
    path = tmp_path / "x.json"
    sizes = ("-b", "64", "-e", "64K", "-f", "1024")
    done = run_bench("--devices", names(2), *sizes, "--peer", "nccl", "-J", str(path))
    assert done.returncode == 0, done.stderr
    lines = data_lines(done.stdout)
    assert [int(line[0]) for line in lines] == [64, 65536]
    # nccl-tests' columns, the algorithm, our latencies, and NCCL's times, latencies and ratios.
    assert {len(line) for line in lines} == {13 + 1 + 2 + 8}
    device = (
        r"#  Rank  0 Group  0 Pid +\d+ on +\S+ device  0 \[[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\] \S"
    )
    assert re.search(device, done.stdout)
    for text in ("# transport: ", "; path: ", "; order of the sum: rank\n", "# nccl: NCCL 2."):
        assert text in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout
    result = json.loads(path.read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", result["nccl_version"])
    assert result["config"]["ngpus"] == 2
    cuda = result["gpuallreduce"]["cuda"]
    assert all(re.fullmatch(r"\d+\.\d+", cuda[key]) for key in ("cuda_driver", "cuda_runtime"))
    assert cuda["gpus"][0]["name"] in done.stdout
    assert cuda["topology"]["nranks"] == 2
    assert result["gpuallreduce"]["device_kind"] == "cuda"
    assert result["gpuallreduce"]["order"].startswith("rank")
    for row in result["results"]:
        for side in ("out_of_place", "in_place"):
            mode, peer = row[side], row[side]["peers"]["nccl"]
            assert mode["nwrong"] == peer["nwrong"] == 0
            assert mode["time"] > 0
            assert 0 < mode["latency_min_us"] <= mode["latency_us"] <= mode["latency_p99_us"]
            assert peer["time_ratio"] == pytest.approx(peer["time"] / mode["time"])
            assert peer["latency_ratio"] == pytest.approx(peer["latency_us"] / mode["latency_us"])


def test_a_process_for_each_gpu_launches_graphs_beside_nccl(tmp_path: Path) -> None:
    needs_nccl(2)
    path = tmp_path / "x.json"
    argv = ("--devices", names(2), "--processes", "2", "-G", "3", "--peer", "nccl")
    done = run_bench(*argv, "-b", "4K", "-e", "4K", "--symmetric", "-J", str(path))
    assert done.returncode == 0, done.stderr
    assert len(data_lines(done.stdout)) == 1
    assert " graph: 3\n" in done.stdout
    assert "# both by CUDA graphs" in done.stdout
    result = json.loads(path.read_text())
    assert len({device["pid"] for device in result["devices"]}) == 2
    assert result["config"]["graph"] == 3
    (row,) = result["results"]
    for side in ("out_of_place", "in_place"):
        assert row[side]["nwrong"] == row[side]["peers"]["nccl"]["nwrong"] == 0
        assert row[side]["calls_per_round"] % 6 == 0
        assert len(row[side]["rounds_us"]) == 2


def test_several_ranks_share_a_gpu_with_and_without_graphs() -> None:
    for more in ((), ("-G", "1")):
        argv = ("--devices", "cuda:0,cuda:0,cuda:0", "-b", "1K", "-e", "1K", *more)
        done = run_bench(*argv, "-d", "float8_e4m3fn", "-o", "prod", "--symmetric")
        assert done.returncode == 0, done.stderr
        assert "# 3 ranks, in one process; arrays: from comm.empty" in done.stdout
        assert len(re.findall(r"#  Rank  \d .* device  0 ", done.stdout)) == 3
        assert "# Out of bounds values : 0 OK" in done.stdout


def test_without_a_gpu_there_is_one_error_for_all_processes() -> None:
    if gpus.are_real():
        pytest.skip("this machine has a GPU")
    environ = {key: value for key, value in os.environ.items() if "EMULATED" not in key}
    for more in ((), ("--processes", "2")):
        command = module_command("gpuallreduce.bench.allreduce_perf", "--device", "cuda", *more)
        options = {
            "capture_output": True,
            "cwd": "/",
            "text": True,
            "timeout": LIMIT_S,
            "check": False,
        }
        done = subprocess.run(command, env=environ, **options)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "need an NVIDIA GPU" in line
        assert done.stdout == ""


# ---- what it refuses and what it finds ----------------------------------------------------------


def test_missing_nccl_is_one_error_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus.start()
    monkeypatch.setattr(peers.NcclEngine, "available", lambda: "pip install nvidia-nccl-cu13")
    for more in ((), ("--processes", "2")):
        assert allreduce_perf.main(["--device", "cuda", "--peer", "nccl", *more]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == "gpuallreduce bench: --peer nccl: pip install nvidia-nccl-cu13\n"


def test_more_gpus_than_there_are_say_how_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    gpus.start()
    assert allreduce_perf.main(["--device", "cuda", "-g", "999"]) == 2
    assert "--devices cuda:0,cuda:0" in capsys.readouterr().err


def test_arrays_that_a_gpu_cannot_hold_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    gpus.start()
    assert allreduce_perf.main(["--devices", names(2), "-b", "1T", "-e", "1T"]) == 2
    assert "lower -e" in capsys.readouterr().err


class Faulty(Communicator):
    """Gives one wrong element on the last rank, and writes to the first rank's input."""

    def allreduce(self, arrays: Any, out: Any = None, **options: Any) -> Any:
        result = super().allreduce(arrays, out, **options)
        if out is not None:
            self.synchronize()
            for array, index in ((out[-1], out[-1].size // 2), (arrays[0], 0)):
                with array.device:
                    array[index : index + 1].set(np.array([-1], array.dtype))
        return result


def test_wrong_values_on_gpus_are_counted_and_make_the_status_1(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    options = parse("--device", "cuda", "-b", "64", "-e", "256", "-f", "4", "-J", str(path), *QUICK)
    text = io.StringIO()
    devices = gpus.devices(2)
    assert allreduce_perf.run(options, connect=lambda _: Faulty(devices), out=text) == 1
    assert [(line[8], line[12]) for line in data_lines(text.getvalue())] == [("2", "0")] * 2
    assert "# Out of bounds values : 2 FAILED" in text.getvalue()
    assert json.loads(path.read_text())["out_of_bounds"] == {"count": 2, "okay": "false"}


def test_nccl_is_no_peer_of_host_ranks() -> None:
    with Communicator(["host"] * 2) as comm, pytest.raises(InvalidArgument, match="GPU memory"):
        peers.connect("nccl", Ranks(comm))


# ---- arrays and clocks --------------------------------------------------------------------------


def test_values_come_to_gpus_and_back_whatever_their_number(
    cuda_ranks: Callable[..., Communicator],
) -> None:
    place = Ranks(cuda_ranks(2)).place
    array = place.view(place.make(8000)[1], 1000, np.dtype(np.int16))
    for count in (1, 3, 500, 999, 1000, 1001):
        values = np.arange(1, count + 1, dtype=np.int16)
        place.write(array, values)
        assert (place.read(array, 0, 1000) == np.resize(values, 1000)).all()
        assert (place.read(array, 500, 700) == np.resize(values, 1000)[500:700]).all()
    whole = place.view(array, 0, np.dtype(np.int16))
    place.write(whole, np.zeros(0, np.int16))
    assert place.read(whole, 0, 0).size == 0


class Doubling:
    """All-reduce in place of two ranks' ones: a value tells how often it was called."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        place = ranks.place
        self.arrays = [place.view(each, 100, np.dtype(np.float64)) for each in place.make(800)]

    def call(self) -> None:
        self.ranks.comm.allreduce(self.arrays, **self.ranks.place.keywords)

    def write(self) -> None:
        for array in self.arrays:
            self.ranks.place.write(array, np.ones(1))

    def calls(self) -> list[float]:
        place = self.ranks.place
        return [float(np.log2(place.read(array, 0, 100)).mean()) for array in self.arrays]


@pytest.mark.parametrize("graph_calls", [0, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_a_clock_makes_the_calls_that_it_divides_by(
    cuda_ranks: Callable[..., Communicator], graph_calls: int, shared: bool
) -> None:
    from gpuallreduce.bench.cuda_clock import CudaClock

    comm = cuda_ranks(devices=["cuda:0"] * 2) if shared else cuda_ranks(2)
    ranks = Ranks(comm)
    case = Doubling(ranks)
    case.write()
    case.call()
    clock = CudaClock(ranks, ranks.place, graph_calls=graph_calls)
    untimed = graph_calls or 1
    for _ in range(2):  # a graph is captured once
        assert clock.back_to_back(case, 6) > 0
        assert case.calls() == [untimed + 6] * 2
        assert len(clock.one_by_one(case, 4)) == 4
        assert case.calls() == [1 + 4] * 2


class Slow:
    """A call that holds the stream of one rank for some time, and returns at once."""

    HELD_S = 0.01

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.place, self.rank = ranks.place, rank

    def write(self) -> None:
        """It has no input."""

    def call(self) -> None:
        stream = self.place.streams[self.rank]
        with gpus.on(f"cuda:{stream.device_id}"):
            stream.launch_host_func(lambda _: time.sleep(self.HELD_S), None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_clock_sees_the_work_of_the_slowest_rank(
    cuda_ranks: Callable[..., Communicator], rank: int
) -> None:
    from gpuallreduce.bench.cuda_clock import CudaClock

    ranks = Ranks(cuda_ranks(2))
    clock = CudaClock(ranks, ranks.place, graph_calls=0)
    case = Slow(ranks, rank)
    # Events are ticked in milliseconds' fractions, so a little less is no fault.
    assert clock.back_to_back(case, 5) > 0.9 * case.HELD_S
    assert min(clock.one_by_one(case, 3)) > 0.9 * case.HELD_S
