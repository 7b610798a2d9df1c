"""Calls on CUDA ranks are ordered on streams: behind what is on them, before what follows, one call
after the other, and as parts of graphs.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import gpus
import numpy as np
import pytest

import gpuallreduce as gar
from gpuallreduce.devices.cuda_streams import Lane

COUNT = 4001


def numbers(rank, turn=0):
    return ((np.arange(COUNT) * 3 + rank * 17 + turn * 5) % 64).astype(np.float32)


def total(nranks, turn=0):
    return sum(numbers(rank, turn) for rank in range(nranks))


def blank(names):
    return gpus.put_all(names, [np.zeros(COUNT, np.float32)] * len(names))


PINNED = []  # alive until the copies have been made


def pinned(array):
    """A copy in pinned host memory, from which copies are asynchronous."""
    cupy = gpus.start()
    PINNED.append(cupy.cuda.alloc_pinned_memory(array.nbytes))
    copy = np.frombuffer(PINNED[-1], array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def fill_late(arrays, streams, values):
    """Puts values into arrays by copies that streams get to only after a while."""
    for x, stream, value in zip(arrays, streams, values, strict=True):
        with gpus.held(stream), gpus.on(f"cuda:{x.device.id}"):
            x.set(pinned(value), stream=stream)


def current(streams):
    """Makes each stream the current one of its GPU."""
    for stream in streams:
        with gpus.on(f"cuda:{stream.device_id}"):
            stream.use()


@pytest.fixture(autouse=True)
def default_streams():
    yield
    cupy = gpus.start()
    for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(ordinal):
            cupy.cuda.Stream.null.use()


def test_a_call_waits_for_its_stream_and_the_host_does_not_wait(cuda_ranks):
    names = gpus.devices(3)
    comm = cuda_ranks(3)
    comm.allreduce(blank(names))  # compiled
    comm.synchronize()
    xs, streams = blank(names), gpus.streams_on(names)
    fill_late(xs, streams, [numbers(rank) for rank in range(3)])
    comm.allreduce(xs, stream=streams)
    assert not all(stream.done for stream in streams)
    out = [x.get(stream=stream) for x, stream in zip(xs, streams, strict=True)]
    assert all((each == total(3)).all() for each in out)


def test_the_current_streams_order_a_call(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs, streams = blank(names), gpus.streams_on(names)
    fill_late(xs, streams, [numbers(rank) for rank in range(2)])
    current(streams)
    comm.allreduce(xs)
    comm.synchronize()
    assert all((x.get() == total(2)).all() for x in xs)


def test_streams_of_other_libraries_order_a_call(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs, streams = blank(names), gpus.streams_on(names)
    fill_late(xs, streams, [numbers(rank) for rank in range(2)])

    class Foreign:
        """A stream as torch offers it."""

        def __init__(self, stream):
            self.stream = stream

        def __cuda_stream__(self):
            return 0, self.stream.ptr

    comm.allreduce(xs, stream=[Foreign(stream) for stream in streams])
    comm.synchronize()
    assert all((x.get() == total(2)).all() for x in xs)


@pytest.mark.parametrize("named", [True, False])
def test_the_stream_of_an_array_is_waited_for(cuda_ranks, named):
    """Without the producer's stream in its interface the call must come too early, which shows that
    the test would see a missing wait.
    """
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs, producers = blank(names), gpus.streams_on(names)
    fill_late(xs, producers, [numbers(rank) for rank in range(2)])
    offered = [
        SimpleNamespace(
            __cuda_array_interface__={
                **x.__cuda_array_interface__,
                "stream": producer.ptr if named else None,
            }
        )
        for x, producer in zip(xs, producers, strict=True)
    ]
    outs = blank(names)
    comm.allreduce(offered, outs, stream=gpus.streams_on(names))
    comm.synchronize()
    right = all((out.get() == total(2)).all() for out in outs)
    assert right is named


def two_calls_on_two_streams(comm, names):
    """Two different calls, the first on a stream that is late on rank 0 only."""
    first, second = gpus.streams_on(names), gpus.streams_on(names)
    xs, ys = blank(names), blank(names)
    for rank, (x, y) in enumerate(zip(xs, ys, strict=True)):
        with gpus.on(names[rank]):
            x.set(numbers(rank))
            y.set(numbers(rank, 1))
    comm.synchronize()
    with gpus.held(first[0]):
        comm.allreduce(xs, stream=first)
    comm.allreduce(ys, op="max", stream=second)
    comm.synchronize()
    for stream in (*first, *second):
        stream.synchronize()
    assert all((x.get() == total(len(names))).all() for x in xs)


def test_calls_run_in_the_order_in_which_they_were_made(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2, timeout=5)
    comm.allreduce(blank(names))  # compiled and loaded, so that the second call overtakes if it can
    comm.allreduce(blank(names), op="max")
    comm.synchronize()
    two_calls_on_two_streams(comm, names)


def test_without_the_wait_between_calls_the_ranks_are_out_of_step(cuda_ranks, monkeypatch):
    names = gpus.devices(2)
    if len(set(names)) == 1:
        pytest.skip("ranks that share a GPU have a stream each, which keeps their calls in order")
    comm = cuda_ranks(2, timeout=5)

    waiting = Lane.begin

    def begin(lane, stream, may_vanish):
        if lane.ordinal == 0:
            lane.stream = stream
        else:
            waiting(lane, stream, may_vanish)

    comm.allreduce(blank(names))
    comm.allreduce(blank(names), op="max")
    comm.synchronize()
    monkeypatch.setattr(Lane, "begin", begin)
    with pytest.raises((gar.MismatchError, gar.Timeout)):
        two_calls_on_two_streams(comm, names)
    comm.abort()


def test_calls_from_several_threads_keep_one_order(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    wrong = []

    def work(number):
        xs, streams = blank(names), gpus.streams_on(names)
        for turn in range(6):
            for rank, (x, stream) in enumerate(zip(xs, streams, strict=True)):
                with gpus.on(names[rank]):
                    x.set(numbers(rank, turn + number), stream=stream)
            comm.allreduce(xs, stream=streams)
            for x, stream in zip(xs, streams, strict=True):
                if (x.get(stream=stream) != total(2, turn + number)).any():
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def captured(streams, names, calls, mode=None):
    """A graph for each stream of what ``calls`` puts on them."""
    for stream, name in zip(streams, names, strict=True):
        with gpus.on(name):
            stream.begin_capture(mode)
    calls()
    graphs = []
    for stream, name in zip(streams, names, strict=True):
        with gpus.on(name):
            graphs.append(stream.end_capture())
    return graphs


def launch_from_threads(graphs, streams, names):
    """One thread per device, as CUDA asks for graphs that wait for each other."""

    def launch(graph, stream, name):
        with gpus.on(name):
            graph.launch(stream)

    threads = [
        threading.Thread(target=launch, args=each)
        for each in zip(graphs, streams, names, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_graphs_are_replayed_with_changing_inputs(cuda_ranks, nranks, in_place):
    names = gpus.devices(nranks)
    comm = cuda_ranks(nranks)
    xs, streams = blank(names), gpus.streams_on(names)
    ys = xs if in_place else blank(names)
    comm.allreduce(xs, ys) if nranks > 1 else comm.allreduce(xs[0], ys[0])  # compiled and loaded
    comm.synchronize()

    def call():
        if nranks > 1:
            comm.allreduce(xs, None if in_place else ys, stream=streams)
        else:
            comm.allreduce(xs[0], None if in_place else ys[0], stream=streams[0])

    graphs = captured(streams, names, call)
    for turn in range(100):
        for rank, (x, stream) in enumerate(zip(xs, streams, strict=True)):
            with gpus.on(names[rank]):
                x.set(numbers(rank, turn), stream=stream)
        launch_from_threads(graphs, streams, names)
        if turn % 10 == 9:
            call()  # calls of graphs and calls of programs follow each other
            want = total(nranks, turn) * (nranks if in_place else 1)
        else:
            want = total(nranks, turn)
        for y, stream in zip(ys, streams, strict=True):
            assert (y.get(stream=stream) == want).all(), turn


def test_a_graph_holds_calls_of_every_algorithm(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs, streams = blank(names), gpus.streams_on(names)
    ways = [
        {"algorithm": "one_shot"},
        {"algorithm": "two_shot", "access": "direct"},
        {"algorithm": "two_shot", "access": "staged"},
        {"algorithm": "ring"},
        {"algorithm": "ring", "order": "any"},
    ]

    def calls():
        for way in ways:
            comm.allreduce(xs, stream=streams, **way)

    calls()
    comm.synchronize()
    graphs = captured(streams, names, calls)
    for turn in range(5):
        for rank, (x, stream) in enumerate(zip(xs, streams, strict=True)):
            with gpus.on(names[rank]):
                x.set(numbers(rank, turn), stream=stream)
        launch_from_threads(graphs, streams, names)
        comm.synchronize()
        for x, stream in zip(xs, streams, strict=True):
            assert (x.get(stream=stream) == total(2, turn) * 2 ** (len(ways) - 1)).all()


def test_ranks_that_share_a_gpu_can_be_captured_on_one_stream(cuda_ranks):
    names = ["cuda:0"] * 3
    comm = cuda_ranks(devices=names)
    xs = blank(names)
    (stream,) = gpus.streams_on(names[:1])
    comm.allreduce(xs)
    comm.synchronize()
    (graph,) = captured([stream], names[:1], lambda: comm.allreduce(xs, stream=[stream] * 3))
    for turn in range(10):
        for rank, x in enumerate(xs):
            x.set(numbers(rank, turn), stream=stream)
        graph.launch(stream)
        assert all((x.get(stream=stream) == total(3, turn)).all() for x in xs)


def test_a_call_under_capture_does_not_hide_the_one_before(cuda_ranks):
    """Neither from the next call, nor from who waits for all of them."""
    names = gpus.devices(2)
    comm = cuda_ranks(2, timeout=5)
    comm.allreduce(blank(names))
    comm.allreduce(blank(names), op="max")
    comm.synchronize()
    xs, ys = (gpus.put_all(names, [numbers(rank, turn) for rank in range(2)]) for turn in range(2))
    first, second, third = (gpus.streams_on(names) for _ in range(3))
    with gpus.held(first[0]):
        comm.allreduce(xs, stream=first)
    captured(second, names, lambda: comm.allreduce(ys, stream=second))
    comm.allreduce(ys, op="max", stream=third)
    comm.synchronize()
    assert all(stream.done for stream in (*first, *third))
    assert all((x.get() == total(2)).all() for x in xs)
    assert all((y.get() == np.maximum(numbers(0, 1), numbers(1, 1))).all() for y in ys)


class Foreign:
    """A stream of another library, which may destroy it."""

    def __init__(self, stream):
        self.pointer = stream.ptr

    def __cuda_stream__(self):
        return 0, self.pointer


def test_copies_behind_a_call_are_part_of_it_on_streams_of_other_libraries(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)

    def lists(turn):
        return [
            [gpus.put(name, numbers(rank, turn + i)) for i in range(3)]
            for rank, name in enumerate(names)
        ]

    comm.allreduce_many(lists(0))
    comm.synchronize()
    for turn in range(10):
        both, streams = [lists(turn), lists(turn + 3)], []
        for each in both:  # the second call uses the bucket of the first
            streams += gpus.streams_on(names)
            comm.allreduce_many(each, stream=[Foreign(stream) for stream in streams[-2:]])
        comm.synchronize()
        assert all(stream.done for stream in streams[-2:])
        for place, each in enumerate(both):
            for xs in each:
                for i, x in enumerate(xs):
                    assert (x.get() == total(2, turn + 3 * place + i)).all()


@pytest.mark.parametrize("mode", [0, 1, 2])  # global, thread-local, relaxed
def test_graphs_keep_the_copies_of_strided_arrays(cuda_ranks, mode):
    cupy, names = gpus.start(), gpus.devices(2)
    comm = cuda_ranks(2)
    wide = gpus.put_all(names, [np.zeros((COUNT, 2), np.float32)] * 2)
    streams = gpus.streams_on(names)
    graphs = captured(
        streams, names, lambda: comm.allreduce([x[:, 1] for x in wide], stream=streams), mode
    )
    others = []
    for stream, name in zip(streams, names, strict=True):
        with gpus.on(name), stream:  # what was freed on this stream would be used again
            others.append(cupy.empty(COUNT, np.float32))
            others[-1].set(numbers(9), stream=stream)
    for turn in range(3):
        for rank, (x, stream) in enumerate(zip(wide, streams, strict=True)):
            with gpus.on(names[rank]):
                x.set(np.stack([numbers(5), numbers(rank, turn)], axis=1), stream=stream)
        launch_from_threads(graphs, streams, names)
        for x, stream in zip(wide, streams, strict=True):
            got = x.get(stream=stream)
            assert (got[:, 1] == total(2, turn)).all()
            assert (got[:, 0] == numbers(5)).all()
    assert all((other.get() == numbers(9)).all() for other in others)


@pytest.mark.parametrize("mode", [0, 1])
def test_memory_that_was_dropped_does_not_spoil_a_capture(cuda_ranks, mode):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    xs, streams = blank(names), gpus.streams_on(names)
    dropped = comm.empty(COUNT)
    comm.allreduce(xs, stream=streams)
    del dropped
    graphs = captured(streams, names, lambda: comm.allreduce(xs, stream=streams), mode)
    launch_from_threads(graphs, streams, names)
    assert all((x.get(stream=stream) == 0).all() for x, stream in zip(xs, streams, strict=True))


def test_communicators_of_two_threads_share_the_streams_of_their_gpus(cuda_ranks, monkeypatch):
    """Of two calls the same comes first on every GPU, else they wait for each other."""
    groups = [gpus.devices(2), gpus.devices(3)]
    comms = [cuda_ranks(devices=names, timeout=5) for names in groups]
    failed, launch, turns = [], Lane.launch, itertools.count()

    def launch_and_let_others(lane, *arguments):
        launch(lane, *arguments)
        time.sleep((0.003, 0.0, 0.001, 0.002, 0.0)[next(turns) % 5])

    def work(comm, names):
        xs = blank(names)
        try:
            for _ in range(15):
                comm.allreduce(xs)
            comm.synchronize()
        except gar.Error as error:
            failed.append(error)

    for comm, names in zip(comms, groups, strict=True):
        comm.allreduce(blank(names))
    monkeypatch.setattr(Lane, "launch", launch_and_let_others)
    threads = [threading.Thread(target=work, args=each) for each in zip(comms, groups, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_streams_of_another_gpu_and_other_things_are_refused(cuda_ranks):
    names = gpus.devices(2)
    comm = cuda_ranks(2)
    streams, xs = gpus.streams_on(names), blank(names)
    wrong = {"stream='fast'": "2 ranks", (streams[0],): "for each", ("a", "b"): "is no stream"}
    if len(set(names)) > 1:
        wrong[tuple(reversed(streams))] = "belongs to cuda:1"
    for stream, message in wrong.items():
        with pytest.raises(gar.InvalidArgument, match=message):
            comm.allreduce(xs, stream=list(stream) if isinstance(stream, tuple) else stream)
    comm.allreduce(xs)
    comm.synchronize()


def test_host_ranks_have_no_streams(ranks):
    with pytest.raises(gar.InvalidArgument, match="no streams"):
        ranks(2).allreduce([np.ones(3), np.ones(3)], stream=[1, 2])
