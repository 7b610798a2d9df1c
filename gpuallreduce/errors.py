"""Every error that gpuallreduce raises on purpose: each says what was asked, what was found and
what to do.

Knows nothing of devices, kernels or communicators.
"""

from __future__ import annotations

__all__ = [
    "Aborted",
    "Closed",
    "CompileError",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "MismatchError",
    "NotSupported",
    "Timeout",
]


class Error(Exception):
    """Base of all errors of gpuallreduce."""


class InvalidArgument(Error, ValueError):
    """An argument cannot be right on any machine: a wrong shape, dtype, name or overlap."""


class NotSupported(Error):
    """The request makes sense, but not for this dtype, operator, device or machine."""


class CompileError(Error):
    """A kernel could not be compiled: no compiler, or its own message."""


class DeviceError(Error):
    """A device or the operating system refused memory, a mapping or a launch."""


class MismatchError(Error):
    """The ranks did not make the same call. Raised on every rank, with both sides' values."""


class Timeout(Error, TimeoutError):
    """A wait reached its limit. Names the rank, step and peer that were waited for."""


class Aborted(Error):
    """The communicator was aborted, or broke in an earlier call, and can run no more calls."""


class Closed(Error):
    """The communicator is closed."""
