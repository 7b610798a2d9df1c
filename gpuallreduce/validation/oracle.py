"""What each case starts from and must lead to, computed once for the cases that share it.

Knows nothing of communicators: inputs, reference and bounds of all ranks, from a seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from gpuallreduce import reference
from gpuallreduce.accuracy import exact
from gpuallreduce.inputs import exact_inputs, random_inputs
from gpuallreduce.types import DTYPES, OPS
from gpuallreduce.validation.cases import VARIANTS, Case

__all__ = ["Expectation", "Oracle"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Expectation:
    """One set of inputs and its outcome.

    Attributes:
        inputs: every rank's.
        result: what is to come out, to the bit; None where the order of the fold is free.
        value, bound: the real value and the bound on the error; None where nothing is combined.
    """

    inputs: list[Array]
    result: Array | None
    value: Array | None = None
    bound: Array | None = None


class Oracle:
    """Expectations for one number of ranks and one seed."""

    def __init__(self, nranks: int, seed: int) -> None:
        self.nranks = nranks
        self._seed = seed
        self._exact: Callable[..., Expectation] = functools.lru_cache(64)(self._make_exact)
        self._random: Callable[..., Expectation] = functools.lru_cache(64)(self._make_random)

    def exact(self, case: Case) -> Expectation:
        """Inputs that reduce without rounding, in any order."""
        variant = VARIANTS[case.variant]
        free = variant.order == "any"
        # A free order rounds partial results to elements: only sums stay representable there, and
        # the mean of an exact sum is rounded once, whatever the order.
        like = "sum" if free and case.op == "avg" else case.op
        expected = self._exact(case.dtype, case.op, like, self._count(case))
        if (
            like != case.op
            and variant.algorithm == "hierarchical"
            and self.nranks & self.nranks - 1
        ):
            return replace(expected, result=None)  # each node divides, which rounds
        return expected

    def random(self, case: Case) -> Expectation:
        """Inputs that round, with NaN, infinity, subnormals and extremes among them."""
        rounds = DTYPES[case.dtype].kind in ("float", "complex")
        free = VARIANTS[case.variant].order == "any" and rounds
        op = case.op if case.reduces else None
        return self._random(case.dtype, op, self._count(case), free)

    def _count(self, case: Case) -> int:
        return case.count * (self.nranks if case.collective == "reduce_scatter" else 1)

    def _make_exact(self, dtype: str, op: str, like: str, count: int) -> Expectation:
        inputs = exact_inputs(DTYPES[dtype], OPS[like], count, self.nranks, self._seed)
        return Expectation(inputs, reference.allreduce(inputs, op))

    def _make_random(self, dtype: str, op: str | None, count: int, free: bool) -> Expectation:
        row, seed = OPS[op or "sum"], self._seed
        inputs = random_inputs(DTYPES[dtype], row, count, self.nranks, seed, special=True)
        if op is None:
            return Expectation(inputs, None)
        value, bound = exact(inputs, op, rounds_each_hop=free)
        return Expectation(inputs, None if free else reference.allreduce(inputs, op), value, bound)
