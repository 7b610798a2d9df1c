"""Compiles the kernels of a run ahead of its cases, on all cores, while the first cases run.

Knows nothing of what the cases check.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from gpuallreduce import tuner
from gpuallreduce.devices.cuda_runtime import find_gpu
from gpuallreduce.errors import CompileError
from gpuallreduce.jit import Kernel, compile_host, compile_host_together
from gpuallreduce.jit_cuda import Target, compile_ahead, target_of
from gpuallreduce.plan import Request, Shards
from gpuallreduce.topology import Topology, available_cores
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS, Case

__all__ = [
    "Builder",
    "compile_share",
    "kernel_of",
    "kernels_between",
    "kernels_of",
    "target_of_gpu",
]


def kernel_of(case: Case, topology: Topology) -> Kernel | None:
    """The kernel that a case's calls will run; None if there is none to run.

    Raises:
        NotSupported: no kernel serves a case that was not to be refused.
    """
    if case.refused or topology.nranks == 1:
        return None
    variant = VARIANTS[case.variant]
    reachable = topology.one_process and topology.path != "host memory"
    many = case.collective == "allreduce_many"
    request = Request(
        collective="allreduce" if many else case.collective,
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


def kernels_between(
    cases: Iterable[Case], nodes: Sequence[int], here: Iterable[int], topology: Topology
) -> list[Kernel]:
    """The kernels of all-reduces between nodes, each once, in the order in which they are needed.

    Args:
        cases: what runs; other collectives and refused cases count for nothing.
        nodes: ranks of each node.
        here: the nodes whose kernels are wanted.
        topology: of a node.
    """
    kernels: dict[Kernel, None] = {}
    for case in cases:
        if case.refused or not case.collective.startswith("allreduce"):
            continue
        for node in here:
            for request in _requests_of_node(case, nodes, node):
                inside = replace(topology, nranks=nodes[node])
                plan = tuner.decide(request, inside, tuner.Forced("one_shot"), transport="")
                kernels[plan.kernel] = None
    return list(kernels)


def _requests_of_node(case: Case, nodes: Sequence[int], node: int) -> Iterator[Request]:
    """What the ranks of a node do in a call; the number of elements decides nothing."""
    in_rank_order = (VARIANTS[case.variant].order or "rank") == "rank"
    shards = Shards(
        min(nodes),
        seeded=in_rank_order and node > 0,
        rounded=not in_rank_order or node == len(nodes) - 1,
        fold_ranks=sum(nodes),
    )
    dtype, nranks = DTYPES[case.dtype], nodes[node]
    yield Request("shard_reduce", dtype, OPS[case.op], 1, nranks, shards=shards)
    whole = Shards(shards.count, fold_ranks=shards.fold_ranks)
    yield Request("shard_gather", dtype, OPS["sum"], 1, nranks, shards=whole)


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


def compile_share(
    kernels: Sequence[Kernel], number: int, nprocesses: int, *, target: Target | None = None
) -> None:
    """Compiles one process's share of kernels. A kernel that cannot be compiled is passed over:
    whoever runs it says so.

    Args:
        kernels: of all the processes, in one order.
        number: of this process.
        nprocesses: on this machine.
        target: as for Builder.
    """
    families = list(dict.fromkeys(kernel.family for kernel in kernels))
    mine = set(families[number::nprocesses])
    share = [kernel for kernel in kernels if kernel.family in mine]
    with Builder(share, max(1, available_cores() // nprocesses), target=target) as builder:
        for kernel in share:
            with contextlib.suppress(CompileError):
                builder.wait(kernel)
