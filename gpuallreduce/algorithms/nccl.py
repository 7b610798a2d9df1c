"""NCCL's own all-reduce, asked for by name: our ranks meet, and NCCL moves the data.

Geometry only; the engine is in ``fabric/nccl.py``. A rank sends 2 (p-1)/p n bytes in NCCL's ring.
"""

from __future__ import annotations

from dataclasses import replace

from gpuallreduce.algorithms.base import call_us, move_us, on_gpu, phase_us
from gpuallreduce.algorithms.one_shot import OneShot
from gpuallreduce.jit import Kernel
from gpuallreduce.plan import Region, Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import DTYPES, OPS

__all__ = ["NcclEngine"]


class NcclEngine:
    """See the module.

    The kernel is a barrier of ours whose header names the call: ranks that do not make the same
    call find out there, instead of waiting in NCCL for ever.
    """

    name = "nccl"

    def supports(self, request: Request) -> str | None:
        """Serves all-reduce in NCCL's order."""
        if request.collective != "allreduce":
            return "serves allreduce only"
        if request.order != "any":
            return "sums in an order of its own: pass order='any'"
        return None

    def accesses(self, request: Request) -> tuple[str, ...]:
        """NCCL's own."""
        return ("engine",)

    def cost_us(self, request: Request, access: str, topology: Topology) -> float:
        """As of a ring; a call of NCCL is some 15 us dearer than one of ours."""
        if not on_gpu(topology):
            return float("inf")
        p, sent = request.nranks, self.bytes_sent(request)
        waits = phase_us(topology) * 2 * (p - 1)
        return 15.0 + call_us(p, topology) + waits + move_us(0, sent, topology)

    def chunk_bytes(self, request: Request, access: str, topology: Topology) -> int:
        """NCCL's business; what is compared between ranks is one element."""
        return request.dtype.itemsize

    def kernel(self, request: Request, access: str) -> Kernel:
        """A barrier."""
        return OneShot().kernel(self._meeting(request), "staged")

    def region(self, request: Request) -> Region:
        """The barrier's."""
        return OneShot().region(self._meeting(request))

    def regions(self) -> tuple[Region, ...]:
        """None of its own."""
        return ()

    def bytes_sent(self, request: Request) -> int:
        """2 (p-1)/p n."""
        return 2 * request.nbytes * (request.nranks - 1) // request.nranks

    def share_bytes(self, request: Request, access: str) -> int:
        """The barrier moves nothing."""
        return 0

    def _meeting(self, request: Request) -> Request:
        return replace(request, collective="barrier", dtype=DTYPES["uint8"], op=OPS["sum"], count=0)
