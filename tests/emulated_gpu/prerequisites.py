"""Finds what the emulated GPUs are built from: CuPy and its source distribution, CUDA's headers.

Knows nothing of the build: each part that is missing raises with the command that installs it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildError", "Cupy", "header_folders", "installed_cupy", "require", "source_archive"]

CUPY_VARIANTS = ("cupy-cuda13x", "cupy-cuda12x")
HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
HEADER_WHEELS = {
    12: "nvidia-cuda-runtime-cu12 nvidia-cuda-nvcc-cu12",
    13: "nvidia-cuda-runtime nvidia-cuda-crt",
}


class BuildError(RuntimeError):
    """The emulated GPUs cannot be built here; the message says what is missing."""


@dataclass(frozen=True)
class Cupy:
    """The installed CuPy wheel."""

    version: str
    cuda_major: int


def require(module: str, package: str) -> None:
    """Raises unless a module can be imported.

    Raises:
        BuildError: it cannot; the message names the package to install.
    """
    if importlib.util.find_spec(module) is None:
        raise BuildError(
            f"building the emulated GPUs needs {package}, and {sys.executable} has none: "
            f"pip install {package}"
        )


def installed_cupy() -> Cupy:
    """The CuPy wheel of this environment.

    Raises:
        BuildError: there is none.
    """
    for name in CUPY_VARIANTS:
        try:
            return Cupy(importlib.metadata.version(name), int(name[-3:-1]))
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BuildError(
        f"the emulated GPUs run CuPy's wheel, and {sys.executable} has none of "
        f"{', '.join(CUPY_VARIANTS)}: pip install {CUPY_VARIANTS[0]}"
    )


def header_folders(cuda_major: int) -> list[Path]:
    """The folders of CUDA's headers: of the wheels, else of a toolkit.

    Raises:
        BuildError: a header is missing, or is of another CUDA than CuPy's.
    """
    require("cuda.pathfinder", "cuda-pathfinder")
    from cuda.pathfinder import find_nvidia_header_directory

    found = [find_nvidia_header_directory(library) for library in ("cudart", "nvcc")]
    folders = [Path(folder) for folder in dict.fromkeys(found) if folder]
    install = f"pip install {HEADER_WHEELS[cuda_major]}"
    for header in HEADERS:
        if not any((folder / header).is_file() for folder in folders):
            looked = ", ".join(map(str, folders)) or "any wheel or toolkit"
            raise BuildError(f"CUDA's {header} is not in {looked}: {install}")
    text = next(path for f in folders if (path := f / "cuda.h").is_file()).read_text()
    version = re.search(r"#define CUDA_VERSION (\d+)", text)
    if version is None or int(version[1]) // 1000 != cuda_major:
        raise BuildError(
            f"CuPy is built for CUDA {cuda_major}, but the headers in {folders[0]} are of version "
            f"{version[1] if version else 'unknown'}: {install}"
        )
    return folders


def source_archive(cupy: Cupy, folder: Path) -> Path:
    """CuPy's source distribution, downloaded into the folder unless it is there.

    Raises:
        BuildError: pip is not there, or could not download it; with pip's own words.
    """
    name = f"cupy-{cupy.version}.tar.gz"
    if (folder / name).is_file():
        return folder / name
    require("pip", "pip")
    wanted = f"cupy=={cupy.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "cupy", wanted]
    # CuPy's set-up asks for no CUDA toolkit when it only builds its documentation.
    done = subprocess.run(
        [*command, "--dest", str(folder)],
        env={**os.environ, "READTHEDOCS": "True"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not (folder / name).is_file():
        raise BuildError(
            f"CuPy's source distribution {wanted} did not download (exit status "
            f"{done.returncode}); put {name} into {folder}, or make this work:\n"
            f"  READTHEDOCS=True {shlex.join(command)}\n{done.stderr.strip()}"
        )
    return folder / name
