"""Whether GPUs really reach each other's memory: runs kernels that store and load on all of them at
once, and says what they found.

Knows nothing of communicators, nor of how the GPUs came to address each other's memory.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpuallreduce import args
from gpuallreduce.args import GarProbeArgs, GarProbeResult
from gpuallreduce.devices import nvml
from gpuallreduce.devices.cuda import argument, load
from gpuallreduce.devices.cuda_memory import DeviceBlock, HostMapped
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module
from gpuallreduce.devices.probe_verdict import Failure, Verdict
from gpuallreduce.errors import DeviceError
from gpuallreduce.jit import Kernel
from gpuallreduce.memory import LINE_BYTES, PAGE_BYTES, SharedPages

__all__ = [
    "KERNEL",
    "abandon",
    "area_bytes",
    "driver",
    "launch",
    "new_nonce",
    "probe",
    "result_bytes",
    "verdict_of",
]

KERNEL = Kernel("probe", "probe.cuh", "probe", arguments="GarProbeArgs")
THREADS = 256
BOX_BYTES = 32 << 10
LIMIT_S = 10.0  # of one wait: another process may be using the GPU
START_S = 30.0  # until all kernels run
END_S = 150.0  # then a GPU hangs in a load or a store
LONGEST_NAP_S = 1e-3
SUCCESS, NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady


def area_bytes(count: int) -> int:
    """What each of so many GPUs gives of its memory."""
    return count * (2 * BOX_BYTES + LINE_BYTES)


def result_bytes(count: int) -> int:
    """Host memory for what each of so many GPUs finds."""
    return -(-count * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES


def new_nonce() -> int:
    """Tells one probe's data from another's."""
    return secrets.randbits(62) | 1 << 62


@functools.cache
def driver() -> str:
    """Version of the driver, as far as it can be found out."""
    return f"{cupy_module().cuda.runtime.driverGetVersion()} {nvml.driver_version()}"


def launch(
    ordinals: Mapping[int, int], areas: Sequence[int], results: Sequence[int], nonce: int
) -> str | None:
    """Runs the kernels of this process's GPUs, and waits for their end.

    Args:
        ordinals: the GPU of each place among those that take part, of this process's.
        areas: for each place the address of its area; zeros.
        results: for each place the address of its results; zeros in host memory that is mapped.
        nonce: the same for all.

    Returns:
        None, or how CUDA failed, after which this process has no more use of it.
    """
    cupy = cupy_module()
    launches = []
    for place, ordinal in ordinals.items():
        struct = GarProbeArgs(
            nonce=nonce,
            box_bytes=BOX_BYTES,
            limit_ns=int(LIMIT_S * 1e9),
            start_ns=int(START_S * 1e9),
            rank=place,
        )
        struct.areas[: len(areas)] = areas
        struct.results[: len(results)] = results
        with cupy.cuda.Device(ordinal):
            stream = cupy.cuda.Stream(non_blocking=True)
        launches.append((ordinal, load(KERNEL, ordinal), argument(struct), stream))
    collecting = gc.isenabled()
    gc.disable()  # see NOTE one thread launches all local ranks
    try:
        with cuda_errors("the probe of peer access"):
            grid, block = (len(areas), 1, 1), (THREADS, 1, 1)
            for ordinal, function, packed, stream in launches:
                with cupy.cuda.Device(ordinal):
                    function(grid, block, (packed,), stream=stream)
            return _wait([stream for *_, stream in launches])
    except DeviceError as error:
        return str(error)
    finally:
        if collecting:
            gc.enable()


def _wait(streams: Sequence[Any]) -> str | None:
    deadline, nap_s = time.monotonic() + END_S, 0.0
    while not all(_has_ended(stream) for stream in streams):
        if time.monotonic() > deadline:
            return f"its kernels had not ended after {END_S:g} s"
        time.sleep(nap_s)
        nap_s = min(LONGEST_NAP_S, nap_s * 1.5 + 1e-6)
    return None


def _has_ended(stream: Any) -> bool:
    """As CuPy's ``done``, to which a stream that failed is one that never ends."""
    status = cupy_module().cuda.runtime.streamQuery(stream.ptr)
    if status not in (SUCCESS, NOT_READY):
        stream.synchronize()  # raises
    return bool(status == SUCCESS)


def verdict_of(
    uuids: Sequence[str], results: Sequence[int], *, broken: Mapping[int, str], elapsed_s: float
) -> Verdict:
    """What the results of all GPUs together say; their kernels have ended.

    Args:
        uuids: of the GPUs, by place.
        results: where the results of each lie.
        broken: how CUDA failed, by place.
        elapsed_s: how long the probe took.
    """
    failures, seen_wrong = [], False
    for place, peer in itertools.permutations(range(len(uuids)), 2):
        mine = GarProbeResult.from_address(results[place] + peer * LINE_BYTES)
        found = _failure(mine, uuids[place], uuids[peer])
        if place in broken:
            found = Failure(uuids[place], uuids[peer], f"CUDA failed: {broken[place]}")
        if found is not None:
            failures.append(found)
        seen_wrong |= mine.code in (args.PROBE_WRONG_LOAD, args.PROBE_WRONG_STORE)
    return Verdict(
        gpus=tuple(uuids),
        failures=tuple(failures),
        elapsed_ms=round(elapsed_s * 1e3, 1),
        is_final=not failures or seen_wrong or bool(broken),
        is_fatal=bool(broken),
    )


def _failure(mine: GarProbeResult, uuid: str, peer_uuid: str) -> Failure | None:
    """What a GPU's result on a peer means; each fault is told by the side that saw it."""
    if mine.code in (args.PROBE_OK, args.PROBE_PEER_ENDED):
        return None
    if mine.code == args.PROBE_WRONG_LOAD:
        return Failure(uuid, peer_uuid, f"loads are wrong ({_word(mine)})")
    if mine.code == args.PROBE_WRONG_STORE:
        return Failure(peer_uuid, uuid, f"stores arrive wrong ({_word(mine)})")
    if mine.code == args.PROBE_NO_STORE:
        return Failure(peer_uuid, uuid, f"stores do not arrive within {LIMIT_S:g} s")
    if mine.meeting <= 1:  # the first is where it was waited for
        return Failure(peer_uuid, uuid, f"its kernel did not start within {START_S:g} s")
    return Failure(peer_uuid, uuid, f"loads or stores hang for more than {LIMIT_S:g} s")


def _word(found: GarProbeResult) -> str:
    return f"byte {found.place}: {found.seen:#x} instead of {found.expected:#x}"


def probe(gpus: Mapping[str, int]) -> Verdict:
    """Probes GPUs that this process sees and that have peer access to each other.

    Args:
        gpus: their numbers, by UUID.

    Raises:
        DeviceError: there is no memory for it.
        CompileError: its kernel does not compile.
    """
    start, count, uuids = time.monotonic(), len(gpus), list(gpus)
    ordinals = dict(enumerate(gpus.values()))
    each = result_bytes(count)
    fd = SharedPages.create_fd(count * each)
    try:
        pages = SharedPages(fd, count * each)
    finally:
        os.close(fd)
    for ordinal in ordinals.values():
        load(KERNEL, ordinal)
    blocks: list[DeviceBlock] = []
    mapped = HostMapped(pages, ordinals[0])
    broken = None
    try:
        for ordinal in ordinals.values():
            blocks.append(DeviceBlock(ordinal, area_bytes(count), zeros=area_bytes(count)))
        results = [pages.address + place * each for place in ordinals]
        areas = [block.address for block in blocks]
        broken = launch(ordinals, areas, results, new_nonce())
        elapsed_s = time.monotonic() - start
        failed = dict.fromkeys(ordinals, broken) if broken else {}
        return verdict_of(uuids, results, broken=failed, elapsed_s=elapsed_s)
    finally:
        if broken is None:
            for block in blocks:
                block.free()
            mapped.close()
        else:
            abandon(mapped)


_abandoned: list[HostMapped] = []


def abandon(mapped: HostMapped) -> None:
    """Leaves memory to kernels that may still run; freeing it would wait for them."""
    _abandoned.append(mapped)
