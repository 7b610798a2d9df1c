"""Calls on CUDA ranks of one process: arrays of every kind, places of results, memory, refusals."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import gpus
import ml_dtypes
import numpy as np
import pytest

import gpuallreduce as gar
from gpuallreduce.devices.cuda_streams import Lane
from gpuallreduce.reference import allreduce as reference

WAYS = (
    {},
    {"algorithm": "one_shot"},
    {"algorithm": "two_shot", "access": "staged"},
    {"algorithm": "two_shot", "access": "direct"},
    {"algorithm": "ring"},
    {"algorithm": "ring", "order": "any"},
)


def filled(count, rank, dtype=np.float32):
    """Small integers, different for every rank and index."""
    return ((np.arange(count) * 7 + rank * 13) % 50).astype(dtype)


def total(count, nranks, dtype=np.float32):
    return sum(filled(count, rank, dtype) for rank in range(nranks))


@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_every_algorithm_sums_on_gpus(cuda_ranks, nranks):
    names = gpus.devices(nranks)
    comm = cuda_ranks(nranks)
    for count in (1, 3, 1000, 70001):
        for way in WAYS:
            xs = gpus.put_all(names, [filled(count, rank) for rank in range(nranks)])
            ys = gpus.put_all(names, [np.full(count, -1, np.float32)] * nranks)
            assert comm.allreduce(xs, ys, **way) is ys
            assert comm.allreduce(xs, **way) is xs
            comm.synchronize()
            for array in (*xs, *ys):
                assert (array.get() == total(count, nranks)).all(), (count, way)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.complex64])
def test_bits_are_those_of_the_reference(cuda_ranks, dtype):
    nranks, generator = 4, np.random.default_rng(5)
    names = gpus.devices(nranks)
    comm = cuda_ranks(nranks)
    inputs = [generator.normal(size=5001).astype(dtype) for _ in range(nranks)]
    want = reference(inputs, "sum")
    for way in WAYS[:-1]:  # the last gives the order up
        xs = gpus.put_all(names, inputs)
        comm.allreduce(xs, **way)
        comm.synchronize()
        for x in xs:
            assert x.get().tobytes() == want.tobytes(), way


def test_many_calls_in_a_row_are_right(cuda_ranks):
    nranks = 4
    names = gpus.devices(nranks)
    comm = cuda_ranks(nranks)
    outs, wants = [], []
    xs = gpus.put_all(names, [np.zeros(3001, np.float32)] * nranks)
    for turn in range(64):
        fresh = [filled(3001, rank + 5 * turn) for rank in range(nranks)]
        for name, x, new in zip(names, xs, fresh, strict=True):
            with gpus.on(name):
                x.set(new)
        outs.append([gpus.put(name, np.zeros(3001, np.float32)) for name in names])
        comm.allreduce(xs, outs[-1], **WAYS[turn % len(WAYS)])
        wants.append(sum(fresh))
        if turn % 2:  # the inputs are rewritten next, by copies on the default stream
            comm.synchronize()
    comm.synchronize()
    for ys, want in zip(outs, wants, strict=True):
        assert all((y.get() == want).all() for y in ys)


def test_layouts_and_strides(cuda_ranks):
    nranks = 3
    names = gpus.devices(nranks)
    comm = cuda_ranks(nranks)
    bases = [filled(600, rank).reshape(20, 30) for rank in range(nranks)]
    want = sum(bases)
    for cut in (np.s_[::2, 1:29:3], np.s_[::-1, :], np.s_[3:4, :], np.s_[:, 5]):
        xs = gpus.put_all(names, bases)
        comm.allreduce([x[cut] for x in xs])
        comm.synchronize()
        for x, base in zip(xs, bases, strict=True):
            expected = base.copy()
            expected[cut] = want[cut]
            assert (x.get() == expected).all(), cut
    xs = gpus.put_all(names, bases)
    comm.allreduce([x.T for x in xs])
    comm.synchronize()
    assert all((x.get() == want).all() for x in xs)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.float64, np.complex128])
def test_strided_elements_of_every_width(cuda_ranks, dtype):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    bases = [filled(90, rank, dtype).reshape(9, 10) for rank in range(2)]
    xs = gpus.put_all(names, bases)
    outs = gpus.put_all(names, [np.zeros((18, 10), dtype)] * 2)
    comm.allreduce([x[:, ::3] for x in xs], [out[::2, 1:5] for out in outs])
    comm.synchronize()
    for out in outs:
        expected = np.zeros((18, 10), dtype)
        expected[::2, 1:5] = sum(bases)[:, ::3]
        assert (out.get() == expected).all()


def test_shapes_without_elements_and_without_axes(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs = gpus.put_all(names, [np.full((), rank + 1.5) for rank in range(2)])
    empty = gpus.put_all(names, [np.zeros((0, 3))] * 2)
    comm.allreduce(xs)
    comm.allreduce(empty)
    comm.synchronize()
    assert [float(x.get()) for x in xs] == [4.0, 4.0]


def test_the_other_collectives(cuda_ranks):
    nranks = 3
    names = gpus.devices(nranks)
    comm = cuda_ranks(nranks)
    inputs = [filled(30, rank) for rank in range(nranks)]
    xs = gpus.put_all(names, inputs)
    scattered = comm.reduce_scatter(xs)
    gathered = comm.all_gather(xs)
    comm.synchronize()
    for rank in range(nranks):
        assert (scattered[rank].get() == sum(inputs)[10 * rank : 10 * rank + 10]).all()
        assert (gathered[rank].get() == np.concatenate(inputs)).all()
        assert scattered[rank].device.id == xs[rank].device.id
    comm.reduce(xs, root=1)
    comm.broadcast(xs, root=1)
    comm.barrier()
    assert all((x.get() == sum(inputs)).all() for x in xs)


def test_many_arrays_in_one_call(cuda_ranks):
    nranks = 2
    names = gpus.devices(nranks)
    comm = cuda_ranks(nranks)
    shapes = [(3,), (50, 4), (), (7, 1, 2)]
    lists = [
        [gpus.put(name, np.full(shape, rank + i, np.float32)) for i, shape in enumerate(shapes)]
        for rank, name in enumerate(names)
    ]
    strided = gpus.put_all(names, [filled(40, rank).reshape(4, 10) for rank in range(nranks)])
    for arrays, each in zip(lists, strided, strict=True):
        arrays.append(each[:, ::2])
    comm.allreduce_many(lists)
    comm.synchronize()
    for arrays in lists:
        for i, array in enumerate(arrays[:-1]):
            assert (array.get() == 1 + 2 * i).all()
    for base in strided:
        want = total(40, nranks).reshape(4, 10)[:, ::2]
        assert (base.get()[:, ::2] == want).all()


def test_symmetric_arrays_need_no_staging_and_are_freed(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    runtime = gpus.start().cuda.runtime
    comm.barrier()
    with gpus.on(names[0]):
        before = runtime.memGetInfo()[0]
    xs = comm.empty((1 << 20,), "float32")
    assert all((x.get() == 0).all() for x in xs)
    assert comm.plan(xs, algorithm="two_shot").config.access == "direct"
    for rank, (name, x) in enumerate(zip(names, xs, strict=True)):
        with gpus.on(name):
            x.set(np.full(1 << 20, rank + 1, np.float32))
    comm.allreduce(xs, algorithm="two_shot")
    comm.synchronize()
    assert all((x.get() == 3).all() for x in xs)
    del xs, x
    gc.collect()
    comm.barrier()  # freed where no call is half launched
    with gpus.on(names[0]):
        assert runtime.memGetInfo()[0] >= before


def test_a_closed_communicator_gives_its_memory_back(cuda_ranks):
    names = gpus.devices(2)
    runtime = gpus.start().cuda.runtime
    cuda_ranks(2).close()
    with gpus.on(names[0]):
        before = runtime.memGetInfo()[0]
    for _ in range(3):
        with gar.Communicator(names) as comm:
            comm.barrier()
    with gpus.on(names[0]):
        assert runtime.memGetInfo()[0] >= before
    with pytest.raises(gar.Closed, match="closed"):
        comm.allreduce(gpus.put_all(names, [np.ones(3)] * 2))


def test_memory_that_peers_cannot_reach_goes_through_slots(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    cupy = gpus.start()
    inputs = [filled(9000, rank) for rank in range(2)]
    plain = gpus.put_all(names, inputs)
    assert comm.plan(plain, algorithm="two_shot").config.access == "direct"
    for allocator in (cupy.cuda.malloc_async, cupy.cuda.malloc_managed):
        with cupy.cuda.using_allocator(allocator):
            xs = gpus.put_all(names, inputs)
        assert comm.plan(xs, algorithm="two_shot").config.access == "staged"
        for way in WAYS[:3]:
            comm.allreduce(xs, op="max", **way)
        comm.synchronize()
        assert all((x.get() == np.maximum(*inputs)).all() for x in xs)
        del xs
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        xs = gpus.put_all(names, inputs)
    with pytest.raises(gar.NotSupported, match="direct access"):
        comm.allreduce(xs, algorithm="two_shot", access="direct")


def test_copies_of_strided_arrays_count_where_their_allocator_gives_what_peers_cannot_reach(
    cuda_ranks,
):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    cupy = gpus.start()
    wide = gpus.put_all(names, [np.stack([filled(9000, rank)] * 2, axis=1) for rank in range(2)])
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        xs = [x[:, 0] for x in wide]
        assert comm.plan(xs, algorithm="two_shot").config.access == "staged"
        comm.allreduce(xs, algorithm="two_shot")
        comm.synchronize()
    assert all((x.get()[:, 0] == total(9000, 2)).all() for x in wide)


def test_a_communicator_that_was_dropped_is_in_nobodys_way(cuda_ranks):
    """Calls that it launched end well, and its memory is given back when another one is made."""
    names = gpus.devices(2)
    runtime = gpus.start().cuda.runtime
    room = []
    for _ in range(4):
        comm = gar.Communicator(names)
        xs = gpus.put_all(names, [filled(9000, rank) for rank in range(2)])
        comm.allreduce(xs)
        del comm
        gc.collect()
        with gpus.on(names[0]):
            room.append(runtime.memGetInfo()[0])
        assert all((x.get() == total(9000, 2)).all() for x in xs)
    assert room[-1] >= room[0]


@pytest.mark.parametrize("way", [{}, {"algorithm": "ring"}])
def test_a_launch_that_is_interrupted_ends_the_communicator(cuda_ranks, monkeypatch, way):
    """Else a rank would meet the others' next call with its last one, and sum what is not meant."""
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs = gpus.put_all(names, [filled(100, rank) for rank in range(2)])
    comm.allreduce(xs, **way)
    comm.synchronize()
    launch, first = Lane.launch, comm._device.lanes[0]

    def interrupted(lane, *arguments):
        if lane is not first:
            raise KeyboardInterrupt
        launch(lane, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm.allreduce(xs, **way)
    with pytest.raises(gar.Aborted, match="KeyboardInterrupt"):
        comm.allreduce(xs, **way)


def test_several_ranks_share_a_gpu(cuda_ranks):
    names = ["cuda:0"] * 4
    comm = cuda_ranks(devices=names)
    for way in WAYS:
        xs = gpus.put_all(names, [filled(50001, rank) for rank in range(4)])
        comm.allreduce(xs, **way)
        comm.synchronize()
        assert all((x.get() == total(50001, 4)).all() for x in xs), way


def offered(array, **changes):
    """The array by ``__cuda_array_interface__`` alone."""
    interface = {**array.__cuda_array_interface__, **changes}
    return SimpleNamespace(__cuda_array_interface__=interface, keep=array)


def test_arrays_of_other_libraries_are_used_in_place(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    inputs = [filled(500, rank) for rank in range(2)]
    xs = gpus.put_all(names, inputs)
    others = [offered(x) for x in xs]
    assert comm.allreduce(others) is others
    comm.synchronize()
    assert all((x.get() == sum(inputs)).all() for x in xs)

    class Capsule:
        """An array by DLPack alone."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **keywords):
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    ys = gpus.put_all(names, inputs)
    comm.allreduce([Capsule(y) for y in ys])
    comm.synchronize()
    assert all((y.get() == sum(inputs)).all() for y in ys)


class LikeTorch:
    """A bfloat16 array as torch offers it: its interface has no name for the type."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "typestr": "<V2"}

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_types_that_array_interfaces_cannot_name_come_by_dlpack(cuda_ranks):
    names = gpus.devices(2)
    xs = gpus.put_all(names, [filled(999, rank, ml_dtypes.bfloat16) for rank in range(2)])
    comm = cuda_ranks(2)
    comm.allreduce([LikeTorch(x) for x in xs])
    comm.synchronize()
    assert all((x.get().astype(np.float32) == total(999, 2)).all() for x in xs)


def refusals():
    def with_names(make):
        return lambda names: make(names, gpus.put_all(names, [np.ones(6, np.float32)] * 2))

    cases = {
        "NumPy arrays": (lambda names, xs: [np.ones(6)] * 2, "host memory"),
        "an array of another GPU": (lambda names, xs: xs[::-1], "lies on cuda:1 and the rank runs"),
        "no array": (lambda names, xs: ["x", "y"], "__cuda_array_interface__"),
        "one array": (lambda names, xs: xs[0], "one per rank"),
        "counts": (lambda names, xs: [xs[0], xs[1][:5]], "same count"),
        "a read-only array": (
            lambda names, xs: [offered(x, data=(x.data.ptr, True)) for x in xs],
            "read-only",
        ),
        "stream 0": (lambda names, xs: [offered(x, stream=0) for x in xs], "forbids"),
        "a repeating array": (
            lambda names, xs: [gpus.start().broadcast_to(x[:1], 6) for x in xs],
            "repeats elements",
        ),
    }
    return {name: (with_names(make), message) for name, (make, message) in cases.items()}


@pytest.mark.parametrize("name", refusals())
def test_bad_arrays_are_refused_and_nothing_is_sent(cuda_ranks, name):
    make, message = refusals()[name]
    names = gpus.devices(2)
    if name == "an array of another GPU" and len(set(names)) == 1:
        pytest.skip("there is one GPU")
    comm = cuda_ranks(2)
    with pytest.raises(gar.InvalidArgument, match=message):
        comm.allreduce(make(names))
    xs = gpus.put_all(names, [np.ones(3, np.float32)] * 2)
    comm.allreduce(xs)  # this communicator goes on
    comm.synchronize()
    assert all((x.get() == 2).all() for x in xs)


def test_overlapping_results_are_refused(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs = gpus.put_all(names, [np.ones(10, np.float32)] * 2)
    with pytest.raises(gar.InvalidArgument, match="overlaps"):
        comm.allreduce([x[:6] for x in xs], [x[3:9] for x in xs])
    with pytest.raises(gar.InvalidArgument, match="share memory"):
        comm.allreduce_many([[x[:6], x[3:9]] for x in xs])
    shared = ["cuda:0"] * 2
    with pytest.raises(gar.InvalidArgument, match="shares memory"):
        cuda_ranks(devices=shared).allreduce([xs[0], xs[0]])


def test_devices_that_do_not_exist_are_refused():
    gpus.start()
    for devices, message in (
        (["cuda:99"], "does not exist; this process sees"),
        (["cuda:0", "host"], "same kind"),
        (["gpu"], "there are"),
        (["cuda:-1"], "there are"),
    ):
        with pytest.raises(gar.InvalidArgument, match=message):
            gar.Communicator(devices)


def test_one_rank_copies_and_changes_nothing(cuda_ranks):
    (name,) = gpus.devices(1)
    comm = cuda_ranks(1)
    x, y = gpus.put(name, filled(10, 0)), gpus.put(name, np.zeros(10, np.float32))
    comm.allreduce(x)
    comm.allreduce(x, y)
    comm.synchronize()
    assert (y.get() == filled(10, 0)).all()


def test_steps_pass_every_power_of_two(cuda_ranks):
    names = gpus.devices(3)
    for near in (1 << 32, 1 << 63, 1 << 64):
        comm = cuda_ranks(3)
        comm._calls.orchestrator.segments.preset_steps(near - 16)
        for turn in range(24):
            xs = gpus.put_all(names, [filled(300, rank + turn) for rank in range(3)])
            comm.allreduce(xs, chunk_bytes=128, **WAYS[1 + turn % 5])
            comm.synchronize()
            want = sum(filled(300, rank + turn) for rank in range(3))
            assert all((x.get() == want).all() for x in xs), turn
        comm.close()


def test_repeated_calls_take_the_short_way_and_are_checked_all_the_same(cuda_ranks, monkeypatch):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs = gpus.put_all(names, [filled(1000, rank) for rank in range(2)])
    ys = gpus.put_all(names, [np.zeros(1000, np.float32)] * 2)
    comm.allreduce(xs, ys)
    comm.synchronize()
    long_way = []
    run = comm._calls.run
    monkeypatch.setattr(comm._calls, "run", lambda *all: (long_way.append(all), run(*all)))
    for turn in range(5):
        for rank, x in enumerate(xs):
            with gpus.on(names[rank]):
                x.set(filled(1000, rank + turn))
        assert comm.allreduce(xs, ys) is ys
        comm.synchronize()
        want = filled(1000, turn) + filled(1000, turn + 1)
        assert all((y.get() == want).all() for y in ys)
    assert not long_way
    whole = gpus.put_all(names, [np.zeros(1500, np.float32)] * 2)
    with pytest.raises(gar.InvalidArgument, match="overlaps"):
        comm.allreduce([x[:1000] for x in whole], [x[500:] for x in whole])
    with pytest.raises(gar.InvalidArgument, match="shape"):
        comm.allreduce(xs, [y.reshape(10, 100) for y in ys])
    if len(set(names)) > 1:
        with pytest.raises(gar.InvalidArgument, match="lies on"):
            comm.allreduce(xs, ys[::-1])
    with pytest.raises(gar.InvalidArgument, match="one per rank"):
        comm.allreduce(xs, ys[:1])
    comm.abort()
    with pytest.raises(gar.Aborted):
        comm.allreduce(xs, ys)


def test_lists_of_gpu_arrays_need_no_communicator():
    names = gpus.devices(2)
    xs = gpus.put_all(names, [filled(40, rank) for rank in range(2)])
    assert gar.allreduce(xs) is xs
    gpus.start().cuda.Device(int(names[0][5:])).synchronize()
    for name, x in zip(names, xs, strict=True):
        with gpus.on(name):
            assert (x.get() == total(40, 2)).all()
    with pytest.raises(gar.InvalidArgument, match="same kind"):
        gar.allreduce([xs[0], np.zeros(40, np.float32)])


def test_a_result_that_cannot_be_scattered_is_refused_before_anything_is_sent(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    shape = (2,) * 9
    xs = gpus.put_all(names, [np.ones(shape, np.float32)] * 2)
    bases = gpus.put_all(names, [np.zeros((4,) * 9, np.float32)] * 2)
    outs = [base[(slice(None, None, 2),) * 9] for base in bases]
    with pytest.raises(gar.NotSupported, match="9 strided axes"):
        comm.allreduce(xs, outs)
    comm.allreduce(xs)  # this was the first call: its number tells the ranks that none came before
    comm.synchronize()
    assert all((x.get() == 2).all() for x in xs)
    sequence = comm._calls.orchestrator.segments.layout.sequence
    assert comm._calls.orchestrator.segments.word(0, sequence) == 1
