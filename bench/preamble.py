"""The comment lines above the table: versions, parameters, devices, and how to read the figures.

Knows nothing of results.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import gpuallreduce
from gpuallreduce.jit_cuda import EMULATED
from gpuallreduce.plan import Plan

from .membw import MemoryLimits
from .options import Options
from .ranks import Ranks
from .report import HOST_NOTE, PROGRAM, Device

__all__ = ["devices_of", "note_of", "notes", "preamble", "where_text"]


def preamble(options: Options, devices: Sequence[Device]) -> list[str]:
    """nccl-tests' lines, up to the list of devices."""
    step = f"{options.step_bytes or 1 << 20}(bytes)"
    if options.step_factor is not None:
        step = f"{options.step_factor}(factor)"
    processes = {(device.hostname, device.pid) for device in devices}
    ranks_per_process = len(devices) // len(processes)
    return [
        f"# gpuallreduce version {gpuallreduce.__version__}, table as of nccl-tests",
        f"# Collective test starting: {PROGRAM}",
        f"# nThread 1 nGpus {ranks_per_process} minBytes {options.min_bytes} maxBytes "
        f"{options.max_bytes} step: {step} warmup iters: {options.warmup} iters: "
        f"{options.iterations} agg iters: 1 validation: {options.checks} "
        f"graph: {options.graph_launches}",
        "#",
        "# Using devices",
        *(device.text for device in devices),
    ]


def notes(
    options: Options,
    ranks: Ranks,
    *,
    peers: Mapping[str, str],
    limits: MemoryLimits | None,
    skipped: Sequence[str],
    plan: Plan | None = None,
) -> list[str]:
    """What one has to know to read the figures.

    Args:
        options, ranks: what was asked, and who measures.
        peers: name and version of the libraries beside ours.
        limits: what memory can do, if measured.
        skipped: pairs of dtype and operator that are not defined.
        plan: of the largest call, out of place.
    """
    cuda = ranks.place.kind == "cuda"
    arrays = "from comm.empty" if options.symmetric else "ordinary memory"
    lines = ["#", f"# {note_of(ranks)}", f"# {where_text(ranks)}; arrays: {arrays}"]
    if plan is not None and len(ranks.layout) > 1:
        lines += _nodes_notes(ranks.layout, plan)
    elif plan is not None and cuda:
        lines.append(
            f"# transport: {plan.transport}; path: {ranks.comm.topology.path}; "
            f"order of the sum: {plan.order.partition(':')[0]}"
        )
    lines += _time_notes(options, cuda=cuda)
    lines += [_peer_note(name, version, cuda=cuda) for name, version in peers.items()]
    if limits is not None:
        lines.append(_memory_note(limits))
        if options.symmetric:
            lines.append(
                f"# memory: useful bytes 2*p*n over time (p={ranks.nranks} arrays of n bytes, "
                "each read and written once), in % of add"
            )
    if skipped:
        lines.append(f"# Skipped, not defined: {', '.join(skipped)}")
    return lines


def _nodes_notes(layout: Sequence[tuple[str, int]], plan: Plan) -> list[str]:
    """Where ranks are, what is between them, and how to read the columns of it."""
    sizes = [size for _, size in layout]
    even = len(set(sizes)) == 1
    shape = f"{len(sizes)} x {sizes[0]}" if even else " + ".join(map(str, sizes))
    nodes = ", ".join(f"{name} {size} rank{'' if size == 1 else 's'}" for name, size in layout)
    return [
        f"# nodes {shape}: {nodes}",
        f"# transport: {plan.transport}; order of the sum: {plan.order.partition(':')[0]}",
        "# within, between: bytes that a rank sends to ranks of its node and to other nodes, the "
        "most of any rank; then over time",
    ]


def note_of(ranks: Ranks) -> str:
    """What figures of this kind of device tell."""
    if ranks.place.kind == "host":
        return HOST_NOTE
    if os.environ.get(EMULATED):
        return "EMULATED GPUS: threads of the processor, whose times say nothing of GPUs"
    return "CUDA DEVICES: times of GPUs"


def where_text(ranks: Ranks) -> str:
    """How many ranks live where."""
    if not ranks.together:
        return f"{ranks.nranks} ranks, one process each"
    threads = "threads of one process" if ranks.place.kind == "host" else "in one process"
    return f"{ranks.nranks} ranks, {threads}"


def _time_notes(options: Options, *, cuda: bool) -> list[str]:
    lines = [
        "# time: one of many calls in a row, slowest rank, median of "
        f"{options.rounds} rounds of about {options.round_ms:g} ms or more"
        + (", by CUDA events" if cuda else "")
    ]
    if not cuda and options.shows_latency:
        lines.append(
            "# latency: one call after a barrier, inputs just written, slowest rank, median"
        )
    elif cuda:
        lines.append(
            "# latency: one of a chain of calls, each waited for by the host, slowest rank, median"
        )
    if options.graph_launches:
        lines.append(
            f"# both by CUDA graphs, launched from a thread for each GPU: {options.iterations} "
            "calls a graph for time, 1 for latency"
        )
    return lines


def _peer_note(name: str, version: str, *, cuda: bool) -> str:
    memory = "same arrays and streams" if cuda else "ordinary memory"
    return (
        f"# {name}: {version}; same processes, rounds in turn with ours, {memory}; "
        "/ours above 1: we are faster"
    )


def _memory_note(limits: MemoryLimits) -> str:
    return (
        f"# Memory limits, all ranks at once, {limits.array_bytes >> 20} MiB arrays, non-temporal "
        f"stores: add a=b+c {limits.add_gbps:.1f} GB/s (3 arrays), "
        f"copy a=b {limits.copy_gbps:.1f} GB/s (2 arrays)"
    )


def devices_of(ranks: Ranks) -> list[Device]:
    """What every rank runs on. A collective."""
    mine = {
        "ranks": ranks.local,
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "devices": ranks.place.describe(),
    }
    return [
        Device(rank, each["pid"], each["hostname"], **device)
        for each in ranks.exchange(mine)
        for rank, device in zip(each["ranks"], each["devices"], strict=True)
    ]
