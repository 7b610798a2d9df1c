"""Places CUDA ranks: which GPU each has, how the GPUs reach each other, and how many blocks of all
ranks are resident at once.

Knows nothing of calls. What one process finds out is agreed with the others before it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpuallreduce.bootstrap.rendezvous import Rendezvous
from gpuallreduce.devices.cuda import CudaDevice
from gpuallreduce.devices.cuda_memory import DeviceBlock, ImportedBlock, on_device
from gpuallreduce.devices.cuda_runtime import Gpu, cupy_module, find_gpu
from gpuallreduce.errors import DeviceError, InvalidArgument
from gpuallreduce.fabric.nccl import Nccl
from gpuallreduce.placement import Placement
from gpuallreduce.topology import Topology, cuda_topology
from gpuallreduce.transport import LocalTransport, SharedMemoryTransport, Transport
from gpuallreduce.transport_cuda import (
    CudaTransport,
    HostMemoryTransport,
    IpcTransport,
    PeerTransport,
    free_departed,
)

__all__ = ["joined_rank", "local_ranks"]

MAX_CHANNELS = 32  # about what saturates the links; each costs slots
HOST_MEMORY_CHANNELS = 4  # a PCIe link needs no more
TRIAL_BYTES = 1 << 16


def local_ranks(devices: Sequence[str]) -> Placement:
    """All ranks in this process. See placement.local_ranks."""
    free_departed()
    gpus = [find_gpu(name) for name in devices]
    ordinals = [gpu.ordinal for gpu in gpus]
    reason = _without_peer_access(sorted(set(ordinals)))
    transport: CudaTransport
    if reason is None:
        transport = PeerTransport(ordinals)
    else:
        transport = HostMemoryTransport(LocalTransport(len(gpus)), ordinals, reason)
    topology = _topology(gpus, reason, one_process=True)
    device = CudaDevice(ordinals, peers=reason is None)
    return Placement(transport, device, topology, lambda: Nccl(ordinals))


def _without_peer_access(ordinals: Sequence[int]) -> str | None:
    """None once all of these GPUs address each other's memory, else which two do not."""
    runtime = cupy_module().cuda.runtime
    pairs = [(a, b) for a in ordinals for b in ordinals if a != b]
    for a, b in pairs:
        if not runtime.deviceCanAccessPeer(a, b):
            return f"cuda:{a} cannot access cuda:{b}"
    for a, b in pairs:
        try:
            with on_device(a):
                runtime.deviceEnablePeerAccess(b)
        except runtime.CUDARuntimeError as error:
            if "PeerAccessAlreadyEnabled" not in str(error):
                return f"cuda:{a} is refused access to cuda:{b}: {error}"
    return None


def joined_rank(rendezvous: Rendezvous, device: str, *, local_rank: int) -> Placement:
    """One rank in this process. See placement.joined_rank."""
    free_departed()
    gpu, problem = None, None
    try:
        gpu = find_gpu(device, default=local_rank)
        cupy_module().cuda.runtime.setDevice(gpu.ordinal)
    except Exception as error:
        problem = error
    facts = vars(gpu) if gpu is not None else {}
    parts = rendezvous.exchange("GPUs", facts, error=problem)
    assert gpu is not None
    gpus = [Gpu(**part.payload) for part in parts]
    host = SharedMemoryTransport(rendezvous)
    reason = _without_ipc(rendezvous, gpu.ordinal)
    transport: Transport
    if reason is None:
        transport = IpcTransport(host, rendezvous, gpu.ordinal)
    else:
        transport = HostMemoryTransport(host, [gpu.ordinal], reason)
    topology = _topology(gpus, reason, one_process=False)

    def connect() -> Nccl:
        def exchange(payload: dict[str, Any]) -> list[dict[str, Any]]:
            return [part.payload for part in rendezvous.exchange("connecting NCCL", payload)]

        ranks, nranks = [rendezvous.rank], rendezvous.nranks
        return Nccl([gpu.ordinal], ranks=ranks, nranks=nranks, exchange=exchange)

    return Placement(transport, CudaDevice([gpu.ordinal], peers=False), topology, connect)


def _without_ipc(rendezvous: Rendezvous, ordinal: int) -> str | None:
    """None if every rank can open every other's memory, else who could not; all ranks agree."""
    block, refusal, handle = None, "", ""
    try:
        block = DeviceBlock(ordinal, TRIAL_BYTES, zeros=TRIAL_BYTES)
        handle = block.handle().hex()
    except DeviceError as error:
        refusal = str(error)
    parts = rendezvous.exchange("trial of IPC", {"handle": handle, "refusal": refusal})
    opened: list[ImportedBlock] = []
    for rank, part in enumerate(parts):
        refusal = refusal or part.payload["refusal"]
        if rank == rendezvous.rank or refusal:
            continue
        try:
            theirs = bytes.fromhex(part.payload["handle"])
            opened.append(ImportedBlock(ordinal, theirs, TRIAL_BYTES))
        except DeviceError as error:
            refusal = f"from rank {rank}: {error}"
    for each in opened:
        each.close()
    verdicts = rendezvous.exchange("verdict on IPC", {"refusal": refusal})
    if block is not None:
        block.free()
    for rank, part in enumerate(verdicts):
        if part.payload["refusal"]:
            return f"rank {rank}: {part.payload['refusal']}"
    return None


def _topology(gpus: Sequence[Gpu], reason: str | None, *, one_process: bool) -> Topology:
    nranks = len(gpus)
    sharing = max(Counter(gpu.uuid for gpu in gpus).values())
    resident = min(gpu.multiprocessors for gpu in gpus) // sharing
    if resident < 1:
        raise InvalidArgument(
            f"{sharing} ranks on one GPU of {gpus[0].multiprocessors} multiprocessors: their "
            "blocks cannot all be resident; use fewer ranks"
        )
    if reason is not None:
        path, most = "host memory", HOST_MEMORY_CHANNELS
    elif len({gpu.uuid for gpu in gpus}) == 1:
        path, most = "one device", MAX_CHANNELS
    else:
        path, most = "pcie", MAX_CHANNELS
    return cuda_topology(
        nranks, one_process=one_process, path=path, max_channels=min(most, resident)
    )
