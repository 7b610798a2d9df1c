"""Two-shot: rank r folds slice r of all arrays, then all ranks collect the slices. Rank order.

Geometry only; the kernels are in ``kernels/two_shot.cuh``. A rank sends 2 (p-1)/p n bytes.
"""

from __future__ import annotations

from gpuallreduce.algorithms.base import STAGING, call_us, move_us, on_gpu, phase_us, reduce_kernel
from gpuallreduce.jit import Kernel
from gpuallreduce.plan import Region, Request
from gpuallreduce.topology import Topology

__all__ = ["TwoShot"]

REGION = Region("two_shot", nsets=2, nslots=4, slot_bytes=256 << 10, per_peer=True)


class TwoShot:
    """See the module."""

    name = "two_shot"

    def supports(self, request: Request) -> str | None:
        """Serves all-reduce."""
        return None if request.collective == "allreduce" else "serves allreduce only"

    def accesses(self, request: Request) -> tuple[str, ...]:
        """Without staging where all ranks can address all arrays."""
        return ("direct", "staged") if request.direct else ("staged",)

    def cost_us(self, request: Request, access: str, topology: Topology) -> float:
        """Direct reads n/p of p arrays and writes as much; staged copies slices there and back."""
        p, n = request.nranks, request.nbytes
        call, sent = call_us(p, topology), self.bytes_sent(request)
        if access == "direct":
            second = phase_us(topology) if on_gpu(topology) else call
            return call + second + move_us(2 * n, sent, topology)
        moved = n + 2 * n / p + 2 * n * (p - 1) / p
        return call + phase_us(topology) + move_us(moved, STAGING * sent, topology)

    def chunk_bytes(self, request: Request, access: str, topology: Topology) -> int:
        """One rank's slice of a round. GPUs: as much as a slot holds."""
        if on_gpu(topology):
            return REGION.slot_bytes
        return (64 << 10) if request.nbytes < 2 << 20 else (128 << 10)

    def kernel(self, request: Request, access: str) -> Kernel:
        """Staged or direct."""
        stem = "two_shot_direct" if access == "direct" else "two_shot"
        template = stem + "<{arguments}>"
        return reduce_kernel("two_shot.cuh", stem, template, request, unrolled=True)

    def region(self, request: Request) -> Region:
        """Both accesses take steps of the same words."""
        return REGION

    def regions(self) -> tuple[Region, ...]:
        """See ``region``."""
        return (REGION,)

    def bytes_sent(self, request: Request) -> int:
        """2 (p-1)/p n."""
        return 2 * request.nbytes * (request.nranks - 1) // request.nranks

    def share_bytes(self, request: Request, access: str) -> int:
        """A slice."""
        return -(-request.nbytes // request.nranks)
