"""Makes a Python process, this one or a child, run CuPy and other CUDA users on the emulated GPUs.

Knows nothing of what the stand-ins do. CuPy's wheel stays as it is: of its modules only ``runtime``
comes from the build, because the wheel's holds NVIDIA's runtime, which serves NVIDIA's driver only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["FOLDER_VARIABLE", "activate", "environment"]

SITE = Path(__file__).resolve().parent / "site"
FOLDER_VARIABLE = "EMULATED_GPU_FOLDER"
SETTINGS = {
    "gpus": "EMULATED_GPUS",
    "topology": "EMULATED_GPU_TOPOLOGY",
    "seed": "EMULATED_GPU_SEED",
    "delay_us": "EMULATED_GPU_DELAY_US",
    "ipc": "EMULATED_GPU_IPC",
    "sms": "EMULATED_GPU_SMS",
    "strict_sync": "EMULATED_GPU_STRICT_SYNC",
    "lying_peers": "EMULATED_GPU_LYING_PEERS",
    "visible": "CUDA_VISIBLE_DEVICES",
}
# CUB's kernels are in CuPy's wheel as real device code, which nothing here can run.
FIXED = {"GPUALLREDUCE_EMULATED": "1", "CUPY_ACCELERATORS": ""}
RUNTIME_MODULE = "cupy_backends.cuda.api.runtime"
RUNTIME_FILE = f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2")


class RuntimeFinder:
    """Answers for CuPy's runtime module alone."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / RUNTIME_FILE

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != RUNTIME_MODULE:
            return None
        return importlib.util.spec_from_file_location(name, self.file)


def _variables(settings: dict[str, object]) -> dict[str, str]:
    """The environment variables of settings; True and False read 1 and 0."""
    unknown = sorted(settings.keys() - SETTINGS.keys())
    if unknown:
        raise TypeError(f"no such setting: {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    values = {
        SETTINGS[name]: str(int(value) if isinstance(value, bool) else value)
        for name, value in settings.items()
    }
    return {**FIXED, **values}


def _folder() -> Path:
    """The built libraries: those of the parent process if it chose, else the build's."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    from .build import build

    return build()


def environment(**settings: object) -> dict[str, str]:
    """This process's environment, changed so that Python processes started under it are activated.

    Args:
        **settings: ``gpus``, ``topology``, ``seed``, ``delay_us``, ``ipc``, ``sms``,
            ``strict_sync``, ``lying_peers``, ``visible`` (CUDA_VISIBLE_DEVICES); those not given
            keep their value.
    """
    paths = [str(SITE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        **_variables(settings),
        FOLDER_VARIABLE: str(_folder()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def _load(path: Path) -> None:
    """Loads a library so that later loads by its bare name find it."""
    ours = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    if ctypes.CDLL(path.name)._handle != ours._handle:
        raise RuntimeError(
            f"{path.name} of the emulated GPUs was loaded after another library of that name: call "
            "activate() first in a process, before anything that uses CUDA"
        )


def activate(**settings: object) -> None:
    """Puts this process on the emulated GPUs; a further call with nothing new does nothing.

    Args:
        **settings: as those of ``environment``.

    Raises:
        RuntimeError: CuPy or CUDA was loaded before, or the settings came too late.
    """
    variables = _variables(settings)
    if any(isinstance(finder, RuntimeFinder) for finder in sys.meta_path):
        late = {name for name, value in variables.items() if os.environ.get(name) != value}
        if late:
            raise RuntimeError(
                f"the emulated GPUs are active with other values of {', '.join(sorted(late))}: "
                "one process keeps its first settings; use another process"
            )
        return
    if "cupy" in sys.modules or RUNTIME_MODULE in sys.modules:
        raise RuntimeError(
            "cupy was imported before activate(): call it first, or start the process under "
            "environment()"
        )
    folder = _folder()
    os.environ.update(variables)
    for name in LIBRARIES:
        _load(folder / name)
    sys.meta_path.insert(0, RuntimeFinder(folder))
