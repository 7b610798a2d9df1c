"""The public calls: shapes, layouts, outputs, other collectives, arguments that are refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

import gpuallreduce as gar
from gpuallreduce.checks import Guarded
from gpuallreduce.types import DTYPES


def filled(shape, rank, dtype=np.float32, order="C"):
    """Exact small integers, every rank and index different."""
    size = int(np.prod(shape))
    values = (np.arange(size) * 7 + rank * 13) % 101
    return np.asarray(values.reshape(shape), dtype=dtype, order=order)


def total(shape, nranks, dtype=np.float32):
    return sum(filled(shape, rank, np.float64) for rank in range(nranks)).astype(dtype)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5)])
def test_any_shape_in_place_and_out_of_place(ranks, shape):
    comm = ranks(3)
    xs = [filled(shape, rank) for rank in range(3)]
    ys = [np.full(shape, -1, np.float32) for _ in range(3)]
    originals = [x.copy() for x in xs]
    assert comm.allreduce(xs, out=ys) is ys
    for x, original, y in zip(xs, originals, ys, strict=True):
        assert (x == original).all()
        assert (y == total(shape, 3)).all()
    assert comm.allreduce(xs) is xs
    for x in xs:
        assert x.shape == shape
        assert (x == total(shape, 3)).all()


def layouts():
    yield "fortran", lambda a: np.asfortranarray(a)
    yield "transposed", lambda a: np.ascontiguousarray(a.transpose(2, 0, 1)).transpose(1, 2, 0)
    yield "every second row", lambda a: np.repeat(a, 2, axis=0)[::2]
    yield "reversed", lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1]
    yield "column of a wider array", lambda a: np.repeat(a[..., None], 3, axis=3)[..., 1]


@pytest.mark.parametrize(("name", "arrange"), list(layouts()))
def test_every_memory_layout_in_place_and_out_of_place(ranks, name, arrange):
    comm = ranks(2)
    shape = (6, 5, 4)
    xs = [arrange(filled(shape, rank)) for rank in range(2)]
    assert not xs[0].flags.c_contiguous
    ys = [np.zeros(shape, np.float32) for _ in range(2)]
    comm.allreduce(xs, out=ys)
    zs = [arrange(np.zeros(shape, np.float32)) for _ in range(2)]
    comm.allreduce(xs, out=zs)
    comm.allreduce(xs)
    for array in (*xs, *ys, *zs):
        assert (array == total(shape, 2)).all()


def test_dense_layouts_are_not_copied(ranks):
    from gpuallreduce.arrays import HostArrays

    x = np.asfortranarray(filled((6, 5), 0))
    bound = HostArrays().bind(x, None)
    assert bound.input == x.ctypes.data
    assert bound.finish is None


def test_strided_results_touch_nothing_between_the_elements(ranks):
    comm = ranks(2)
    bases = [np.full((10, 4), -5.0, np.float32) for _ in range(2)]
    views = [base[::2, 1:3] for base in bases]
    for rank, view in enumerate(views):
        view[...] = filled((5, 2), rank)
    comm.allreduce(views)
    for base, view in zip(bases, views, strict=True):
        assert (view == total((5, 2), 2)).all()
        view[...] = -5.0
        assert (base == -5.0).all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_arrays_and_their_neighbours(ranks, name, offset):
    comm = ranks(2)
    row = DTYPES[name]
    for count in (1, 77, 1000):
        guarded = [Guarded(row, count, offset=offset + rank) for rank in range(2)]
        for rank, each in enumerate(guarded):
            each.array[...] = (filled((count,), rank, np.float32) % 2).astype(row.numpy)
        want = np.maximum(guarded[0].array.astype(np.float32) if row.kind != "complex" else 0, 0)
        op = "sum" if row.kind == "complex" else "max"
        comm.allreduce([each.array for each in guarded], op=op)
        for each in guarded:
            assert each.check() is None
            assert each.array.tobytes() == guarded[0].array.tobytes()
        del want


def test_out_may_be_the_input(ranks):
    comm = ranks(2)
    xs = [filled((50,), rank) for rank in range(2)]
    comm.allreduce(xs, out=[x[:] for x in xs])
    assert (xs[1] == total((50,), 2)).all()


def test_one_rank_works_and_changes_nothing():
    with gar.Communicator(["host"]) as comm:
        x = filled((9,), 0)
        y = np.zeros_like(x)
        assert comm.allreduce(x) is x
        assert comm.allreduce(x, y) is y
        assert (y == filled((9,), 0)).all()
        comm.broadcast(x)
        comm.barrier()
        assert (comm.all_gather(x) == x).all()
        assert (comm.reduce_scatter(x) == x).all()
        with pytest.raises(gar.NotSupported, match="avg of int32"):
            comm.allreduce(np.zeros(3, np.int32), op="avg")


@pytest.mark.parametrize("nranks", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 1000, 100_003])
def test_other_collectives(ranks, nranks, count):
    comm = ranks(nranks)
    xs = [filled((count,), rank) for rank in range(nranks)]
    gathered = comm.all_gather(xs)
    for each in gathered:
        assert (each == np.concatenate(xs)).all()
    blocks = [
        np.concatenate([filled((count,), rank + 3 * k) for k in range(nranks)])
        for rank in range(nranks)
    ]
    kept = [block.copy() for block in blocks]
    scattered = comm.reduce_scatter(blocks)
    for rank, each in enumerate(scattered):
        assert (each == sum(filled((count,), other + 3 * rank) for other in range(nranks))).all()
        assert (blocks[rank] == kept[rank]).all()
    for root in {0, nranks - 1}:
        ys = [x.copy() for x in xs]
        comm.reduce(ys, root=root)
        for rank, y in enumerate(ys):
            assert (y == (total((count,), nranks) if rank == root else xs[rank])).all()
        zs = [x.copy() for x in xs]
        comm.broadcast(zs, root=root)
        for z in zs:
            assert (z == xs[root]).all()
    comm.barrier()


def test_collectives_keep_the_trailing_shape(ranks):
    comm = ranks(2)
    xs = [filled((4, 3), rank) for rank in range(2)]
    assert comm.all_gather(xs)[0].shape == (8, 3)
    assert comm.reduce_scatter(xs)[1].shape == (2, 3)
    assert comm.all_gather([np.full((), r, np.float32) for r in range(2)])[0].tolist() == [0.0, 1.0]


def test_reduce_writes_to_out_on_the_root_only(ranks):
    comm = ranks(2)
    xs = [filled((10,), rank) for rank in range(2)]
    outs = [np.zeros(10, np.float32) for _ in range(2)]
    comm.reduce(xs, outs, root=1)
    assert (outs[0] == 0).all()
    assert (outs[1] == total((10,), 2)).all()


def test_alternating_algorithms_do_not_disturb_each_other(ranks):
    comm = ranks(4)
    ways = [
        {"algorithm": "one_shot"},
        {"algorithm": "ring"},
        {"algorithm": "two_shot", "access": "staged"},
        {"algorithm": "ring", "order": "any"},
        {"algorithm": "two_shot", "access": "direct"},
    ]
    for turn in range(40):
        xs = [filled((501 + turn,), rank + turn) for rank in range(4)]
        comm.allreduce(
            xs, chunk_bytes=256 if turn % 3 else None, nchannels=1 + turn % 2, **ways[turn % 5]
        )
        want = sum(filled((501 + turn,), rank + turn) for rank in range(4))
        assert all((x == want).all() for x in xs)


def test_sixty_four_calls_with_changing_inputs_checked_at_the_end(ranks):
    """Late reads of a slot or an input show only when nobody looks between the calls."""
    for nranks in (2, 4):
        comm = ranks(nranks)
        for way in (
            {"algorithm": "one_shot"},
            {"algorithm": "two_shot", "access": "staged"},
            {"algorithm": "ring"},
            {"algorithm": "two_shot", "access": "direct"},
        ):
            outs = []
            xs = [np.empty(3001, np.float32) for _ in range(nranks)]
            for turn in range(64):
                for rank, x in enumerate(xs):
                    x[...] = filled((3001,), rank + 5 * turn)
                outs.append([np.empty(3001, np.float32) for _ in range(nranks)])
                comm.allreduce(xs, outs[-1], chunk_bytes=1024, **way)
            for turn, ys in enumerate(outs):
                want = sum(filled((3001,), rank + 5 * turn) for rank in range(nranks))
                assert all((y == want).all() for y in ys), (nranks, way, turn)


def test_three_communicators_at_once(ranks):
    comms = [ranks(nranks) for nranks in (2, 3, 2)]
    for turn in range(10):
        for comm in comms:
            xs = [filled((1001,), rank + turn) for rank in range(comm.nranks)]
            comm.allreduce(xs)
            want = sum(filled((1001,), rank + turn) for rank in range(comm.nranks))
            assert all((x == want).all() for x in xs)


@pytest.mark.parametrize("near", [1 << 31, 1 << 32, 1 << 63, 1 << 64])
def test_steps_pass_every_power_of_two(ranks, near):
    comm = ranks(3)
    # A multiple of all slot counts, so that step % nslots starts where a fresh communicator would.
    comm._calls.orchestrator.segments.preset_steps(near - 16)
    for turn in range(40):
        xs = [filled((300,), rank + turn) for rank in range(3)]
        way = (
            {"algorithm": "one_shot"},
            {"algorithm": "ring"},
            {"algorithm": "two_shot", "access": "staged"},
            {"algorithm": "two_shot", "access": "direct"},
            {"algorithm": "ring", "order": "any"},
        )[turn % 5]
        comm.allreduce(xs, chunk_bytes=128, **way)
        want = sum(filled((300,), rank + turn) for rank in range(3))
        assert all((x == want).all() for x in xs), turn


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(ranks):
    comm = ranks(2)
    count = (1 << 31) + 77
    xs = [np.full(count, rank + 1, np.int8) for rank in range(2)]
    xs[0][-1], xs[1][-1] = 40, 50
    comm.allreduce(xs)
    for x in xs:
        assert x[-1] == 90
        assert x[0] == 3
        assert int(np.count_nonzero(x[:-1] != 3)) == 0


def refused():
    ones = np.ones(4, np.float32)
    yield "not an array", lambda: ([[1.0], [2.0]], {}), gar.InvalidArgument, "numpy.ndarray"
    yield "one array for two ranks", lambda: (ones, {}), gar.InvalidArgument, "one per rank"
    yield "three arrays for two ranks", lambda: ([ones] * 3, {}), gar.InvalidArgument, "2 ranks"
    yield (
        "counts differ",
        lambda: ([ones, np.ones(5, np.float32)], {}),
        gar.InvalidArgument,
        "same count",
    )
    yield "dtypes differ", lambda: ([ones, np.ones(4)], {}), gar.InvalidArgument, "dtype"
    yield (
        "layouts differ",
        lambda: ([np.ones((2, 3), order="F"), np.ones((2, 3))], {}),
        gar.InvalidArgument,
        "layout",
    )
    yield (
        "object dtype",
        lambda: ([np.array([None]) for _ in range(2)], {}),
        gar.InvalidArgument,
        "supported: bool",
    )
    yield (
        "byte order",
        lambda: ([np.ones(3, ">f4") for _ in range(2)], {}),
        gar.InvalidArgument,
        "byte-swapped",
    )
    yield "masked", lambda: ([np.ma.ones(3) for _ in range(2)], {}), gar.InvalidArgument, "mask"
    yield (
        "operator",
        lambda: ([ones.copy(), ones.copy()], {"op": "mean"}),
        gar.InvalidArgument,
        "sum, prod",
    )
    yield (
        "max of complex",
        lambda: ([np.ones(2, complex) for _ in range(2)], {"op": "max"}),
        gar.NotSupported,
        "takes sum, prod, avg",
    )
    yield (
        "xor of floats",
        lambda: ([ones.copy(), ones.copy()], {"op": "bxor"}),
        gar.NotSupported,
        "takes bool",
    )
    yield (
        "algorithm",
        lambda: ([ones.copy(), ones.copy()], {"algorithm": "tree"}),
        gar.InvalidArgument,
        "one_shot",
    )
    yield (
        "order",
        lambda: ([ones.copy(), ones.copy()], {"order": "fast"}),
        gar.InvalidArgument,
        "rank, any",
    )
    yield (
        "chunk too small",
        lambda: ([ones.copy(), ones.copy()], {"chunk_bytes": 3}),
        gar.InvalidArgument,
        "slot",
    )
    yield (
        "chunk too large",
        lambda: ([ones.copy(), ones.copy()], {"chunk_bytes": 1 << 30}),
        gar.InvalidArgument,
        "slot",
    )
    yield (
        "channels",
        lambda: ([ones.copy(), ones.copy()], {"nchannels": 99}),
        gar.InvalidArgument,
        r"1\.\.4",
    )
    yield (
        "timeout",
        lambda: ([ones.copy(), ones.copy()], {"timeout": 0}),
        gar.InvalidArgument,
        "above 0",
    )
    yield (
        "out shape",
        lambda: ([ones, ones], {"out": [np.ones(5, np.float32)] * 2}),
        gar.InvalidArgument,
        "must be equal",
    )
    yield (
        "out dtype",
        lambda: ([ones, ones], {"out": [np.ones(4)] * 2}),
        gar.InvalidArgument,
        "must be equal",
    )
    yield (
        "repeated elements",
        lambda: (
            [np.lib.stride_tricks.as_strided(ones.copy(), (3, 4), (0, 4)) for _ in range(2)],
            {},
        ),
        gar.InvalidArgument,
        "zero stride",
    )


def refused_values():
    yield "text for a timeout", {"timeout": "5"}, "seconds above 0"
    yield "float channels", {"nchannels": 1.0}, "not an integer"
    yield "float chunk", {"chunk_bytes": 1e4}, "not an integer"


@pytest.mark.parametrize(("name", "keywords", "text"), list(refused_values()))
def test_values_of_a_wrong_kind_are_refused(ranks, name, keywords, text):
    comm = ranks(2)
    with pytest.raises(gar.InvalidArgument, match=text):
        comm.allreduce([filled((4,), rank) for rank in range(2)], **keywords)
    with pytest.raises(gar.InvalidArgument, match="not an integer"):
        comm.broadcast([filled((4,), rank) for rank in range(2)], root=0.0)


def test_an_endless_timeout_is_taken(ranks):
    comm = ranks(2)
    xs = [filled((4,), rank) for rank in range(2)]
    comm.allreduce(xs, timeout=float("inf"))
    assert (xs[0] == total((4,), 2)).all()


@pytest.mark.parametrize("shape", [-1, (3, -2), 1.5, (2.0,)])
def test_empty_refuses_what_is_no_shape(ranks, shape):
    with pytest.raises(gar.InvalidArgument):
        ranks(2).empty(shape)
    assert ranks(2).empty(np.int64(5))[0].shape == (5,)


@pytest.mark.parametrize("count", [8, 1000, 100_000])
@pytest.mark.parametrize("warm", [False, True])
def test_ranks_that_share_memory_are_refused_at_every_size(ranks, count, warm):
    """Which algorithm runs, and whether the call was made before, must not decide."""
    comm = ranks(2)
    if warm:
        comm.allreduce([np.ones(count, np.float32) for _ in range(2)])
        ones = [np.ones(count, np.float32) for _ in range(4)]
        comm.allreduce(ones[:2], out=ones[2:])
    x, y = np.ones(count, np.float32), np.ones(count, np.float32)
    with pytest.raises(gar.InvalidArgument, match="arrays of its own"):
        comm.allreduce([x, x])
    with pytest.raises(gar.InvalidArgument, match="arrays of its own"):
        comm.allreduce([x, y], out=[y, x])
    with pytest.raises(gar.InvalidArgument, match="arrays of its own"):
        comm.allreduce([x, y], out=[np.empty_like(x), x])
    comm.allreduce([x, x], out=[np.empty_like(x), np.empty_like(x)])  # read by both: fine


@pytest.mark.parametrize("warm", [False, True])
def test_the_short_way_takes_no_more_than_the_long_one(ranks, warm):
    comm = ranks(2)
    if warm:
        comm.allreduce([np.ones(1, np.float32) for _ in range(2)])
        comm.allreduce([np.ones((), np.float32) for _ in range(2)])

    class Lookalike:
        dtype = np.dtype(np.float32)
        __array_struct__ = None

    for pair in (
        [np.ma.ones(1, np.float32), np.ma.ones(1, np.float32)],
        [np.float32(1), np.float32(2)],
        [Lookalike(), Lookalike()],
    ):
        with pytest.raises(gar.InvalidArgument):
            comm.allreduce(pair)


def test_tuples_do_as_well_as_lists(ranks):
    comm = ranks(2)
    for _ in range(2):
        xs = tuple(filled((9,), rank) for rank in range(2))
        assert comm.allreduce(xs) is xs
        assert (xs[1] == total((9,), 2)).all()


def test_reduce_takes_any_layout(ranks):
    comm = ranks(2)
    for arrange in (np.asfortranarray, lambda a: np.repeat(a, 2, axis=0)[::2]):
        xs = [arrange(filled((6, 5), rank)) for rank in range(2)]
        comm.reduce(xs, root=1)
        assert (xs[1] == total((6, 5), 2)).all()
        ys = [filled((6, 5), rank) for rank in range(2)]
        outs = ["not looked at", arrange(np.zeros((6, 5), np.float32))]
        comm.reduce(ys, outs, root=1)
        assert (outs[1] == total((6, 5), 2)).all()


@pytest.mark.parametrize("count", [100, 400_000])
def test_fused_arrays_that_share_memory_are_refused(ranks, count):
    comm = ranks(2)
    xs = [np.ones(count, np.float32) for _ in range(2)]
    with pytest.raises(gar.InvalidArgument, match="share memory"):
        comm.allreduce_many([[x, x] for x in xs])
    with pytest.raises(gar.InvalidArgument, match="share memory"):
        comm.allreduce_many([[x[:60], np.ones(3, np.float32), x[40:]] for x in xs])
    comm.allreduce_many([[x[::2], x[1::2]] for x in xs])  # interleaved, nothing shared
    assert all((x == 2).all() for x in xs)
    comm.allreduce_many([[], []])


def test_fused_strided_arrays_take_no_more_memory_than_a_bucket(ranks):
    import tracemalloc

    comm = ranks(2)
    per_rank = [[np.ones((50_000, 2), np.float32)[:, 0] for _ in range(40)] for _ in range(2)]
    comm.allreduce_many(per_rank)
    tracemalloc.start()
    comm.allreduce_many(per_rank)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20  # the buckets are kept from the first call
    assert all((array == 4).all() for arrays in per_rank for array in arrays)


def test_a_closed_communicator_has_no_threads_left():
    import threading  # Python's count does not see them; the system's does

    before = len(os.listdir("/proc/self/task"))
    kept = []
    for _ in range(5):
        comm = gar.Communicator(["host"] * 3)
        comm.allreduce([np.ones(5) for _ in range(3)])
        comm.close()
        kept.append(comm)
    assert len(os.listdir("/proc/self/task")) == before
    assert threading.active_count() >= 1


@pytest.mark.parametrize(("name", "make", "kind", "text"), list(refused()))
def test_bad_calls_are_refused_and_leave_the_communicator_usable(ranks, name, make, kind, text):
    comm = ranks(2)
    arrays, keywords = make()
    with pytest.raises(kind, match=text):
        comm.allreduce(arrays, **keywords)
    xs = [filled((4,), rank) for rank in range(2)]
    comm.allreduce(xs)
    assert (xs[0] == total((4,), 2)).all()


def test_read_only_arrays_are_refused_in_place_and_taken_as_input(ranks):
    comm = ranks(2)
    xs = [filled((4,), rank) for rank in range(2)]
    for x in xs:
        x.flags.writeable = False
    with pytest.raises(gar.InvalidArgument, match="read-only"):
        comm.allreduce(xs)
    ys = [np.zeros(4, np.float32) for _ in range(2)]
    comm.allreduce(xs, ys)
    assert (ys[0] == total((4,), 2)).all()


def test_overlapping_out_is_refused(ranks):
    comm = ranks(2)
    bases = [np.zeros(20, np.float32) for _ in range(2)]
    with pytest.raises(gar.InvalidArgument, match="overlaps"):
        comm.allreduce([base[:10] for base in bases], out=[base[5:15] for base in bases])
    comm.allreduce([base[:10] for base in bases], out=[base[10:] for base in bases])
    comm.allreduce(
        [base[::2] for base in bases], out=[base[1::2] for base in bases]
    )  # interleaved, no overlap


@pytest.mark.parametrize("devices", ["host", [], ["gpu"], None, 3])
def test_bad_device_lists_are_refused(devices):
    with pytest.raises(gar.InvalidArgument, match="host"):
        gar.Communicator(devices)


def test_empty_gives_arrays_that_peers_address(ranks):
    comm = ranks(3)
    xs = comm.empty((10, 7), "bfloat16")
    assert [x.shape for x in xs] == [(10, 7)] * 3
    assert all((x == 0).all() for x in xs)
    for rank, x in enumerate(xs):
        x[...] = rank + 1
    comm.allreduce(xs)
    assert (xs[2].astype(np.float32) == 6).all()
    comm.close()
    assert (xs[0].astype(np.float32) == 6).all()  # usable after close


def test_plan_says_what_runs(ranks):
    comm = ranks(2)
    xs = [np.zeros(1 << 20, np.float32) for _ in range(2)]
    text = comm.plan(xs).describe()
    for word in (
        "allreduce sum",
        "1048576 x float32",
        "algorithm",
        "order",
        "rank",
        "channels",
        "sends",
        "us estimated",
    ):
        assert word in text
    forced = comm.plan(xs, algorithm="ring", order="any", chunk_bytes=1 << 16)
    assert forced.config.algorithm == "ring"
    assert forced.config.chunk_count == 1 << 14
    assert "of the ring" in forced.describe()


def test_the_list_call_keeps_its_communicator():
    for _ in range(2):
        xs = [filled((10,), rank) for rank in range(3)]
        assert gar.allreduce(xs) is xs
        assert (xs[1] == total((10,), 3)).all()
    assert gar.allreduce([np.ones(3)])[0].tolist() == [1, 1, 1]


def test_calls_from_several_threads_take_turns(ranks):
    import threading

    comm = ranks(2)
    failures = []

    def work(seed):
        for turn in range(20):
            xs = [filled((999,), rank + seed + turn) for rank in range(2)]
            comm.allreduce(xs)
            want = sum(filled((999,), rank + seed + turn) for rank in range(2))
            if not all((x == want).all() for x in xs):
                failures.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_importing_needs_no_compiler_and_no_cuda():
    import subprocess
    import sys

    code = (
        "import sys, gpuallreduce; assert 'cupy' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": ""})
