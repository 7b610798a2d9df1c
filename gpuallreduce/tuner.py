"""Decides how a request is served: algorithm, access, chunk, channels. Pure functions of request
and topology.

Never changes numerics: every choice it has gives the same bits (or the order the caller gave up).
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuallreduce.algorithms import ALGORITHMS, BY_NAME, ENGINES
from gpuallreduce.algorithms.base import gpu_channels, on_gpu, placed
from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.plan import ACCESSES, Config, Plan, Request
from gpuallreduce.topology import Topology
from gpuallreduce.types import DTYPES, reduction

__all__ = ["Forced", "decide"]

# Out of place only: below, and in place, the caches serve the next reader better.
STREAMING_BYTES = 64 << 20
IN_RANK_ORDER = "rank: the same bits for every algorithm, size and number of processes"
WARP_THREADS, MIN_WARPS, MAX_WARPS = 32, 2, 16


@dataclass(frozen=True)
class Forced:
    """What a call's keywords fix; None leaves a field to the tuner."""

    algorithm: str | None = None
    access: str | None = None
    chunk_bytes: int | None = None
    nchannels: int | None = None


def _candidates(request: Request, topology: Topology, forced: Forced) -> list[tuple[str, str]]:
    """(algorithm, access) pairs that may serve the request under the caller's keywords."""
    if forced.algorithm is not None and forced.algorithm not in BY_NAME:
        raise InvalidArgument(
            f"algorithm {forced.algorithm!r} does not exist; there are {', '.join(BY_NAME)}"
        )
    if forced.access is not None and forced.access not in ACCESSES:
        raise InvalidArgument(
            f"access {forced.access!r} does not exist; there are {', '.join(ACCESSES)}"
        )
    names = [forced.algorithm] if forced.algorithm else list(ALGORITHMS)
    found, reasons = [], []
    for name in names:
        reason = BY_NAME[name].supports(request)
        if name in ENGINES and not on_gpu(topology):
            reason = "runs on CUDA devices only"
        accesses = BY_NAME[name].accesses(request)
        if forced.access is not None:
            if reason is None and forced.access not in accesses:
                reason = f"has no {forced.access} access for these arrays" + (
                    " (use arrays from comm.empty on every rank)" if not request.direct else ""
                )
            accesses = (forced.access,)
        if reason is None:
            found += [(name, access) for access in accesses]
        else:
            reasons.append(f"{name} {reason}")
    if not found:
        raise NotSupported(f"{request.collective} cannot be served: {'; '.join(reasons)}")
    return found


def _chunk_count(
    request: Request, name: str, access: str, topology: Topology, forced: Forced
) -> int:
    algorithm = BY_NAME[name]
    itemsize = request.dtype.itemsize
    region = placed(algorithm.region(request), topology)
    widest = DTYPES[request.dtype.accumulator].itemsize if region.partials else itemsize
    most = region.slot_bytes // widest
    if forced.chunk_bytes is None:
        return min(most, max(1, algorithm.chunk_bytes(request, access, topology) // itemsize))
    count = forced.chunk_bytes // itemsize
    if not 1 <= count <= most:
        raise InvalidArgument(
            f"chunk_bytes={forced.chunk_bytes} does not fit a slot of {name}: for "
            f"{request.dtype.name} it takes {itemsize} to {most * itemsize} bytes"
        )
    return count


def _nchannels(share_bytes: int, topology: Topology, forced: Forced) -> int:
    """One block on host devices; on GPUs as many as keep their threads busy."""
    if forced.nchannels is not None:
        if not 1 <= forced.nchannels <= topology.max_channels:
            raise InvalidArgument(
                f"nchannels={forced.nchannels} is outside 1..{topology.max_channels}, the channels "
                "of this communicator"
            )
        return forced.nchannels
    if not on_gpu(topology):
        return 1
    return gpu_channels(share_bytes, topology)


def _nthreads(channel_bytes: int) -> int:
    """Whole warps, one 16-byte pack for each thread, as far as a block goes."""
    warps = -(-channel_bytes // (16 * WARP_THREADS))
    return WARP_THREADS * max(MIN_WARPS, min(MAX_WARPS, warps))


def decide(request: Request, topology: Topology, forced: Forced, *, transport: str) -> Plan:
    """The plan of a call.

    Raises:
        InvalidArgument: a keyword names what does not exist or does not fit.
        NotSupported: no algorithm serves the request.
    """
    candidates = _candidates(request, topology, forced)
    costs: dict[str, float | str] = {}
    best: tuple[float, str, str] | None = None
    for name, access in candidates:
        cost = BY_NAME[name].cost_us(request, access, topology)
        known = costs.get(name)
        costs[name] = min(cost, known) if isinstance(known, float) else cost
        if best is None or cost < best[0]:
            best = (cost, name, access)
    for name, algorithm in ALGORITHMS.items():
        if name not in costs:
            costs[name] = algorithm.supports(request) or "not asked for"
    assert best is not None
    _, name, access = best
    algorithm = BY_NAME[name]
    share_bytes = algorithm.share_bytes(request, access)
    nchannels = _nchannels(share_bytes, topology, forced)
    config = Config(
        algorithm=name,
        access=access,
        chunk_count=_chunk_count(request, name, access, topology, forced),
        nchannels=nchannels,
        streaming=not on_gpu(topology)
        and not request.in_place
        and request.nbytes >= STREAMING_BYTES,
        push=on_gpu(topology) and access == "staged",
        nthreads=_nthreads(share_bytes // nchannels) if on_gpu(topology) else 1,
    )
    orders = {"ring": "of the ring", "nccl": "NCCL's own"} if request.order == "any" else {}
    order = orders.get(name, IN_RANK_ORDER)
    return Plan(
        request=request,
        config=config,
        kernel=algorithm.kernel(request, access),
        region=placed(algorithm.region(request), topology),
        order=order,
        bytes_within=algorithm.bytes_sent(request),
        transport=transport,
        items=reduction(request.dtype, request.op).elements_per_item if request.reduces else 1,
        costs=costs,
    )
