"""CuPy's own runtime module on the emulated GPUs: devices, memory, errors.

Knows nothing of gpuallreduce's devices: what is tested is the ground that their tests stand on.
"""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stdout

import numpy as np
import pytest
from emulated_gpu.child import in_child, run_in_child

pytest.importorskip("cupy_backends", reason="the emulated GPUs run CuPy: install .[test,cuda13]")

MIB = 1 << 20
TYPES = ("?", "b", "u1", "i2", "f2", "i4", "f4", "i8", "f8", "c8", "c16")
SHAPES = ((0,), (1,), (7, 5), (3, 4, 5))


def some(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(1, 1 + int(np.prod(shape))).astype(dtype).reshape(shape)


@in_child(gpus=3, sms=20)
def test_every_device_is_there_with_its_properties() -> None:
    import cupy

    runtime = cupy.cuda.runtime
    assert runtime.getDeviceCount() == 3
    for number in range(3):
        properties = runtime.getDeviceProperties(number)
        assert properties["name"] == b"Emulated H100 SXM"
        assert (properties["major"], properties["minor"]) == (9, 0)
        assert properties["multiProcessorCount"] == 20
        assert properties["warpSize"] == 32
        assert properties["totalGlobalMem"] == 80 << 30
        assert properties["maxThreadsDim"][0] >= 1024
        assert properties["maxGridSize"][0] >= 1 << 30
        device = cupy.cuda.Device(number)
        assert device.compute_capability == "90"
        assert device.attributes["MultiProcessorCount"] == 20
        assert device.attributes["CooperativeLaunch"] == 1
        assert runtime.deviceGetByPCIBusId(device.pci_bus_id) == number


@in_child(gpus=2)
def test_show_config_tells_of_every_device() -> None:
    import cupy

    text = io.StringIO()
    with redirect_stdout(text):
        cupy.show_config()
    assert text.getvalue().count("Emulated H100 SXM") == 2


@in_child(gpus=2)
def test_arrays_come_back_as_they_went() -> None:
    import cupy

    for number in range(2):
        with cupy.cuda.Device(number):
            for dtype in TYPES:
                for shape in SHAPES:
                    for order in "CF":
                        x = np.asarray(some(dtype, shape), order=order)
                        device_x = cupy.asarray(x)
                        assert device_x.device.id == number
                        assert device_x.strides == x.strides
                        assert np.array_equal(device_x.get(order="A"), x)
                scalar = cupy.empty((), dtype)
                scalar.set(some(dtype, ()))  # asarray would fill it by a kernel
                assert scalar.get() == some(dtype, ())


@in_child(gpus=1)
def test_zeros_are_zero_in_memory_that_was_used() -> None:
    import cupy

    used = cupy.asarray(np.full(MIB, 255, np.uint8))
    pointer = used.data.ptr
    del used
    zeros = cupy.zeros(MIB, np.uint8)
    assert zeros.data.ptr == pointer, "the pool gave other memory: this test shows nothing"
    assert not zeros.get().any()


@in_child(gpus=1)
def test_the_memory_pool_gives_back_what_it_took() -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    free, total = cupy.cuda.runtime.memGetInfo()
    assert 0 < free <= total == 80 << 30
    x = cupy.empty(64 * MIB, np.uint8)
    assert pool.used_bytes() == 64 * MIB
    assert cupy.cuda.runtime.memGetInfo()[0] <= free - 64 * MIB
    del x
    pool.free_all_blocks()
    assert pool.total_bytes() == 0
    assert cupy.cuda.runtime.memGetInfo()[0] == free


@in_child(gpus=2)
def test_pools_of_the_driver_serve_streams() -> None:
    import cupy

    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc), stream:
        x = cupy.asarray(np.arange(1000))
        assert isinstance(x.data.mem, cupy.cuda.memory.MemoryAsync)
        assert x.get().tolist() == list(range(1000))
        del x
    pinned_on_device_1 = runtime.MemPoolProps(
        runtime.cudaMemAllocationTypePinned,
        runtime.cudaMemHandleTypeNone,
        runtime.cudaMemLocationTypeDevice,
        1,
    )
    pool = runtime.memPoolCreate(pinned_on_device_1)
    threshold = runtime.cudaMemPoolAttrReleaseThreshold
    runtime.memPoolSetAttribute(pool, threshold, MIB)
    assert runtime.memPoolGetAttribute(pool, threshold) == MIB
    with cupy.cuda.Device(1):
        pointer = runtime.mallocFromPoolAsync(1000, pool, runtime.streamLegacy)
        assert runtime.pointerGetAttributes(pointer).device == 1
        runtime.freeAsync(pointer, runtime.streamLegacy)
        runtime.deviceSynchronize()
    runtime.memPoolTrimTo(pool, 0)
    runtime.memPoolDestroy(pool)


@in_child(gpus=1)
def test_too_large_an_array_raises_out_of_memory() -> None:
    import cupy

    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(1 << 40, np.uint8)
    assert cupy.asarray(np.ones(3)).get().sum() == 3  # and the device goes on


@in_child(gpus=2)
def test_arrays_are_copied_between_devices() -> None:
    import cupy

    x = some("f4", (1000,))
    device_x = cupy.asarray(x)
    cupy.cuda.runtime.deviceSynchronize()  # the other device's stream does not wait for it
    with cupy.cuda.Device(1):
        by_peer = cupy.empty_like(device_x)
        by_peer.data.copy_from_device_async(device_x.data, x.nbytes)
        cupy.cuda.get_current_stream().synchronize()
        moved = cupy.asarray(device_x)
        cupy.cuda.runtime.memcpyPeer(moved.data.ptr, 1, device_x.data.ptr, 0, x.nbytes)
    for copy in (by_peer, moved):
        assert copy.device.id == 1
        assert np.array_equal(copy.get(), x)


@in_child(gpus=1)
def test_a_rectangle_is_copied_by_pitch() -> None:
    import cupy

    x = some("i4", (6, 8))
    device_x, part = cupy.asarray(x), cupy.zeros((6, 3), np.int32)
    runtime = cupy.cuda.runtime
    source = device_x.data.ptr + 2 * x.itemsize
    runtime.memcpy2D(part.data.ptr, 12, source, 32, 12, 6, runtime.memcpyDeviceToDevice)
    assert np.array_equal(part.get(), x[:, 2:5])


@in_child(gpus=2)
def test_pointers_tell_where_they_point() -> None:
    import cupy

    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(1):
        x = cupy.empty(100, np.uint8)
    attributes = runtime.pointerGetAttributes(x.data.ptr + 50)
    assert (attributes.type, attributes.device) == (runtime.memoryTypeDevice, 1)
    assert attributes.devicePointer == x.data.ptr + 50

    pinned = cupy.cuda.alloc_pinned_memory(100)
    attributes = runtime.pointerGetAttributes(pinned.ptr)
    assert attributes.type == runtime.memoryTypeHost
    assert attributes.hostPointer == attributes.devicePointer == pinned.ptr

    plain = np.empty(1000)
    assert runtime.pointerGetAttributes(plain.ctypes.data).type == runtime.memoryTypeUnregistered
    runtime.hostRegister(plain.ctypes.data, plain.nbytes, 0)
    assert runtime.pointerGetAttributes(plain.ctypes.data).type == runtime.memoryTypeHost
    runtime.hostUnregister(plain.ctypes.data)
    assert runtime.pointerGetAttributes(plain.ctypes.data).type == runtime.memoryTypeUnregistered


@in_child(gpus=1)
def test_pinned_memory_is_copied_asynchronously() -> None:
    import cupy
    from cupyx import empty_pinned

    x, back = empty_pinned(1000, np.float32), empty_pinned(1000, np.float32)
    x[:] = np.arange(1000)
    back[:] = -1
    stream = cupy.cuda.Stream(non_blocking=True)
    device_x = cupy.empty(1000, np.float32)
    device_x.set(x, stream=stream)
    device_x.get(out=back, stream=stream, blocking=False)
    stream.synchronize()
    assert np.array_equal(back, x)


PEERS = {
    "nvswitch8": lambda a, b: a != b,
    "pcie4": lambda a, b: a != b,
    "islands2": lambda a, b: a != b and a // 2 == b // 2,
    "partial": lambda a, b: a != b and {a, b} != {0, 3},
}


def check_peer_access(topology: str) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    count = runtime.getDeviceCount()
    for a in range(count):
        runtime.setDevice(a)
        for b in range(count):
            can = PEERS[topology](a, b)
            assert runtime.deviceCanAccessPeer(a, b) == can
            if can:
                runtime.deviceEnablePeerAccess(b)
                with pytest.raises(runtime.CUDARuntimeError, match="PeerAccessAlreadyEnabled"):
                    runtime.deviceEnablePeerAccess(b)
            elif a != b:
                with pytest.raises(runtime.CUDARuntimeError, match="PeerAccessUnsupported"):
                    runtime.deviceEnablePeerAccess(b)


@pytest.mark.parametrize("topology", PEERS)
def test_peer_access_is_that_of_the_topology(topology: str) -> None:
    run_in_child(check_peer_access, {"topology": topology}, topology=topology)


@in_child(gpus=2)
def test_threads_have_their_own_current_device() -> None:
    import cupy

    runtime = cupy.cuda.runtime
    runtime.setDevice(1)
    seen: list[int] = []

    def in_thread() -> None:
        seen.append(runtime.getDevice())
        seen.append(cupy.empty(1).device.id)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [0, 0]
    assert runtime.getDevice() == 1


@in_child(gpus=1)
def test_errors_have_cuda_names_and_words() -> None:
    import cupy
    from cuda.bindings.runtime import cudaError_t

    runtime = cupy.cuda.runtime
    with pytest.raises(runtime.CUDARuntimeError) as caught:
        runtime.setDevice(1)
    assert str(caught.value) == "cudaErrorInvalidDevice: invalid device ordinal"
    described = 0
    for error in cudaError_t:
        name, text = str(runtime.CUDARuntimeError(int(error))).split(": ")
        assert name in (error.name, "unrecognized error code")
        described += name == error.name and len(text) > 5
    assert described > 45


@in_child(gpus=1)
def test_a_failed_call_leaves_no_error_behind() -> None:
    import cupy

    for _ in range(2):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InvalidDevice"):
            cupy.cuda.runtime.setDevice(9)
        assert cupy.asarray(np.arange(3)).get().tolist() == [0, 1, 2]


@in_child(gpus=1)
def test_what_is_not_supported_says_so() -> None:
    import cupy

    runtime = cupy.cuda.runtime
    with pytest.raises(runtime.CUDARuntimeError, match="NotSupported: operation not supported"):
        runtime.freeArray(0)


@in_child(gpus=1)
def test_kernels_of_cupy_itself_are_refused_and_do_no_harm() -> None:
    import cupy

    x = cupy.asarray(np.arange(4.0))
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="NO_BINARY_FOR_GPU"):
        x + x
    assert x.get().tolist() == [0, 1, 2, 3]
