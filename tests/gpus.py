"""The GPUs that tests run on: the machine's, or else emulated ones.

Knows nothing of what is tested.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from emulated_gpu.activate import activate, environment

DELAYS = {"seed": 11, "delay_us": 60}  # so that a missing wait shows


@functools.cache
def are_real() -> bool:
    """Whether this machine has a GPU and its driver. It is then what the tests run on."""
    if os.environ.get("GPUALLREDUCE_EMULATED"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0


@functools.cache
def start() -> Any:
    """CuPy, on the machine's GPUs or on emulated ones, for this whole process."""
    if not are_real():
        activate(**DELAYS)
    import cupy

    return cupy


def variables(**settings: object) -> dict[str, str]:
    """Environment variables for processes that use GPUs; settings are those of emulated ones."""
    if are_real():
        return {}
    return environment(**{**DELAYS, **settings})


def devices(nranks: int) -> list[str]:
    """A device name per rank; where there are fewer GPUs, ranks share them."""
    count = start().cuda.runtime.getDeviceCount()
    return [f"cuda:{rank % count}" for rank in range(nranks)]


def on(name: str) -> Any:
    """The device of a name, as a context."""
    return start().cuda.Device(int(name.partition(":")[2]))


def put(name: str, array: np.ndarray[Any, Any]) -> Any:
    """A copy of an array on a device, made by copies alone: emulated GPUs run no kernel of CuPy."""
    with on(name):
        copy = start().empty(array.shape, array.dtype)
        copy.set(array)
        start().cuda.get_current_stream().synchronize()  # other streams may use it at once
        return copy


def put_all(names: Sequence[str], arrays: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
    """A copy of each array on its device."""
    return [put(name, array) for name, array in zip(names, arrays, strict=True)]


def streams_on(names: Sequence[str]) -> list[Any]:
    """A non-blocking stream on each device."""
    streams = []
    for name in names:
        with on(name):
            streams.append(start().cuda.Stream(non_blocking=True))
    return streams


@contextlib.contextmanager
def held(stream: Any, seconds: float = 0.15) -> Iterator[None]:
    """Whatever is put on the stream inside the block waits for some time first."""
    import time

    with on(f"cuda:{stream.device_id}"):
        stream.launch_host_func(lambda _: time.sleep(seconds), None)
    yield
