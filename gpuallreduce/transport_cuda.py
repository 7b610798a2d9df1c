"""With what address does a GPU touch another's memory? Peer access in one process, CUDA IPC between
processes, or host memory that every GPU maps.

Knows nothing of what the memory is for. Meeting other processes is a host transport's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from gpuallreduce.bootstrap.rendezvous import Rendezvous
from gpuallreduce.devices.cuda_memory import DeviceBlock, HostMapped, ImportedBlock
from gpuallreduce.errors import DeviceError, MismatchError
from gpuallreduce.memory import Mapped, SharedPages, SymmetricBuffer
from gpuallreduce.transport import LocalTransport, SharedMemoryTransport

__all__ = ["HostMemoryTransport", "IpcTransport", "PeerTransport", "free_departed"]


HostTransport = LocalTransport | SharedMemoryTransport


class CudaTransport(ABC):
    """What the three have in common: control blocks in host memory, and when memory is freed.

    NOTE departure. A rank's kernels touch the memory of its peers, so memory that others can
    address is freed only when all ranks have said, in every control block, that their kernels have
    ended for good. Who closes first cannot know, and must not wait: its memory is laid aside, and
    freed when a later communicator is closed or made, or with the process.
    """

    name: str

    def __init__(self, host: HostTransport, ordinals: Sequence[int]) -> None:
        """Over a host transport of the same ranks.

        Args:
            host: shares pages between the processes of the ranks.
            ordinals: the GPU of each local rank.
        """
        self.host = host
        self.nranks, self.ranks = host.nranks, host.ranks
        self.ordinals = list(ordinals)
        self._controls: list[HostMapped] = []

    @abstractmethod
    def allocate(
        self, nbytes: int, *, purpose: str, zeros: int | None = None, timeout: float | None = None
    ) -> SymmetricBuffer:
        """See Transport."""

    @abstractmethod
    def release(self) -> None:
        """Frees everything; no kernel of any rank touches it any more."""

    def allocate_controls(self, nbytes: int) -> SymmetricBuffer | None:
        """See Transport: pinned host memory, at one address for the host and all GPUs."""
        buffer, mapped = self._host_mapped(nbytes, "control blocks", None)
        self._controls += mapped
        return buffer

    def _host_mapped(
        self, nbytes: int, purpose: str, timeout: float | None
    ) -> tuple[SymmetricBuffer, list[HostMapped]]:
        buffer = self.host.allocate(nbytes, purpose=purpose, timeout=timeout)
        mapped: list[HostMapped] = []
        problem: Exception | None = None
        try:
            for rank, pages in enumerate(buffer.mappings):
                assert isinstance(pages, SharedPages)
                local = self.ranks.index(rank) if rank in self.ranks else 0
                mapped.append(HostMapped(pages, self.ordinals[local]))
        except Exception as error:
            problem = error
        try:
            self.host.agree(f"{purpose} {buffer.identity} mapped to GPUs", problem, timeout)
        except BaseException:  # pages that go must not stay registered
            for each in mapped:
                each.close()
            raise
        return SymmetricBuffer(buffer.addresses, nbytes, buffer.identity, tuple(mapped)), mapped

    def lost(self) -> Sequence[int]:
        """See Transport."""
        return self.host.lost()

    def processes(self) -> Mapping[int, int]:
        """See Transport."""
        return self.host.processes()

    def interrupt(self) -> None:
        """See Transport."""
        self.host.interrupt()

    def let_go(self) -> None:
        """See Transport; addresses of one process need nothing."""
        self.host.let_go()

    def close(self, departed: Callable[[], bool] = lambda: True) -> None:
        """See Transport and NOTE departure."""
        self.host.close()
        _laid_aside.append((self, departed))
        free_departed()

    def free(self) -> None:
        """Frees everything, control blocks last."""
        self.release()
        for mapped in self._controls:
            mapped.close()
        self._controls = []


_laid_aside: list[tuple[CudaTransport, Callable[[], bool]]] = []


def free_departed() -> None:
    """Frees the memory of closed communicators that all ranks have left; see NOTE departure."""
    for entry in list(_laid_aside):
        transport, departed = entry
        if departed() and entry in _laid_aside:
            _laid_aside.remove(entry)
            transport.free()


class PeerTransport(CudaTransport):
    """All ranks in this process, GPUs that address each other: an address is an address."""

    def __init__(self, ordinals: Sequence[int]) -> None:
        """Ranks on these GPUs; peer access is on."""
        super().__init__(LocalTransport(len(ordinals)), ordinals)
        self.name = "peer access of one process" if len(set(ordinals)) > 1 else "one GPU's memory"
        self._blocks: list[DeviceBlock] = []
        self._made = 0

    def allocate(
        self, nbytes: int, *, purpose: str, zeros: int | None = None, timeout: float | None = None
    ) -> SymmetricBuffer:
        """See Transport; nobody is waited for. Without ``zeros`` its arrays keep it alive."""
        self._made += 1
        blocks: list[DeviceBlock] = []
        try:
            for ordinal in self.ordinals:
                blocks.append(
                    DeviceBlock(ordinal, nbytes, zeros=nbytes if zeros is None else zeros)
                )
        except DeviceError:
            for block in blocks:
                block.free()
            raise
        if zeros is None:
            for block in blocks:
                block.free_with_arrays()
        else:
            self._blocks += blocks
        return SymmetricBuffer(_addresses(blocks), nbytes, self._made, tuple(blocks))

    def release(self) -> None:
        """See CudaTransport."""
        for block in self._blocks:
            block.free()
        self._blocks = []


class IpcTransport(CudaTransport):
    """One rank per process: each rank's memory is exported, and opened by all others."""

    name = "CUDA IPC"

    def __init__(self, host: HostTransport, rendezvous: Rendezvous, ordinal: int) -> None:
        """A rank on this GPU."""
        super().__init__(host, [ordinal])
        self.rendezvous = rendezvous
        self._mine: list[DeviceBlock] = []
        self._theirs: list[ImportedBlock] = []
        self._made = 0

    def allocate(
        self, nbytes: int, *, purpose: str, zeros: int | None = None, timeout: float | None = None
    ) -> SymmetricBuffer:
        """See Transport. Lives until all ranks have closed their communicator.

        Raises:
            MismatchError: the ranks asked for different sizes.
            DeviceError: a rank could not; every rank raises and says which.
            Timeout: a rank did not come.
        """
        self._made += 1
        stage, ordinal, me = f"{purpose} {self._made} on GPUs", self.ordinals[0], self.ranks[0]
        block: DeviceBlock | None = None
        problem: Exception | None = None
        payload = {"nbytes": nbytes, "handle": ""}
        try:
            block = DeviceBlock(ordinal, nbytes, zeros=nbytes if zeros is None else zeros)
            self._mine.append(block)
            payload["handle"] = block.handle().hex()
        except Exception as error:
            problem = error
        parts = self.rendezvous.exchange(stage, payload, error=problem, timeout=timeout)
        assert block is not None
        sizes = [part.payload["nbytes"] for part in parts]
        if len(set(sizes)) > 1:
            raise MismatchError(
                f"ranks asked for different sizes of {purpose}: bytes by rank {sizes}; ask for the "
                "same everywhere"
            )
        mapped: list[Mapped] = []
        try:
            for rank, part in enumerate(parts):
                if rank == me:
                    mapped.append(block)
                    continue
                opened = ImportedBlock(ordinal, bytes.fromhex(part.payload["handle"]), nbytes)
                self._theirs.append(opened)
                mapped.append(opened)
        except Exception as error:
            problem = error
        self.rendezvous.exchange(f"{stage}, opened", error=problem, timeout=timeout)
        return SymmetricBuffer(_addresses(mapped), nbytes, self._made, tuple(mapped))

    def let_go(self) -> None:
        """See Transport: CUDA asks for this before the owner frees what was opened."""
        for block in self._theirs:
            block.close()
        self._theirs = []

    def release(self) -> None:
        """See CudaTransport."""
        for block in self._mine:
            block.free()
        self._mine = []


class HostMemoryTransport(CudaTransport):
    """GPUs that do not reach each other: everything shared lies in pinned host memory."""

    def __init__(self, host: HostTransport, ordinals: Sequence[int], reason: str) -> None:
        """Over a host transport.

        Args:
            host: shares pages between the processes of the ranks.
            ordinals: the GPU of each local rank.
            reason: why GPUs do not reach each other.
        """
        super().__init__(host, ordinals)
        self.name = f"pinned host memory ({reason})"
        self._mapped: list[HostMapped] = []

    def allocate(
        self, nbytes: int, *, purpose: str, zeros: int | None = None, timeout: float | None = None
    ) -> SymmetricBuffer:
        """See Transport."""
        buffer, mapped = self._host_mapped(nbytes, purpose, timeout)
        self._mapped += mapped
        return buffer

    def release(self) -> None:
        """See CudaTransport."""
        for mapped in self._mapped:
            mapped.close()
        self._mapped = []


def _addresses(blocks: Sequence[Mapped]) -> tuple[int, ...]:
    return tuple(block.address for block in blocks)
