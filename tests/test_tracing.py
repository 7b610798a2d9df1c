"""The trace of a job on two nodes: what it holds; stages between and inside nodes overlap."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from gpuallreduce.across.chunks import chunk_count, chunks_of

BODY = """
import os, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["GPUALLREDUCE_NODE"] = f"node{rank // 2}"
import numpy as np
import gpuallreduce
with gpuallreduce.init(timeout=60) as comm:
    x = np.ones(4 << 20, np.float32)
    for order in ("any", "rank"):
        comm.allreduce(x, order=order)
"""
CHUNKS = len(chunks_of(4 << 20, 4, nshards=2, owner=0, step=chunk_count(4, 2)))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict]]:
    """Events by rank."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (Debian and Ubuntu: apt install openmpi-bin)")
    folder = tmp_path_factory.mktemp("trace") / "new"
    environ = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "GPUALLREDUCE_TRACE": str(folder),
    }
    command = ["mpirun", "-n", "4", "--oversubscribe", sys.executable, "-c", BODY]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, cwd="/", timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank-{rank}.0.json" for rank in range(4)
    ]
    files = [folder / f"rank-{rank}.0.json" for rank in range(4)]
    return [json.loads(path.read_text())["traceEvents"] for path in files]


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


def test_every_chunk_is_reduced_and_gathered_once_in_each_call(traces):
    for rank, events in enumerate(traces):
        assert {(each["pid"], each["tid"]) for each in events} == {(rank // 2, rank)}
        for name in ("reduce", "gather"):
            chunks = [each["args"]["chunk"] for each in events if each["name"] == name]
            assert chunks == [*range(CHUNKS)] * 2, (rank, name)


def test_kernels_run_while_chunks_travel_between_the_nodes(traces):
    for rank, events in enumerate(traces):
        flights = sends(events)
        assert len(flights) == 2 * CHUNKS, rank
        overlapped = sum(
            any(begin < ended and started < end for started, ended in kernels(events))
            for begin, end in flights
        )
        assert overlapped >= CHUNKS, (rank, overlapped)
