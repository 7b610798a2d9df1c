"""The trace of a job on two nodes: what it holds; stages between and inside nodes overlap."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jobs
import numpy as np
import pytest

import gpuallreduce as gar
from gpuallreduce.tracing import Trace, trace_file

BODY = """
import json, os, sys
import numpy as np
import gpuallreduce
rank, folder = int(os.environ["OMPI_COMM_WORLD_RANK"]), sys.argv[1]
def job(nodes, count, orders, trace):
    os.environ["GPUALLREDUCE_NODE"] = nodes[rank]
    with gpuallreduce.init(timeout=60, trace=trace) as comm:
        x = np.ones(count, np.float32)
        for order in orders:
            plan = comm.plan(x, order=order)
            comm.allreduce(x, order=order)
            if rank == 0:
                facts = [order, plan.config.chunk_count, plan.bytes_between]
                print("PLAN", trace, *facts, flush=True)
job("aabb", 4 << 20, ["any", "rank"], None)
for nodes in ("aabb", "abbb", "abcc"):
    orders = ["any", "rank"] if nodes[2] == "b" else ["rank"]
    job(nodes, 1 << 20, orders, f"{folder}/{nodes}.json")
"""


@dataclass
class Traces:
    """Events by rank, and what the plan of each order said: elements of a chunk, and bytes that a
    rank sends to other nodes.
    """

    ranks: list[list[dict]]
    plans: dict[str, tuple[int, int]]
    count: int

    def chunks(self) -> int:
        return sum(-(-self.count // step) for step, _ in self.plans.values())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traces]:
    """By name of the trace."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (Debian and Ubuntu: apt install openmpi-bin)")
    base = tmp_path_factory.mktemp("trace")
    folder = base / "new"
    environ = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "GPUALLREDUCE_TRACE": str(folder),
    }
    command = ["mpirun", "-n", "4", "--oversubscribe", sys.executable, "-c", BODY, str(base)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, cwd="/", timeout=100
    )
    assert done.returncode == 0, done.stderr
    plans: dict[str, dict[str, tuple[int, int]]] = {}
    for line in done.stdout.splitlines():
        _, trace, order, *numbers = line.split()
        plans.setdefault(Path(trace).name, {})[order] = (int(numbers[0]), int(numbers[1]))
    files = [folder / f"rank-{rank}.0.json" for rank in range(4)]
    assert sorted(folder.iterdir()) == files
    ranks = [json.loads(path.read_text())["traceEvents"] for path in files]
    traces = {"folder": Traces(ranks, plans.pop("None"), 4 << 20)}
    for name, said in plans.items():
        events = json.loads((base / name).read_text())["traceEvents"]
        ranks = [[each for each in events if each["tid"] == rank] for rank in range(4)]
        assert sum(map(len, ranks)) == len(events)
        traces[name] = Traces(ranks, said, 1 << 20)
    assert sorted(path.name for path in base.iterdir()) == sorted([*plans, "new"])
    return traces


def kernels(events: list[dict]) -> list[tuple[float, float]]:
    return [
        (each["ts"], each["ts"] + each["dur"])
        for each in events
        if each["ph"] == "X" and each["name"] in ("reduce", "gather")
    ]


def sends(events: list[dict]) -> list[tuple[float, float]]:
    """Of chunks; the messages that compare calls are short."""
    found: dict[str, list[float]] = {}
    for each in events:
        if each["ph"] in "be" and each["name"] == "send" and each["args"]["bytes"] > 1024:
            found.setdefault(each["id2"]["local"], []).append(each["ts"])
    return [(begin, end) for begin, end in found.values()]


def test_every_chunk_is_reduced_and_gathered_once_in_each_call(found):
    for trace in ("folder", "aabb.json"):
        traces = found[trace]
        for rank, events in enumerate(traces.ranks):
            assert {(each["pid"], each["tid"]) for each in events} == {(rank // 2, rank)}
            counts = [-(-traces.count // step) for step, _ in traces.plans.values()]
            chunks = [chunk for count in counts for chunk in range(count)]
            for name in ("reduce", "gather"):
                seen = [each["args"]["chunk"] for each in events if each["name"] == name]
                assert seen == chunks, (trace, rank, name)


@pytest.mark.parametrize("trace", ["folder", "aabb.json"])
def test_kernels_run_while_chunks_travel_between_the_nodes(trace, found):
    traces = found[trace]
    for rank, events in enumerate(traces.ranks):
        flights = sends(events)
        assert len(flights) == traces.chunks(), rank
        overlapped = sum(
            any(begin < ended and started < end for started, ended in kernels(events))
            for begin, end in flights
        )
        assert overlapped >= traces.chunks() / 2, (rank, overlapped)


@pytest.mark.parametrize("nodes", ["aabb", "abbb", "abcc"])
def test_ranks_send_the_bytes_that_the_plan_says(nodes, found):
    traces = found[f"{nodes}.json"]
    calls = [0] * 4
    for rank, events in enumerate(traces.ranks):
        calls[rank] = sum(
            each["args"]["bytes"]
            for each in events
            if each["ph"] == "b" and each["name"] == "send" and each["args"]["bytes"] > 1024
        )
    assert max(calls) == sum(between for _, between in traces.plans.values())
    owners = min(nodes.count(node) for node in nodes)
    silent = [nodes[:rank].count(nodes[rank]) >= owners for rank in range(4)]
    assert [not sent for sent in calls] == silent


# ---- one node, and what cannot be written -------------------------------------------------------


def test_a_communicator_of_one_node_records_its_calls(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("of an earlier run")
    with gar.Communicator(["host"] * 3, trace=path) as comm:
        for _ in range(3):  # the third would go the short way
            comm.allreduce([np.ones(1000) for _ in range(3)])
        comm.barrier()
    events = json.loads(path.read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert [each["name"].split()[0] for each in spans] == ["allreduce"] * 3 + ["barrier"]
    assert [each["args"]["bytes"] for each in spans] == [8000] * 3 + [0]
    assert {each["args"]["name"] for each in events if each["name"] == "thread_name"} == {
        "ranks 0 to 2"
    }


def test_a_trace_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    for trace, text in (
        (tmp_path / "none" / "x.json", "No such file"),
        (tmp_path, "Is a directory"),
        ("", "must be the path"),
        (3, "must be the path"),
    ):
        with pytest.raises(gar.InvalidArgument, match=text):
            gar.Communicator(["host"], trace=trace)
        with pytest.raises(gar.InvalidArgument, match=text):
            gar.init(rank=0, nranks=1, address="unix:nobody", trace=trace)
    with pytest.raises(gar.NotSupported, match="Nsight"):
        gar.Communicator(["cuda:0"], trace=tmp_path / "y.json")
    assert not (tmp_path / "y.json").exists()


def test_every_rank_learns_that_one_cannot_write_its_trace(tmp_path):
    body = f"""
        trace = "{tmp_path}/" + ("none/x.json" if os.environ["GPUALLREDUCE_RANK"] == "1" else "x")
        report(error_of(gar.init, trace=trace))
    """
    for rank in jobs.run_job(2, body):
        kind, text = rank.reports[0]
        assert kind == "InvalidArgument"
        assert text.startswith("rank 1: trace=")


def test_ranks_that_are_left_write_their_stages(tmp_path):
    body = f"""
        comm = gar.init(trace="{tmp_path}/x.json")
        if comm.rank == 1:
            os._exit(0)
        report(error_of(comm.allreduce, np.ones(9)))
        comm.close()
    """
    left = jobs.run_job(3, body)
    assert [rank.reports[0][0] for rank in (left[0], left[2])] == ["Aborted"] * 2
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    spans = [each["tid"] for each in events if each["ph"] == "X"]
    assert sorted(spans) == [0, 2]


def test_a_file_that_is_locked_or_was_replaced_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpuallreduce.tracing.LOCK_S", 0.0)
    path = trace_file(tmp_path / "x.json")
    traces = [Trace(path, node=0, node_name="n", rank=rank, shared=True) for rank in range(3)]
    for trace in traces:
        with trace.span("stage"):
            pass
    traces[0].write()
    kept = path.read_bytes()
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        traces[1].write()
    assert path.read_bytes() == kept
    path.write_text("notes")
    traces[2].write()
    assert path.read_text() == "notes"
    said = capsys.readouterr().err.splitlines()
    for rank in (1, 2):
        events = json.loads((tmp_path / f"x.rank-{rank}.json").read_text())["traceEvents"]
        assert {each["tid"] for each in events} == {rank}
        assert f"x.rank-{rank}.json" in said[rank - 1]
    path.unlink()
    tmp_path.rename(tmp_path.with_name("gone"))
    traces[0].write()  # closing a communicator goes on
    assert "no trace was written" in capsys.readouterr().err
