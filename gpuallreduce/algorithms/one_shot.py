"""One-shot: every rank hands its data to its peers directly. All-reduce and the other collectives
in one exchange.

Geometry only; the kernels are in ``kernels/one_shot.cuh`` and ``kernels/shard.cuh``. A rank sends
(p-1) n bytes for all-reduce; rank order.
"""

from __future__ import annotations

from gpuallreduce.algorithms.base import STAGING, call_us, move_us, on_gpu, reduce_kernel
from gpuallreduce.jit import Kernel
from gpuallreduce.plan import Region, Request, shard_range
from gpuallreduce.topology import Topology

__all__ = ["OneShot"]

REGION = Region("exchange", nsets=1, nslots=16, slot_bytes=256 << 10, per_peer=True)
_REDUCING = {
    "allreduce": ("one_shot", "exchange<OneShot<{arguments}>>"),
    "reduce": ("reduce", "exchange<Reduce<{arguments}>>"),
    "reduce_scatter": ("reduce_scatter", "exchange<ReduceScatter<{arguments}>>"),
}
_MOVING = {
    "all_gather": ("all_gather", "exchange<AllGather<{word}>>"),
    "broadcast": ("broadcast", "exchange<Broadcast<{word}>>"),
    "barrier": ("broadcast", "exchange<Broadcast<{word}>>"),
    "shard_gather": ("shard_gather", "exchange<ShardGather<{word}>>"),
}
# Words that move elements without looking at them; a 16-byte element is a pair of doubles to nobody
# here.
_WORDS = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "Complex<double>"}


class OneShot:
    """See the module."""

    name = "one_shot"

    def supports(self, request: Request) -> str | None:
        """Serves every collective."""
        shards = request.shards
        if request.collective not in ("shard_reduce", "shard_gather"):
            return None
        if shards is not None and 1 <= shards.count <= request.nranks:
            return None
        found = 0 if shards is None else shards.count
        return f"cuts an array in 1 to {request.nranks} shards, one a rank, not in {found}"

    def accesses(self, request: Request) -> tuple[str, ...]:
        """Always through slots."""
        return ("staged",)

    def cost_us(self, request: Request, access: str, topology: Topology) -> float:
        """Copy n to a slot, read all p arrays, write the result."""
        p, n = request.nranks, request.nbytes
        sent = STAGING * n * (p - 1)
        return call_us(p, topology) + move_us(n * (p + 2), sent, topology)

    def chunk_bytes(self, request: Request, access: str, topology: Topology) -> int:
        """Small arrays in a few chunks, so that staging and folding overlap; larger ones in
        cache-sized chunks. GPUs: as much as a slot holds.
        """
        if on_gpu(topology):
            return REGION.slot_bytes
        return 8 << 10 if request.nbytes <= 16 << 10 else 64 << 10

    def kernel(self, request: Request, access: str) -> Kernel:
        """One kernel per collective; of shard_reduce one for each place of a node in the chain."""
        if request.collective == "shard_reduce":
            return _shard_reduce(request)
        if request.collective in _REDUCING:
            symbol, template = _REDUCING[request.collective]
            return reduce_kernel("one_shot.cuh", symbol, template, request, unrolled=True)
        symbol, template = _MOVING[request.collective]
        word = _WORDS[request.dtype.itemsize]
        header = "shard.cuh" if request.shards else "one_shot.cuh"
        return Kernel(f"{symbol}_{request.dtype.itemsize}", header, template.format(word=word))

    def region(self, request: Request) -> Region:
        """All of these collectives take the same steps through the same slots."""
        return REGION

    def regions(self) -> tuple[Region, ...]:
        """See ``region``."""
        return (REGION,)

    def bytes_sent(self, request: Request) -> int:
        """(p-1) n; n for reduce; of shards all that others fold, or one's own to all others."""
        if request.collective == "barrier":
            return 0
        if request.collective == "shard_gather":
            return _shard_bytes(request, 0) * (request.nranks - 1)
        if request.shards is not None:  # a rank without a shard sends all, else the last one most
            last = request.nranks - 1
            kept = _shard_bytes(request, last) if last < request.shards.count else 0
            return request.nbytes - kept
        return request.nbytes * (1 if request.collective == "reduce" else request.nranks - 1)

    def share_bytes(self, request: Request, access: str) -> int:
        """The whole array, or the longest shard."""
        return request.nbytes if request.shards is None else _shard_bytes(request, 0)


def _shard_bytes(request: Request, owner: int) -> int:
    assert request.shards is not None  # supports() has seen to it
    itemsize = request.dtype.itemsize
    return shard_range(request.count, owner, request.shards.count, itemsize)[1] * itemsize


def _shard_reduce(request: Request) -> Kernel:
    shards = request.shards
    assert shards is not None  # supports() has seen to it
    places = {
        (False, False): ("first", "false, false"),
        (True, False): ("between", "true, false"),
        (True, True): ("last", "true, true"),
        (False, True): ("only", "false, true"),
    }
    place, flags = places[shards.seeded, shards.rounded]
    template = f"exchange<ShardReduce<{{arguments}}, {flags}>>"
    return reduce_kernel("shard.cuh", f"shard_reduce_{place}", template, request, unrolled=True)
