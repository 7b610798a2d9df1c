"""Ring: every rank talks to its two neighbours only. Order any (Patarasuk & Yuan 2009), or rank
order as a chain.

Geometry only; the kernels are in ``kernels/ring.cuh``.
"""

from __future__ import annotations

import math

from gpuallreduce.algorithms.base import (
    call_us,
    gpu_channels,
    move_us,
    on_gpu,
    phase_us,
    placed,
    reduce_kernel,
)
from gpuallreduce.jit import Kernel
from gpuallreduce.plan import Region, Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import DTYPES

__all__ = ["Ring"]

ANY = Region("ring", nsets=1, nslots=8, slot_bytes=1 << 20, per_peer=False)
# Partials travel in the accumulator type, so a slot holds fewer elements of narrower types.
RANK = Region(
    "ring_in_rank_order", nsets=2, nslots=8, slot_bytes=1 << 20, per_peer=False, partials=True
)


LEAST_CHAIN_CHUNK_BYTES, CHUNK_GRAIN = 4 << 10, 512


def _widening(request: Request) -> int:
    return DTYPES[request.dtype.accumulator].itemsize // request.dtype.itemsize


class Ring:
    """See the module."""

    name = "ring"

    def supports(self, request: Request) -> str | None:
        """Serves all-reduce."""
        return None if request.collective == "allreduce" else "serves allreduce only"

    def accesses(self, request: Request) -> tuple[str, ...]:
        """Always through slots."""
        return ("staged",)

    def cost_us(self, request: Request, access: str, topology: Topology) -> float:
        """2(p-1) hops of latency; each byte is read and written at every hop. GPUs in a chain wait
        for chunks besides.
        """
        p, n = request.nranks, request.nbytes
        moved = 5 * n * (p - 1) / p if request.order == "any" else n * (3 + 2 * _widening(request))
        waits = phase_us(topology) * 2 * (p - 1)
        if request.order == "rank" and on_gpu(topology) and n:
            waits += self._chain_waits_us(request, topology)
        return call_us(p, topology) + waits + move_us(moved, self.bytes_sent(request), topology)

    def chunk_bytes(self, request: Request, access: str, topology: Topology) -> int:
        """Small enough to fill the pipeline, large enough to hide a flag. GPUs: in a ring as much
        as a slot holds.
        """
        if not on_gpu(topology):
            return 64 << 10
        if request.order == "any":
            return ANY.slot_bytes
        return self._chain_chunk(request, topology)

    def _chain_chunk(self, request: Request, topology: Topology) -> int:
        """Where two waits are balanced: the first chunks of all channels take 2p - 3 steps round
        the chain, and a rank has p chunks under way, which take 2(p-1) hops to come back.
        """
        p, n = max(2, request.nranks), request.nbytes
        most = placed(RANK, topology).slot_bytes // _widening(request)
        flight = phase_us(topology) * topology.link_gbps * 1e3 * 4 / (1 + _widening(request))
        step = math.sqrt(n * flight * (p - 1) / (p * (2 * p - 3)))
        each = int(step / gpu_channels(n, topology)) // CHUNK_GRAIN * CHUNK_GRAIN
        return min(most, max(LEAST_CHAIN_CHUNK_BYTES, each))

    def _chain_waits_us(self, request: Request, topology: Topology) -> float:
        """What a chain waits for beside its hops and its links; see ``_chain_chunk``."""
        p, n = request.nranks, request.nbytes
        step = min(n, gpu_channels(n, topology) * self._chain_chunk(request, topology))
        filling_us = move_us(0, max(0, 2 * p - 3 - min(p, n // step)) * step, topology)
        turn_us = move_us(0, (1 + _widening(request)) * step, topology)
        back_us = (p - 1) * (2 * phase_us(topology) + turn_us) / (p + 1)
        return filling_us + max(0, n / step - p) * max(0.0, back_us - turn_us)

    def kernel(self, request: Request, access: str) -> Kernel:
        """The five verbs, or the chain."""
        stem = "ring" if request.order == "any" else "ring_in_rank_order"
        return reduce_kernel("ring.cuh", stem, stem + "<{arguments}>", request, unrolled=False)

    def region(self, request: Request) -> Region:
        """The two orders do not share slots."""
        return ANY if request.order == "any" else RANK

    def regions(self) -> tuple[Region, ...]:
        """See ``region``."""
        return (ANY, RANK)

    def bytes_sent(self, request: Request) -> int:
        """2 (p-1)/p n; in rank order the partial and the result."""
        if request.order == "any":
            return 2 * request.nbytes * (request.nranks - 1) // request.nranks
        partial = request.nbytes * _widening(request)
        return partial + (request.nbytes if request.nranks > 2 else 0)

    def share_bytes(self, request: Request, access: str) -> int:
        """What a rank handles at every hop; in rank order all of it."""
        return request.nbytes if request.order == "rank" else -(-request.nbytes // request.nranks)
