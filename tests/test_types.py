"""Properties of the dtype and operator tables that the kernels and call headers rely on."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from gpuallreduce.errors import Error, InvalidArgument, NotSupported
from gpuallreduce.types import DTYPES, OPS, Reduction, dtype_of, op_of, reduction

PAIRS = [(d, o) for d in DTYPES.values() for o in OPS.values()]
DEFINED = [(d, o) for d, o in PAIRS if d.kind in o.kinds]
REFUSED = [(d, o) for d, o in PAIRS if d.kind not in o.kinds]


def test_tables_hold_what_the_documentation_lists():
    widths = ("8", "16", "32", "64")
    assert list(DTYPES) == [
        *("bool", *(f"int{w}" for w in widths), *(f"uint{w}" for w in widths)),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    ]
    assert list(OPS) == ["sum", "prod", "max", "min", "avg", "band", "bor", "bxor"]


@pytest.mark.parametrize("table", [DTYPES, OPS], ids=["DTYPES", "OPS"])
def test_each_row_is_under_its_own_name_and_code(table):
    assert all(name == row.name for name, row in table.items())
    assert [row.code for row in table.values()] == list(range(len(table)))


def test_no_two_rows_share_a_name_or_a_numpy_dtype():
    assert len({row.name for row in DTYPES.values()}) == len(DTYPES)
    assert len({row.numpy for row in DTYPES.values()}) == len(DTYPES)
    assert len({row.name for row in OPS.values()}) == len(OPS)
    assert len({row.functor for row in OPS.values()}) == len(OPS)


@pytest.mark.parametrize("row", DTYPES.values(), ids=lambda row: row.name)
def test_dtype_row_agrees_with_numpy(row):
    kinds = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
    assert row.numpy.name == row.name
    assert row.numpy.isnative
    assert row.itemsize == row.numpy.itemsize == np.zeros(3, row.numpy).nbytes // 3
    # ml_dtypes gives its types kinds of its own.
    assert kinds.get(row.numpy.kind, "float") == row.kind or hasattr(ml_dtypes, row.name)


@pytest.mark.parametrize("row", DTYPES.values(), ids=lambda row: row.name)
def test_accumulator_holds_every_element_and_is_its_own_accumulator(row):
    accumulator = DTYPES[row.accumulator]
    assert accumulator.accumulator == accumulator.name
    narrow = row.kind == "float" and row.itemsize < 4
    assert accumulator.name == ("float32" if narrow else row.name)


@pytest.mark.parametrize("row", DTYPES.values(), ids=lambda row: row.name)
def test_element_of_integers_and_bool_has_the_size_of_the_dtype(row):
    if row.kind in ("bool", "int", "uint"):
        prefix = "int" if row.kind == "int" else "uint"
        assert row.element == f"{prefix}{8 * row.itemsize}_t"


def test_rows_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DTYPES["int8"].name = "other"


@pytest.mark.parametrize("row", DTYPES.values(), ids=lambda row: row.name)
def test_dtype_is_found_by_name_dtype_scalar_type_and_typestr(row):
    assert dtype_of(row.name) is row
    assert dtype_of(row.numpy) is row
    assert dtype_of(row.numpy.type) is row
    assert dtype_of(np.zeros(2, row.numpy).dtype) is row
    if not hasattr(ml_dtypes, row.name):
        assert dtype_of(row.numpy.str) is row


@pytest.mark.parametrize(
    ("alias", "name"), [(np.longlong, "int64"), ("float", "float64"), ("<f4", "float32")]
)
def test_aliases_find_the_row_of_the_same_layout(alias, name):
    assert dtype_of(alias) is DTYPES[name]


@pytest.mark.parametrize(
    "bad",
    [
        *("object", "S3", "U2", "M8[ns]", "longdouble", "clongdouble", [("a", "f4")], "nonsense"),
        *("", "(2,)f4", ml_dtypes.int4, ml_dtypes.float8_e4m3b11fnuz, object(), 3),
    ],
    ids=str,
)
def test_other_dtypes_are_refused_with_the_list_of_those_supported(bad):
    with pytest.raises(InvalidArgument, match=f"supported: {', '.join(DTYPES)}$") as caught:
        dtype_of(bad)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, Error)


@pytest.mark.parametrize("name", ["int16", "int64", "uint32", "float16", "float64", "complex64"])
def test_byte_swapped_dtype_is_refused_with_the_way_to_convert_it(name):
    with pytest.raises(InvalidArgument, match=r"byte-swapped: convert with x\.astype"):
        dtype_of(np.dtype(name).newbyteorder("S"))


def test_byte_order_of_single_bytes_does_not_matter():
    assert dtype_of(">i1") is DTYPES["int8"]
    assert dtype_of(">u1") is DTYPES["uint8"]


@pytest.mark.parametrize("row", OPS.values(), ids=lambda row: row.name)
def test_op_is_found_by_name(row):
    assert op_of(row.name) is row


@pytest.mark.parametrize("bad", ["add", "SUM", "", None, 0, np.add, ["sum"]], ids=str)
def test_other_operators_are_refused_with_the_list_of_those_supported(bad):
    with pytest.raises(InvalidArgument, match=f"supported: {', '.join(OPS)}$"):
        op_of(bad)


@pytest.mark.parametrize("row", OPS.values(), ids=lambda row: row.name)
def test_kinds_of_an_operator_exist(row):
    assert set(row.kinds) <= {dtype.kind for dtype in DTYPES.values()}
    assert len(set(row.kinds)) == len(row.kinds)


def test_refused_pairs_are_those_without_a_meaning():
    kinds = {(dtype.kind, op.name) for dtype, op in REFUSED}
    assert kinds == {
        *((kind, "avg") for kind in ("bool", "int", "uint")),
        *(("complex", name) for name in ("max", "min")),
        *((kind, name) for kind in ("float", "complex") for name in ("band", "bor", "bxor")),
    }


@pytest.mark.parametrize(("dtype", "op"), REFUSED, ids=lambda row: row.name)
def test_refused_pair_says_what_the_dtype_and_the_operator_take(dtype, op):
    with pytest.raises(NotSupported) as caught:
        reduction(dtype, op)
    asked, of_dtype, of_op = str(caught.value).replace("; ", ": ").split(": ")
    assert asked == f"{op.name} of {dtype.name} is not defined"
    ops = of_dtype.removeprefix(f"{dtype.name} takes ").split(", ")
    dtypes = of_op.removeprefix(f"{op.name} takes ").split(", ")
    assert ops == [o.name for d, o in DEFINED if d is dtype]
    assert dtypes == [d.name for d, o in DEFINED if o is op]


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=lambda row: row.name)
def test_kernel_element_covers_the_array_element(dtype, op):
    found = reduction(dtype, op)
    elements = {row.element: row.itemsize for row in DTYPES.values()}
    assert elements[found.element] * found.elements_per_item == dtype.itemsize


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind == "int"], ids=str)
def test_signed_integers_share_the_unsigned_kernel_unless_they_are_compared(dtype):
    unsigned = DTYPES[f"u{dtype.name}"]
    for op in OPS.values():
        if "int" in op.kinds:
            same = reduction(dtype, op) == reduction(unsigned, op)
            assert same == (op.name not in ("max", "min"))


@pytest.mark.parametrize(
    ("name", "functor"),
    [
        ("sum", "BitOr"),
        ("max", "BitOr"),
        ("bor", "BitOr"),
        ("prod", "BitAnd"),
        ("min", "BitAnd"),
        ("band", "BitAnd"),
        ("bxor", "BitXor"),
    ],
)
def test_bool_operators_are_logical(name, functor):
    assert reduction(DTYPES["bool"], OPS[name]) == Reduction("uint8_t", functor)


@pytest.mark.parametrize(("name", "part"), [("complex64", "float"), ("complex128", "double")])
def test_complex_sum_and_avg_run_on_parts_and_prod_does_not(name, part):
    dtype = DTYPES[name]
    assert reduction(dtype, OPS["sum"]) == Reduction(part, "Sum", 2)
    assert reduction(dtype, OPS["avg"]) == Reduction(part, "Avg", 2)
    assert reduction(dtype, OPS["prod"]) == Reduction(f"Complex<{part}>", "Prod", 1)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_narrow_floats_keep_their_own_element(name):
    for op in OPS.values():
        if "float" in op.kinds:
            assert reduction(DTYPES[name], op) == Reduction(DTYPES[name].element, op.functor)


def test_none_is_no_dtype():
    with pytest.raises(InvalidArgument):
        dtype_of(None)


@pytest.mark.parametrize("bad", ["i4,,", ("f4", -1)], ids=str)
def test_malformed_dtype_is_refused_like_any_other(bad):
    with pytest.raises(InvalidArgument, match="supported: "):
        dtype_of(bad)
