"""The numeric contract: the same bits whatever the algorithm, size, chunking, placement or run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from jobs import run_job

from gpuallreduce import reference
from gpuallreduce.checks import first_difference
from gpuallreduce.inputs import random_inputs
from gpuallreduce.types import DTYPES, OPS

WAYS = [
    {"algorithm": "one_shot"},
    {"algorithm": "two_shot", "access": "staged"},
    {"algorithm": "two_shot", "access": "direct"},
    {"algorithm": "ring"},
]
NRANKS = [1, 2, 3, 4, 5, 7, 8, 12, 16]


def inputs(name: str, op: str, count: int, nranks: int, *, special: bool = False, seed: int = 7):
    return random_inputs(DTYPES[name], OPS[op], count, nranks, seed, special=special)


def assert_all_equal(results, want):
    for rank, result in enumerate(results):
        assert first_difference(result, want) is None, f"rank {rank}"


def call(comm, arrays, **keywords):
    """allreduce in place on copies; always a list of results."""
    copies = [array.copy() for array in arrays]
    comm.allreduce(copies if comm.nranks > 1 else copies[0], **keywords)
    return copies


@pytest.mark.parametrize("nranks", NRANKS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_every_rank_count_and_algorithm_gives_the_reference_bits(ranks, nranks, way):
    comm = ranks(nranks)
    if nranks == 1:
        way = {}
    for count in (0, 1, 2, 997, 4099):
        arrays = inputs("float32", "sum", count, nranks)
        want = reference.allreduce(arrays, "sum")
        assert_all_equal(call(comm, arrays, **way), want)
        assert_all_equal(
            call(comm, arrays, **way, **({} if nranks == 1 else {"chunk_bytes": 256})), want
        )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_counts_around_every_edge_of_pack_chunk_and_slice(ranks, way, name):
    comm = ranks(4)
    itemsize = DTYPES[name].itemsize
    edges = {
        16 // itemsize,
        64 // itemsize,
        128 // itemsize,
        512 // itemsize,
        4 * 512 // itemsize,
        17 * 512 // itemsize,
    }
    for edge in sorted(edges):
        for count in (edge - 1, edge, edge + 1):
            arrays = inputs(name, "sum", count, 4, special=True)
            want = reference.allreduce(arrays, "sum")
            assert_all_equal(call(comm, arrays, chunk_bytes=512, **way), want)


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_channels_do_not_change_bits(ranks, way, channels):
    comm = ranks(3)
    arrays = inputs("float16", "avg", 5003, 3, special=True)
    want = reference.allreduce(arrays, "avg")
    for _ in range(3):
        assert_all_equal(
            call(comm, arrays, op="avg", nchannels=channels, chunk_bytes=256, **way), want
        )


def test_a_prefix_of_the_result_is_the_result_of_the_prefix(ranks):
    comm = ranks(4)
    arrays = inputs("bfloat16", "sum", 100_003, 4)
    whole = call(comm, arrays)[0]
    for count in (1, 100, 4097, 65_537):
        part = call(comm, [array[:count] for array in arrays])[0]
        assert first_difference(part, whole[:count]) is None


def test_fused_calls_give_the_bits_of_separate_calls(ranks):
    comm = ranks(3)
    columns = [
        inputs("float16", "sum", count, 3, seed=count)
        for count in (1, 5, 0, 1000, 3, 600_000, 70_001)
    ]
    columns += [inputs("float32", "sum", count, 3, seed=count) for count in (17, 0, 4)]
    want = [reference.allreduce(column, "sum") for column in columns]
    per_rank = [[column[rank].copy() for column in columns] for rank in range(3)]
    comm.allreduce_many(per_rank)
    for arrays in per_rank:
        for array, expected in zip(arrays, want, strict=True):
            assert first_difference(array, expected) is None


def test_order_any_gives_all_ranks_the_same_bits_every_time(ranks):
    comm = ranks(5)
    arrays = inputs("float16", "sum", 3001, 5)
    first = call(comm, arrays, algorithm="ring", order="any", chunk_bytes=512)
    for _ in range(3):
        again = call(comm, arrays, algorithm="ring", order="any", chunk_bytes=512)
        assert_all_equal(again, first[0])
    exact = sum(array.astype(np.float64) for array in arrays)
    # Partials are rounded at each of 4 hops and again at the end: 5 roundings of at most half a
    # last place each.
    bound = 5 * 2.0**-11 * sum(np.abs(array.astype(np.float64)) for array in arrays) + 2.0**-24
    assert (np.abs(first[0].astype(np.float64) - exact) <= bound).all()


def test_sixteen_bit_sums_are_rounded_once(ranks):
    """256 + 1/2 + 1/2 loses both halves in bfloat16 if partials are rounded, and neither in
    float32.
    """
    comm = ranks(3)
    values = [256.0, 1.0, 1.0]
    arrays = [np.full(100, value, ml_dtypes.bfloat16) for value in values]
    assert (call(comm, arrays)[0].astype(np.float32) == 258.0).all()


def test_subnormals_are_kept_even_where_the_caller_flushes_them(ranks):
    """Fast-math libraries switch the processor to flush subnormals; the kernels switch back for
    themselves.
    """
    ctypes = pytest.importorskip("ctypes")
    machine = __import__("platform").machine()
    if machine != "x86_64":
        pytest.skip(f"sets the x86 control register, and this is {machine}")
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_char * 32)()
    assert libm.fegetenv(environment) == 0
    saved = bytes(environment)
    mxcsr = int.from_bytes(saved[28:32], "little") | 0x8040  # flush to zero, denormals are zero
    environment.raw = saved[:28] + mxcsr.to_bytes(4, "little")
    comm = ranks(2)
    tiny = np.float32(1e-42)
    arrays = [np.full(100, tiny, np.float32) for _ in range(2)]
    comm.allreduce([array.copy() for array in arrays])
    libm.fesetenv(environment)
    try:
        comm.allreduce(arrays)
    finally:
        libm.fesetenv((ctypes.c_char * 32).from_buffer_copy(saved))
    assert arrays[0].view(np.uint32)[0] == 2 * np.uint32(714)


def test_integers_wrap_and_bools_are_logical(ranks):
    comm = ranks(3)
    assert (call(comm, [np.full(9, 100, np.int8)] * 3)[0] == np.int8(300 - 256)).all()
    truth = [np.array([a, b, False]) for a, b in ((True, True), (False, True), (False, True))]
    assert call(comm, truth)[0].tolist() == [True, True, False]
    assert call(comm, truth, op="prod")[0].tolist() == [False, True, False]
    assert call(comm, truth, op="bxor")[0].tolist() == [True, True, False]


def test_bool_sum_does_not_wrap_at_many_ranks(ranks):
    """A sum of uint8 would wrap at 256; OR cannot."""
    comm = ranks(16)
    assert call(comm, [np.ones(3, bool)] * 16)[0].tolist() == [True] * 3


def test_nan_payloads_and_signs_do_not_reach_the_result(ranks):
    comm = ranks(2)
    patterns = [
        np.array([0x7FC12345, 0xFFC00001, 0x7F800001, 0x7F800000], np.uint32),
        np.array([0xFFC54321, 0x7FC00002, 0x3F800000, 0xFF800000], np.uint32),
    ]
    for op in ("sum", "prod", "max"):
        results = call(comm, [pattern.view(np.float32) for pattern in patterns], op=op)
        for result in results:
            nan = np.isnan(result)
            assert (result.view(np.uint32)[nan] == 0x7FC00000).all()


def test_equal_values_keep_the_lower_ranks_zero(ranks):
    comm = ranks(2)
    minus, plus = np.full(40, -0.0, np.float32), np.zeros(40, np.float32)
    assert np.signbit(call(comm, [minus, plus], op="max")[1]).all()
    assert not np.signbit(call(comm, [plus, minus], op="min")[0]).any()


def test_processes_and_threads_give_the_same_bits(ranks):
    body = """
        import hashlib
        from gpuallreduce.inputs import random_inputs
        from gpuallreduce.types import DTYPES, OPS
        comm = gar.init(timeout=30)
        digests = {}
        cases = (("bfloat16", "sum", 70001), ("float32", "avg", 4097), ("float64", "prod", 999))
        ways_to_go = ({}, {"algorithm": "ring"}, {"algorithm": "two_shot"}, {"chunk_bytes": 512})
        for name, op, count in cases:
            arrays = random_inputs(DTYPES[name], OPS[op], count, comm.nranks, 7)
            for ways in ways_to_go:
                x = arrays[comm.rank].copy()
                comm.allreduce(x, op=op, **ways)
                digests[f"{name} {op} {count} {ways}"] = hashlib.sha256(x.tobytes()).hexdigest()
            x = comm.empty(count, arrays[0].dtype)
            x[...] = arrays[comm.rank]
            comm.allreduce(x, op=op, algorithm="two_shot", access="direct")
            digests[f"{name} {op} {count} direct"] = hashlib.sha256(x.tobytes()).hexdigest()
        report(digests)
    """
    job = run_job(3, body)
    digests = [rank.reports[0] for rank in job]
    assert digests[0] == digests[1] == digests[2]
    import hashlib

    for key, digest in digests[0].items():
        name, op, count = key.split()[:3]
        want = reference.allreduce(inputs(name, op, int(count), 3), op)
        assert hashlib.sha256(want.tobytes()).hexdigest() == digest, key
