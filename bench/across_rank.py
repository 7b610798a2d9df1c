"""What each rank of a job on several nodes measures: our all-reduce, its two stages alone, MPI's
all-reduce, and what the link carries.

Knows nothing of how the nodes are made. Run by mpirun; rank 0 writes what it found as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

import gpuallreduce
from gpuallreduce.across.calls import CallsAcross
from gpuallreduce.across.chunks import chunks_of
from gpuallreduce.across.host import HostAcross
from gpuallreduce.across.shards import NodeShards
from gpuallreduce.plan import Plan, Request, Shards
from gpuallreduce.tuner import Forced
from gpuallreduce.types import DTYPES, OPS

__all__ = ["main"]

Array = np.ndarray[Any, Any]
FLOAT = DTYPES["float32"]
TIMEOUT_S = 60.0


class _NoShards(NodeShards):
    """Ranks of a node that neither fold nor gather, which leaves what is between nodes."""

    def __init__(self, shards: NodeShards) -> None:
        self.orchestrator, self.timeout = shards.orchestrator, shards.timeout

    def reduce(self, *_: Any, **__: Any) -> None:
        """Folds nothing."""

    def gather(self, *_: Any, **__: Any) -> None:
        """Gathers nothing."""

    def forget(self) -> None:
        """Has nothing to forget."""


class Calls:
    """What is timed, on one array."""

    def __init__(self, communicator: gpuallreduce.Communicator, world: Any, count: int) -> None:
        self.communicator, self.world = communicator, world
        self.across = cast(HostAcross, cast(CallsAcross, communicator._calls).across)
        self.x = np.ones(count, np.float32)
        shard = -(-count // self.across.nshards)
        self.out, self.into = np.ones(shard, np.float32), np.ones(shard, np.float32)

    def all(self) -> dict[str, Callable[[], None]]:
        """By name."""
        return {
            "any": lambda: self._ours("any"),
            "any_between": lambda: self._between("any"),
            "rank": lambda: self._ours("rank"),
            "rank_between": lambda: self._between("rank"),
            "inside": self._inside,
            "mpi": self._mpi,
            "exchange": self._exchange,
        }

    def _ours(self, order: str) -> None:
        self.communicator.allreduce(self.x, order=order)

    def _between(self, order: str) -> None:
        """The same messages of the same chunks in the same turns, without kernels."""
        across, kept, plan = self.across, self.across.shards, self._plan(order)
        across.shards = _NoShards(kept)
        try:
            address = int(self.x.ctypes.data)
            across.allreduce(address, address, plan)
        finally:
            across.shards = kept

    def _inside(self) -> None:
        """Folds and gathers all chunks, and nothing travels."""
        across = self.across
        request = self._request("any")
        shards = Shards(across.nshards, fold_ranks=request.nranks)
        buffer, base = int(self.out.ctypes.data), int(self.x.ctypes.data)
        owner = across.nodes.local_rank
        step = self._plan("any").config.chunk_count
        for chunk in chunks_of(request.count, FLOAT.itemsize, across.nshards, owner, step):
            at = base + chunk.first * FLOAT.itemsize
            common: dict[str, Any] = {"dtype": FLOAT, "count": chunk.count, "shards": shards}
            across.shards.reduce([at], [buffer], op=OPS["sum"], **common)
            across.shards.gather([buffer], [at], **common)

    def _mpi(self) -> None:
        self.world.Allreduce(sys.modules["mpi4py.MPI"].IN_PLACE, self.x)

    def _exchange(self) -> None:
        """As many bytes as our way needs, in one message each way: what the link can do."""
        half = self.world.size // 2
        peer = (self.world.rank + half) % self.world.size
        self.world.Sendrecv(self.out, peer, recvbuf=self.into, source=peer)

    def _request(self, order: str) -> Request:
        return replace(
            Request("allreduce", FLOAT, OPS["sum"], self.x.size, self.world.size),
            in_place=True,
            order=order,
        )

    def _plan(self, order: str) -> Plan:
        calls = cast(CallsAcross, self.communicator._calls)
        return calls.decide(self._request(order), Forced())


def measure(
    communicator: gpuallreduce.Communicator, world: Any, count: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of the slowest rank, by name and round; names take turns."""
    calls = Calls(communicator, world, count)
    times: dict[str, list[float]] = {name: [] for name in calls.all()}
    for turn in range(rounds + 1):  # the first warms up
        for name, call in calls.all().items():
            calls.x[:] = 1
            world.Barrier()
            start = time.perf_counter()
            call()
            slowest = world.allreduce(time.perf_counter() - start, sys.modules["mpi4py.MPI"].MAX)
            if name in ("any", "rank", "mpi"):
                assert (calls.x == world.size).all(), name
            if turn:
                times[name].append(slowest)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all sizes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    results = []
    with gpuallreduce.init(timeout=TIMEOUT_S) as communicator:
        for mib in options.mib:
            count = int(mib * (1 << 20)) // FLOAT.itemsize
            load = os.getloadavg()[0]
            times = measure(communicator, world, count, options.rounds)
            results.append({"bytes": count * FLOAT.itemsize, "load": load, "seconds": times})
    if world.rank == 0:
        found = {"mpi": MPI.Get_library_version().split(",")[0], "results": results}
        options.output.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
