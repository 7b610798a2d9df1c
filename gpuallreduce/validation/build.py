"""Compiles the kernels of a run ahead of its cases, on all cores, while the first cases run.

Knows nothing of what the cases check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gpuallreduce import tuner
from gpuallreduce.devices.cuda_runtime import find_gpu
from gpuallreduce.errors import CompileError
from gpuallreduce.jit import Kernel, compile_host, compile_host_together
from gpuallreduce.jit_cuda import Target, compile_ahead, target_of
from gpuallreduce.plan import Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS, Case

__all__ = ["Builder", "kernel_of", "kernels_of", "target_of_gpu"]


def kernel_of(case: Case, topology: Topology) -> Kernel | None:
    """The kernel that a case's calls will run; None if there is none to run.

    Raises:
        NotSupported: no kernel serves a case that was not to be refused.
    """
    if case.refused or topology.nranks == 1:
        return None
    variant = VARIANTS[case.variant]
    reachable = topology.one_process and topology.path != "host memory"
    request = Request(
        collective=case.collective,
        dtype=DTYPES[case.dtype],
        op=OPS[case.op],
        count=case.count,
        nranks=topology.nranks,
        order=variant.order or "rank",
        direct=reachable or variant.access == "direct",
        in_place=case.in_place,
        root=case.root,
    )
    forced = tuner.Forced(variant.algorithm, variant.access, case.chunk_bytes)
    # Channels run the same kernel, however many there are.
    return tuner.decide(request, topology, forced, transport="").kernel


def kernels_of(cases: Iterable[Case], topology: Topology) -> list[Kernel]:
    """The kernels of cases, each once, in the order in which they are needed."""
    kernels = (kernel_of(case, topology) for case in cases)
    return [kernel for kernel in dict.fromkeys(kernels) if kernel is not None]


def target_of_gpu(device: str) -> Target:
    """What to compile for the GPU of a device name.

    Raises:
        NotSupported, InvalidArgument: there is no such GPU.
    """
    gpu = find_gpu(device)
    return target_of(gpu.major, gpu.minor)


class Builder:
    """Compilations in the order in which their results are needed. Use it as a context manager."""

    def __init__(
        self, kernels: Iterable[Kernel], workers: int, *, target: Target | None = None
    ) -> None:
        """Starts at once; nothing is compiled that is in the cache.

        Args:
            kernels: repeated ones count once.
            workers: compilers at a time.
            target: what GPUs to compile for; None: host devices.
        """
        self._target = target
        self._pool = ThreadPoolExecutor(workers, "compile")
        self._futures: dict[Kernel, Future[None]] = {}
        for _, family in itertools.groupby(dict.fromkeys(kernels), key=lambda each: each.family):
            together = tuple(family)
            future = self._pool.submit(self._compile, together)
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
            self._compile((kernel,))  # alone: a faulty neighbour is not its fault

    def _compile(self, kernels: Sequence[Kernel]) -> None:
        if self._target is not None:
            compile_ahead(kernels, self._target)
        elif len(kernels) == 1:
            compile_host(kernels[0])
        else:
            compile_host_together(kernels)
