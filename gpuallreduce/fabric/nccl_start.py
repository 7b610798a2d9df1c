"""How the ranks of NCCL communicators agree to start: who holds which GPU, and one unique id.

Knows nothing of how processes reach each other: the caller gives the exchange.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuallreduce.devices.cuda_runtime import gpu_of
from gpuallreduce.errors import DeviceError, Error, InvalidArgument, NotSupported
from gpuallreduce.fabric.nccl_library import nccl_errors, nccl_module, nccl_version
from gpuallreduce.fabric.nccl_types import code_of_version, text_of_version

__all__ = ["Exchange", "Start", "agree"]

Exchange = Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]

SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARED_GPU_SINCE = "2.30"


@dataclass(frozen=True)
class Start:
    """What all ranks agreed on.

    Attributes:
        unique_id: of rank 0.
        shared_gpu: some GPU holds several ranks.
    """

    unique_id: bytes
    shared_gpu: bool


def check_arguments(
    devices: Sequence[int], ranks: Sequence[int], nranks: int, exchange: Exchange | None
) -> None:
    """Raises InvalidArgument if the ranks of this process cannot be these."""
    if not devices or len(ranks) != len(devices):
        raise InvalidArgument(
            f"NCCL needs a GPU for each rank: {len(devices)} GPUs for ranks {list(ranks)} were "
            "given"
        )
    if len(set(ranks)) < len(ranks) or not all(0 <= rank < nranks for rank in ranks):
        raise InvalidArgument(
            f"ranks {list(ranks)} of {nranks} were given; each must be there once, from 0 to "
            f"{nranks - 1}"
        )
    if exchange is None and len(ranks) < nranks:
        raise InvalidArgument(
            f"{len(ranks)} of {nranks} ranks are here; give exchange= to meet those of other "
            "processes"
        )


def agree(
    devices: Sequence[int], ranks: Sequence[int], nranks: int, exchange: Exchange | None
) -> Start:
    """Exchanges what the processes bring. A failure is exchanged too: nobody waits for us.

    Raises:
        InvalidArgument: the arguments do not fit each other.
        NotSupported: NCCL is missing or too old, or ranks share a GPU and that is not enabled.
        DeviceError: another process failed.
    """
    mine: dict[str, Any] = {"ranks": list(ranks), "id": "", "gpus": [], "error": ""}
    failure: Error | None = None
    try:
        check_arguments(devices, ranks, nranks, exchange)
        nccl = nccl_module()
        mine["gpus"] = [_place_of(device) for device in devices]
        mine["may_share"] = _may_share_gpus()
        if 0 in ranks:
            with nccl_errors("making NCCL's unique id"):
                mine["id"] = bytes(byte & 0xFF for byte in nccl.get_unique_id()).hex()
    except Error as error:
        failure, mine["error"] = error, f"{type(error).__name__}: {error}"
    everyone = exchange(mine) if exchange is not None else [mine]
    if failure is not None:
        raise failure
    return _conclude(everyone, nranks)


def _conclude(everyone: Sequence[Mapping[str, Any]], nranks: int) -> Start:
    """The same on every process, since all hold the same data."""
    for one in everyone:
        if one["error"]:
            raise DeviceError(f"ranks {one['ranks']} could not start NCCL: {one['error']}")
    ranks = sorted(rank for one in everyone for rank in one["ranks"])
    if ranks != list(range(nranks)):
        raise InvalidArgument(
            f"ranks {ranks} came; every rank from 0 to {nranks - 1} must come, once"
        )
    gpus = [gpu for one in everyone for gpu in one["gpus"]]
    shared = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    if shared is not None and not all(one["may_share"] for one in everyone):
        raise NotSupported(
            f"several NCCL ranks on one GPU ({shared}) were asked for: that takes "
            f"NCCL {SHARED_GPU_SINCE} or later (found {text_of_version(nccl_version())}) and "
            f"{SHARED_GPU}=1 in the environment of every rank"
        )
    unique_id = next(one["id"] for one in everyone if one["id"])
    return Start(bytes.fromhex(unique_id), shared is not None)


def _may_share_gpus() -> bool:
    """True if the user has told NCCL to take several ranks on one GPU, and it can."""
    enabled = os.environ.get(SHARED_GPU) == "1"
    return enabled and nccl_version() >= code_of_version(SHARED_GPU_SINCE)


def _place_of(device: int) -> str:
    """Names a GPU, or a partition of one, on a machine; machines as NCCL tells them apart."""
    gpu = gpu_of(device)
    return f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()} {gpu.bus_id} {gpu.uuid}"
