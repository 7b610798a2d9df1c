"""What every algorithm answers: can it serve a request, how long would it take, which kernel does
it run.

Knows nothing of any algorithm in particular.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from gpuallreduce.jit import Kernel
from gpuallreduce.plan import Region, Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import reduction

__all__ = [
    "GPU_CHANNEL_BYTES",
    "STAGING",
    "Algorithm",
    "call_us",
    "gpu_channels",
    "move_us",
    "on_gpu",
    "phase_us",
    "placed",
    "reduce_kernel",
]

MAX_UNROLLED_RANKS = 8  # kernels for more ranks loop over them at run time

# Host devices: fitted to medians of bench/allreduce_perf with 2 and 4 rank processes on 2 cores.
# Only the sizes at which one algorithm overtakes another depend on them.
HOST_BYTES_PER_US = 34000.0  # read or written by one core, arrays in its caches
HOST_CALL_US = 0.35
HOST_PEER_US = 0.45  # a word seen from one more rank
HOST_PHASE_US = 2.3  # a second meeting of all ranks in every round

# CUDA devices: public measurements of the best kernels (small messages take 3.5 to 8 us; one_shot
# overtakes two_shot at 128-256 KB on 8 GPUs and 384-512 KB on 4). Not yet fitted to our own.
GPU_CALL_US = 5.5
GPU_PHASE_US = 2.1
STAGING = 1.1  # copies through slots share a GPU's memory with the transfers
GPU_CHANNEL_BYTES = 16 << 10  # that a channel is worth: 512 threads with two packs each
GPU_SLOT_BYTES = 64 << 10  # a chunk: 512 threads move it in eight packs each
GPU_SLOTS = 4  # the fewest that the protocols of per-peer slots allow
SLOT_GRAIN = 1024
GPU_SLOTS_FOR_RANKS = 8  # with more ranks slots shrink, so that a segment does not grow


class Algorithm(Protocol):
    """One way to move and combine data between ranks."""

    @property
    def name(self) -> str:
        """How calls and messages name it."""

    def supports(self, request: Request) -> str | None:
        """None if it can serve the request, else the reason why not."""

    def accesses(self, request: Request) -> tuple[str, ...]:
        """``staged`` and ``direct``, as far as it has them for this request; the preferred one
        first.
        """

    def cost_us(self, request: Request, access: str, topology: Topology) -> float:
        """Estimated time of one call in microseconds."""

    def chunk_bytes(self, request: Request, access: str, topology: Topology) -> int:
        """Bytes of a chunk, unless the call asks for another."""

    def kernel(self, request: Request, access: str) -> Kernel:
        """The kernel that every rank runs."""

    def region(self, request: Request) -> Region:
        """Where the kernel's slots and words lie."""

    def regions(self) -> tuple[Region, ...]:
        """All regions that this algorithm ever uses."""

    def bytes_sent(self, request: Request) -> int:
        """Bytes that one rank sends to its peers in a call (the largest over the ranks)."""

    def share_bytes(self, request: Request, access: str) -> int:
        """Bytes that one rank folds: what its channels divide among them."""


def reduce_kernel(
    header: str, symbol: str, template: str, request: Request, *, unrolled: bool
) -> Kernel:
    """The instantiation of a reducing kernel for a request.

    Args:
        header: file of ``kernels/``.
        symbol: stem of the entry point's name.
        template: C++ expression with ``{arguments}`` for the template arguments.
        request: names dtype, operator and ranks.
        unrolled: whether the template has the rank count as its last argument.
    """
    pair = reduction(request.dtype, request.op)
    arguments = [pair.element, pair.functor]
    if unrolled:
        arguments.append(str(request.nranks if request.nranks <= MAX_UNROLLED_RANKS else 0))
    tag = "_".join([symbol, *arguments]).replace("<", "_").replace(">", "")
    family = f"{pair.element} {pair.functor}"
    return Kernel(tag, header, template.format(arguments=", ".join(arguments)), family)


def on_gpu(topology: Topology) -> bool:
    """Whether the ranks are CUDA devices."""
    return topology.device_kind == "cuda"


def move_us(host_bytes: float, sent_bytes: float, topology: Topology) -> float:
    """Time for one rank to move its data.

    Args:
        host_bytes: what a host rank reads and writes; its core's other ranks do the same.
        sent_bytes: what a GPU sends to its peers: its links are the bottleneck.
        topology: which of the two it is.
    """
    if on_gpu(topology):
        return sent_bytes / (topology.link_gbps * 1e3)
    return host_bytes * topology.sharing / HOST_BYTES_PER_US


def call_us(nranks: int, topology: Topology) -> float:
    """Time for ranks to enter a call and see each other."""
    if on_gpu(topology):
        return GPU_CALL_US
    return HOST_CALL_US + HOST_PEER_US * (nranks - 1) * topology.sharing


def gpu_channels(share_bytes: int, topology: Topology) -> int:
    """Channels of a GPU that folds so many bytes: as many as keep their threads busy."""
    return max(1, min(topology.max_channels, share_bytes // GPU_CHANNEL_BYTES))


def phase_us(topology: Topology) -> float:
    """A second meeting of ranks in every round."""
    return GPU_PHASE_US if on_gpu(topology) else HOST_PHASE_US


def placed(region: Region, topology: Topology) -> Region:
    """A region as large as the devices want it.

    Host devices pay for pages that they touch, GPUs for all of them; a GPU has more channels, so
    that each may have fewer and smaller slots.
    """
    if not on_gpu(topology):
        return region
    if not region.per_peer:
        return replace(region, slot_bytes=2 * GPU_SLOT_BYTES)
    crowd = max(1.0, topology.nranks / GPU_SLOTS_FOR_RANKS)
    slot_bytes = max(SLOT_GRAIN, int(GPU_SLOT_BYTES / crowd) // SLOT_GRAIN * SLOT_GRAIN)
    return replace(region, nslots=GPU_SLOTS, slot_bytes=slot_bytes)
