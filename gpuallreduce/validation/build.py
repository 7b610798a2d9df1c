"""Compiles the kernels of a run ahead of its cases, on all cores, while the first cases run.

Knows nothing of what the cases check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from gpuallreduce import tuner
from gpuallreduce.errors import CompileError
from gpuallreduce.jit import Kernel, compile_host, compile_host_together
from gpuallreduce.plan import Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS, Case

__all__ = ["Builder", "kernel_of"]


def kernel_of(case: Case, topology: Topology) -> Kernel | None:
    """The kernel that a case's calls will run; None if there is none to run.

    Raises:
        NotSupported: no kernel serves a case that was not to be refused.
    """
    if case.refused or topology.nranks == 1:
        return None
    variant = VARIANTS[case.variant]
    request = Request(
        collective=case.collective,
        dtype=DTYPES[case.dtype],
        op=OPS[case.op],
        count=case.count,
        nranks=topology.nranks,
        order=variant.order or "rank",
        direct=topology.one_process or variant.access == "direct",
        in_place=case.in_place,
        root=case.root,
    )
    forced = tuner.Forced(variant.algorithm, variant.access, case.chunk_bytes)
    # Channels run the same kernel, however many there are.
    return tuner.decide(request, topology, forced, transport="").kernel


class Builder:
    """Compilations in the order in which their results are needed. Use it as a context manager."""

    def __init__(self, kernels: Iterable[Kernel], workers: int) -> None:
        """Starts at once; nothing is compiled that is in the cache.

        Args:
            kernels: repeated ones count once.
            workers: compilers at a time.
        """
        self._pool = ThreadPoolExecutor(workers, "compile")
        self._futures: dict[Kernel, Future[list[Path]]] = {}
        for _, family in itertools.groupby(dict.fromkeys(kernels), key=lambda each: each.family):
            together = tuple(family)
            future = self._pool.submit(compile_host_together, together)
            self._futures |= dict.fromkeys(together, future)

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __len__(self) -> int:
        return len(self._futures)

    def wait(self, kernel: Kernel | None) -> None:
        """Returns when a kernel can be loaded without compiling.

        Raises:
            CompileError: it cannot be compiled.
        """
        future = self._futures.get(kernel) if kernel is not None else None
        if future is None or kernel is None:
            return
        try:
            future.result()
        except CompileError:
            compile_host(kernel)  # alone: a faulty neighbour is not its fault
