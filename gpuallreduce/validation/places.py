"""Where the arrays of a case lie, guards included: host memory, or GPU memory with a host mirror.

Knows nothing of what is checked: bytes go to where a call finds them, and come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from gpuallreduce.checks import Guarded
from gpuallreduce.communicator import Communicator
from gpuallreduce.devices.cuda_runtime import cuda_errors, cupy_module
from gpuallreduce.errors import NotSupported
from gpuallreduce.validation.cases import VARIANTS, Case

__all__ = ["CudaPlace", "HostPlace", "Place", "needs_shared", "place_of"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

GUARD_BYTES = 256
# What any case takes for one rank: inputs and outputs of its calls, their offsets and their guards.
ARENA_BYTES = 4 << 20
COPY_DEFAULT = 4  # cudaMemcpyDefault


class Place(Protocol):
    """Memory of the local ranks of one communicator.

    Attributes:
        keywords: what calls on its arrays are to be made with.
        direct: whether peers can address arrays that were asked for as ``shared``.
    """

    @property
    def keywords(self) -> Mapping[str, Any]:
        """See the class."""

    @property
    def direct(self) -> bool:
        """See the class."""

    def begin(self, *, shared: bool) -> None:
        """Takes back the memory of all arrays so far.

        Args:
            shared: peers are to address the arrays that follow.
        """

    def guarded(self, local: int, values: Array, offset: int) -> Guarded:
        """A guarded copy of values, in host memory.

        Args:
            local: position among the ranks of this process.
            values: what it holds.
            offset: elements by which it starts past an aligned address.
        """

    def bring(self) -> None:
        """Puts all guarded arrays, guards too, where calls find them."""

    def array(self, local: int, guarded: Guarded) -> Any:
        """What a call is given for a guarded array."""

    def fetch(self) -> None:
        """Waits for the calls; then guarded arrays, guards too, hold what these left.

        Raises:
            Error: a call failed.
        """

    def blank(self, local: int, count: int, dtype: np.dtype[Any]) -> Any:
        """An array of the kind that calls take, of any content."""


class _Arena:
    """Memory of one rank, handed out piece by piece."""

    def __init__(self, memory: Array) -> None:
        self.memory, self.used = memory, 0

    def guarded(self, values: Array, offset: int) -> Guarded:
        """A guarded copy of values, behind those so far."""
        guarded = _guarded(values, offset, self.memory[self.used :])
        self.used = self.start(guarded.buffer) + guarded.buffer.size
        return guarded

    def start(self, array: Array) -> int:
        """Where one of its arrays begins."""
        return int(array.ctypes.data - self.memory.ctypes.data)


class HostPlace:
    """NumPy arrays: calls are given the guarded arrays themselves."""

    keywords: Mapping[str, Any] = {}
    direct = True

    def __init__(self, communicator: Communicator, *, shared: bool) -> None:
        """With ``shared`` a collective, which makes memory that other processes can address."""
        self._arena: _Arena | None = None
        self._shared = False
        if shared and len(communicator.ranks) == 1 and communicator.nranks > 1:
            self._arena = _Arena(communicator.empty(ARENA_BYTES, np.uint8))

    def begin(self, *, shared: bool) -> None:
        """See Place."""
        self._shared = shared
        if self._arena is not None:
            self._arena.used = 0

    def guarded(self, local: int, values: Array, offset: int) -> Guarded:
        """See Place."""
        if self._shared and self._arena is not None:
            return self._arena.guarded(values, offset)
        return _guarded(values, offset, None)

    def bring(self) -> None:
        """They are there."""

    def array(self, local: int, guarded: Guarded) -> Any:
        """See Place."""
        return guarded.array

    def fetch(self) -> None:
        """Calls are complete on return."""

    def blank(self, local: int, count: int, dtype: np.dtype[Any]) -> Any:
        """See Place."""
        return np.zeros(count, dtype)


class CudaPlace:
    """A block of GPU memory for each local rank, and its mirror in pinned host memory.

    Copies and calls of a rank go to one stream, so all the calls of a case need one copy each way
    and one wait.
    """

    def __init__(self, communicator: Communicator, *, shared: bool) -> None:
        """A collective. Memory that peers can address is made in any case: it names the GPUs.

        Args:
            communicator: of CUDA ranks.
            shared: arrays that peers can address will be wanted.
        """
        cupy = cupy_module()
        self._copy_bytes = cupy.cuda.runtime.memcpyAsync
        self._communicator = communicator
        blocks = communicator.empty(ARENA_BYTES if shared else 1, np.uint8)
        self._shared: list[Any] = list(blocks) if len(communicator.ranks) > 1 else [blocks]
        self._own: list[Any] = []
        self._mirrors: list[_Arena] = []
        self._streams: list[Any] = []
        for block in self._shared:
            with block.device:
                self._own.append(cupy.empty(ARENA_BYTES, np.uint8))
                self._streams.append(cupy.cuda.Stream(non_blocking=True))
                pinned = cupy.cuda.alloc_pinned_memory(ARENA_BYTES)
            self._mirrors.append(_Arena(np.frombuffer(pinned, np.uint8, ARENA_BYTES)))
        self._blocks = self._own
        one = len(self._streams) == 1
        self.keywords: Mapping[str, Any] = {"stream": self._streams[0] if one else self._streams}
        self.direct = shared and self._can_be_direct()

    def _can_be_direct(self) -> bool:
        given: Any = self._shared if len(self._shared) > 1 else self._shared[0]
        try:
            self._communicator.plan(given, op="max", algorithm="two_shot", access="direct")
        except NotSupported:
            return False
        return True

    def begin(self, *, shared: bool) -> None:
        """See Place."""
        self._blocks = self._shared if shared else self._own
        for mirror in self._mirrors:
            mirror.used = 0

    def guarded(self, local: int, values: Array, offset: int) -> Guarded:
        """See Place."""
        return self._mirrors[local].guarded(values, offset)

    def bring(self) -> None:
        """See Place."""
        self._copy(to_host=False)

    def _copy(self, *, to_host: bool) -> None:
        for block, mirror, stream in zip(self._blocks, self._mirrors, self._streams, strict=True):
            ends = (block.data.ptr, mirror.memory.ctypes.data)
            target, source = reversed(ends) if to_host else ends
            with cuda_errors(f"copying {mirror.used} bytes"), block.device:
                self._copy_bytes(target, source, mirror.used, COPY_DEFAULT, stream.ptr)

    def array(self, local: int, guarded: Guarded) -> Any:
        """See Place."""
        values = guarded.array
        return self._view(local, self._mirrors[local].start(values), values.size, values.dtype)

    def _view(self, local: int, start: int, count: int, dtype: np.dtype[Any]) -> Any:
        """Part of a rank's block. CuPy allocates no float8 arrays, but makes them over memory."""
        return cupy_module().ndarray((count,), dtype, self._blocks[local].data + start)

    def fetch(self) -> None:
        """See Place."""
        self._copy(to_host=True)
        self._communicator.synchronize()
        with cuda_errors("copying results"):
            for stream in self._streams:
                stream.synchronize()

    def blank(self, local: int, count: int, dtype: np.dtype[Any]) -> Any:
        """See Place."""
        self._blocks = self._own
        return self._view(local, 0, count, dtype)


def needs_shared(cases: Iterable[Case]) -> bool:
    """Whether any case wants memory that peers can address."""
    return any(VARIANTS[case.variant].access == "direct" for case in cases)


def place_of(communicator: Communicator, *, shared: bool) -> Place:
    """The place for a communicator's kind of ranks. A collective."""
    kind = CudaPlace if communicator.topology.device_kind == "cuda" else HostPlace
    return kind(communicator, shared=shared)


def _guarded(values: Array, offset: int, memory: Array | None) -> Guarded:
    guarded = Guarded(
        values.dtype, values.size, offset=offset, guard_bytes=GUARD_BYTES, memory=memory
    )
    guarded.array.view(np.uint8)[:] = values.view(np.uint8)
    return guarded
