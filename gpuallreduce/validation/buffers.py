"""The arrays of one call on the local ranks, guarded, and what each is to hold afterwards.

Knows nothing of how a call is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce.checks import Guarded, first_difference
from gpuallreduce.communicator import Communicator
from gpuallreduce.types import DTYPES
from gpuallreduce.validation.cases import VARIANTS, Case

__all__ = ["Arena", "Buffers"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_GUARD_BYTES = 256
_ARENA_BYTES = 512 << 10  # the largest array of any case, its offset and its guards


class Arena:
    """Memory of one process's rank that its peers can address, for an input and an output."""

    def __init__(self, communicator: Communicator) -> None:
        """A collective: every rank makes one."""
        self.input: Array = communicator.empty(_ARENA_BYTES, np.uint8)
        self.output: Array = communicator.empty(_ARENA_BYTES, np.uint8)


class Buffers:
    """Inputs and, unless the call is in place, outputs of the local ranks."""

    def __init__(
        self, case: Case, inputs: Sequence[Array], ranks: Sequence[int], arena: Arena | None
    ) -> None:
        """Copies the local ranks' inputs.

        Args:
            case: says how many elements, and where arrays start.
            inputs: every rank's.
            ranks: the local ones.
            arena: where arrays lie if the case has direct access.
        """
        self._case, self._ranks, self._given = case, ranks, inputs
        if VARIANTS[case.variant].access != "direct":
            arena = None
        memory, shared = (None, False) if arena is None else (arena.input, True)
        # Symmetric arrays start at the same place on every rank, others anywhere.
        self._inputs = [
            _guarded(inputs[rank], case.offset * (1 if shared else rank), memory) for rank in ranks
        ]
        self._outputs = self._inputs if case.in_place else self._make_outputs(arena)

    def _make_outputs(self, arena: Arena | None) -> list[Guarded]:
        count = self._case.count
        if self._case.collective == "all_gather":
            count *= len(self._given)
        filler = np.resize(np.arange(251, dtype=np.uint8), count * self._dtype.itemsize)
        if self._dtype.kind == "b":
            filler &= 1
        self._filler: Array = filler.view(self._dtype)
        memory = None if arena is None else arena.output
        return [_guarded(self._filler, 2 * self._case.offset, memory) for _ in self._ranks]

    @property
    def _dtype(self) -> np.dtype[Any]:
        return DTYPES[self._case.dtype].numpy

    def inputs(self) -> list[Array]:
        """The arrays to call with."""
        return [guarded.array for guarded in self._inputs]

    def results(self) -> list[Array]:
        """The arrays that the call writes: those of inputs() if it is in place."""
        return [guarded.array for guarded in self._outputs]

    def overwritten(self) -> Iterator[tuple[int, str | None]]:
        """(rank, which guard bytes were overwritten) of every buffer."""
        for side, buffers in (("input", self._inputs), ("output", self._outputs)):
            for rank, guarded in zip(self._ranks, buffers, strict=True):
                message = guarded.check()
                yield rank, message and f"{side}: {message}"

    def modified(self) -> Iterator[tuple[int, str | None]]:
        """(rank, where an array differs that the call was not to write)."""
        for rank, guarded, out in zip(self._ranks, self._inputs, self._outputs, strict=True):
            receives = self._case.collective != "reduce" or rank == self._case.root
            if not (self._case.in_place and receives):
                yield rank, first_difference(guarded.array, self._given[rank])
            if not self._case.in_place and not receives:
                yield rank, first_difference(out.array, self._filler)

    def expected(self, whole: Array | None) -> Iterator[tuple[int, Array, Array | None]]:
        """(rank, what it got, its part of ``whole``) for the ranks that get a result.

        Args:
            whole: something for each element of the reduction; collectives that only move data
                have no need of it.
        """
        case, given = self._case, self._given
        for rank, guarded in zip(self._ranks, self._outputs, strict=True):
            right = whole
            if case.collective == "reduce" and rank != case.root:
                continue
            if case.collective == "reduce_scatter" and whole is not None:
                right = whole[rank * case.count : (rank + 1) * case.count]
            elif case.collective == "all_gather":
                right = np.concatenate(given)
            elif case.collective == "broadcast":
                right = given[case.root]
            yield rank, guarded.array, right


def _guarded(values: Array, offset: int, memory: Array | None) -> Guarded:
    guarded = Guarded(
        values.dtype, values.size, offset=offset, guard_bytes=_GUARD_BYTES, memory=memory
    )
    guarded.array.view(np.uint8)[:] = values.view(np.uint8)
    return guarded
