"""Inputs that make mistakes visible: sums that are exact in any order, and sums that round.

Knows nothing of devices, communicators or how a reduction is computed.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from gpuallreduce.types import DTYPES, Dtype, Op

__all__ = ["exact_inputs", "random_inputs"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_PART = {"complex64": "float32", "complex128": "float64"}
_SCALING_RANKS = 6


def exact_inputs(dtype: Dtype, op: Op, count: int, nranks: int, seed: int) -> list[Array]:
    """Inputs whose reduction has the same bits in any order, so that any difference is a fault.

    Sum: random integers times one power of two, so small that any partial sum is representable in
    the element type itself. avg: the same, but partial sums need the accumulator, and the mean is
    representable. prod: powers of two and signs that keep any partial product in range; complex
    prod: also multiples of 2 + i, which have no part that cancels to zero. Integers: full range,
    odd factors for prod, so that no product collapses to zero; masks for and/or that leave about
    a third of the bits undecided. max and min: random values, no two zeros.

    Args:
        dtype: element type.
        op: an operator that is defined for it.
        count: elements of each array.
        nranks: number of arrays.
        seed: same seed, same inputs.

    Returns:
        One array of shape ``(count,)`` per rank. Values are random over ranks and indices, so a
        misplaced run of elements shows even where the type has few values.
    """
    rng = np.random.default_rng([seed, nranks])
    if dtype.kind not in ("float", "complex"):
        return [_random_bits(rng, dtype, op, count, nranks, rank=rank) for rank in range(nranks)]
    if op.name == "prod":
        factors = _complex_factors if dtype.kind == "complex" else _factors
        return [x.astype(dtype.numpy) for x in factors(rng, count, nranks)]
    part = DTYPES[_PART.get(dtype.name, dtype.name)]
    parts = count * dtype.itemsize // part.itemsize
    scale = 2.0 ** (seed % 5 - 3)
    integers = _terms(rng, part, op, parts, nranks)
    return [(scale * x).astype(part.numpy).view(dtype.numpy) for x in integers]


def _terms(rng: np.random.Generator, part: Dtype, op: Op, count: int, nranks: int) -> list[Array]:
    largest = 2 ** (_finfo(part).nmant + 1)  # all integers up to here are representable
    if op.name in ("max", "min"):
        return [rng.integers(-largest, largest + 1, count) for _ in range(nranks)]
    if op.name == "avg":
        wide = 2 ** (_finfo(DTYPES[part.accumulator]).nmant + 1)
        return _with_integer_mean(rng, min(largest, wide // nranks), count, nranks)
    if nranks <= largest:
        limit = largest // nranks
        return [rng.integers(-limit, limit + 1, count) for _ in range(nranks)]
    first = rng.integers(0, nranks, count)
    return [
        rng.integers(-1, 2, count) * ((first + rank) % nranks < largest) for rank in range(nranks)
    ]


def _with_integer_mean(
    rng: np.random.Generator, limit: int, count: int, nranks: int
) -> list[Array]:
    terms = [rng.integers(-limit, limit + 1, count) for _ in range(nranks)]
    # Lowering terms by the remainder cannot run out of room: the remainder is also that of the
    # sum of all distances to the lower limit, so at most that sum.
    remainder = np.sum(terms, axis=0, dtype=np.int64) % nranks
    for x in terms:
        step = np.minimum(remainder, x + limit)
        x -= step
        remainder -= step
    return terms


def _factors(rng: np.random.Generator, count: int, nranks: int) -> list[Array]:
    # Only some ranks scale at an index, so any partial product lies within 2^-6 .. 2^6.
    first = rng.integers(0, nranks, count)
    result: list[Array] = []
    for rank in range(nranks):
        scales = (first + rank) % nranks < _SCALING_RANKS
        exponent = rng.integers(-1, 2, count) * scales
        result.append(np.ldexp(rng.choice([-1.0, 1.0], count), exponent))
    return result


def _complex_factors(rng: np.random.Generator, count: int, nranks: int) -> list[Array]:
    # Powers of 2 + i are never real or imaginary, so no zero's sign depends on the order; 16 of
    # them stay below 5^8 < 2^24, so their products and sums are exact in float32.
    choices = np.array([2 + 1j, -2 - 1j, 2, 0.5])
    first = rng.integers(0, nranks, count)
    return [
        np.where((first + rank) % nranks < 16, rng.choice(choices, count), 1)
        for rank in range(nranks)
    ]


def _random_bits(
    rng: np.random.Generator, dtype: Dtype, op: Op, count: int, nranks: int, *, rank: int
) -> Array:
    """Integers or bool of full range, thinned where the operator would saturate."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = _uniform(rng, unsigned, count)
    logical = dtype.kind == "bool"
    conjunction = op.name == "band" or (logical and op.name in ("prod", "min"))
    if conjunction or op.name == "bor" or (logical and op.name in ("sum", "max")):
        for _ in range((nranks - 1).bit_length() - 1):
            bits &= _uniform(rng, unsigned, count)
        bits = ~bits if conjunction else bits
    elif op.name == "prod":
        bits |= rng.integers(0, nranks, count) != rank
    return (bits & 1).view(np.bool_) if logical else bits.view(dtype.numpy)


def _uniform(rng: np.random.Generator, unsigned: np.dtype[Any], count: int) -> Array:
    return rng.integers(0, np.iinfo(unsigned).max, count, dtype=unsigned, endpoint=True)


def random_inputs(
    dtype: Dtype, op: Op, count: int, nranks: int, seed: int, *, special: bool = False
) -> list[Array]:
    """Inputs whose reduction rounds, so that order and precision show in the bits.

    Floats are normal deviates of widely varying scale (of scale around 1 for prod); integers and
    bool are as in exact_inputs.

    Args:
        dtype: element type.
        op: an operator that is defined for it.
        count: elements of each array.
        nranks: number of arrays.
        seed: same seed, same inputs.
        special: put NaN (quiet, signalling, of either sign), infinity, subnormals, both zeros,
            the largest and least finite values (for integers: the extremes) into a quarter of
            the indices, on several ranks at once; zeros of either sign (for integers: 0 and 1)
            alone on all ranks at some.

    Returns:
        One array of shape ``(count,)`` per rank.
    """
    rng = np.random.default_rng([seed, nranks, 1])
    part = DTYPES[_PART.get(dtype.name, dtype.name)]
    parts = count * dtype.itemsize // part.itemsize
    if dtype.kind in ("float", "complex"):
        spread = 1 if op.name == "prod" else 3 if part.itemsize == 1 else 6
        arrays = [_deviates(rng, part, parts, spread) for _ in range(nranks)]
    else:
        arrays = [_random_bits(rng, dtype, op, count, nranks, rank=rank) for rank in range(nranks)]
    if special and dtype.kind != "bool":
        patterns = _special_patterns(part)
        where = rng.random(parts) < 0.25
        zeros = where & (rng.random(parts) < 0.2)  # on all ranks, or another value would hide them
        for x in arrays:
            chosen = where & (rng.random(parts) < 2 / (nranks + 1))
            bits = x.view(patterns.dtype)
            bits[chosen] = rng.choice(patterns, np.count_nonzero(chosen))
            bits[zeros] = rng.choice(patterns[:2], np.count_nonzero(zeros))
    return [x.view(dtype.numpy) for x in arrays]


def _deviates(rng: np.random.Generator, part: Dtype, count: int, spread: int) -> Array:
    # Wider types start from float64: float32 values would add without rounding.
    kind = np.float64 if part.itemsize == 8 else np.float32
    scale = rng.integers(-spread, spread + 1, count, dtype=np.int32)
    return np.ldexp(rng.standard_normal(count, dtype=kind), scale).astype(part.numpy)


def _special_patterns(dtype: Dtype) -> Array:
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = 1 << (8 * dtype.itemsize - 1)
    if dtype.kind != "float":
        return np.array([0, 1, sign - 1, sign, 2 * sign - 1], unsigned)
    fraction = (1 << _finfo(dtype).nmant) - 1
    infinity = sign - 1 - fraction
    quiet = infinity | (fraction + 1) // 2
    patterns = [0, 1, fraction // 2 + 1, fraction, fraction + 1]
    if dtype.name == "float8_e4m3fn":  # has no infinity; all ones is its only NaN
        patterns += [sign - 2, sign - 1]
    else:
        patterns += [infinity - 1, infinity, infinity, infinity + 1, quiet, quiet + 1, sign - 1]
    return np.array([bits | s for bits in patterns for s in (0, sign)], unsigned)


def _finfo(dtype: Dtype) -> Any:
    return ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-untyped-call,unused-ignore]
