"""Places CUDA ranks: which GPU each has, how the GPUs reach each other, and how many blocks of all
ranks are resident at once.

Knows nothing of calls. What one process finds out is agreed with the others before it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpuallreduce import links
from gpuallreduce.bootstrap.rendezvous import Rendezvous
from gpuallreduce.devices import nvml
from gpuallreduce.devices.cuda import CudaDevice
from gpuallreduce.devices.cuda_runtime import Gpu, cupy_module, find_gpu
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.fabric.nccl import Nccl
from gpuallreduce.links import GpuFacts
from gpuallreduce.placement import Placement
from gpuallreduce.reach_cuda import Reach, joined_reach, local_reach
from gpuallreduce.topology import Topology, cuda_topology
from gpuallreduce.transport import LocalTransport, SharedMemoryTransport
from gpuallreduce.transport_cuda import (
    CudaTransport,
    HostMemoryTransport,
    IpcTransport,
    PeerTransport,
    free_departed,
)

__all__ = ["facts_of", "joined_rank", "local_ranks", "placed_locally"]

MAX_CHANNELS = 32  # about what saturates the links; each costs slots
HOST_MEMORY_CHANNELS = 4  # a PCIe link needs no more


def local_ranks(devices: Sequence[str]) -> Placement:
    """All ranks in this process. See placement.local_ranks."""
    free_departed()
    gpus = [find_gpu(name) for name in devices]
    return placed_locally(gpus, local_reach(gpus))


def placed_locally(gpus: Sequence[Gpu], reach: Reach) -> Placement:
    """A rank of this process on each of these GPUs.

    Args:
        gpus: a GPU may stand there several times.
        reach: what local_reach says of them.
    """
    ordinals = [gpu.ordinal for gpu in gpus]
    transport: CudaTransport
    if reach.reason is None:
        transport = PeerTransport(ordinals)
    else:
        transport = HostMemoryTransport(LocalTransport(len(gpus)), ordinals, reach.reason)
    transport.name = noted(transport.name, reach)
    topology = _topology(gpus, facts_of(gpus), reach, one_process=True)
    device = CudaDevice(ordinals, peers=reach.reason is None)
    return Placement(transport, device, topology, lambda: Nccl(ordinals))


def joined_rank(rendezvous: Rendezvous, device: str, *, local_rank: int) -> Placement:
    """One rank in this process. See placement.joined_rank."""
    free_departed()
    gpu, problem = None, None
    try:
        gpu = find_gpu(device, default=local_rank)
        cupy_module().cuda.runtime.setDevice(gpu.ordinal)
    except Exception as error:
        problem = error
    # Each process asks NVML about its own GPU only: all see the same facts, whatever they can see.
    brought = {}
    if gpu is not None:
        brought = {"gpu": vars(gpu), "facts": links.to_plain(facts_of([gpu])[0])}
    parts = rendezvous.exchange("GPUs", brought, error=problem)
    assert gpu is not None
    gpus = [Gpu(**part.payload["gpu"]) for part in parts]
    facts = [links.from_plain(part.payload["facts"]) for part in parts]
    host = SharedMemoryTransport(rendezvous)
    reach = joined_reach(rendezvous, host, gpus)
    transport: CudaTransport
    if reach.reason is None:
        transport = IpcTransport(host, rendezvous, gpu.ordinal)
    else:
        transport = HostMemoryTransport(host, [gpu.ordinal], reach.reason)
    transport.name = noted(transport.name, reach)
    topology = _topology(gpus, facts, reach, one_process=False)

    def connect() -> Nccl:
        def exchange(payload: dict[str, Any]) -> list[dict[str, Any]]:
            return [part.payload for part in rendezvous.exchange("connecting NCCL", payload)]

        ranks, nranks = [rendezvous.rank], rendezvous.nranks
        return Nccl([gpu.ordinal], ranks=ranks, nranks=nranks, exchange=exchange)

    return Placement(transport, CudaDevice([gpu.ordinal], peers=False), topology, connect)


def facts_of(gpus: Sequence[Gpu]) -> list[GpuFacts]:
    """What NVML tells of GPUs; without it, nothing but who they are."""
    different = tuple(dict.fromkeys(gpu.uuid for gpu in gpus))
    machine = nvml.machine(different)
    if machine is None:
        return [GpuFacts(gpu.uuid) for gpu in gpus]
    return [machine.gpus[different.index(gpu.uuid)] for gpu in gpus]


def noted(name: str, reach: Reach) -> str:
    """A transport's name with what else there is to say."""
    return f"{name} ({reach.note})" if reach.note else name


def _topology(
    gpus: Sequence[Gpu], facts: Sequence[GpuFacts], reach: Reach, *, one_process: bool
) -> Topology:
    """The same on every rank, since it follows from what all know: the tuner must decide alike."""
    sharing = max(Counter(gpu.uuid for gpu in gpus).values())
    resident = min(gpu.multiprocessors for gpu in gpus) // sharing
    if resident < 1:
        raise InvalidArgument(
            f"{sharing} ranks on one GPU of {gpus[0].multiprocessors} multiprocessors: their "
            "blocks cannot all be resident; use fewer ranks"
        )
    path = links.path_of(facts) if reach.reason is None else "host memory"
    most = HOST_MEMORY_CHANNELS if path == "host memory" else MAX_CHANNELS
    return cuda_topology(
        len(gpus),
        one_process=one_process,
        path=path,
        max_channels=min(most, resident),
        link_gbps=links.sends_gbps(facts, path),
    )
