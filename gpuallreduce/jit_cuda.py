"""Compiles kernels for GPUs: NVRTC to device code, kept in the same cache as the host's objects.

Knows nothing of devices but their architecture, and of calls nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from gpuallreduce.errors import CompileError
from gpuallreduce.jit import (
    Kernel,
    cache_folder,
    cached,
    compile_host,
    compile_host_together,
    content_of,
    kernels_folder,
    sources_digest,
)

__all__ = ["Target", "compile_ahead", "compile_cubin", "device_code", "target_of"]

EMULATED = "GPUALLREDUCE_EMULATED"  # set by tests that run on emulated GPUs
EMULATED_DEFINES = ("GAR_EMULATED",)
Target = str  # sm_90: device code; compute_120: PTX; emulated: what emulated GPUs run


# Threads that import cuda.core at once can see it half made: its parts import each other.
_IMPORTING = threading.Lock()


def _cuda_core() -> Any:
    try:
        with _IMPORTING:
            import cuda.core  # type: ignore[import-untyped]
    except ImportError as error:
        raise CompileError(
            f"compiling for GPUs needs NVRTC through cuda-core, and it cannot be imported "
            f"({error}): pip install 'gpuallreduce[cuda13]' (or [cuda12])"
        ) from None
    return cuda.core


@functools.cache
def _newest_architecture() -> int:
    """The newest architecture that the installed NVRTC knows, such as 90."""
    _cuda_core()
    from cuda.bindings import nvrtc  # type: ignore[import-untyped]

    error, known = nvrtc.nvrtcGetSupportedArchs()
    if int(error) != 0 or not known:
        raise CompileError(f"NVRTC does not say which GPUs it can compile for: {error}")
    return int(max(known))


def target_of(major: int, minor: int) -> Target:
    """What to compile for a GPU of this compute capability: its device code, or PTX for the
    driver to translate if NVRTC is older than the GPU.
    """
    if os.environ.get(EMULATED):
        return "emulated"
    wanted, newest = major * 10 + minor, _newest_architecture()
    return f"sm_{wanted}" if wanted <= newest else f"compute_{newest}"


def _options(target: Target) -> dict[str, Any]:
    """What NVRTC is asked for; part of the cache's key.

    No fused multiply-add, as -ffp-contract=off on the host; subnormals are kept, by default.
    """
    return {"arch": target, "std": "c++17", "fma": False}


def compile_cubin(kernel: Kernel, arch: str) -> bytes:
    """The device code of a kernel for a GPU architecture such as ``sm_90``; needs no GPU.

    ``compute_90`` gives PTX instead, which needs a driver.

    Raises:
        CompileError: cuda-core or NVRTC is not installed, or the compiler refused.
    """
    core = _cuda_core()
    options = core.ProgramOptions(**_options(arch), include_path=[str(kernels_folder())])
    form = "ptx" if arch.startswith("compute_") else "cubin"
    try:
        code = core.Program(kernel.source, code_type="c++", options=options).compile(form).code
    except Exception as error:
        raise CompileError(f"{kernel.symbol} did not compile for {arch}: {error}") from error
    return bytes(code)


@functools.cache
def _compiler_identity() -> str:
    """Changes whenever NVRTC is upgraded."""
    _cuda_core()
    from cuda.bindings import nvrtc

    versions = [metadata.version(name) for name in ("cuda-core", "cuda-bindings")]
    return f"nvrtc {nvrtc.nvrtcVersion()[1:]} {versions}"


def device_code(kernel: Kernel, target: Target) -> bytes:
    """What a GPU's driver loads, compiled if it is not in the cache.

    Raises:
        CompileError: cuda-core or NVRTC is not installed, or the compiler refused.
    """
    if target == "emulated":
        return content_of(compile_host(kernel, defines=EMULATED_DEFINES))
    key = hashlib.sha256()
    for part in (_compiler_identity(), repr(_options(target)), kernel.source):
        key.update(part.encode() + b"\0")
    key.update(sources_digest(kernels_folder()))
    ending = "ptx" if target.startswith("compute_") else "cubin"
    path = cache_folder() / f"{kernel.symbol}-{target}-{key.hexdigest()[:32]}.{ending}"
    return content_of(cached(path, lambda: compile_cubin(kernel, target)))


def compile_ahead(kernels: Sequence[Kernel], target: Target) -> None:
    """Puts the device code of kernels into the cache; those of one family are best given together.

    Raises:
        CompileError: as ``device_code``, for any of them.
    """
    if target == "emulated":
        compile_host_together(kernels, defines=EMULATED_DEFINES)
        return
    for kernel in kernels:
        device_code(kernel, target)
