"""Says without loading CuPy whether this process can have CUDA devices, and why not.

Knows nothing of what they are used for.
"""

from __future__ import annotations

import ctypes
import importlib.util

__all__ = ["absence"]

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def absence() -> str | None:
    """Why there are no CUDA devices; None: there may be some, and CuPy knows more."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return f"there is no NVIDIA driver ({LIBRARY} is not found)"
    status = driver.cuInit(0)
    if status == NO_DEVICE:
        return "the NVIDIA driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if status != 0:
        return f"the NVIDIA driver does not start (cuInit says {status}): check nvidia-smi"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is missing: pip install 'gpuallreduce[cuda13]' (or [cuda12])"
    return None
