"""CuPy, if it and a GPU are there; else one clear error.

Knows nothing of communicators. Everything CUDA in this package comes to CuPy through here.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from gpuallreduce.errors import DeviceError, InvalidArgument, NotSupported

__all__ = [
    "Gpu",
    "cuda_errors",
    "cupy_module",
    "device_count",
    "find_gpu",
    "gpu_of",
    "in_any_capture",
    "on_device",
]

INSTALL = "pip install 'gpuallreduce[cuda13]' for drivers of CUDA 13, '[cuda12]' for CUDA 12"


@functools.cache
def _imported() -> Any:
    try:
        import cupy  # type: ignore[import-untyped]
    except Exception as error:  # CuPy raises more than ImportError where its libraries are missing
        raise NotSupported(
            f"CUDA devices need CuPy, and it cannot be imported ({error}): {INSTALL}"
        ) from error
    return cupy


def device_count() -> int:
    """GPUs that this process sees.

    Raises:
        NotSupported: CuPy or the driver is missing, or there is no GPU.
    """
    runtime = _imported().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise NotSupported(
            f"CUDA devices need an NVIDIA GPU and its driver, and CUDA says: {error}. "
            "nvidia-smi should list the GPU; in a container start it with --gpus"
        ) from None
    if count == 0:
        raise NotSupported(
            "CUDA devices need an NVIDIA GPU, and this process sees none: check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES"
        )
    return count


@functools.cache
def cupy_module() -> Any:
    """CuPy, in a process that sees a GPU.

    Raises:
        NotSupported: CuPy or the driver is missing, or there is no GPU.
    """
    device_count()
    return _imported()


@dataclass(frozen=True)
class Gpu:
    """A GPU as far as ranks care.

    Attributes:
        ordinal: its number in this process.
        uuid: the same in all processes, whatever they see of the machine.
        bus_id: its PCI address.
        name: of the model.
        major, minor: compute capability.
        multiprocessors: blocks of 512 threads that are resident at once, one on each.
    """

    ordinal: int
    uuid: str
    bus_id: str
    name: str
    major: int
    minor: int
    multiprocessors: int


def _uuid(ordinal: int) -> str:
    """As nvidia-smi prints it. From the driver: CuPy cuts it at its first zero byte."""
    from cuda.bindings import driver  # type: ignore[import-untyped]

    error, device = driver.cuDeviceGet(ordinal)
    if int(error) == 0:
        # The second version tells instances of one GPU (MIG) apart.
        ask = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
        error, found = ask(device)
    if int(error) != 0:
        raise DeviceError(f"the driver does not tell the UUID of cuda:{ordinal}: {error}")
    digits = bytes(found.bytes).hex()
    cuts = (0, 8, 12, 16, 20, 32)
    return "GPU-" + "-".join(digits[low:high] for low, high in itertools.pairwise(cuts))


@functools.cache
def gpu_of(ordinal: int) -> Gpu:
    """The GPU with this number.

    Raises:
        NotSupported: CuPy or the driver is missing, or there is no GPU.
        InvalidArgument: there are fewer GPUs.
    """
    count = device_count()
    if not 0 <= ordinal < count:
        raise InvalidArgument(
            f'device "cuda:{ordinal}" does not exist; this process sees '
            + ('1 GPU, "cuda:0"' if count == 1 else f'{count} GPUs, "cuda:0" to "cuda:{count - 1}"')
        )
    runtime = cupy_module().cuda.runtime
    facts = runtime.getDeviceProperties(ordinal)
    return Gpu(
        ordinal=ordinal,
        uuid=_uuid(ordinal),
        bus_id=runtime.deviceGetPCIBusId(ordinal),
        name=facts["name"].decode(),
        major=facts["major"],
        minor=facts["minor"],
        multiprocessors=facts["multiProcessorCount"],
    )


def find_gpu(name: str, *, default: int | None = None) -> Gpu:
    """The GPU of a device name.

    Args:
        name: ``cuda:1``, or ``cuda``.
        default: the number that ``cuda`` stands for; None: CuPy's current device.
    """
    _, colon, number = name.partition(":")
    if colon:
        return gpu_of(int(number))
    current = cupy_module().cuda.runtime.getDevice() if default is None else default
    return gpu_of(current % device_count())


class on_device:
    """Makes a GPU current for a while; in a ``with``. A class because every call enters it."""

    def __init__(self, ordinal: int) -> None:
        self._runtime = cupy_module().cuda.runtime
        self._ordinal = ordinal

    def __enter__(self) -> None:
        self._before = self._runtime.getDevice()
        if self._before != self._ordinal:
            self._runtime.setDevice(self._ordinal)

    def __exit__(self, *_: object) -> None:
        if self._before != self._ordinal:
            self._runtime.setDevice(self._before)


class in_any_capture:
    """Allows what CUDA refuses while a stream is captured, and what would spoil the capture, such
    as to allocate, free or load; in a ``with``. This thread only.
    """

    def __enter__(self) -> None:
        from cuda.bindings import driver

        self._exchange = driver.cuThreadExchangeStreamCaptureMode
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _, self._before = self._exchange(relaxed)

    def __exit__(self, *_: object) -> None:
        self._exchange(self._before)


class cuda_errors:
    """Turns CUDA's errors into DeviceError that says what was tried; in a ``with``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Costs nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: Any, _: object) -> None:
        if kind is not None and issubclass(kind, _kinds_of_errors()):
            raise DeviceError(f"{self._what} failed: {error}") from error


@functools.cache
def _kinds_of_errors() -> tuple[type[BaseException], ...]:
    cuda = cupy_module().cuda
    return (
        cuda.runtime.CUDARuntimeError,
        cuda.driver.CUDADriverError,
        cuda.memory.OutOfMemoryError,
    )
