"""Where the ranks of a communicator live: transport, device and topology, which belong together.

Knows nothing of calls. Each kind of device has its own way of placing ranks.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from gpuallreduce.bootstrap.rendezvous import Rendezvous
from gpuallreduce.devices.base import Device
from gpuallreduce.devices.host import HostDevice
from gpuallreduce.fabric.base import Engine
from gpuallreduce.topology import Topology, available_cores, host_topology
from gpuallreduce.transport import LocalTransport, SharedMemoryTransport, Transport

__all__ = ["Placement", "host_placement", "joined_rank", "local_ranks"]


@dataclass(frozen=True)
class Placement:
    """What a communicator is made of.

    Attributes:
        transport: how ranks address each other's memory.
        device: what the local ranks run on.
        topology: what all ranks run on.
        engine: connects the ranks by another library, when a call first asks for it; a collective.
    """

    transport: Transport
    device: Device
    topology: Topology
    engine: Callable[[], Engine] | None = None


class _Places(Protocol):
    """What the module for CUDA ranks has."""

    def local_ranks(self, devices: Sequence[str]) -> Placement:
        """See this module's."""

    def joined_rank(self, rendezvous: Rendezvous, device: str, *, local_rank: int) -> Placement:
        """See this module's."""


def _cuda() -> _Places:
    """Imported when asked for, so that nothing of CUDA is without it."""
    return cast(_Places, importlib.import_module("gpuallreduce.placement_cuda"))


def host_placement(transport: Transport, topology: Topology) -> Placement:
    """Host ranks over any transport."""
    device = HostDevice(nlocal=len(transport.ranks), spin=not topology.crowded)
    return Placement(transport, device, topology)


def local_ranks(devices: Sequence[str]) -> Placement:
    """All ranks in this process, one for each device name (checked before).

    Raises:
        NotSupported: CUDA devices where CuPy or a GPU is missing.
        InvalidArgument: there is no such GPU.
    """
    if devices[0] != "host":
        return _cuda().local_ranks(devices)
    nranks = len(devices)
    topology = host_topology(nranks, cores=available_cores(), one_process=True)
    return host_placement(LocalTransport(nranks), topology)


def joined_rank(rendezvous: Rendezvous, device: str, *, local_rank: int) -> Placement:
    """One rank in this process, the others in the processes that have met.

    A collective.

    Args:
        rendezvous: where they have met.
        device: name of this rank's device.
        local_rank: the rank among those of this machine; ``cuda`` means the GPU of that number.

    Raises as ``local_ranks``, on every rank.
    """
    if device != "host":
        return _cuda().joined_rank(rendezvous, device, local_rank=local_rank)
    # Launchers bind each rank to cores of its own; together they may use the union.
    parts = rendezvous.exchange("cores", {"cores": sorted(os.sched_getaffinity(0))})
    cores = len(set().union(*(part.payload["cores"] for part in parts)))
    topology = host_topology(rendezvous.nranks, cores=cores, one_process=False)
    return host_placement(SharedMemoryTransport(rendezvous), topology)
