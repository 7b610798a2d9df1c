"""Enumerates what a validation run checks: which collective, on what, how, and how much of it.

Pure: knows nothing of communicators, devices or results.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.types import DTYPES, OPS, Dtype, Op, Reduction, reduction
from gpuallreduce.validation import counts

__all__ = [
    "ACROSS",
    "LEVELS",
    "ONE_NODE",
    "VARIANTS",
    "Case",
    "Variant",
    "enumerate_cases",
    "smaller",
]

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
    "hierarchical": Variant("hierarchical"),
    "hierarchical_any": Variant("hierarchical", order="any"),
}
ACROSS = ("auto", "hierarchical", "hierarchical_any")  # what there is between nodes
ONE_NODE = tuple(name for name in VARIANTS if name not in ACROSS or name == "auto")
_ROTATING = ("two_shot", "two_shot_direct", "ring", "ring_any")
_ROTATING_ACROSS = ("hierarchical", "hierarchical_any")
_ELEMENTS = {dtype.element: dtype.code for dtype in DTYPES.values()}
_FUNCTORS = {op.functor: op.code for op in OPS.values()}


@dataclass(frozen=True)
class Case:
    """One thing to check.

    Attributes:
        collective: name of the communicator's method; for allreduce_many one array is given in
            several parts.
        dtype, op: names.
        count: elements; for reduce_scatter and all_gather of one rank's block.
        variant: name in VARIANTS.
        chunk_bytes, nchannels: what the call forces.
        in_place: whether there is no ``out``.
        offset: elements by which arrays start past an aligned address.
        stride: elements from one to the next.
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
    stride: int = 1
    root: int = 0
    refused: bool = False

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, or only moved."""
        return self.collective in ("allreduce", "allreduce_many", "reduce", "reduce_scatter")

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
    nodes: Sequence[int] = (),
) -> list[Case]:
    """The cases of a run, those of one kernel one after the other.

    Every pair of dtype and operator is in each level: defined pairs are reduced, the others must
    be refused. ``full`` and ``default`` run each pair through every variant; ``default`` has all
    counts for one-shot and for one of the others in turn, and some for the rest. ``quick`` runs
    each through the tuner's choice, and sums also through one of the others. Between nodes
    ``default`` has all counts for the one in rank order.

    Args:
        nranks: ranks of the communicator.
        level: one of LEVELS.
        dtypes, ops: names to keep; empty: all.
        variants: run each pair through these only, and leave out the other collectives.
        nodes: ranks of each node; none or one: all are on one.

    Raises:
        InvalidArgument: one of the variants does not exist for so many nodes.
    """
    across = len(nodes) > 1
    _check_variants(variants, across=across)
    cases: list[Case] = []
    for dtype, op in itertools.product(DTYPES.values(), OPS.values()):
        if (dtypes and dtype.name not in dtypes) or (ops and op.name not in ops):
            continue
        try:
            kernel = reduction(dtype, op)
        except NotSupported:
            cases += _refusals(dtype, op)
            continue
        turn = _turn(kernel, across)
        pair = _Pair(dtype, op, nranks, across)
        for variant in variants or _chosen(level, op, turn, across):
            first = variant == ("hierarchical" if across else "one_shot")
            thorough = level == "full" or first or variant == turn or bool(variants)
            cases += _allreduces(pair, variant, few=level == "quick" or not thorough)
        if not variants:
            cases += _arrangements(pair)
            cases += _reductions(dtype, op, nranks, level)
    if variants or ops:
        return cases
    moved = [dtype for dtype in DTYPES.values() if not dtypes or dtype.name in dtypes]
    cases += itertools.chain.from_iterable(_moves(dtype, nranks) for dtype in moved)
    return [*cases, Case("barrier", "uint8", "sum", 0)]


def _check_variants(variants: Collection[str], *, across: bool) -> None:
    offered = ACROSS if across else ONE_NODE
    for variant in variants:
        if variant not in offered:
            where = "between nodes" if across else "on one node"
            raise InvalidArgument(
                f"{where} there is no algorithm {variant!r} to validate; there are "
                f"{', '.join(offered)}"
            )


def _turn(kernel: Reduction, across: bool) -> str:
    """The variant whose turn it is: one for a kernel, so that pairs that share it still do."""
    names = _ROTATING_ACROSS if across else _ROTATING
    return names[(_ELEMENTS[kernel.element] + _FUNCTORS[kernel.functor]) % len(names)]


def _chosen(level: str, op: Op, turn: str, across: bool) -> tuple[str, ...]:
    if level != "quick":
        return ACROSS if across else ONE_NODE
    return ("auto", turn) if op.name in ("sum", "avg") else ("auto",)


def _refusals(dtype: Dtype, op: Op) -> Iterator[Case]:
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        yield Case(collective, dtype.name, op.name, 3, refused=True)


@dataclass(frozen=True)
class _Pair:
    """A pair that is defined, on so many ranks, on one node or across several."""

    dtype: Dtype
    op: Op
    nranks: int
    across: bool

    def case(self, count: int, variant: str = "auto", **fields: Any) -> Case:
        return Case("allreduce", self.dtype.name, self.op.name, count, variant, **fields)


def _allreduces(pair: _Pair, variant: str, *, few: bool) -> Iterator[Case]:
    plain = counts.plain(pair.dtype, pair.nranks)
    quick = few or variant == "auto"
    for i, count in enumerate(plain[1::2] if quick else plain):
        for in_place in (True, False):
            yield pair.case(count, variant, in_place=in_place, offset=i % 3)
    is_sum = pair.op.name == "sum"
    if is_sum and not few:
        count = counts.long_across(pair.dtype) if pair.across else counts.long(pair.dtype)
        yield pair.case(count, variant, in_place=variant != "auto")
    if variant == "auto":
        return
    chunked = counts.chunked_across if pair.across else counts.chunked
    for i, (count, chunk_bytes) in enumerate(chunked(pair.dtype, pair.nranks, few=quick)):
        forced = {"chunk_bytes": chunk_bytes, "in_place": i % 2 == 0, "offset": i % 3}
        yield pair.case(count, variant, **forced)
    if is_sum and pair.across and not quick:
        yield pair.case(counts.MANY_CHUNKS, variant, chunk_bytes=pair.dtype.itemsize)
    if is_sum and not pair.across:
        forced = {"chunk_bytes": 64, "nchannels": 3, "in_place": False, "offset": 1}
        yield pair.case(1009, variant, **forced)


def _arrangements(pair: _Pair) -> Iterator[Case]:
    """Arrays with gaps, and many arrays at once."""
    if pair.op.name != "sum":
        return
    for in_place in (True, False):
        yield pair.case(129, in_place=in_place, offset=1, stride=2)
    if pair.across:
        ((count, chunk_bytes), _) = counts.chunked_across(pair.dtype, pair.nranks, few=True)
        yield pair.case(count, "hierarchical", chunk_bytes=chunk_bytes, stride=3)
    for count in (7, 3001):
        yield replace(pair.case(count, offset=count % 2), collective="allreduce_many")


def _reductions(dtype: Dtype, op: Op, nranks: int, level: str) -> Iterator[Case]:
    if level != "full" and op.name != "sum":
        return
    pack = counts.pack(dtype)
    few = (0, 1) if level == "quick" else (0, 1, pack - 1)
    for i, count in enumerate((*few, nranks * pack + 1, 20_000 // dtype.itemsize + 3)):
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
