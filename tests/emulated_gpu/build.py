"""Builds the libraries of the emulated GPUs, once per version of their sources, CuPy and tools.

Knows nothing of how they are used: it hands out the folder that holds them.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuallreduce.jit import host_compiler

if __package__:
    from . import prerequisites
    from .prerequisites import BuildError, Cupy
else:  # run as a script
    import prerequisites
    from prerequisites import BuildError, Cupy

__all__ = ["build"]

SOURCES = Path(__file__).resolve().parent
COMPILE_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread")
# -Bsymbolic: NVIDIA's own runtime may be loaded too, and has functions of the same names.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,-rpath,$ORIGIN")
COMPILERS_AT_ONCE = 2
RUNTIME_PYX = Path("cupy_backends/cuda/api/runtime.pyx")


@dataclass(frozen=True)
class Library:
    """One shared object: its file, the sources in this folder, and what it links."""

    file: str
    sources: str
    links: tuple[str, ...] = ()


DRIVER = Library("libcuda.so.1", "driver_*.cpp", ("-ldl",))
RUNTIME = Library(
    f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}", "runtime_*.cpp", (DRIVER.file,)
)
LIBRARIES = (
    DRIVER,
    RUNTIME,
    Library("libnvidia-ml.so.1", "nvml*.cpp"),
    Library("libnccl.so.2", "nccl*.cpp", ("-ldl",)),
)


def cache_folder() -> Path:
    """``GPUALLREDUCE_TEST_CACHE``, else ``gpuallreduce-emulated-gpu`` in the user's cache."""
    chosen = os.environ.get("GPUALLREDUCE_TEST_CACHE")
    return Path(chosen or Path.home() / ".cache" / "gpuallreduce-emulated-gpu").resolve()


def build_key(cupy: Cupy, headers: Sequence[Path]) -> str:
    """Names a build: another one as soon as anything that goes into it changes."""
    digest = hashlib.sha256()
    tools = (sys.version, platform.machine(), importlib.metadata.version("Cython"))
    for part in (*tools, host_compiler().identity, repr(cupy), *map(str, headers)):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h") or path == Path(__file__).resolve():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def run(command: Sequence[str], what: str) -> None:
    """Runs a tool to its end.

    Raises:
        BuildError: it failed; with its own words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(
            f"{what} failed (exit status {done.returncode}):\n  {shlex.join(command)}\n"
            f"{done.stderr.strip()}"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock; the kernel frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Builder:
    """One build, in a folder of its own that is renamed when it is whole."""

    def __init__(self, cupy: Cupy, headers: Sequence[Path], *, cache: Path, work: Path) -> None:
        self.cupy = cupy
        self.cache = cache
        self.work = work
        self.objects = work / "objects"
        self.objects.mkdir()
        self.includes = [f"-I{folder}" for folder in (*headers, SOURCES)]

    def compile(self, source: Path, flags: Sequence[str] = ()) -> Path:
        """One object file."""
        result = self.objects / f"{source.stem}.o"
        command = [*host_compiler().command, *COMPILE_FLAGS, *flags, *self.includes]
        run([*command, "-c", str(source), "-o", str(result)], f"compiling {source.name}")
        return result

    def compile_cupy_module(self) -> Path:
        """The object file of CuPy's own runtime module."""
        sources = self.objects / f"cupy-{self.cupy.version}"
        archive = prerequisites.source_archive(self.cupy, self.cache)
        with tarfile.open(archive) as file:
            wanted = f"{sources.name}/cupy_backends/"
            members = [member for member in file.getmembers() if member.name.startswith(wanted)]
            file.extractall(self.objects, members=members, filter="data")
        constants = {
            "CUPY_CUDA_VERSION": self.cupy.cuda_major * 1000,
            "CUPY_HIP_VERSION": 0,
            "CUPY_USE_CUDA_PYTHON": False,
        }
        generated = self.objects / "cupy_runtime.cpp"
        definitions = ",".join(f"{name}={value}" for name, value in constants.items())
        command = [sys.executable, "-m", "cython", "--cplus", "-3", "-E", definitions]
        run(
            [*command, "-w", str(sources), "-o", str(generated), str(RUNTIME_PYX)],
            f"translating {RUNTIME_PYX.name}",
        )
        python = sysconfig.get_path("include")
        return self.compile(generated, ["-w", f"-I{sources / RUNTIME_PYX.parent}", f"-I{python}"])

    def link(self, library: Library, objects: Sequence[Path]) -> None:
        """One shared object under its SONAME, by which later loads by name find it."""
        links = [str(self.work / name) if name[0] != "-" else name for name in library.links]
        command = [*host_compiler().command, *LINK_FLAGS, f"-Wl,-soname,{library.file}"]
        run(
            [*command, *map(str, objects), *links, "-o", str(self.work / library.file)],
            f"linking {library.file}",
        )

    def build(self) -> None:
        """All libraries."""
        with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
            module = pool.submit(self.compile_cupy_module)  # the longest, hence first
            pending = {
                library: [
                    pool.submit(self.compile, source)
                    for source in sorted(SOURCES.glob(library.sources))
                ]
                for library in LIBRARIES
            }
            pending[RUNTIME].append(module)
            try:
                for library, objects in pending.items():
                    self.link(library, [future.result() for future in objects])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        shutil.rmtree(self.objects)


@functools.cache
def build() -> Path:
    """The folder that holds the libraries, which are built if they are not there.

    Processes may call it at once: the first builds, the others wait for it.

    Raises:
        BuildError: something is missing here, or a compiler refused.
        gpuallreduce.errors.CompileError: there is no C++ compiler.
    """
    prerequisites.require("Cython", "Cython")
    cupy = prerequisites.installed_cupy()
    headers = prerequisites.header_folders(cupy.cuda_major)
    cache = cache_folder()
    result = cache / build_key(cupy, headers)
    if result.is_dir():
        return result
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        if not result.is_dir():
            work = Path(tempfile.mkdtemp(dir=cache, prefix="new-"))
            try:
                Builder(cupy, headers, cache=cache, work=work).build()
                work.rename(result)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
    return result


if __name__ == "__main__":
    print(build())
