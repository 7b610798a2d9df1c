"""Which algorithm the tuner would take at each size, and what it thinks of the others.

Knows nothing of this machine but the topology it is given, and runs nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

from gpuallreduce import tuner
from gpuallreduce.algorithms import ALGORITHMS
from gpuallreduce.plan import Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import OPS, Dtype

__all__ = ["as_text", "table"]

SIZES = tuple(1 << shift for shift in range(10, 29, 2))  # 1 KiB .. 256 MiB


def table(topology: Topology, dtype: Dtype) -> list[dict[str, Any]]:
    """A row for each size, place of the result and kind of array, as plain data.

    Costs are estimated microseconds, or the reason why an algorithm cannot serve.
    """
    rows: list[dict[str, Any]] = []
    kinds = _kinds_of_arrays(topology)
    for nbytes, direct, in_place in itertools.product(SIZES, kinds, (True, False)):
        request = Request(
            collective="allreduce",
            dtype=dtype,
            op=OPS["max" if dtype.kind == "bool" else "sum"],
            count=nbytes // dtype.itemsize,
            nranks=topology.nranks,
            direct=direct,
            in_place=in_place,
        )
        plan = tuner.decide(request, topology, tuner.Forced(), transport="")
        rows.append(
            {
                "bytes": nbytes,
                "arrays": kinds[direct],
                "in_place": in_place,
                "algorithm": plan.config.algorithm,
                "access": plan.config.access,
                "nchannels": plan.config.nchannels,
                "chunk_bytes": plan.config.chunk_count * dtype.itemsize,
                "streaming": plan.config.streaming,
                "costs_us": plan.costs,
            }
        )
    return rows


def _kinds_of_arrays(topology: Topology) -> dict[bool, str]:
    """Names of arrays that peers cannot and can address, as far as there are such."""
    if not topology.one_process:
        return {False: "plain", True: "empty"}
    if topology.path == "host memory":
        return {False: "plain"}
    # What cudaMalloc gives can be addressed; CUDA's memory pools and managed memory cannot.
    return {True: "plain", False: "pooled"}


def as_text(rows: list[dict[str, Any]]) -> str:
    """The rows for people; where the place of the result makes no difference, one for both."""
    header = f"{'size':>8}  arrays  result        takes             chunk    "
    lines = [header + "".join(f"{name:>11}" for name in ALGORITHMS) + "  (us, estimated)"]
    for inside, outside in zip(rows[::2], rows[1::2], strict=True):
        if _choice(inside) == _choice(outside):
            lines.append(_line(inside, "either"))
        else:
            lines += [_line(inside, "in place"), _line(outside, "out of place")]
    return "\n".join(lines)


def _choice(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "in_place"}


def _line(row: dict[str, Any], place: str) -> str:
    costs = "".join(
        f"{cost:>11.1f}" if isinstance(cost, float) else f"{'-':>11}"
        for cost in (row["costs_us"].get(name) for name in ALGORITHMS)
    )
    takes = f"{row['algorithm']} {row['access']}"
    note = "  stores past the caches" if row["streaming"] else ""
    return (
        f"{_size(row['bytes']):>8}  {row['arrays']:<7} {place:<13} {takes:<17} "
        f"{_size(row['chunk_bytes']):<8} {costs}{note}"
    )


def _size(nbytes: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
