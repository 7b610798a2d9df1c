"""What CuPy puts on streams of the emulated GPUs: events, host functions, kernels, graphs.

Knows nothing of gpuallreduce's devices: what is tested is the ground that their tests stand on.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_gpu.child import in_child, run_in_child

pytest.importorskip("cupy_backends", reason="the emulated GPUs run CuPy: install .[test,cuda13]")


@in_child(gpus=1)
def test_work_behind_a_waited_event_comes_after_it() -> None:
    import cupy

    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    order: list[str] = []
    gate = threading.Event()
    begin.record(first)
    first.launch_host_func(lambda _: (gate.wait(60), order.append("first")), None)
    end.record(first)
    second.wait_event(end)
    second.launch_host_func(lambda _: order.append("second"), None)
    assert begin.done or not end.done
    assert not second.done
    gate.set()
    second.synchronize()
    assert order == ["first", "second"]
    assert first.done
    assert end.done
    assert cupy.cuda.get_elapsed_time(begin, end) >= 0


@in_child(gpus=1)
def test_a_stream_callback_learns_that_all_is_well() -> None:
    import cupy

    stream = cupy.cuda.Stream()
    seen: list[tuple[int, object]] = []
    stream.add_callback(lambda _, status, argument: seen.append((status, argument)), "argument")
    stream.synchronize()
    assert seen == [(0, "argument")]


@in_child(gpus=1)
def test_streams_keep_flags_and_priority() -> None:
    import cupy

    runtime = cupy.cuda.runtime
    for stream, flags in ((cupy.cuda.Stream(), 0), (cupy.cuda.Stream(non_blocking=True), 1)):
        assert runtime.streamGetFlags(stream.ptr) == flags
    urgent = cupy.cuda.Stream(priority=-1)
    assert runtime.streamGetPriority(urgent.ptr) == -1
    assert runtime.streamGetFlags(cupy.cuda.Stream.null.ptr) == 0


IMAGE = """
#include <cstdint>
struct Params { float* to; const float* from; uint64_t count; float factor; };
extern "C" {
extern const uint32_t scale_params_bytes = sizeof(Params);
int scale(const void* raw, uint32_t block, uint32_t nblocks) {
  const Params& p = *static_cast<const Params*>(raw);
  for (uint64_t i = block; i < p.count; i += nblocks) p.to[i] = p.factor * p.from[i];
  return 0;
}
}
"""
PARAMS = np.dtype([("to", "u8"), ("from", "u8"), ("count", "u8"), ("factor", "f4")], align=True)


def scale_image(folder: Path) -> str:
    """The path of an image for the stand-in driver, with one kernel."""
    from gpuallreduce.jit import host_compiler

    source, image = folder / "scale.cpp", folder / "scale.so"
    source.write_text(IMAGE)
    command = [*host_compiler().command, "-O1", "-fPIC", "-shared", str(source), "-o", str(image)]
    subprocess.run(command, check=True)
    return str(image)


def scale_params(to: Any, x: Any, factor: float) -> np.ndarray:
    """The kernel's struct. Zeroed, because its padding reaches the driver too."""
    params = np.zeros(1, PARAMS)
    params[0] = (to.data.ptr, x.data.ptr, x.size, factor)
    return params


def check_launch_by_value(folder: str) -> None:
    import cupy

    kernel = cupy.RawModule(path=scale_image(Path(folder))).get_function("scale")
    x = np.arange(1000, dtype=np.float32)
    device_x, y = cupy.asarray(x), cupy.zeros(1000, np.float32)
    params = scale_params(y, device_x, 3.0)
    cupy.cuda.runtime.deviceSynchronize()  # the kernel's stream does not wait for others
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kernel((7,), (64,), (params,))
    params["factor"] = 0  # a launch has taken its arguments when it returns
    stream.synchronize()
    assert np.array_equal(y.get(), 3 * x)
    assert kernel.num_regs >= 0


def test_a_kernel_gets_a_struct_by_value(tmp_path: Path) -> None:
    run_in_child(check_launch_by_value, {"folder": str(tmp_path)}, gpus=1)


def check_graph(folder: str) -> None:
    import cupy

    kernel = cupy.RawModule(path=scale_image(Path(folder))).get_function("scale")
    x, y, z = cupy.empty(100, np.float32), cupy.empty(100, np.float32), cupy.empty(100, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        assert stream.is_capturing()
        kernel((2,), (32,), (scale_params(y, x, 2.0),))
        z.data.copy_from_device_async(y.data, y.nbytes, stream)
        graph = stream.end_capture()
        graph.upload(stream)
        for replay in range(3):
            values = np.full(100, replay + 1, np.float32)
            x.set(values, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(z.get(stream=stream), 2 * values)


def test_a_captured_graph_replays_with_new_data(tmp_path: Path) -> None:
    run_in_child(check_graph, {"folder": str(tmp_path)}, gpus=1)
