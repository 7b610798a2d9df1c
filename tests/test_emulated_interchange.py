"""Memory, arrays and streams that pass between processes and libraries on the emulated GPUs.

Knows nothing of gpuallreduce's devices: what is tested is the ground that their tests stand on.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from emulated_gpu.child import in_child

pytest.importorskip("cupy_backends", reason="the emulated GPUs run CuPy: install .[test,cuda13]")


IMPORTER = """
import sys
import cupy, numpy as np
runtime = cupy.cuda.runtime
runtime.setDevice(1)
base = runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
memory = cupy.cuda.UnownedMemory(base, 4096, None, 1)
x = cupy.ndarray(512, np.float64, cupy.cuda.MemoryPointer(memory, 0))
assert np.array_equal(x.get(), np.arange(512.0)), x
x.set(np.arange(512.0) * 2)
runtime.deviceSynchronize()
del x, memory
runtime.ipcCloseMemHandle(base)
"""


def open_elsewhere(handle: bytes) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORTER, handle.hex()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@in_child(gpus=2)
def test_another_process_reads_and_writes_memory_by_its_handle() -> None:
    import cupy

    x = cupy.asarray(np.arange(512.0))
    done = open_elsewhere(cupy.cuda.runtime.ipcGetMemHandle(x.data.ptr))
    assert done.returncode == 0, done.stderr
    assert np.array_equal(x.get(), np.arange(512.0) * 2)


@in_child(gpus=2, ipc=False)
def test_handles_can_be_refused() -> None:
    import cupy

    x = cupy.empty(512)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorNotSupported"):
        cupy.cuda.runtime.ipcGetMemHandle(x.data.ptr)


@in_child(gpus=2)
def test_numba_and_cuda_core_see_the_same_devices() -> None:
    import cupy
    from cuda.core import Device
    from numba import cuda

    assert len(cuda.gpus) == 2
    for gpu in cuda.gpus:
        assert gpu.name == "Emulated H100 SXM"
    cuda.select_device(1)
    x = cuda.to_device(np.arange(3))
    assert x.copy_to_host().tolist() == [0, 1, 2]
    assert cupy.asarray(x).device.id == 1
    assert [Device(number).name for number in range(2)] == ["Emulated H100 SXM"] * 2
    Device(0).set_current()
    assert cupy.cuda.runtime.getDevice() == 0  # CuPy follows the context that is current


class Foreign:
    """An array of a library that speaks the CUDA array interface."""

    def __init__(self, **interface: object) -> None:
        self.__cuda_array_interface__ = interface


@in_child(gpus=2)
def test_arrays_are_taken_over_without_a_copy() -> None:
    import cupy
    from numba import cuda

    x = cupy.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    stream = cupy.cuda.Stream(non_blocking=True)
    interface = {"shape": (2, 3), "typestr": "<f4", "data": (x.data.ptr, False), "version": 3}
    others = [Foreign(**interface, stream=value) for value in (None, 1, 2, stream.ptr)]
    for taken in (
        *map(cupy.asarray, others),
        cupy.from_dlpack(x),
        cupy.asarray(cuda.as_cuda_array(x)),
    ):
        assert taken.data.ptr == x.data.ptr
        assert np.array_equal(taken.get(), x.get())
    strided = cupy.asarray(Foreign(**interface, strides=(4, 8)))
    assert strided.strides == (4, 8)
    assert cupy.asarray(Foreign(shape=(0,), typestr="<f4", data=(0, False), version=3)).size == 0
    with cupy.cuda.Device(1):
        assert cupy.from_dlpack(cupy.zeros(3)).__dlpack_device__() == (2, 1)


@in_child(gpus=1)
def test_who_takes_an_array_over_waits_for_its_stream() -> None:
    import cupy

    gate, consumed, order = threading.Event(), threading.Event(), list[str]()
    x = cupy.zeros(3)

    def open_gate() -> None:
        consumed.wait(0.3)  # what does not wait for the gate has the time to show it
        gate.set()

    def consume(_: object) -> None:
        order.append("consumed")
        consumed.set()

    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    producer.launch_host_func(lambda _: (gate.wait(60), order.append("produced")), None)
    foreign = Foreign(**{**x.__cuda_array_interface__, "stream": producer.ptr})
    opener = threading.Thread(target=open_gate)
    with consumer:
        opener.start()  # CuPy may wait in the host or on the consumer's stream
        cupy.asarray(foreign)
        consumer.launch_host_func(consume, None)
        consumer.synchronize()
    opener.join()
    assert order == ["produced", "consumed"]


@in_child(gpus=1)
def test_sixteen_and_eight_bit_types_of_ml_dtypes_are_held() -> None:
    import cupy
    import ml_dtypes

    x = np.arange(6).astype(ml_dtypes.bfloat16)
    assert np.array_equal(cupy.asarray(x).get(), x)
    assert cupy.empty(6, np.uint16).view(ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    for name in ("float8_e4m3fn", "float8_e5m2"):  # views only: CuPy cannot make such an array
        x = np.arange(6).astype(getattr(ml_dtypes, name))
        viewed = cupy.asarray(x.view(np.uint8)).view(x.dtype)
        assert np.array_equal(viewed.get().view(np.uint8), x.view(np.uint8))


SHARER = """
import mmap, sys
import cupy, numpy as np
runtime = cupy.cuda.runtime
shared = np.frombuffer(mmap.mmap(int(sys.argv[1]), 8192), np.float64)
runtime.setDevice(1)
runtime.hostRegister(shared.ctypes.data, shared.nbytes, 0)
x = cupy.empty(1024)
runtime.memcpy(x.data.ptr, shared.ctypes.data, shared.nbytes, runtime.memcpyDefault)
x.set(x.get() + 1)
runtime.memcpy(shared.ctypes.data, x.data.ptr, shared.nbytes, runtime.memcpyDefault)
runtime.hostUnregister(shared.ctypes.data)
"""


@in_child(gpus=2)
def test_processes_share_registered_host_memory() -> None:
    import mmap
    import os

    import cupy

    runtime = cupy.cuda.runtime
    file = os.memfd_create("shared")
    os.ftruncate(file, 8192)
    shared = np.frombuffer(mmap.mmap(file, 8192), np.float64)
    runtime.hostRegister(shared.ctypes.data, shared.nbytes, 0)
    pointer = runtime.pointerGetAttributes(shared.ctypes.data).devicePointer
    memory = cupy.cuda.UnownedMemory(pointer, shared.nbytes, shared, 0)
    x = cupy.ndarray(1024, np.float64, cupy.cuda.MemoryPointer(memory, 0))
    x.set(np.arange(1024.0))
    runtime.deviceSynchronize()
    command = [sys.executable, "-c", SHARER, str(file)]
    done = subprocess.run(
        command, pass_fds=[file], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert np.array_equal(x.get(), np.arange(1024.0) + 1)
    assert np.array_equal(shared, np.arange(1024.0) + 1)


@in_child(gpus=1)
def test_streams_pass_between_cupy_and_cuda_core() -> None:
    import cupy
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    theirs, ours = device.create_stream(), cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Stream.from_external(theirs) as stream:
        assert stream.ptr == int(theirs.handle)
        x = cupy.zeros(3)
    theirs.sync()
    assert x.get().tolist() == [0, 0, 0]
    assert int(device.create_stream(ours).handle) == ours.ptr
