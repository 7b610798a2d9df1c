"""The short way of an all-reduce that was made before: from CuPy arrays to launches, past plans and
bindings.

Knows nothing of plans: what it repeats was checked when it was prepared, and whatever differs from
that in any way is left to the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuallreduce.args import GarDeviceArgs

__all__ = ["QuickCalls", "QuickLaunch"]

KEPT = 4096  # a program that never repeats a size must not grow without end


@dataclass(frozen=True)
class QuickLaunch:
    """A launch on all local ranks that only waits for its addresses.

    Attributes:
        functions: the kernel on each GPU.
        structs: its arguments on each rank, of this launch alone.
        arguments: the same bytes as CuPy passes them.
        nblocks, nthreads: of each.
        direct: peers touch the arrays, so each rank gets everyone's addresses.
    """

    functions: Sequence[Any]
    structs: Sequence[GarDeviceArgs]
    arguments: Sequence[np.ndarray[Any, Any]]
    nblocks: int
    nthreads: int
    direct: bool


class QuickCalls:
    """Launches by what decides them: dtype, operator, bytes, place of results, kind of memory."""

    def __init__(
        self, array_type: Any, ordinals: Sequence[int], is_addressable: Callable[[Any], bool]
    ) -> None:
        """For the ranks of one process.

        Args:
            array_type: CuPy's; subclasses go the long way.
            ordinals: the GPU of each rank.
            is_addressable: whether peers of this process can address an array.
        """
        self._array_type = array_type
        self._ordinals = list(ordinals)
        self._is_addressable = is_addressable
        self._shared = len(set(ordinals)) < len(self._ordinals)
        self._launches: dict[Any, QuickLaunch] = {}
        self._symmetric: dict[int, int] = {}

    def keep(
        self, dtype: Any, op: str, nbytes: int, in_place: bool, direct: bool, launch: QuickLaunch
    ) -> None:
        """Remembers a launch. ``direct``: all arrays could be addressed by peers."""
        if len(self._launches) >= KEPT:
            self._launches.clear()
        self._launches[dtype, op, nbytes, in_place, direct] = launch

    def forget(self) -> None:
        """Drops all launches."""
        self._launches.clear()

    def add_symmetric(self, begin: int, nbytes: int) -> None:
        """Arrays in this range go the long way: peers' addresses depend on where they lie."""
        self._symmetric[begin] = begin + max(nbytes, 1)

    def remove_symmetric(self, begin: int) -> None:
        """The range is gone."""
        self._symmetric.pop(begin, None)

    def find(self, arrays: Any, out: Any, op: str) -> QuickLaunch | None:
        """The launch for these arrays with their addresses filled in; None: go the long way."""
        if not self._launches:
            return None
        inputs = self._listed(arrays)
        outputs = inputs if out is None or out is arrays else self._listed(out)
        if inputs is None or outputs is None:
            return None
        dtype, nbytes = getattr(inputs[0], "dtype", None), getattr(inputs[0], "nbytes", 0)
        sources = self._addresses(inputs, dtype, nbytes)
        targets = sources if outputs is inputs else self._addresses(outputs, dtype, nbytes)
        if sources is None or targets is None or not self._apart(sources, targets, nbytes):
            return None
        pairs = zip(inputs, outputs, strict=True)
        if outputs is not inputs and any(a.shape != b.shape for a, b in pairs):
            return None
        in_place = sources == targets
        several = len(self._ordinals) > 1
        direct = several and all(map(self._is_addressable, (*inputs, *outputs)))
        launch = self._launches.get((dtype, op, nbytes, in_place, direct))
        if launch is not None:
            _fill(launch, sources, targets)
        return launch

    def _listed(self, arrays: Any) -> Sequence[Any] | None:
        """One array per local rank."""
        if len(self._ordinals) == 1:
            return (arrays,)
        if type(arrays) in (list, tuple) and len(arrays) == len(self._ordinals):
            return arrays  # type: ignore[no-any-return]
        return None

    def _addresses(self, arrays: Sequence[Any], dtype: Any, nbytes: int) -> list[int] | None:
        """Where plain arrays lie; None if one is not plain, or not alike."""
        found = []
        for array, ordinal in zip(arrays, self._ordinals, strict=True):
            if type(array) is not self._array_type or array.dtype is not dtype:
                return None
            memory = array.data
            if array.nbytes != nbytes or memory.device_id != ordinal:
                return None
            if nbytes == 0 or not array.flags.c_contiguous:
                return None
            address = memory.ptr
            for begin, end in self._symmetric.items():
                if begin <= address < end:
                    return None
            found.append(address)
        return found

    def _apart(self, sources: Sequence[int], targets: Sequence[int], nbytes: int) -> bool:
        """Whether no result shares bytes with another array, its own input in place apart."""
        for source, target in zip(sources, targets, strict=True):
            if source != target and abs(source - target) < nbytes:
                return False
        if not self._shared:
            return True
        for i, target in enumerate(targets):
            for j, (source, other) in enumerate(zip(sources, targets, strict=True)):
                if i != j and (abs(target - source) < nbytes or abs(target - other) < nbytes):
                    return False
        return True


def _fill(launch: QuickLaunch, sources: Sequence[int], targets: Sequence[int]) -> None:
    for i, struct in enumerate(launch.structs):
        struct.input, struct.output = sources[i], targets[i]
        if launch.direct:
            count = len(sources)
            struct.peer_inputs[:count] = sources
            struct.peer_outputs[:count] = targets
