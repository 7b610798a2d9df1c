"""The oracle against a second one: scalar, exact (fractions), and with its own rounding."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gpuallreduce import reference
from gpuallreduce.accuracy import exact
from gpuallreduce.checks import first_difference, worst_error
from gpuallreduce.errors import InvalidArgument, NotSupported
from gpuallreduce.inputs import random_inputs
from gpuallreduce.types import DTYPES, OPS


@dataclass(frozen=True)
class Format:
    """A binary floating-point format; ``infinite`` is False where all ones is the only NaN."""

    bits: int
    nmant: int
    bias: int
    nan: int
    infinite: bool = True

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        return (self.sign - 1) >> self.nmant << self.nmant

    @property
    def largest(self) -> int:
        return self.infinity - 1 if self.infinite else self.sign - 2


FORMATS = {
    "float8_e4m3fn": Format(8, 3, 7, 0x7F, infinite=False),
    "float8_e5m2": Format(8, 2, 15, 0x7E),
    "float16": Format(16, 10, 15, 0x7E00),
    "bfloat16": Format(16, 7, 127, 0x7FC0),
    "float32": Format(32, 23, 127, 0x7FC00000),
    "float64": Format(64, 52, 1023, 0x7FF8000000000000),
}
NARROW = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"]
FLOATS = list(FORMATS)
INTEGERS = [name for name, row in DTYPES.items() if row.kind in ("int", "uint")]
COMPLEX = {"complex64": "float32", "complex128": "float64"}
NAN = (0, None)  # a number is (sign, magnitude), the magnitude a Fraction, math.inf or None


def decode(bits, fmt):
    sign, field = bits // fmt.sign, bits % fmt.sign
    exponent, mantissa = field >> fmt.nmant, field % (1 << fmt.nmant)
    if field > fmt.largest:
        return (sign, math.inf) if fmt.infinite and field == fmt.infinity else NAN
    if exponent:
        mantissa += 1 << fmt.nmant
    return sign, mantissa * Fraction(2) ** (max(exponent, 1) - fmt.bias - fmt.nmant)


def encode(number, fmt):
    """Rounds once, to nearest even; returns bits."""
    sign, size = number
    if size is None:
        return fmt.nan
    least = 1 - fmt.bias
    if size == math.inf:
        field = fmt.infinity if fmt.infinite else fmt.sign
    elif size == 0:
        field = 0
    else:
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        exponent -= size < Fraction(2) ** exponent
        exponent = max(exponent, least)
        units = round(size / Fraction(2) ** (exponent - fmt.nmant))
        field = ((exponent - least) << fmt.nmant) + units
    if field > fmt.largest:
        if not fmt.infinite:
            return fmt.nan
        field = fmt.infinity
    return field + sign * fmt.sign


def rounded(number, fmt):
    return decode(encode(number, fmt), fmt)


def negate(x):
    return (1 - x[0], x[1])


def add(x, y, fmt):
    if x[1] is None or y[1] is None:
        return NAN
    if math.inf in (x[1], y[1]):
        if x[1] == y[1] and x[0] != y[0]:
            return NAN
        return x if x[1] == math.inf else y
    total = (-x[1] if x[0] else x[1]) + (-y[1] if y[0] else y[1])
    sign = x[0] & y[0] if total == 0 else int(total < 0)
    return rounded((sign, abs(total)), fmt)


def multiply(x, y, fmt):
    if x[1] is None or y[1] is None:
        return NAN
    sign = x[0] ^ y[0]
    if math.inf in (x[1], y[1]):
        return NAN if 0 in (x[1], y[1]) else (sign, math.inf)
    return rounded((sign, x[1] * y[1]), fmt)


def maximum(x, y, fmt):
    if x[1] is None or y[1] is None:
        return NAN
    a, b = ((-v if s else v) for s, v in (x, y))
    return x if a >= b else y


def minimum(x, y, fmt):
    return negate(maximum(negate(x), negate(y), fmt)) if None not in (x[1], y[1]) else NAN


STEPS = {"sum": add, "avg": add, "prod": multiply, "max": maximum, "min": minimum}


def divided(x, nranks, fmt):
    return x if x[1] in (None, math.inf) else rounded((x[0], x[1] / nranks), fmt)


def model_float(patterns, op, name):
    """Bits of the reduction of one element per rank."""
    fmt, wide = FORMATS[name], FORMATS[DTYPES[name].accumulator]
    numbers = [decode(bits, fmt) for bits in patterns]
    acc = numbers[0]
    for number in numbers[1:]:
        acc = STEPS[op](acc, number, wide)
    return encode(divided(acc, len(numbers), wide) if op == "avg" else acc, fmt)


def model_complex(patterns, op, name):
    """As model_float, for pairs of bits."""
    fmt = FORMATS[COMPLEX[name]]
    if op != "prod":
        return tuple(model_float(part, op, COMPLEX[name]) for part in zip(*patterns, strict=True))
    numbers = [[decode(bits, fmt) for bits in pair] for pair in patterns]
    a, b = numbers[0]
    for c, d in numbers[1:]:
        ac, bd, ad, bc = (multiply(x, y, fmt) for x, y in ((a, c), (b, d), (a, d), (b, c)))
        a, b = add(ac, negate(bd), fmt), add(ad, bc, fmt)
    return encode(a, fmt), encode(b, fmt)


def specials(name):
    """Zeros, subnormals, normals at the edges, ones, infinities and NaNs, of both signs."""
    fmt = FORMATS[name]
    one = fmt.bias << fmt.nmant
    fields = {0, 1, 2, (1 << fmt.nmant) - 1, 1 << fmt.nmant, one - 1, one, one + 1, one + 3}
    fields |= {fmt.largest - 1, fmt.largest, fmt.largest // 2, fmt.infinity, fmt.infinity + 1}
    fields |= {fmt.nan, fmt.sign - 1}
    return [field + sign for field in sorted(fields) for sign in (0, fmt.sign)]


def arrays_of(tuples, name):
    """One array per rank from one tuple of bit patterns per element."""
    bits = np.array(tuples, dtype=f"u{DTYPES[name].itemsize}")
    return [np.ascontiguousarray(column).view(DTYPES[name].numpy) for column in bits.T]


def bits_of(x):
    return x.view(f"u{x.dtype.itemsize}").tolist()


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_match_exact_arithmetic_on_all_pairs_of_specials_and_random_folds(name, op):
    rng = random.Random(f"{name} {op}")
    values = specials(name)
    pairs = list(itertools.product(values, values))
    pairs += [tuple(rng.getrandbits(FORMATS[name].bits) for _ in range(2)) for _ in range(300)]
    triples = [tuple(rng.choice(values) for _ in range(3)) for _ in range(200)]
    one = FORMATS[name].bias << FORMATS[name].nmant
    longer = [
        tuple(rng.choice((0, FORMATS[name].sign)) + one + rng.randrange(16) for _ in range(7))
        for _ in range(200)
    ]
    for tuples in (pairs, triples, longer):
        result = reference.allreduce(arrays_of(tuples, name), op)
        assert result.dtype == DTYPES[name].numpy
        for got, patterns in zip(bits_of(result), tuples, strict=True):
            assert got == model_float(patterns, op, name), [hex(bits) for bits in patterns]


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_matches_exact_arithmetic_part_by_part(name, op):
    rng = random.Random(f"{name} {op}")
    part = COMPLEX[name]
    values = specials(part)
    one, spread = FORMATS[part].bias << FORMATS[part].nmant, 3 << FORMATS[part].nmant
    values += [one + rng.randrange(-spread, spread) for _ in range(len(values))]
    for nranks in (2, 3):
        tuples = [
            tuple((rng.choice(values), rng.choice(values)) for _ in range(nranks))
            for _ in range(600)
        ]
        bits = np.array(tuples, dtype=f"u{DTYPES[part].itemsize}")
        arrays = [
            np.ascontiguousarray(bits[:, rank]).view(DTYPES[name].numpy)[:, 0]
            for rank in range(nranks)
        ]
        result = reference.allreduce(arrays, op).view(bits.dtype).reshape(-1, 2)
        for got, patterns in zip(result.tolist(), tuples, strict=True):
            assert tuple(got) == model_complex(patterns, op, name), patterns


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_product_is_not_contracted_in_vectorised_loops(name):
    x, y = (
        a.view(f"f{a.dtype.itemsize // 2}").reshape(-1, 2).T
        for a in random_inputs(DTYPES[name], OPS["prod"], 20_001, 2, seed=1)
    )
    (a, b), (c, d) = x, y
    ac, bd, ad, bc = a * c, b * d, a * d, b * c
    expected = np.stack([ac - bd, ad + bc], axis=1).view(DTYPES[name].numpy)[:, 0]
    arrays = [np.ascontiguousarray(v.T).view(DTYPES[name].numpy)[:, 0] for v in (x, y)]
    assert first_difference(reference.allreduce(arrays, "prod"), expected) is None


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "avg"])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_vectorised_fold_matches_numpy_rank_by_rank(name, op):
    arrays = random_inputs(DTYPES[name], OPS[op], 10_007, 5, seed=2)
    steps = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}
    expected = arrays[0]
    for x in arrays[1:]:
        expected = steps.get(op, np.add)(expected, x)
    if op == "avg":
        expected = expected / expected.dtype.type(5)
    assert first_difference(reference.allreduce(arrays, op), expected) is None


def round_bits(source, fmt):
    """float32 bits to ``fmt`` bits, in integers only."""
    field = source.astype(np.int64) & 0x7FFFFFFF
    sign = source.astype(np.int64) >> 31 << (fmt.bits - 1)
    exponent = np.maximum(field >> 23, 1)
    mantissa = (field & 0x7FFFFF) | ((field >> 23 > 0) << 23).astype(np.int64)
    target = np.maximum(exponent - 127, 1 - fmt.bias)
    shift = np.minimum(target - fmt.nmant - (exponent - 150), 40)
    kept, rest, half = mantissa >> shift, mantissa & ((1 << shift) - 1), 1 << (shift - 1)
    kept += (rest > half) | ((rest == half) & (kept & 1 == 1))
    result = ((target - 1 + fmt.bias) << fmt.nmant) + kept
    overflow = fmt.infinity | sign if fmt.infinite else fmt.nan
    result = np.where((result > fmt.largest) | (field == 0x7F800000), overflow, result | sign)
    return np.where(field > 0x7F800000, fmt.nan, result)


@pytest.mark.parametrize("name", NARROW)
def test_every_narrow_value_widens_exactly_and_rounds_back_to_itself(name):
    fmt, row = FORMATS[name], DTYPES[name]
    every = np.arange(1 << fmt.bits).astype(f"u{row.itemsize}")
    wide = reference._widened(every.view(row.numpy), row, "sum")
    assert wide.dtype == np.float32
    for bits, value in zip(every.tolist(), wide.tolist(), strict=True):
        sign, size = decode(bits, fmt)
        if size is None:
            assert math.isnan(value)
        else:
            assert (abs(value), math.copysign(1, value)) == (size, -1 if sign else 1)
    back = bits_of(reference._rounded(wide, row, 1))
    assert back == [encode(decode(bits, fmt), fmt) for bits in every.tolist()]


@pytest.mark.parametrize("name", NARROW)
def test_rounding_is_single_and_to_nearest_even_at_and_around_every_midpoint(name):
    fmt, row = FORMATS[name], DTYPES[name]
    positive = np.arange(fmt.largest + 1).astype(f"u{row.itemsize}").view(row.numpy)
    wide = positive.astype(np.float64)
    step = wide[-1] - wide[-2]
    middle = ((wide + np.append(wide[1:], wide[-1] + step)) / 2).astype(np.float32).view(np.uint32)
    rng = np.random.default_rng(3)
    sample = np.concatenate(
        [middle - 2, middle - 1, middle, middle + 1, middle + 2]
        + [positive.astype(np.float32).view(np.uint32) + d for d in (0, 1)]
        + [rng.integers(0, 1 << 31, 300_000, dtype=np.uint32)]  # all magnitudes
        + [np.arange(0x31000000, 0x49000000, 997, dtype=np.uint32)]  # 2^-29 .. 2^19, densely
        + [np.arange(0, 0x02000000, 101, dtype=np.uint32)]  # float32 subnormals and beyond
        + [np.array([0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF], np.uint32)]
    )
    sample = np.concatenate([sample, sample | np.uint32(1 << 31)])
    result = reference._rounded(sample.view(np.float32).copy(), row, 1)
    expected = round_bits(sample, fmt).astype(f"u{row.itemsize}").view(row.numpy)
    assert first_difference(result, expected) is None


def test_the_integer_rounding_of_this_test_agrees_with_fractions():
    rng = random.Random(4)
    for name in NARROW:
        sample = [rng.getrandbits(32) for _ in range(1000)]
        expected = [encode(decode(bits, FORMATS["float32"]), FORMATS[name]) for bits in sample]
        assert round_bits(np.array(sample, np.uint32), FORMATS[name]).tolist() == expected


def test_float8_e4m3fn_overflows_to_nan_past_the_tie_and_float8_e5m2_to_infinity():
    e4m3 = [
        np.array(v, ml_dtypes.float8_e4m3fn) for v in ([448, 448, 448, -448], [15, 16, 18, 448])
    ]
    assert bits_of(reference.allreduce(e4m3, "sum")) == [0x7E, 0x7E, 0x7F, 0x00]
    e5m2 = [np.array(v, ml_dtypes.float8_e5m2) for v in ([57344, -57344], [8192, -57344])]
    assert bits_of(reference.allreduce(e5m2, "sum")) == [0x7C, 0xFC]


def model_integer(values, op, row):
    acc = values[0]
    for x in values[1:]:
        acc = {
            "sum": acc + x,
            "prod": acc * x,
            "max": max(acc, x),
            "min": min(acc, x),
            "band": acc & x,
            "bor": acc | x,
            "bxor": acc ^ x,
        }[op]
    acc %= 1 << (8 * row.itemsize)
    limit = np.iinfo(row.numpy).max
    return acc if acc <= limit else acc - (1 << (8 * row.itemsize))


@pytest.mark.parametrize("op", [op for op in OPS if op != "avg"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_like_unbounded_integers_modulo_their_width(name, op):
    row = DTYPES[name]
    info, rng = np.iinfo(row.numpy), random.Random(5)
    edges = [info.min, info.min + 1, 0, 1, 2, 3, info.max // 2, info.max - 1, info.max]
    tuples = list(itertools.product(edges, edges))
    for nranks, count in ((2, 81), (3, 200), (9, 100)):
        tuples = tuples if nranks == 2 else []
        while len(tuples) < count:
            tuples.append(tuple(rng.randint(info.min, info.max) for _ in range(nranks)))
        arrays = [np.array(column, row.numpy) for column in zip(*tuples, strict=True)]
        expected = [model_integer(values, op, row) for values in tuples]
        assert reference.allreduce(arrays, op).tolist() == expected


@pytest.mark.parametrize("op", [op for op in OPS if op != "avg"])
@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_bool_is_logical_for_every_combination(op, nranks):
    tuples = list(itertools.product([False, True], repeat=nranks))
    fold = {"bxor": lambda v: sum(v) % 2 == 1}
    fold |= dict.fromkeys(("sum", "max", "bor"), any)
    fold |= dict.fromkeys(("prod", "min", "band"), all)
    result = reference.allreduce([np.array(v) for v in zip(*tuples, strict=True)], op)
    assert result.tolist() == [fold[op](values) for values in tuples]


@pytest.mark.parametrize("op", ["sum", "prod", "avg", "max", "min"])
@pytest.mark.parametrize("name", FLOATS)
def test_one_rank_gets_its_own_bits_back_even_nan_payloads(name, op):
    (x,) = arrays_of([(bits,) for bits in specials(name)], name)
    result = reference.allreduce([x], op)
    assert result is not x
    assert not np.shares_memory(result, x)
    assert first_difference(result, x) is None


@pytest.mark.parametrize("name", FLOATS)
def test_ties_of_signed_zeros_keep_the_lowest_ranks_value(name):
    zeros = np.array([0.0, -0.0], DTYPES[name].numpy)
    for op in ("max", "min"):
        result = reference.allreduce([zeros, zeros[::-1], zeros[::-1]], op)
        assert first_difference(result, zeros) is None


@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
def test_every_nan_of_a_result_is_the_canonical_one(name):
    part = COMPLEX.get(name, name)
    for op in ("sum", "prod", "avg"):
        arrays = random_inputs(DTYPES[name], OPS[op], 2000, 2, seed=6, special=True)
        result = reference.allreduce(arrays, op).view(DTYPES[part].numpy)
        nan = result.view(f"u{result.dtype.itemsize}")[np.isnan(result)]
        assert set(nan.tolist()) == {FORMATS[part].nan} == {reference.NAN_BITS[part]}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_shape_is_kept_and_inputs_are_not_modified(name, shape):
    arrays = [np.full(shape, r + 1).astype(DTYPES[name].numpy) for r in range(3)]
    before = [x.copy() for x in arrays]
    result = reference.allreduce(arrays, "sum")
    assert (result.shape, result.dtype) == (shape, DTYPES[name].numpy)
    assert result.flags.c_contiguous
    assert all(first_difference(x, y) is None for x, y in zip(arrays, before, strict=True))


def test_strided_transposed_and_unaligned_inputs_are_read_by_value():
    x = np.arange(24.0).reshape(4, 6)
    raw = np.zeros(8 * 12 + 1, np.uint8)
    unaligned = raw[1:].view(np.float64).reshape(6, 2)
    unaligned[...] = 0.5
    result = reference.allreduce([x.T[:, ::2], unaligned], "sum")
    assert np.array_equal(result, x.T[:, ::2] + 0.5)


@pytest.mark.parametrize("call", [reference.allreduce, exact])
def test_calls_without_a_meaning_are_refused(call):
    x = np.zeros(3, np.float32)
    for arrays, op in (
        ([], "sum"),
        ([x, x[:2]], "sum"),
        ([x, x.astype(np.float64)], "sum"),
        ([x], "add"),
        ([x.astype(">f4")] * 2, "sum"),
    ):
        with pytest.raises(InvalidArgument):
            call(arrays, op)
    with pytest.raises(NotSupported, match="bxor of float32"):
        call([x, x], "bxor")


def as_fraction(x):
    return Fraction(float(x))


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("name", FLOATS)
def test_exact_value_and_bound_hold_in_fractions_for_any_order_of_ranks(name, op):
    arrays = random_inputs(DTYPES[name], OPS[op], 40, 4, seed=7)
    value, bound = exact(arrays, op)
    assert value.dtype == bound.dtype == np.float64
    results = [
        reference.allreduce([arrays[r] for r in order], op)
        for order in itertools.permutations(range(4))
    ]
    for i in np.flatnonzero(np.isfinite(bound)):
        terms = [as_fraction(x[i]) for x in arrays]
        truth = math.prod(terms) if op == "prod" else sum(terms) / (4 if op == "avg" else 1)
        assert abs(as_fraction(value[i]) - truth) <= abs(truth) * Fraction(2) ** -52
        for result in results:
            error = abs(as_fraction(result[i]) - truth)
            assert error <= Fraction(float(bound[i]))
    assert np.isfinite(bound).mean() > 0.5


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_reference_is_within_its_bound_and_the_bound_is_not_idle(name, op, nranks):
    arrays = random_inputs(DTYPES[name], OPS[op], 3000, nranks, seed=8)
    value, bound = exact(arrays, op)
    fraction = worst_error(reference.allreduce(arrays, op), value, bound)
    # Two ranks' float64 result and the real value in float64 are the same rounding.
    idle = nranks == 2 and DTYPES[COMPLEX.get(name, name)].itemsize == 8 and fraction == 0
    assert fraction > 0.1 or idle
    assert fraction <= 1


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
def test_bound_sees_an_error_of_three_units_in_the_last_place(name, op):
    arrays = random_inputs(DTYPES[name], OPS[op], 500, 2, seed=9)
    arrays = [abs(x).astype(x.dtype) for x in arrays]  # no cancellation
    value, bound = exact(arrays, op)
    result = reference.allreduce(arrays, op)
    wrong = result.copy()
    parts = wrong.view(DTYPES[COMPLEX.get(name, name)].numpy)
    checked = np.isfinite(bound) & (abs(value) > 1e-4)
    parts.view(f"u{parts.dtype.itemsize}")[:] += np.uint8(3)
    seen = [worst_error(wrong[i], value[i], bound[i]) > 1 for i in np.flatnonzero(checked)]
    assert np.mean(seen) > 0.99


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max", "min"])
@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
def test_special_values_stay_within_the_bound(name, op):
    if name in COMPLEX and op in ("max", "min"):
        return
    for nranks in (1, 2, 5):
        arrays = random_inputs(DTYPES[name], OPS[op], 3000, nranks, seed=10, special=True)
        value, bound = exact(arrays, op)
        for order in (list(range(nranks)), list(range(nranks))[::-1]):
            result = reference.allreduce([arrays[r] for r in order], op)
            assert worst_error(result, value, bound) <= 1
        assert (bound >= 0).all()


def test_exact_is_better_than_float64_where_a_sum_cancels():
    arrays = [np.array([x]) for x in (2.0**53, 1.0, 2.0**-3, -(2.0**53))]
    value, bound = exact(arrays, "sum")
    assert abs(value[0] - 1.125) <= bound[0]
    assert 0 < bound[0] <= 2.0**4
    if np.finfo(np.longdouble).nmant >= 63:
        assert value[0] == 1.125


def test_bound_is_infinite_where_the_fold_may_overflow_and_zero_for_exact_operators():
    big = np.array([3e38, 1.0], np.float32)
    value, bound = exact([big, big, -big], "sum")
    assert np.isinf(bound[0])
    assert np.isfinite(bound[1])
    assert abs(value[1] - 1) <= bound[1]
    for op in ("max", "min"):
        value, bound = exact([big, -big], op)
        assert not bound.any()
        assert np.array_equal(value, np.array([1, 1]) * (big if op == "max" else -big))


@pytest.mark.parametrize("name", ["bool", *INTEGERS])
def test_exact_of_integers_is_the_result_itself(name):
    arrays = random_inputs(DTYPES[name], OPS["sum"], 100, 3, seed=11)
    value, bound = exact(arrays, "sum")
    assert first_difference(value, reference.allreduce(arrays, "sum")) is None
    assert not bound.any()


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_exact_keeps_the_shape(shape):
    for dtype in (np.float16, np.complex64):
        for op in ("sum", "prod", "avg"):
            value, bound = exact([np.ones(shape, dtype)] * 2, op)
            assert value.shape == bound.shape == shape


NARROW = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"]


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("name", NARROW)
def test_rounding_each_hop_stays_within_its_own_bound_and_not_always_within_the_other(name, op):
    worst = {True: 0.0, False: 0.0}
    for nranks in (2, 4, 9):
        arrays = random_inputs(DTYPES[name], OPS[op], 4000, nranks, seed=13, special=True)
        result = arrays[0]
        for x in arrays[1:]:
            result = reference.allreduce([result, x], op)
        for rounds_each_hop in worst:
            value, bound = exact(arrays, op, rounds_each_hop=rounds_each_hop)
            fraction = worst_error(result, value, bound)
            worst[rounds_each_hop] = max(worst[rounds_each_hop], fraction)
    assert 0.2 < worst[True] <= 1 < worst[False]


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
def test_rounding_each_hop_changes_nothing_where_elements_are_accumulators(name, op):
    arrays = random_inputs(DTYPES[name], OPS[op], 100, 4, seed=14)
    plain, hops = exact(arrays, op), exact(arrays, op, rounds_each_hop=True)
    assert all(np.array_equal(x, y) for x, y in zip(plain, hops, strict=True))
