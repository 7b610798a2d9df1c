"""The GPUs of this machine: what they are, how they are linked, and what a communicator of all of
them would use.

Knows nothing of how to find out; what cannot be found is said in its place, and is no error.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpuallreduce.cli import choices
from gpuallreduce.devices import cuda_presence, nvml
from gpuallreduce.errors import Error
from gpuallreduce.links import ANCESTORS, GpuFacts, Machine
from gpuallreduce.types import Dtype

__all__ = ["as_text", "facts"]


def facts(dtype: Dtype, *, nranks: int | None = None, probe: bool = False) -> dict[str, Any]:
    """All of them, as plain data; ``error`` says why there are no GPUs.

    Args:
        dtype: of the table of choices.
        nranks: of the communicator; None: one for each GPU, at least 2.
        probe: whether to probe anew if GPUs reach each other.
    """
    reason = cuda_presence.absence()
    if reason is None:
        try:
            return _found(dtype, nranks, probe)
        except Error as error:
            reason = str(error)
    return {"error": reason, "gpus": [], "matrix": [], "communicator": None}


def _found(dtype: Dtype, nranks: int | None, probe: bool) -> dict[str, Any]:
    runtime = importlib.import_module("gpuallreduce.devices.cuda_runtime")
    found = [runtime.gpu_of(ordinal) for ordinal in range(runtime.device_count())]
    machine = nvml.machine([gpu.uuid for gpu in found])
    gpus = []
    for place, gpu in enumerate(found):
        linked = GpuFacts(gpu.uuid) if machine is None else machine.gpus[place]
        gpus.append({**vars(gpu), "links": asdict(linked)})
    return {
        "error": None,
        "driver": machine and machine.driver,
        "nvml": machine is not None,
        "gpus": gpus,
        "matrix": _matrix(found, machine),
        "communicator": _communicator(len(found), dtype, nranks, probe),
    }


def _matrix(gpus: Sequence[Any], machine: Machine | None) -> list[list[dict[str, Any]]]:
    """For each pair what joins it, and whether CUDA lets the one address the other's memory."""
    cupy = importlib.import_module("gpuallreduce.devices.cuda_runtime").cupy_module()
    can_access = cupy.cuda.runtime.deviceCanAccessPeer
    rows = []
    for a, gpu in enumerate(gpus):
        row = []
        for b, other in enumerate(gpus):
            link = None if machine is None else machine.link(a, b)
            peer = a == b or bool(can_access(gpu.ordinal, other.ordinal))
            unknown = {"kind": "X" if a == b else "?", "gbps": None, "usable_gbps": None}
            row.append({**(asdict(link) if link else unknown), "peer_access": peer})
        rows.append(row)
    return rows


def _communicator(count: int, dtype: Dtype, nranks: int | None, probe: bool) -> dict[str, Any]:
    """What ranks of one process on all GPUs would use: placed as a communicator places them."""
    runtime = importlib.import_module("gpuallreduce.devices.cuda_runtime")
    placing = importlib.import_module("gpuallreduce.placement_cuda")
    reaching = importlib.import_module("gpuallreduce.reach_cuda")
    gpus = [runtime.gpu_of(rank % count) for rank in range(nranks or max(2, count))]
    found: dict[str, Any] = {"devices": [f"cuda:{gpu.ordinal}" for gpu in gpus], "error": None}
    try:
        reach = reaching.local_reach(gpus, probing=reaching.AGAIN if probe else reaching.KEPT)
        placement = placing.placed_locally(gpus, reach)
    except Error as error:
        return {**found, "error": str(error)}
    topology = placement.topology
    found |= {
        "transport": placement.transport.name,
        "path": topology.path,
        "link_gbps": topology.link_gbps,
        "max_channels": topology.max_channels,
        "uuids": {f"cuda:{gpu.ordinal}": gpu.uuid for gpu in gpus},
        "peers": reach.reason is None,
        "probe": reach.verdict and reach.verdict.as_plain(),
        "choices": choices.table(topology, dtype),
    }
    placement.device.close()
    placement.transport.close()
    return found


# ---- for people ---------------------------------------------------------------------------------


def as_text(found: dict[str, Any], dtype: str) -> str:
    """What ``facts`` found, for people."""
    if found["error"]:
        return f"no CUDA devices: {found['error']}"
    parts = [_list(found), _table(found), _legend(found), _plan(found["communicator"], dtype)]
    return "\n\n".join(parts)


def _list(found: dict[str, Any]) -> str:
    driver = f"driver {found['driver']}" if found["driver"] else "driver's version unknown"
    lines = [f"CUDA devices, {driver}"]
    for gpu in found["gpus"]:
        lines.append(
            f"  cuda:{gpu['ordinal']}  {gpu['name']}, sm_{gpu['major']}{gpu['minor']}, "
            f"{gpu['multiprocessors']} multiprocessors, {gpu['bus_id']}, {gpu['uuid']}"
        )
        lines.append(f"          {_links(gpu['links'])}")
    if not found["nvml"]:
        lines.append("  NVML is missing (pip install nvidia-ml-py), so links are not known")
    return "\n".join(lines)


def _links(links: dict[str, Any]) -> str:
    """A GPU's own links in words."""
    parts = []
    if links["nvlinks"]:
        where = "to a switch" if links["switch_links"] else "to other GPUs"
        parts.append(f"NVLink {links['nvlink_version'] or '?'} x {links['nvlinks']} {where}")
    if links["pcie_generation"] is not None:
        now = (links["pcie_generation_now"], links["pcie_width_now"])
        best = (links["pcie_generation"], links["pcie_width"])
        saving = "" if now in (best, (None, None)) else f" (now {now[0]} x{now[1]})"
        parts.append(f"PCIe {best[0]} x{best[1]}{saving}")
    return ", ".join(parts) or "links unknown"


def _table(found: dict[str, Any]) -> str:
    """The matrix: kinds of links with one direction's GB/s; ! where CUDA grants no peer access."""
    names = [f"cuda:{gpu['ordinal']}" for gpu in found["gpus"]]
    lines = ["".join([" " * 8, *(f"{name:>10}" for name in names), "  NUMA node"])]
    for name, gpu, row in zip(names, found["gpus"], found["matrix"], strict=True):
        node = gpu["links"]["numa_node"]
        cells = "".join(f"{_cell(link):>10}" for link in row)
        lines.append(f"{name:<8}{cells}{'?' if node is None else node:>11}")
    return "\n".join(lines)


def _cell(link: dict[str, Any]) -> str:
    rate = "" if link["gbps"] is None else f" {link['gbps']:.0f}"
    return f"{link['kind']}{rate}{'' if link['peer_access'] else ' !'}"


def _legend(found: dict[str, Any]) -> str:
    cells = [link for row in found["matrix"] for link in row]
    kinds = {link["kind"] for link in cells}
    lines = ["GB/s are one direction's, by the numbers on the box"]
    lines += [f"{kind}: {kind[2:]} NVLinks" for kind in sorted(kinds) if kind.startswith("NV")]
    lines += [f"{kind}: PCIe through {way}" for kind, way in ANCESTORS.items() if kind in kinds]
    if not all(link["peer_access"] for link in cells):
        lines.append("!: CUDA grants no access to each other's memory")
    return "\n".join(lines)


def _plan(found: dict[str, Any], dtype: str) -> str:
    count = len(found["devices"])
    title = f"all-reduce of {dtype} over {count} CUDA ranks of one process"
    if found["error"]:
        return f"{title}: {found['error']}"
    lines = [
        f"{title}\n",
        f"path       {found['path']}, {found['link_gbps']:.0f} GB/s expected of a GPU to its peers",
        f"transport  {found['transport']}",
        f"probe      {_probe(found)}",
        "",
        choices.as_text(found["choices"]),
    ]
    return "\n".join(lines)


def _probe(found: dict[str, Any]) -> str:
    verdict = found["probe"]
    if verdict is None:
        return "--probe tries whether GPUs reach each other" if found["peers"] else "not needed"
    pairs = len(verdict["gpus"]) * (len(verdict["gpus"]) - 1)
    names = {uuid: name for name, uuid in found["uuids"].items()}
    lines = [f"{pairs} pairs, {len(verdict['failures'])} of them with faults"]
    for each in verdict["failures"]:
        pair = f"{names[each['accessing']]} on memory of {names[each['owner']]}"
        lines.append(f"             {pair}: {each['what']}")
    return "\n".join(lines)
