"""The results as JSON: nccl-tests' keys, and beside them keys that nccl-tests does not have.

Builds plain data; knows nothing of how it was measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuallreduce.errors import InvalidArgument

from .arguments import to_argv
from .measure import Timing
from .membw import MemoryLimits
from .options import Options
from .report import Device, Mode, Row, average_busbw_gbps, failures, rate_gbps, useful_gbps

__all__ = ["Facts", "check_folder", "document", "now", "shown_environment", "write"]

FORMAT_VERSION = 1
# Only what can change the figures: an environment also holds secrets.
_SHOWN = (
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "GPUALLREDUCE_EMULATED",
    "GPUALLREDUCE_NRANKS",
    "OMP_",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_MCA_btl",
    "OMPI_MCA_coll",
    "OMPI_MCA_pml",
    "MPICH_",
    "MPIR_",
    "NCCL_",
)


@dataclass(frozen=True)
class Facts:
    """What a run has beside rows.

    Attributes:
        environ: variables of the process.
        start_time: as ``now`` wrote it.
        extra: plain data for the key ``gpuallreduce``.
        limits: what memory can do, if measured.
        nccl_version: such as 2.30.3, if NCCL took part.
    """

    environ: Mapping[str, str]
    start_time: str
    extra: Mapping[str, Any]
    limits: MemoryLimits | None
    nccl_version: str | None = None


def now() -> str:
    """The time as nccl-tests writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def shown_environment(environ: Mapping[str, str]) -> list[str]:
    """NAME=value of the variables that matter."""
    return [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(_SHOWN)]


def document(
    options: Options,
    rows: Sequence[Row],
    devices: Sequence[Device],
    facts: Facts,
) -> dict[str, Any]:
    """The whole result."""
    wrong = failures(rows)
    listed = [_device(device) for device in devices]
    processes = len({(device.hostname, device.pid) for device in devices})
    return {
        "version": FORMAT_VERSION,
        "start_time": facts.start_time,
        "args": to_argv(options),
        "env": shown_environment(facts.environ),
        "nccl_version": facts.nccl_version,
        # nccl-tests puts the devices inside config; they are here under both.
        "config": {
            **_config(options, ranks_per_process=len(devices) // processes),
            "devices": listed,
        },
        "devices": listed,
        "results": [_row(row, facts.limits) for row in rows],
        "out_of_bounds": {"count": wrong, "okay": _bool(wrong == 0)},
        "average_bus_bandwidth": {"bandwidth": average_busbw_gbps(rows), "okay": "unchecked"},
        "errors": [],
        "gpuallreduce": {**facts.extra, "memory_limits": facts.limits and asdict(facts.limits)},
        "end_time": now(),
    }


def _bool(value: bool) -> str:
    return "true" if value else "false"  # nccl-tests writes texts


def _config(options: Options, *, ranks_per_process: int) -> dict[str, Any]:
    step: dict[str, int] = {"step_bytes": options.step_bytes or 1 << 20}
    if options.step_factor is not None:
        step = {"step_factor": options.step_factor}
    return {
        "nthreads": 1,
        "ngpus": ranks_per_process,
        "minimum_bytes": options.min_bytes,
        "maximum_bytes": options.max_bytes,
        **step,
        "warmup_iters": options.warmup,
        "iterations": options.iterations,
        "aggregated_iterations": 1,
        "validation": options.checks,
        "graph": options.graph_launches,
        "blocking_collectives": _bool(False),
        "parallel_init": _bool(False),
    }


def _device(device: Device) -> dict[str, Any]:
    return {
        "rank": device.rank,
        "group": 0,
        "pid": device.pid,
        "hostname": device.hostname,
        "device": device.number,
        "device_hex": device.bus,
        "device_info": device.info,
    }


def _row(row: Row, limits: MemoryLimits | None) -> dict[str, Any]:
    return {
        "size": row.nbytes,
        "count": row.count,
        "type": row.dtype,
        "redop": row.op,
        "root": "-1",
        "out_of_place": _mode(row, row.out_of_place, limits),
        "in_place": _mode(row, row.in_place, limits),
    }


def _mode(row: Row, mode: Mode, limits: MemoryLimits | None) -> dict[str, Any]:
    useful = useful_gbps(row, mode.ours.time_us)
    result = {
        **_timing(row, mode.ours),
        "nwrong": mode.nwrong,
        "algorithm": mode.algorithm,
        "access": mode.access,
        "order": mode.order,
        "useful_gbps": useful,
        "bytes_within": mode.bytes_within,
        "bytes_between": mode.bytes_between,
        "within_gbps": rate_gbps(mode.bytes_within, mode.ours.time_us),
        "between_gbps": rate_gbps(mode.bytes_between, mode.ours.time_us),
        "peers": {},
    }
    if limits is not None:
        result["fraction_of_add_limit"] = useful / limits.add_gbps
    for name, timing in mode.peers.items():
        result["peers"][name] = None if timing is None else _peer(row, mode, name, timing)
    return result


def _peer(row: Row, mode: Mode, name: str, timing: Timing) -> dict[str, Any]:
    ours = mode.ours
    latency_ratio = None
    if timing.latency_us and ours.latency_us:
        latency_ratio = timing.latency_us / ours.latency_us
    return {
        **_timing(row, timing),
        "nwrong": mode.peers_nwrong[name],
        "time_ratio": timing.time_us / ours.time_us if ours.time_us else None,
        "latency_ratio": latency_ratio,
    }


def _timing(row: Row, timing: Timing) -> dict[str, Any]:
    return {
        "time": timing.time_us,
        "alg_bw": row.algbw_gbps(timing.time_us),
        "bus_bw": row.busbw_gbps(timing.time_us),
        "rounds_us": list(timing.rounds_us),
        "calls_per_round": timing.iterations,
        "latency_us": timing.latency_us,
        "latency_min_us": timing.latency_min_us,
        "latency_p99_us": timing.latency_p99_us,
    }


def write(path: str, result: Mapping[str, Any]) -> str:
    """Writes a file that is not there yet: PATH, else PATH.0, PATH.1 and so on, as nccl-tests does.

    Returns:
        The name of the file.

    Raises:
        InvalidArgument: it cannot be written.
    """
    name, number = path, 0
    while True:
        try:
            with open(name, "x", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
                file.write("\n")
            return name
        except FileExistsError:
            name, number = f"{path}.{number}", number + 1
        except OSError as error:
            raise InvalidArgument(f"cannot write {name}: {error.strerror}") from None


def check_folder(path: str | None, option: str) -> None:
    """Fails before anything is measured.

    Raises:
        InvalidArgument: the folder of a file to be written is not there or not writable.
    """
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidArgument(f"{option} {path}: {folder} is not a folder that can be written to")
