"""What every algorithm answers: can it serve a request, how long would it take, which kernel does
it run.

Knows nothing of any algorithm in particular.
"""

from __future__ import annotations

from typing import Protocol

from gpuallreduce.jit import Kernel
from gpuallreduce.plan import Region, Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import reduction

__all__ = ["HOST_PHASE_US", "Algorithm", "host_call_us", "host_copy_us", "reduce_kernel"]

MAX_UNROLLED_RANKS = 8  # kernels for more ranks loop over them at run time

# Host devices: fitted to medians of bench/allreduce_perf with 2 and 4 rank processes on 2 cores.
# Only the sizes at which one algorithm overtakes another depend on them.
HOST_BYTES_PER_US = 34000.0  # read or written by one core, arrays in its caches
HOST_CALL_US = 0.35
HOST_PEER_US = 0.45  # a word seen from one more rank
HOST_PHASE_US = 2.3  # a second meeting of all ranks in every round


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


def host_copy_us(nbytes: float, topology: Topology) -> float:
    """Time for one rank to read or write some bytes, its core's other ranks doing the same."""
    return nbytes * topology.sharing / HOST_BYTES_PER_US


def host_call_us(nranks: int, topology: Topology) -> float:
    """Time for ranks to enter a call and see each other."""
    return HOST_CALL_US + HOST_PEER_US * (nranks - 1) * topology.sharing
