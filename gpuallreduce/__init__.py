"""gpuallreduce: all-reduce with the same bits on every rank, for any size, algorithm and run.

``Communicator(["host"] * 4)`` makes ranks of this process; ``init()`` makes this process one rank
of a job.
"""

from __future__ import annotations

from gpuallreduce.api import allreduce, init
from gpuallreduce.communicator import Communicator
from gpuallreduce.errors import (
    Aborted,
    Closed,
    CompileError,
    DeviceError,
    Error,
    InvalidArgument,
    MismatchError,
    NotSupported,
    Timeout,
)
from gpuallreduce.plan import Plan
from gpuallreduce.version import VERSION

__all__ = [
    "Aborted",
    "Closed",
    "Communicator",
    "CompileError",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "MismatchError",
    "NotSupported",
    "Plan",
    "Timeout",
    "allreduce",
    "init",
]
__version__ = VERSION
