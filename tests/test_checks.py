"""Inputs: exact in any order, and telling; checks: each kind of fault is found and named."""

from __future__ import annotations

import itertools
import math
import random

import ml_dtypes
import numpy as np
import pytest

from gpuallreduce import reference
from gpuallreduce.accuracy import exact
from gpuallreduce.checks import (
    Guarded,
    first_difference,
    worst_deviation,
    worst_error,
    wrong_count,
)
from gpuallreduce.errors import InvalidArgument
from gpuallreduce.inputs import exact_inputs, random_inputs
from gpuallreduce.types import DTYPES, OPS

DEFINED = [(d, o) for d in DTYPES.values() for o in OPS.values() if d.kind in o.kinds]
FLOATING = [(d, o) for d, o in DEFINED if d.kind in ("float", "complex")]


def by_name(row):
    return row.name


def bits_of(x):
    columns = 2 if x.dtype.kind == "c" else 1
    return x.view(f"u{x.dtype.itemsize // columns}")


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=by_name)
@pytest.mark.parametrize("nranks", [2, 3, 8, 16, 20])
def test_exact_inputs_have_the_same_bits_in_any_order_of_the_ranks(dtype, op, nranks):
    arrays = exact_inputs(dtype, op, 200, nranks, seed=1)
    expected = reference.allreduce(arrays, op.name)
    rng = random.Random(1)
    for _ in range(6):
        rng.shuffle(arrays)
        assert first_difference(reference.allreduce(arrays, op.name), expected) is None


@pytest.mark.parametrize(
    ("dtype", "op"), [(d, o) for d, o in DEFINED if o.name != "avg"], ids=by_name
)
@pytest.mark.parametrize("nranks", [4, 16])
def test_exact_inputs_have_the_same_bits_as_a_tree_that_rounds_every_partial_result(
    dtype, op, nranks
):
    arrays = exact_inputs(dtype, op, 200, nranks, seed=2)
    expected = reference.allreduce(arrays, op.name)
    random.Random(2).shuffle(arrays)
    while len(arrays) > 1:
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        arrays = [reference.allreduce(pair, op.name) for pair in pairs]
    assert first_difference(arrays[0], expected) is None


@pytest.mark.parametrize(("dtype", "op"), FLOATING, ids=by_name)
@pytest.mark.parametrize("nranks", [1, 2, 5, 16])
def test_exact_inputs_reduce_to_the_real_value_without_error(dtype, op, nranks):
    for seed in range(5):
        arrays = exact_inputs(dtype, op, 300, nranks, seed)
        result = reference.allreduce(arrays, op.name)
        value, _ = exact(arrays, op.name)
        assert np.isfinite(value).all()
        assert np.array_equal(result.astype(value.dtype), value)
        assert op.name != "prod" or (result != 0).all()


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=by_name)
@pytest.mark.parametrize("nranks", [2, 3, 16])
def test_exact_inputs_show_a_lost_a_repeated_and_a_shifted_contribution(dtype, op, nranks):
    arrays = exact_inputs(dtype, op, 400, nranks, seed=3)
    expected = reference.allreduce(arrays, op.name)
    assert len(np.unique(expected)) > 1
    for rank in range(nranks):
        others = arrays[:rank] + arrays[rank + 1 :]
        repeated = [*others, arrays[rank - 1]]
        shifted = [*others, np.roll(arrays[rank], 8)]
        for wrong in (others, repeated, shifted):
            assert wrong_count(reference.allreduce(wrong, op.name), expected) > 3


@pytest.mark.parametrize("inputs", [exact_inputs, random_inputs])
@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=by_name)
def test_inputs_are_reproducible_differ_by_seed_and_accept_count_zero(inputs, dtype, op):
    first, again, other = (inputs(dtype, op, 64, 3, seed) for seed in (4, 4, 5))
    assert all(x.shape == (64,) and x.dtype == dtype.numpy for x in first)
    assert all(first_difference(x, y) is None for x, y in zip(first, again, strict=True))
    assert any(first_difference(x, y) for x, y in zip(first, other, strict=True))
    assert [x.shape for x in inputs(dtype, op, 0, 3, 4)] == [(0,)] * 3


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int32", "complex64"])
def test_exact_inputs_of_wide_types_differ_between_ranks_and_neighbours(name):
    arrays = exact_inputs(DTYPES[name], OPS["sum"], 10_000, 4, seed=6)
    for x, y in itertools.combinations(arrays, 2):
        assert np.mean(x == y) < 0.01
    assert np.mean(arrays[0][1:] == arrays[0][:-1]) < 0.01


def test_mean_of_exact_inputs_is_an_integer_multiple_of_their_unit_for_many_ranks():
    for nranks in (16, 24, 100):
        arrays = exact_inputs(DTYPES["float8_e5m2"], OPS["avg"], 500, nranks, seed=3)
        total = np.sum([x.astype(np.float64) for x in arrays], axis=0)
        assert not (total % nranks).any()  # seed 3 has unit 1
        assert len(np.unique(total)) > 3


@pytest.mark.parametrize("name", [d.name for d in DTYPES.values() if d.kind in ("int", "uint")])
def test_integer_inputs_have_full_range_and_their_sum_wraps(name):
    dtype = DTYPES[name]
    arrays = exact_inputs(dtype, OPS["sum"], 2000, 2, seed=7)
    info, wide = np.iinfo(dtype.numpy), [int(v) for v in np.concatenate(arrays)]
    assert max(wide) > info.max * 0.98
    assert min(wide) < info.min * 0.98 + info.max * 0.02
    assert any(not info.min <= int(x) + int(y) <= info.max for x, y in zip(*arrays, strict=True))


@pytest.mark.parametrize(
    ("dtype", "op"), [(d, o) for d, o in DEFINED if d.kind in ("bool", "int", "uint")], ids=by_name
)
def test_integer_and_bool_results_of_many_ranks_do_not_saturate(dtype, op):
    result = reference.allreduce(exact_inputs(dtype, op, 2000, 16, seed=7), op.name)
    bits = np.unpackbits(result.view(np.uint8))
    ones = bits.mean() * (8 if dtype.kind == "bool" else 1)
    if op.name not in ("max", "min") or dtype.kind == "bool":
        assert 0.2 < ones < 0.8


@pytest.mark.parametrize(
    ("dtype", "op"), [(d, o) for d, o in FLOATING if o.name in ("sum", "avg", "prod")], ids=by_name
)
def test_random_inputs_show_the_order_and_the_rounding(dtype, op):
    arrays = random_inputs(dtype, op, 4000, 4, seed=8)
    assert all(np.isfinite(x).all() for x in arrays)
    result = reference.allreduce(arrays, op.name)
    if dtype.itemsize >= 4:
        assert wrong_count(reference.allreduce(arrays[::-1], op.name), result) > 400
    else:
        value, _ = exact(arrays, op.name)
        assert np.mean(result.astype(value.dtype) != value) > 0.2
    finite = np.isfinite(result)
    assert finite.mean() > 0.8
    assert np.mean(result[finite] != 0) > 0.9


@pytest.mark.parametrize(
    "name", [d.name for d in DTYPES.values() if d.kind in ("float", "complex")]
)
def test_special_inputs_hold_every_kind_of_special_value_on_every_rank(name):
    dtype = DTYPES[name]
    part = DTYPES[{"complex64": "float32", "complex128": "float64"}.get(name, name)]
    info = ml_dtypes.finfo(part.numpy)
    for x in random_inputs(dtype, OPS["sum"], 4000, 3, seed=9, special=True):
        parts = x.view(part.numpy)
        bits, size = bits_of(parts), abs(parts)
        with np.errstate(invalid="ignore"):
            nan, subnormal = np.isnan(parts), (size > 0) & (size < info.tiny)
            found = [size == 0, subnormal, size == info.max, nan]
            finite = np.isfinite(parts)
        if name != "float8_e4m3fn":
            found.append(~finite & ~nan)
        for kind in found:
            assert set(np.signbit(parts[kind]).tolist()) == {False, True}
        payloads = set(bits[nan].tolist())
        assert len(payloads) == {"float8_e4m3fn": 2, "float8_e5m2": 6}.get(name, 8)
        assert np.mean(finite) > 0.8


@pytest.mark.parametrize("name", ["int8", "int64", "uint8", "uint64"])
def test_special_integers_hold_both_extremes(name):
    info = np.iinfo(DTYPES[name].numpy)
    for x in random_inputs(DTYPES[name], OPS["max"], 1000, 3, seed=10, special=True):
        assert {info.min, info.max} <= set(x.tolist())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=by_name)
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_guards_stay_whole_while_only_the_array_is_written(dtype, count, offset):
    guarded = Guarded(dtype, count, offset=offset, guard_bytes=128)
    assert (guarded.array.shape, guarded.array.dtype) == ((count,), dtype.numpy)
    assert guarded.array.flags.writeable
    assert np.shares_memory(guarded.array, guarded.buffer) == (count > 0)
    address = guarded.buffer.ctypes.data
    start = 128 + offset * dtype.itemsize
    assert address % 128 == 0
    if count:
        assert guarded.array.ctypes.data == address + start
    assert guarded.buffer.size == start + count * dtype.itemsize + 128
    assert guarded.check() is None
    for value in (0, 1):
        guarded.array[...] = value
        assert guarded.check() is None


@pytest.mark.parametrize("count", [0, 3])
def test_each_overwritten_guard_byte_is_found_on_its_side(count):
    guarded = Guarded(DTYPES["float32"], count, offset=1, guard_bytes=128)
    start, stop = 132, 132 + 4 * count
    for at in [*range(start), *range(stop, guarded.buffer.size)]:
        before = guarded.buffer[at]
        guarded.buffer[at] ^= 1
        edge, distance = ("start", at - start) if at < start else ("end", at - stop)
        message = guarded.check()
        assert message is not None
        assert f"1 guard bytes overwritten at {distance:+d} .." in message
        assert f"from the array's {edge}" in message
        assert message.endswith(f"is {before ^ 1:#04x}, was {before:#04x}")
        guarded.buffer[at] = before
    assert guarded.check() is None


def test_guard_shows_an_overrun_that_copies_another_guard_from_the_same_place():
    source, target = (Guarded(DTYPES["int32"], 5) for _ in range(2))
    target.buffer[:] = source.buffer
    assert "1024 guard bytes overwritten at -1024 .. -1 from" in target.check()


def test_guard_bytes_are_rounded_up_so_that_the_alignment_holds():
    guarded = Guarded(np.dtype(np.int16), 1, offset=3, guard_bytes=1)
    assert guarded.buffer.size == 128 + 6 + 2 + 128
    assert guarded.array.ctypes.data % 128 == 6


def test_guarded_array_of_bool_holds_only_zero_and_one_at_first():
    assert set(Guarded(DTYPES["bool"], 500).array.view(np.uint8).tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=by_name)
def test_holding_copies_bits(dtype):
    values = random_inputs(dtype, OPS["sum"], 60, 1, seed=11, special=True)[0]
    guarded = Guarded.holding(values.reshape(5, 12).T, offset=1)
    assert first_difference(guarded.array, values.reshape(5, 12).T.reshape(-1)) is None
    assert guarded.check() is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=by_name)
def test_differences_are_of_bits_not_values(dtype):
    x = random_inputs(dtype, OPS["sum"], 500, 1, seed=12, special=True)[0]
    assert first_difference(x, x.copy()) is None
    assert wrong_count(x, x.copy()) == 0
    y = x.copy()
    bits_of(y)[[7, -1]] ^= np.uint8(1)
    message = first_difference(x, y)
    assert message.startswith(f"element {7 // (bits_of(y).size // 500)}: ")
    assert message.endswith("2 of 500 differ")
    assert wrong_count(x, y) == 2


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.float32(0.0), np.float32(-0.0), "0.0 (0x00000000) is not -0.0 (0x80000000)"),
        (np.int8(-1), np.int8(1), "-1 (0xff) is not 1 (0x01)"),
        (
            np.complex64(1j),
            np.complex64(0),
            "1j (0x00000000 0x3f800000) is not 0j (0x00000000 0x00",
        ),
        (ml_dtypes.bfloat16(1), ml_dtypes.bfloat16(1.5), "1 (0x3f80) is not 1.5 (0x3fc0)"),
        (np.bool_(True), np.bool_(False), "True (0x01) is not False (0x00)"),
    ],
)
def test_first_difference_shows_values_and_bits(a, b, message):
    x, y = (np.array([[0, 0], [0, v]], v.dtype) for v in (a, b))
    assert first_difference(x, y).startswith(f"element (1, 1): {message}")


def test_nan_payloads_differ_and_equal_nans_do_not():
    x, y = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert first_difference(x, x) is None
    assert wrong_count(x, y) == 1


def test_arrays_of_other_shape_or_dtype_are_different_and_cannot_be_counted():
    x = np.zeros(4, np.float32)
    for y in (x[:3], x.reshape(2, 2), x.astype(np.int32)):
        assert "is not" in first_difference(x, y)
        with pytest.raises(InvalidArgument, match="cannot be compared"):
            wrong_count(x, y)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_checks_accept_scalars_and_empty_arrays(shape):
    for dtype in DTYPES.values():
        x = np.zeros(shape, dtype.numpy)
        assert first_difference(x, x) is None
        assert wrong_count(x, x) == 0
        assert worst_error(x, *exact([x, x], "sum")) == 0
    assert first_difference(np.array(1), np.array(2)).startswith("element (): 1 ")


@pytest.mark.parametrize(
    ("result", "value", "bound", "fraction"),
    [
        (1.0, 1.0, 0.0, 0.0),
        (1.5, 1.0, 1.0, 0.5),
        (1.0, 2.0, 0.5, 2.0),
        (1.0, 2.0, 0.0, math.inf),
        (math.nan, math.nan, 0.0, 0.0),
        (math.nan, 1.0, 1.0, math.inf),
        (1.0, math.nan, 0.0, math.inf),
        (math.inf, math.inf, 0.0, 0.0),
        (-math.inf, math.inf, 0.0, math.inf),
        (math.inf, 1.0, 1.0, math.inf),
        (math.nan, 1.0, math.inf, 0.0),
        (complex(math.inf, 1.5), complex(math.inf, 1), 1.0, 0.5),
        (complex(math.nan, 1), complex(1, 1), 1.0, math.inf),
        (3 + 4j, 0j, 10.0, 0.5),
    ],
)
def test_worst_error_is_the_fraction_of_the_bound(result, value, bound, fraction):
    arrays = [np.array([v, v]) for v in (result, value)]
    assert worst_error(*arrays, np.array([bound, bound])) == fraction
    assert worst_error(*(np.array(v) for v in (result, value, bound))) == fraction


def test_worst_error_of_integers_is_all_or_nothing():
    x = np.array([1, 2], np.uint64)
    assert worst_error(x, x, np.zeros(2)) == 0
    assert worst_error(x, x + np.uint64(1), np.zeros(2)) == math.inf


def test_worst_deviation_names_the_error_and_the_bound_of_the_same_element():
    value, bound = np.array([1.0, 10.0, 100.0]), np.array([0.5, 4.0, 50.0])
    assert worst_deviation(np.array([1.1, 13.0, 110.0]), value, bound) == (0.75, 3.0, 4.0)
    assert worst_deviation(np.zeros(0), np.zeros(0), np.zeros(0)) == (0, 0, 0)


def test_guarded_array_lies_in_the_memory_it_is_given():
    memory = np.zeros(1024, np.uint8)
    guarded = Guarded(DTYPES["int16"], 5, guard_bytes=128, memory=memory)
    assert np.shares_memory(guarded.array, memory)
    assert guarded.check() is None
    with pytest.raises(InvalidArgument, match="memory has 1024"):
        Guarded(DTYPES["int16"], 500, guard_bytes=128, memory=memory)


@pytest.mark.parametrize("name", ["float8_e5m2", "float16", "float32", "complex128"])
@pytest.mark.parametrize("nranks", [2, 8])
def test_special_inputs_have_zeros_of_both_signs_meet_without_another_value(name, nranks):
    arrays = random_inputs(DTYPES[name], OPS["max"], 400, nranks, seed=15, special=True)
    parts = [x.view(f"f{x.itemsize // 2}") if name == "complex128" else x for x in arrays]
    tied = np.all([x == 0 for x in parts], axis=0)
    negative = np.sum([np.signbit(x) for x in parts], axis=0)
    assert np.count_nonzero(tied & (negative > 0) & (negative < nranks)) >= 2
