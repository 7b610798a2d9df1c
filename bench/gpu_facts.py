"""What a reader of results must know of this machine's GPUs, its driver and its libraries.

Knows nothing of results. As a program it prints them as JSON: a driver that hangs then hangs a
process that can be ended.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gpuallreduce.devices import nvml
from gpuallreduce.devices.cuda_runtime import cupy_module, device_count, gpu_of
from gpuallreduce.errors import Error
from gpuallreduce.fabric.nccl import Nccl

__all__ = ["facts", "main"]


def facts() -> dict[str, Any]:
    """As plain data.

    Raises:
        NotSupported: CuPy, the driver or a GPU is missing.
    """
    cupy = cupy_module()
    runtime = cupy.cuda.runtime
    gpus = [gpu_of(ordinal) for ordinal in range(device_count())]
    machine = nvml.machine([gpu.uuid for gpu in gpus])
    return {
        "gpus": [
            {
                **vars(gpu),
                "memory_bytes": runtime.getDeviceProperties(gpu.ordinal)["totalGlobalMem"],
            }
            for gpu in gpus
        ],
        "driver_version": None if machine is None else machine.driver,
        "cuda_driver": _version(runtime.driverGetVersion()),
        "cuda_runtime": _version(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
    }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def main() -> int:
    """Prints them, and whether NCCL is there; 2 if there is no GPU."""
    try:
        found = facts()
    except Error as error:
        print(error, file=sys.stderr)
        return 2
    missing = Nccl.available()
    version = Nccl.version() if missing is None else None
    print(json.dumps({**found, "nccl": version, "nccl_missing": missing}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
