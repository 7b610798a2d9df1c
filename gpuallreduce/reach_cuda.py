"""Do the GPUs of a communicator address each other's memory? What CUDA says, and what a probe
finds; the reason is said wherever they do not.

Knows nothing of what the memory is for. What one process finds out is agreed with the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuallreduce.bootstrap.rendezvous import Rendezvous
from gpuallreduce.devices import cuda_probe, probe_verdict
from gpuallreduce.devices.cuda import load
from gpuallreduce.devices.cuda_memory import DeviceBlock, HostMapped, ImportedBlock
from gpuallreduce.devices.cuda_runtime import Gpu, cupy_module, on_device
from gpuallreduce.devices.probe_verdict import Verdict
from gpuallreduce.errors import DeviceError, InvalidArgument
from gpuallreduce.memory import SharedPages
from gpuallreduce.transport import Transport

__all__ = ["AGAIN", "IF_NEW", "KEPT", "SKIP", "Reach", "joined_reach", "local_reach"]

SKIP = "GPUALLREDUCE_PROBE"  # 0: believe CUDA
IF_NEW, AGAIN, KEPT = "if new", "again", "kept"  # when to probe; KEPT: never, but heed a verdict
REACH = "GPUALLREDUCE_REACH"  # host: pinned host memory, though GPUs may reach each other
ASKED = f"{REACH}=host asks for it"
SKIPPED = f"not probed, as {SKIP}=0 asks"
PEER_ACCESS, IPC = "peer access", "CUDA IPC"


@dataclass(frozen=True)
class Reach:
    """Whether GPUs address each other's memory.

    Attributes:
        reason: None if they do, else why not.
        note: what else there is to say, or nothing.
        verdict: of a probe, where there is one.
    """

    reason: str | None
    note: str = ""
    verdict: Verdict | None = None


def _asked_to_skip() -> bool:
    return os.environ.get(SKIP) == "0"


def _asked_for_host() -> bool:
    asked = os.environ.get(REACH, "peer")
    if asked not in ("peer", "host"):
        raise InvalidArgument(f"{REACH}={asked!r} is not known; there are peer and host")
    return asked == "host"


def _believed(probe: Callable[[], Verdict]) -> Verdict:
    """A probe's verdict. A wait that took too long may have met other work; it is tried twice."""
    verdict = probe()
    return verdict if verdict.is_final else replace(probe(), is_final=True)


def _judged(verdict: Verdict, names: dict[str, str]) -> Reach:
    """What a verdict means.

    Raises:
        DeviceError: CUDA does not live on in a process that took part.
    """
    reason = verdict.reason(names)
    if verdict.is_fatal:
        raise DeviceError(
            f"{reason}. CUDA is lost to this process, but the verdict is kept: start again, and "
            "pinned host memory is used instead"
        )
    return Reach(reason, verdict=verdict)


# ---- GPUs of one process ------------------------------------------------------------------------


def local_reach(gpus: Sequence[Gpu], *, probing: str = IF_NEW) -> Reach:
    """Lets the GPUs of this process address each other's memory, if they can.

    Args:
        gpus: a GPU may stand there several times.
        probing: IF_NEW, AGAIN or KEPT.

    Raises:
        DeviceError: the probe broke CUDA in this process.
    """
    if _asked_for_host():
        return Reach(ASKED)
    different = {gpu.uuid: gpu for gpu in sorted(gpus, key=lambda gpu: gpu.ordinal)}
    reason = _without_peer_access([gpu.ordinal for gpu in different.values()])
    if reason is not None or len(different) == 1:
        return Reach(reason)
    if _asked_to_skip() and probing != AGAIN:
        return Reach(None, SKIPPED)
    path = probe_verdict.path_of(list(different), way=PEER_ACCESS, driver=cuda_probe.driver())
    verdict = None if probing == AGAIN else probe_verdict.kept(path)
    if verdict is None:
        if probing == KEPT:
            return Reach(None, "not probed yet")
        ordinals = {gpu.uuid: gpu.ordinal for gpu in different.values()}
        verdict = _believed(lambda: cuda_probe.probe(ordinals))
        probe_verdict.keep(path, verdict)
    return _judged(verdict, {gpu.uuid: f"cuda:{gpu.ordinal}" for gpu in different.values()})


def _without_peer_access(ordinals: Sequence[int]) -> str | None:
    """None once all of these GPUs address each other's memory, else which two do not."""
    runtime = cupy_module().cuda.runtime
    pairs = [(a, b) for a in ordinals for b in ordinals if a != b]
    for a, b in pairs:
        if not runtime.deviceCanAccessPeer(a, b):
            return f"cuda:{a} cannot access cuda:{b}"
    for a, b in pairs:
        try:
            with on_device(a):
                runtime.deviceEnablePeerAccess(b)
        except runtime.CUDARuntimeError as error:
            if "PeerAccessAlreadyEnabled" not in str(error):
                return f"cuda:{a} is refused access to cuda:{b}: {error}"
    return None


# ---- a GPU per process --------------------------------------------------------------------------


def joined_reach(rendezvous: Rendezvous, host: Transport, gpus: Sequence[Gpu]) -> Reach:
    """Whether every rank can open every other's memory, and reaches it. A collective.

    Args:
        rendezvous: of the ranks.
        host: shares pages of host memory between them.
        gpus: the GPU of each rank.

    Returns:
        The same on every rank.

    Raises:
        DeviceError: the probe broke CUDA in a process; every rank raises.
    """
    return _Joined(rendezvous, host, gpus).reach()


class _Joined:
    """One rank's part. The first rank on each GPU stands for it in the probe."""

    def __init__(self, rendezvous: Rendezvous, host: Transport, gpus: Sequence[Gpu]) -> None:
        self.rendezvous, self.host = rendezvous, host
        self.ordinal = gpus[rendezvous.rank].ordinal
        uuids = [gpu.uuid for gpu in gpus]
        self.uuids = list(dict.fromkeys(uuids))
        self.holders = [uuids.index(uuid) for uuid in self.uuids]  # ranks
        self.block: DeviceBlock | None = None
        self.opened: dict[int, ImportedBlock] = {}

    def reach(self) -> Reach:
        """See joined_reach."""
        path = probe_verdict.path_of(self.uuids, way=IPC, driver=cuda_probe.driver())
        mine = probe_verdict.kept(path)
        known = {"skip": _asked_to_skip(), "verdict": mine and mine.as_plain()}
        try:
            reason, parts = self._open(known)
            verdict, note = None, ""
            if reason is not None or len(self.uuids) == 1:
                pass
            elif any(part["skip"] for part in parts):
                note = SKIPPED
            else:
                verdict = self._kept(parts)
                if verdict is None:
                    verdict = _believed(self._probe)
                    probe_verdict.keep(path, verdict)
            self._close()
            self.rendezvous.exchange("end of the trial of IPC")
        finally:
            self._close()
            if self.block is not None:
                self.block.free()
        if verdict is None:
            return Reach(reason, note)
        names = zip(self.uuids, (f"rank {rank}" for rank in self.holders), strict=True)
        return _judged(verdict, dict(names))

    def _kept(self, parts: Sequence[dict[str, Any]]) -> Verdict | None:
        """A verdict that some process kept, if all did: who has none would have to believe it."""
        found = [part["verdict"] for part in parts]
        if None in found:
            return None
        verdicts = [probe_verdict.from_plain(each) for each in found]
        return next((verdict for verdict in verdicts if verdict.failures), verdicts[0])

    def _open(self, known: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]]]:
        """Opens everybody's memory; who could not, and what each rank brought along."""
        nbytes, refusal, handle = cuda_probe.area_bytes(len(self.uuids)), "", ""
        problem: Exception | None = None
        try:
            self.block = DeviceBlock(self.ordinal, nbytes, zeros=nbytes)
        except DeviceError as error:  # no memory: there would be none for a communicator either
            problem = error
        if self.block is not None:
            try:
                handle = self.block.handle().hex()
            except DeviceError as error:
                refusal = str(error)
        if _asked_for_host():
            refusal = ASKED
        brought = {**known, "handle": handle, "refusal": refusal}
        exchanged = self.rendezvous.exchange("trial of IPC", brought, error=problem)
        parts = [part.payload for part in exchanged]
        for rank, part in enumerate(parts):
            refusal = refusal or part["refusal"]
            if rank == self.rendezvous.rank or refusal:
                continue
            try:
                theirs = bytes.fromhex(part["handle"])
                self.opened[rank] = ImportedBlock(self.ordinal, theirs, nbytes)
            except DeviceError as error:
                refusal = f"from rank {rank}: {error}"
        verdicts = self.rendezvous.exchange("verdict on IPC", {"refusal": refusal})
        for rank, verdict in enumerate(verdicts):
            if verdict.payload["refusal"]:
                return f"rank {rank}: {verdict.payload['refusal']}", parts
        return None, parts

    def _close(self) -> None:
        """Gives up what was opened: before its owner frees it, as CUDA asks."""
        for each in self.opened.values():
            each.close()
        self.opened = {}

    def _probe(self) -> Verdict:
        """A collective; every rank finds the same."""
        start = time.monotonic()
        nbytes = cuda_probe.result_bytes(len(self.uuids))
        results = self.host.allocate(nbytes, purpose="probe of peer access")
        addresses = [results.addresses[holder] for holder in self.holders]
        mapped: list[HostMapped] = []
        problem: Exception | None = None
        broken: str | None = None
        try:
            try:
                for pages in results.mappings:
                    assert isinstance(pages, SharedPages)
                    mapped.append(HostMapped(pages, self.ordinal))
                load(cuda_probe.KERNEL, self.ordinal)
            except Exception as error:
                problem = error
            brought = {"nonce": cuda_probe.new_nonce()}
            parts = self.rendezvous.exchange("start of the probe", brought, error=problem)
            broken = self._launch(addresses, parts[0].payload["nonce"])
            ends = self.rendezvous.exchange("end of the probe", {"broken": broken})
        finally:
            for each in mapped:
                if broken is None:
                    each.close()
                else:
                    cuda_probe.abandon(each)
        failed = {
            place: ends[holder].payload["broken"]
            for place, holder in enumerate(self.holders)
            if ends[holder].payload["broken"] is not None
        }
        elapsed_s = time.monotonic() - start
        return cuda_probe.verdict_of(self.uuids, addresses, broken=failed, elapsed_s=elapsed_s)

    def _launch(self, results: Sequence[int], nonce: int) -> str | None:
        """Runs the kernel of a rank that stands for its GPU; how CUDA failed, if it did."""
        rank, block = self.rendezvous.rank, self.block
        assert block is not None
        if rank not in self.holders:
            return None
        areas = [
            block.address if holder == rank else self.opened[holder].address
            for holder in self.holders
        ]
        place = {self.holders.index(rank): self.ordinal}
        broken = cuda_probe.launch(place, areas, results, nonce)
        if broken is not None:  # kernels may still run, and freeing would wait for them
            self.opened, self.block = {}, None
        return broken
