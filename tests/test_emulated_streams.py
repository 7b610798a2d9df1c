"""The emulated GPUs order work as CUDA does and no more: streams, events, graphs and their capture.

Each body runs in a process of its own. Delays are seeded, so what they show they show every time.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
from emulated_gpu.child import in_child, run_in_child
from emulated_gpu.handmade import LIMIT_NS, Image, call, compile_image, current, read, status, write

pytest.importorskip("cupy_backends")
pytest.importorskip("cuda.bindings.driver")

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


def _mode(mode: int) -> Any:
    from cuda.bindings import driver

    return driver.CUstreamCaptureMode(mode)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_image(tmp_path_factory.mktemp("image"))


def wrong_copies(image: str, first: Any, second: Any, *, waits: bool) -> int:
    """Of 40 values handed from one stream to another, how many arrive wrong."""
    kernels, words = Image(image), call("cuMemAlloc", 8 * 80)
    write(words, *[0] * 80)
    for i in range(40):
        source, target = int(words) + 8 * i, int(words) + 320 + 8 * i
        kernels.launch("store", source, 0, i + 1, stream=first)
        if waits:
            event = call("cuEventCreate", 2)
            call("cuEventRecord", event, first)
            call("cuStreamWaitEvent", second, event, 0)
        kernels.launch("copy_words", target, source, 1, stream=second)
        call("cuCtxSynchronize")  # each value is a race of its own
    return sum(value != i + 1 for i, value in enumerate(read(int(words) + 320, 40)))


@in_child(seed=1)
@pytest.mark.parametrize("waits", [True, False])
def test_delays_show_a_missing_wait_and_break_nothing_that_waits(image: str, waits: bool) -> None:
    current(0)
    first, second = (call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    assert (wrong_copies(image, first, second, waits=waits) == 0) == waits


@in_child(seed=2)
@pytest.mark.parametrize("flags", [0, NON_BLOCKING])
def test_only_blocking_streams_are_ordered_with_the_legacy_stream(image: str, flags: int) -> None:
    current(0)
    stream, ordered = call("cuStreamCreate", flags), flags == 0
    assert (wrong_copies(image, 0, stream, waits=False) == 0) == ordered
    assert (wrong_copies(image, stream, 0, waits=False) == 0) == ordered


@in_child()
def test_a_destroyed_stream_ends_its_work_and_the_legacy_stream_waits_for_it(image: str) -> None:
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 24)
    call("cuMemsetD8", words, 0, 24)
    stream = call("cuStreamCreate", 0)
    kernels.launch("wait_for", words, 1, 30_000_000, stream=stream)
    kernels.launch("store", words, 8, 5, stream=stream)
    call("cuStreamDestroy", stream)
    assert status("cuStreamQuery", stream) == "INVALID_HANDLE"
    kernels.launch("copy_words", int(words) + 16, int(words) + 8, 1)
    assert read(words, 3) == [0, 5, 5]


@in_child()
def test_each_thread_has_a_stream_of_its_own(image: str) -> None:
    context = current(0)
    kernels, words, per_thread = Image(image), call("cuMemAlloc", 8), 2
    write(words, 0)

    def release() -> None:
        call("cuCtxSetCurrent", context)
        kernels.launch("store", words, 0, 1, stream=per_thread)
        call("cuStreamSynchronize", per_thread)

    kernels.launch("wait_for", words, 1, LIMIT_NS, stream=per_thread)
    other = threading.Thread(target=release)
    other.start()
    other.join()
    assert status("cuStreamSynchronize", per_thread) == "SUCCESS"
    assert read(words) == [1]


@in_child()
@pytest.mark.parametrize("stream_device", [0, 1])
def test_a_launch_belongs_to_the_current_device(image: str, stream_device: int) -> None:
    current(stream_device)
    stream = call("cuStreamCreate", 0)
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 8)
    expected = "SUCCESS" if stream_device == 0 else "INVALID_HANDLE"
    assert kernels.launch("store", words, 0, 1, stream=stream) == expected
    assert status("cuMemsetD8Async", words, 0, 8, stream) == "SUCCESS", "copies go by the stream"


@pytest.mark.parametrize("strict", [True, False])
def test_strict_devices_wait_before_they_allocate(image: str, strict: bool) -> None:
    run_in_child(allocate_beside_a_kernel, {"image": image, "strict": strict}, strict_sync=strict)


def allocate_beside_a_kernel(image: str, strict: bool) -> None:
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 8)
    write(words, 0)
    stream = call("cuStreamCreate", NON_BLOCKING)
    kernels.launch("wait_for", words, 1, 100_000_000 if strict else LIMIT_NS, stream=stream)
    call("cuMemAlloc", 8)
    assert status("cuStreamQuery", stream) == ("SUCCESS" if strict else "NOT_READY")
    write(words, 1)
    call("cuStreamSynchronize", stream)


@in_child()
def test_a_wait_means_the_record_at_the_time_of_the_call(image: str) -> None:
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 16)
    write(words, 0, 0)
    first, second = (call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    event = call("cuEventCreate", 0)
    call("cuStreamWaitEvent", second, event, 0)  # never recorded: nothing to wait for
    call("cuEventRecord", event, first)
    call("cuStreamWaitEvent", second, event, 0)
    kernels.launch("wait_for", words, 1, LIMIT_NS, stream=first)
    call("cuEventRecord", event, first)
    assert status("cuEventQuery", event) == "NOT_READY"
    kernels.launch("store", words, 0, 1, stream=second)  # ends the wait in the first stream
    call("cuEventSynchronize", event)
    assert read(words) == [1]


@in_child()
def test_events_order_devices_and_measure_time(image: str) -> None:
    contexts = [current(device) for device in (0, 1)]
    shared = call("cuMemHostAlloc", 16, 0)
    ctypes.memset(int(shared), 0, 16)
    streams, events = [], []
    for context in contexts:
        call("cuCtxSetCurrent", context)
        streams.append(call("cuStreamCreate", NON_BLOCKING))
        events.append(call("cuEventCreate", 0))
    call("cuCtxSetCurrent", contexts[0])
    start = call("cuEventCreate", 0)
    assert status("cuEventElapsedTime", start, events[0]) == "INVALID_HANDLE", "never recorded"
    call("cuEventRecord", start, streams[0])
    Image(image).launch("wait_for", shared, 1, 20_000_000, stream=streams[0])
    call("cuEventRecord", events[0], streams[0])
    assert status("cuEventRecord", events[0], streams[1]) == "INVALID_HANDLE", "another device's"
    call("cuStreamWaitEvent", streams[1], events[0], 0)
    call("cuCtxSetCurrent", contexts[1])
    Image(image).launch("store", shared, 8, 5, stream=streams[1])
    call("cuStreamSynchronize", streams[1])
    assert status("cuEventQuery", events[0]) == "SUCCESS"
    assert 20 <= call("cuEventElapsedTime", start, events[0]) < 2000
    assert ctypes.c_uint64.from_address(int(shared) + 8).value == 5


@in_child()
def test_a_pageable_source_is_read_at_the_call_and_a_pinned_one_later(image: str) -> None:
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 24)
    write(words, 0, 0, 0)
    pinned, pageable = call("cuMemHostAlloc", 8, 0), (ctypes.c_uint64 * 1)(1)
    ctypes.c_uint64.from_address(int(pinned)).value = 1
    stream = call("cuStreamCreate", NON_BLOCKING)
    kernels.launch("wait_for", words, 1, LIMIT_NS, stream=stream)
    call("cuMemcpyHtoDAsync", int(words) + 8, ctypes.addressof(pageable), 8, stream)
    call("cuMemcpyHtoDAsync", int(words) + 16, pinned, 8, stream)
    pageable[0] = ctypes.c_uint64.from_address(int(pinned)).value = 2
    write(words, 1)
    call("cuStreamSynchronize", stream)
    assert read(words, 3) == [1, 1, 2]


@in_child(seed=4)
def test_stream_ordered_memory_begins_and_ends_in_its_stream(image: str) -> None:
    current(0)
    kernels = Image(image)
    first, second = (call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    address = call("cuMemAllocAsync", 64, first)
    kernels.launch("store", address, 0, 1, stream=first)
    call("cuMemFreeAsync", address, first)
    assert status("cuMemFreeAsync", address, first) == "INVALID_VALUE"
    call("cuCtxSynchronize")
    gate, early = call("cuMemAlloc", 8), None
    write(gate, 0)
    kernels.launch("wait_for", gate, 1, LIMIT_NS, stream=first)
    early = call("cuMemAllocAsync", 64, first)
    kernels.launch("store", early, 0, 1, stream=second)  # nothing says that it comes after
    assert status("cuStreamSynchronize", second) == "ILLEGAL_ADDRESS"


@in_child()
def test_freeing_waits_for_the_work_of_the_context(image: str) -> None:
    current(0)
    kernels, words, other = Image(image), call("cuMemHostAlloc", 16, 0), call("cuMemAlloc", 8)
    ctypes.memset(int(words), 0, 16)
    stream = call("cuStreamCreate", NON_BLOCKING)
    kernels.launch("wait_for", words, 1, 30_000_000, stream=stream)
    kernels.launch("store", words, 8, 1, stream=stream)
    call("cuMemFree", other)
    assert ctypes.c_uint64.from_address(int(words) + 8).value == 1


@in_child()
def test_host_functions_run_in_order_and_cannot_call_the_driver(image: str) -> None:
    current(0)
    library, seen = ctypes.CDLL("libcuda.so.1"), []
    words = call("cuMemHostAlloc", 8, 0)
    ctypes.memset(int(words), 0, 8)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def look(data: int) -> None:
        seen.append(ctypes.c_uint64.from_address(int(words)).value)
        seen.append(library.cuCtxSynchronize())

    stream = call("cuStreamCreate", NON_BLOCKING)
    kernels = Image(image)
    kernels.launch("store", words, 0, 1, stream=stream)
    assert library.cuLaunchHostFunc(ctypes.c_void_p(int(stream)), look, None) == 0
    kernels.launch("store", words, 0, 2, stream=stream)
    assert library.cuStreamSynchronize(ctypes.c_void_p(int(stream))) == 0
    assert seen == [1, 800]


def capture(stream: Any, body: Any, mode: int = GLOBAL) -> Any:
    """What ``body`` enqueues, as an executable graph."""
    call("cuStreamBeginCapture", stream, _mode(mode))
    body()
    return call("cuGraphInstantiate", call("cuStreamEndCapture", stream), 0)


@in_child(seed=5)
def test_a_graph_replays_with_its_order_on_two_devices(image: str) -> None:
    second = current(1)
    kernels_1, side, event_1 = Image(image), call("cuStreamCreate", 1), call("cuEventCreate", 2)
    words = call("cuMemHostAlloc", 24, 0)
    ctypes.memset(int(words), 0, 24)
    first = current(0)
    kernels_0, main, event_0 = Image(image), call("cuStreamCreate", 1), call("cuEventCreate", 2)

    def body() -> None:
        kernels_0.launch("add", words, 1, 1, stream=main)
        call("cuEventRecord", event_0, main)
        call("cuStreamWaitEvent", side, event_0, 0)
        call("cuCtxSetCurrent", second)
        kernels_1.launch("copy_words", int(words) + 8, words, 1, stream=side)
        call("cuEventRecord", event_1, side)
        call("cuCtxSetCurrent", first)
        call("cuStreamWaitEvent", main, event_1, 0)
        kernels_0.launch("copy_words", int(words) + 16, int(words) + 8, 1, stream=main)

    graph = capture(main, body)
    for replay in range(1, 31):
        call("cuGraphLaunch", graph, main)
        call("cuStreamSynchronize", main)
        assert list((ctypes.c_uint64 * 3).from_address(int(words))) == [replay] * 3
    assert status("cuEventQuery", event_0) == "CAPTURED_EVENT"


@in_child()
def test_launches_of_one_graph_follow_each_other(image: str) -> None:
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 24)
    call("cuMemsetD8", words, 0, 24)
    gate, begun, seen = (int(words) + 8 * i for i in range(3))
    streams = [call("cuStreamCreate", NON_BLOCKING) for _ in range(3)]
    call("cuCtxSynchronize")

    def body() -> None:
        kernels.launch("add", begun, 1, 1, stream=streams[0])
        kernels.launch("wait_for", gate, 1, LIMIT_NS, stream=streams[0])

    graph = capture(streams[0], body)
    for stream in streams[:2]:
        call("cuGraphLaunch", graph, stream)
    kernels.launch("wait_for", begun, 2, 50_000_000, stream=streams[2])
    kernels.launch("copy_words", seen, begun, 1, stream=streams[2])
    call("cuStreamSynchronize", streams[2])
    write(gate, 1)
    call("cuCtxSynchronize")
    assert read(words, 3) == [1, 2, 1]


@in_child(seed=6)
def test_branches_of_a_graph_run_at_once(image: str) -> None:
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 32)
    write(words, 0, 0, 0, 0)
    main, side, other = (call("cuStreamCreate", NON_BLOCKING) for _ in range(3))
    fork, join = (call("cuEventCreate", 2) for _ in range(2))

    def body() -> None:
        call("cuMemsetD8Async", words, 0, 8, main)
        call("cuEventRecord", fork, main)
        call("cuStreamWaitEvent", side, fork, 0)
        for stream in (main, side):
            arguments = (words, 4, LIMIT_NS, int(words) + 8)
            kernels.launch("meet", *arguments, grid=2, stream=stream)
        call("cuEventRecord", join, side)
        call("cuStreamWaitEvent", main, join, 0)
        kernels.launch("add", int(words) + 16, 1, 1, stream=main)

    graph = capture(main, body)
    assert read(words, 3) == [0, 0, 0], "capture runs nothing"
    for i in range(20):
        call("cuGraphLaunch", graph, (main, other)[i % 2])
    call("cuGraphExecDestroy", graph)
    call("cuCtxSynchronize")
    assert read(words, 3) == [4, 0, 20]


@in_child()
def test_what_capture_prohibits_fails_and_invalidates_it() -> None:
    current(0)
    stream, outside, blocking = (call("cuStreamCreate", flags) for flags in (1, 1, 0))
    captured, old = call("cuEventCreate", 2), call("cuEventCreate", 2)
    address = call("cuMemAlloc", 8)
    call("cuEventRecord", old, outside)
    call("cuStreamSynchronize", outside)
    prohibited = [
        (("cuStreamSynchronize", stream), "STREAM_CAPTURE_UNSUPPORTED"),
        (("cuStreamQuery", stream), "STREAM_CAPTURE_UNSUPPORTED"),
        (("cuCtxSynchronize",), "STREAM_CAPTURE_UNSUPPORTED"),
        (("cuMemAlloc", 8), "STREAM_CAPTURE_UNSUPPORTED"),
        (("cuMemFree", address), "STREAM_CAPTURE_UNSUPPORTED"),
        (("cuEventSynchronize", captured), "CAPTURED_EVENT"),
        (("cuEventQuery", captured), "CAPTURED_EVENT"),
        (("cuStreamWaitEvent", stream, old, 0), "STREAM_CAPTURE_ISOLATION"),
        (("cuStreamWaitEvent", 0, captured, 0), "STREAM_CAPTURE_IMPLICIT"),
    ]
    for arguments, expected in prohibited:
        call("cuStreamBeginCapture", stream, _mode(GLOBAL))
        call("cuMemsetD8Async", address, 0, 8, stream)
        call("cuEventRecord", captured, stream)
        assert status(*arguments) == expected, arguments
        assert status("cuMemsetD8Async", address, 0, 8, stream) == "STREAM_CAPTURE_INVALIDATED"
        assert status("cuStreamEndCapture", stream) == "STREAM_CAPTURE_INVALIDATED"
        assert status("cuMemsetD8Async", address, 0, 8, stream) == "SUCCESS"
        call("cuCtxSynchronize")
    call("cuStreamBeginCapture", blocking, _mode(RELAXED))
    assert status("cuMemsetD8Async", address, 0, 8, 0) == "STREAM_CAPTURE_IMPLICIT"
    assert status("cuStreamEndCapture", blocking) == "STREAM_CAPTURE_INVALIDATED"
    assert status("cuStreamBeginCapture", 0, _mode(GLOBAL)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert status("cuStreamEndCapture", stream) == "ILLEGAL_STATE"


@in_child()
def test_captures_must_be_joined_and_kept_apart() -> None:
    current(0)
    streams = [call("cuStreamCreate", NON_BLOCKING) for _ in range(3)]
    event, address = call("cuEventCreate", 2), call("cuMemAlloc", 8)
    call("cuStreamBeginCapture", streams[0], _mode(GLOBAL))
    call("cuEventRecord", event, streams[0])
    call("cuStreamWaitEvent", streams[1], event, 0)
    call("cuMemsetD8Async", address, 0, 8, streams[1])
    assert status("cuStreamEndCapture", streams[1]) == "STREAM_CAPTURE_UNMATCHED"
    assert status("cuStreamEndCapture", streams[0]) == "STREAM_CAPTURE_INVALIDATED"

    call("cuStreamBeginCapture", streams[0], _mode(GLOBAL))
    call("cuEventRecord", event, streams[0])
    call("cuStreamWaitEvent", streams[1], event, 0)
    call("cuMemsetD8Async", address, 0, 8, streams[1])
    assert status("cuStreamEndCapture", streams[0]) == "STREAM_CAPTURE_UNJOINED"

    for stream in streams[:2]:
        call("cuStreamBeginCapture", stream, _mode(RELAXED))
    call("cuEventRecord", event, streams[0])
    assert status("cuStreamWaitEvent", streams[1], event, 0) == "STREAM_CAPTURE_MERGE"
    for stream in streams[:2]:
        assert status("cuStreamEndCapture", stream) == "STREAM_CAPTURE_INVALIDATED"


@in_child()
def test_a_relaxed_capture_may_allocate_and_keeps_its_arguments(image: str) -> None:
    current(0)
    kernels, stream = Image(image), call("cuStreamCreate", NON_BLOCKING)
    made: list[Any] = []

    def body() -> None:
        made.append(call("cuMemAlloc", 8))
        kernels.launch("store", made[0], 0, 42, stream=stream)

    graph = capture(stream, body, RELAXED)
    write(made[0], 0)
    call("cuGraphLaunch", graph, stream)
    call("cuStreamSynchronize", stream)
    assert read(made[0]) == [42]
    call("cuMemFree", made[0])
    call("cuGraphLaunch", graph, stream)
    assert status("cuStreamSynchronize", stream) == "ILLEGAL_ADDRESS", "replays see what is freed"


@in_child()
def test_cuda_core_runs_on_the_stand_in(image: str) -> None:
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    device = Device(2)
    device.set_current()
    assert device.compute_capability == (9, 0)
    stream = device.create_stream()
    kernel = ObjectCode.from_cubin(Path(image).read_bytes()).get_kernel("count_blocks")
    buffer = call("cuMemAlloc", 8 * 4)
    call("cuMemsetD8", buffer, 0, 32)
    call("cuStreamSynchronize", 0)
    launch(stream, LaunchConfig(grid=4, block=64), kernel, int(buffer))
    stream.sync()
    assert read(buffer, 4) == [4] * 4
