"""NCCL's library as CuPy finds it: there or why not, its version, its errors in our words.

Knows nothing of ranks. The only place that imports ``cupy.cuda.nccl``.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from gpuallreduce.devices.cuda_runtime import cupy_module
from gpuallreduce.errors import DeviceError, NotSupported
from gpuallreduce.fabric.nccl_types import code_of_version, text_of_version

__all__ = ["in_progress", "nccl_errors", "nccl_group", "nccl_module", "nccl_version"]

OLDEST = "2.18"
IN_PROGRESS = 7  # ncclInProgress
INSTALL = "pip install nvidia-nccl-cu13 (CUDA 13) or nvidia-nccl-cu12 (CUDA 12)"


@functools.cache
def nccl_module() -> Any:
    """CuPy's NCCL module.

    Raises:
        NotSupported: CuPy, a GPU or NCCL is missing, or NCCL is too old.
    """
    cupy_module()
    with warnings.catch_warnings():  # CuPy warns where we raise
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl  # type: ignore[import-untyped]
    if not nccl.available:
        raise NotSupported(f"NCCL was asked for, and libnccl.so.2 cannot be loaded: {INSTALL}")
    found = int(nccl.get_version())
    if found < code_of_version(OLDEST):
        raise NotSupported(
            f"NCCL {OLDEST} or later is needed, and {text_of_version(found)} is installed: "
            f"{INSTALL}"
        )
    return nccl


def nccl_version() -> int:
    """The number of NCCL's version; raises as ``nccl_module``."""
    return int(nccl_module().get_version())


def _last_error() -> str:
    """What NCCL says of its last failure. CuPy does not hand it on, so the library is asked."""
    try:
        ask = ctypes.CDLL("libnccl.so.2").ncclGetLastError  # loaded already, found by its SONAME
    except (OSError, AttributeError):
        return ""
    ask.restype, ask.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    text = (ask(None) or b"").decode(errors="replace").strip()
    return f"; NCCL says: {text}" if text else ""


@contextmanager
def nccl_errors(what: str) -> Iterator[None]:
    """Turns NCCL's errors into DeviceError that says what was tried."""
    try:
        yield
    except nccl_module().NcclError as error:
        raise DeviceError(f"{what} failed: {error}{_last_error()}") from error
    except KeyError as error:
        raise DeviceError(
            f"{what} failed with NCCL's result {error}, which CuPy does not know{_last_error()}"
        ) from error


def in_progress(error: DeviceError) -> bool:
    """True if NCCL only said that something still runs: CuPy has no name for that result."""
    cause = error.__cause__
    return isinstance(cause, KeyError) and cause.args == (IN_PROGRESS,)


@contextmanager
def nccl_group() -> Iterator[None]:
    """Calls for several ranks go together: one thread cannot wait in the first for the second."""
    nccl = nccl_module()
    nccl.groupStart()
    with ExitStack() as stack:
        stack.callback(nccl.groupEnd)
        yield
