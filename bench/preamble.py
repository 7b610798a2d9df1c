"""The comment lines above the table: versions, parameters, devices, and how to read the figures.

Knows nothing of results.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence

import numpy as np

import gpuallreduce

from .membw import MemoryLimits
from .options import Options
from .ranks import Ranks
from .report import HOST_NOTE, PROGRAM, Device

__all__ = ["devices_of", "notes", "preamble", "processor"]


def preamble(options: Options, devices: Sequence[Device]) -> list[str]:
    """nccl-tests' lines, up to the list of devices."""
    step = f"{options.step_bytes or 1 << 20}(bytes)"
    if options.step_factor is not None:
        step = f"{options.step_factor}(factor)"
    ranks_per_process = len(devices) // len({device.pid for device in devices})
    return [
        f"# gpuallreduce version {gpuallreduce.__version__}, table as of nccl-tests",
        f"# Collective test starting: {PROGRAM}",
        f"# nThread 1 nGpus {ranks_per_process} minBytes {options.min_bytes} maxBytes "
        f"{options.max_bytes} step: {step} warmup iters: {options.warmup} iters: "
        f"{options.iterations} agg iters: 1 validation: {options.checks} graph: 0",
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
) -> list[str]:
    """What one has to know to read the figures.

    Args:
        options, ranks: what was asked, and who measures.
        peers: name and version of the libraries beside ours.
        limits: what memory can do, if measured.
        skipped: pairs of dtype and operator that are not defined.
    """
    where = "threads of one process" if ranks.together else "one process each"
    arrays = "from comm.empty" if options.symmetric else "ordinary memory"
    lines = [
        "#",
        f"# {HOST_NOTE}",
        f"# {ranks.nranks} ranks, {where}; arrays: {arrays}",
        "# time: one of many calls in a row, slowest rank, median of "
        f"{options.rounds} rounds of about {options.round_ms:g} ms or more",
    ]
    if options.latency:
        lines.append(
            "# latency: one call after a barrier, inputs just written, slowest rank, median"
        )
    lines += [_peer_note(name, version) for name, version in peers.items()]
    if limits is not None:
        lines.append(_memory_note(limits))
    if options.symmetric:
        lines.append(
            f"# memory: useful bytes 2*p*n over time (p={ranks.nranks} arrays of n bytes, each "
            "read and written once), in % of add"
        )
    if skipped:
        lines.append(f"# Skipped, not defined: {', '.join(skipped)}")
    return lines


def _peer_note(name: str, version: str) -> str:
    return (
        f"# {name}: {version}; same processes, rounds in turn with ours, ordinary memory; "
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
    cores = os.sched_getaffinity(0)
    core = min(cores) if len(cores) == 1 else -1
    rows = ranks.gather(np.array([os.getpid(), core], np.int64))
    model, hostname = processor(), socket.gethostname()
    devices = []
    for rank in range(ranks.nranks):
        pid, bound = (int(value) for value in rows[0 if ranks.together else rank])
        info = f"host {model}" + (f" core {bound}" if bound >= 0 else "")
        devices.append(Device(rank, pid, hostname, rank, info))
    return devices


def processor() -> str:
    """The machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
