"""The arrays of one call on the local ranks, guarded, and what each is to hold afterwards.

Knows nothing of how a call is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce.checks import Guarded, first_difference
from gpuallreduce.types import DTYPES
from gpuallreduce.validation.cases import VARIANTS, Case
from gpuallreduce.validation.places import Place

__all__ = ["Buffers"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Buffers:
    """Inputs and, unless the call is in place, outputs of the local ranks."""

    def __init__(
        self, case: Case, inputs: Sequence[Array], ranks: Sequence[int], place: Place
    ) -> None:
        """Copies the local ranks' inputs to memory of a place that begins anew with each case.

        Args:
            case: says how many elements, and where arrays start.
            inputs: every rank's.
            ranks: the local ones.
            place: where arrays lie.
        """
        self._case, self._ranks, self._given, self._place = case, ranks, inputs, place
        # Symmetric arrays start at the same place on every rank, others anywhere.
        symmetric = VARIANTS[case.variant].access == "direct"
        offsets = [case.offset * (1 if symmetric else rank) for rank in ranks]
        self._inputs = [
            place.guarded(local, self._spread(inputs[rank]), offsets[local])
            for local, rank in enumerate(ranks)
        ]
        self._outputs = self._inputs if case.in_place else self._make_outputs()

    def _make_outputs(self) -> list[Guarded]:
        count = self._case.count
        if self._case.collective == "all_gather":
            count *= len(self._given)
        self._filler = self._pattern(count)
        spread, offset = self._spread(self._filler), 2 * self._case.offset
        return [self._place.guarded(local, spread, offset) for local in range(len(self._ranks))]

    def _pattern(self, count: int) -> Array:
        filler = np.resize(np.arange(251, dtype=np.uint8), count * self._dtype.itemsize)
        if self._dtype.kind == "b":
            filler &= 1
        return filler.view(self._dtype)

    def _spread(self, values: Array) -> Array:
        """The values as far apart as the case has them, with a pattern between them."""
        stride, itemsize = self._case.stride, self._dtype.itemsize
        if stride == 1:
            return values
        spread = self._pattern(values.size * stride)
        # As bytes: not every copy of a NaN keeps its bits.
        places = spread.view(np.uint8).reshape(-1, itemsize)[::stride]
        places[...] = values.view(np.uint8).reshape(-1, itemsize)
        return spread

    def _gaps(self, guarded: Guarded) -> str | None:
        """Where the pattern between the values was overwritten."""
        stride, pattern = self._case.stride, self._pattern(guarded.array.size)
        differences = (
            first_difference(guarded.array[first::stride], pattern[first::stride])
            for first in range(1, stride)
        )
        return next((f"in a gap: {each}" for each in differences if each is not None), None)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return DTYPES[self._case.dtype].numpy

    def given(self) -> tuple[list[Any], list[Any] | None]:
        """The arrays to call with, one for each local rank: inputs, and outputs or None."""
        inputs = self._arrays(self._inputs)
        return inputs, None if self._case.in_place else self._arrays(self._outputs)

    def _arrays(self, buffers: Sequence[Guarded]) -> list[Any]:
        arrays = [self._place.array(local, guarded) for local, guarded in enumerate(buffers)]
        return arrays if self._case.stride == 1 else [x[:: self._case.stride] for x in arrays]

    def results(self) -> list[Array]:
        """The arrays that the call writes: the inputs if it is in place."""
        return [self._values(guarded) for guarded in self._outputs]

    def _values(self, guarded: Guarded) -> Array:
        return guarded.array[:: self._case.stride]

    def overwritten(self) -> Iterator[tuple[int, str | None]]:
        """(rank, which guard bytes were overwritten) of every buffer."""
        for side, buffers in (("input", self._inputs), ("output", self._outputs)):
            for rank, guarded in zip(self._ranks, buffers, strict=True):
                message = guarded.check() or self._gaps(guarded)
                yield rank, message and f"{side}: {message}"

    def modified(self) -> Iterator[tuple[int, str | None]]:
        """(rank, where an array differs that the call was not to write)."""
        for rank, guarded, out in zip(self._ranks, self._inputs, self._outputs, strict=True):
            receives = self._case.collective != "reduce" or rank == self._case.root
            if not (self._case.in_place and receives):
                yield rank, first_difference(self._values(guarded), self._given[rank])
            if not self._case.in_place and not receives:
                yield rank, first_difference(self._values(out), self._filler)

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
            yield rank, self._values(guarded), right
