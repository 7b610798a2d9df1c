"""Enumerates what a validation run checks: which collective, on what, how, and how much of it.

Pure: knows nothing of communicators, devices or results.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from gpuallreduce.errors import NotSupported
from gpuallreduce.types import DTYPES, OPS, Dtype, Op, Reduction, reduction

__all__ = ["LEVELS", "VARIANTS", "Case", "Variant", "enumerate_cases", "smaller"]

LEVELS = ("quick", "default", "full")


@dataclass(frozen=True)
class Variant:
    """A way to run an all-reduce: what its keywords force; None leaves it to the tuner."""

    algorithm: str | None = None
    access: str | None = None
    order: str | None = None


VARIANTS = {
    "auto": Variant(),
    "one_shot": Variant("one_shot", "staged"),
    "two_shot": Variant("two_shot", "staged"),
    "two_shot_direct": Variant("two_shot", "direct"),
    "ring": Variant("ring", "staged"),
    "ring_any": Variant("ring", "staged", "any"),
}
_ALWAYS = {"quick": ("auto",), "default": tuple(VARIANTS), "full": tuple(VARIANTS)}
_ROTATING = ("two_shot", "two_shot_direct", "ring", "ring_any")
_ELEMENTS = {dtype.element: dtype.code for dtype in DTYPES.values()}
_FUNCTORS = {op.functor: op.code for op in OPS.values()}


@dataclass(frozen=True)
class Case:
    """One thing to check.

    Attributes:
        collective: name of the communicator's method.
        dtype, op: names.
        count: elements; for reduce_scatter and all_gather of one rank's block.
        variant: name in VARIANTS.
        chunk_bytes, nchannels: what the call forces.
        in_place: whether there is no ``out``.
        offset: elements by which arrays start past an aligned address.
        root: for broadcast and reduce.
        refused: whether NotSupported is the right answer.
    """

    collective: str
    dtype: str
    op: str
    count: int
    variant: str = "auto"
    chunk_bytes: int | None = None
    nchannels: int | None = None
    in_place: bool = True
    offset: int = 0
    root: int = 0
    refused: bool = False

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, or only moved."""
        return self.collective in ("allreduce", "reduce", "reduce_scatter")

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What cases have in common that differ in how much and where only."""
        return self.collective, self.dtype, self.op, self.variant


def enumerate_cases(
    nranks: int,
    level: str = "default",
    *,
    dtypes: Collection[str] = (),
    ops: Collection[str] = (),
    variants: Collection[str] = (),
) -> list[Case]:
    """The cases of a run, those of one kernel one after the other.

    Every pair of dtype and operator is in each level: defined pairs are reduced, the others must
    be refused. ``full`` and ``default`` run each pair through every variant; ``default`` has all
    counts for one-shot and for one of the others in turn, and some for the rest. ``quick`` runs
    each through the tuner's choice, and sums also through one of the others.

    Args:
        nranks: ranks of the communicator.
        level: one of LEVELS.
        dtypes, ops: names to keep; empty: all.
        variants: run each pair through these only, and leave out the other collectives.
    """
    cases: list[Case] = []
    for dtype, op in itertools.product(DTYPES.values(), OPS.values()):
        if (dtypes and dtype.name not in dtypes) or (ops and op.name not in ops):
            continue
        try:
            kernel = reduction(dtype, op)
        except NotSupported:
            cases += _refusals(dtype, op)
            continue
        for variant in variants or _chosen(level, op, _turn(kernel)):
            thorough = level == "full" or variant in ("one_shot", _turn(kernel)) or bool(variants)
            cases += _allreduces(dtype, op, variant, nranks, few=level == "quick" or not thorough)
        if not variants:
            cases += _reductions(dtype, op, nranks, level)
    if variants or ops:
        return cases
    moved = [dtype for dtype in DTYPES.values() if not dtypes or dtype.name in dtypes]
    cases += itertools.chain.from_iterable(_moves(dtype, nranks) for dtype in moved)
    return [*cases, Case("barrier", "uint8", "sum", 0)]


def _turn(kernel: Reduction) -> str:
    """The variant whose turn it is: one for a kernel, so that pairs that share it still do."""
    return _ROTATING[(_ELEMENTS[kernel.element] + _FUNCTORS[kernel.functor]) % len(_ROTATING)]


def _chosen(level: str, op: Op, turn: str) -> tuple[str, ...]:
    if level == "quick" and op.name not in ("sum", "avg"):
        return _ALWAYS[level]
    return tuple(dict.fromkeys((*_ALWAYS[level], turn)))


def _refusals(dtype: Dtype, op: Op) -> Iterator[Case]:
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        yield Case(collective, dtype.name, op.name, 3, refused=True)


def _allreduces(dtype: Dtype, op: Op, variant: str, nranks: int, *, few: bool) -> Iterator[Case]:
    base = Case("allreduce", dtype.name, op.name, 0, variant)
    counts = _plain_counts(dtype, nranks)
    quick = few or variant == "auto"
    for i, count in enumerate(counts[1::2] if quick else counts):
        for in_place in (True, False):
            yield replace(base, count=count, in_place=in_place, offset=i % 3)
    if op.name == "sum" and not few:
        large = 200_000 // dtype.itemsize + 7  # more than a slot, in chunks of the tuner's size
        yield replace(base, count=large, in_place=variant != "auto")
    if variant == "auto":
        return
    for i, (count, chunk_bytes) in enumerate(_chunked_counts(dtype, nranks, few=quick)):
        case = replace(base, count=count, chunk_bytes=chunk_bytes, in_place=i % 2 == 0)
        yield replace(case, offset=i % 3)
    if op.name == "sum":
        yield replace(base, count=1009, chunk_bytes=64, nchannels=3, in_place=False, offset=1)


def _pack(dtype: Dtype) -> int:
    """Elements of the widest pack of any target; its edges are edges of the narrower ones too."""
    return 64 // DTYPES[dtype.accumulator].itemsize


def _plain_counts(dtype: Dtype, nranks: int) -> list[int]:
    pack = _pack(dtype)
    edges = {pack - 1, pack, pack + 1, nranks - 1, nranks + 1, nranks * pack, nranks * pack + 1}
    return sorted({0, 1, 13, 127, *edges} - {2, 3})


def _chunked_counts(dtype: Dtype, nranks: int, *, few: bool) -> Iterator[tuple[int, int]]:
    """(count, chunk_bytes): one, several and many chunks; more than slots, and than ranks."""
    chunk = 3 * max(16, dtype.itemsize) // dtype.itemsize
    everyone = chunk * nranks
    counts = [40 * chunk + 1, everyone - 1, everyone + 1, chunk - 1, chunk, chunk + 1]
    for count in counts[:2] if few else [*counts, 5 * everyone + nranks + 1]:
        yield count, chunk * dtype.itemsize
    if not few:
        yield 5 * nranks + 1, dtype.itemsize  # chunks of one element


def _reductions(dtype: Dtype, op: Op, nranks: int, level: str) -> Iterator[Case]:
    if level != "full" and op.name != "sum":
        return
    pack = _pack(dtype)
    counts = (0, 1, nranks * pack + 1) if level == "quick" else (0, 1, pack - 1, nranks * pack + 1)
    for i, count in enumerate((*counts, 20_000 // dtype.itemsize + 3)):
        root = (i + dtype.code) % nranks
        for in_place in (True, False):
            yield Case(
                "reduce", dtype.name, op.name, count, in_place=in_place, root=root, offset=i % 2
            )
        yield Case("reduce_scatter", dtype.name, op.name, count, in_place=False, offset=i % 3)


def _moves(dtype: Dtype, nranks: int) -> Iterator[Case]:
    for i, count in enumerate((0, 1, 13, 129, 20_000 // dtype.itemsize + 3)):
        root = (i + dtype.code) % nranks
        yield Case("all_gather", dtype.name, "sum", count, in_place=False, offset=i % 3)
        yield Case("broadcast", dtype.name, "sum", count, root=root, offset=i % 2)


def smaller(case: Case) -> Iterator[Case]:
    """The same case with fewer elements: from the fewest on, all small counts, then the halves."""
    halves = {case.count >> shift for shift in range(1, case.count.bit_length())}
    if case.chunk_bytes is not None:
        chunk = case.chunk_bytes // DTYPES[case.dtype].itemsize
        halves |= {k * chunk + d for k in (1, 2, 4, 8, 16) for d in (0, 1)}
    for count in sorted({*range(35), 63, 64, 65, 127, 128, 129, *halves}):
        if count < case.count:
            yield replace(case, count=count)
