"""Compiles kernel sources at first use, and keeps the results in a cache that survives crashes and
races.

Knows nothing of ranks or calls: it turns a C++ text that instantiates templates of ``kernels/``
into an object file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuallreduce.errors import CompileError

__all__ = [
    "Compiler",
    "Kernel",
    "cache_folder",
    "cached",
    "content_of",
    "compile_host",
    "compile_host_together",
    "host_compiler",
]

# -ffp-contract=off and -fwrapv keep the bits equal on all targets: no fused multiply-add, integers
# wrap. The kernels name their vectors, and g++ 12's own vectoriser makes vfmaddsub of complex
# products even so, hence -fno-tree-vectorize.
COMMON_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fno-tree-vectorize",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fwrapv",
    "-Wno-psabi",
)
KERNEL_FLAGS = ("-fno-exceptions", "-fno-rtti")
RUNTIME_FLAGS = ("-pthread",)
RUNTIME_SOURCES = ("host.cpp", "host_python.cpp")
DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Kernel:
    """An instantiation of one kernel template.

    Attributes:
        symbol: name of the entry point.
        header: file of ``kernels/`` that holds the template.
        expression: C++ expression of the function to run, such as ``exchange<OneShot<float, Sum,
            2>>``.
        family: kernels of one family share much, and are best compiled together.
        arguments: C++ struct that it takes by value.
    """

    symbol: str
    header: str
    expression: str
    family: str = ""
    arguments: str = "GarArgs"

    @property
    def source(self) -> str:
        """The translation unit: it only instantiates."""
        return (
            f'#include "{self.header}"\n'
            f"namespace gar {{\n"
            f"GAR_KERNEL({self.symbol}, {self.arguments}, ({self.expression}))\n}}\n"
        )


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler for host devices: the command, and what changes when it is upgraded."""

    command: tuple[str, ...]
    identity: str


@functools.cache
def kernels_folder() -> Path:
    """Where the kernel sources lie: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "kernels"
    return inside if inside.is_dir() else package.parent / "kernels"


def sources_digest(folder: Path) -> bytes:
    """Digest of every kernel source, so that an edited header is noticed."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".cuh", ".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def cache_folder() -> Path:
    """``GPUALLREDUCE_CACHE``, else ``gpuallreduce`` in the user's cache folder."""
    chosen = os.environ.get("GPUALLREDUCE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpuallreduce"


def host_compiler() -> Compiler:
    """The compiler for host devices: ``CXX``, else g++, else clang++.

    Raises:
        CompileError: there is none; the message says what to install.
    """
    asked = os.environ.get("CXX")
    candidates = [shlex.split(asked)] if asked else [["g++"], ["clang++"]]
    for command in candidates:
        found = shutil.which(command[0]) if command else None
        if found:
            # Name, size and time change with every upgrade, and cost no process to learn.
            stat = os.stat(os.path.realpath(found))
            identity = f"{os.path.realpath(found)} {stat.st_size} {stat.st_mtime_ns}"
            return Compiler((found, *command[1:]), identity)
    tried = " ".join(shlex.join(command) for command in candidates)
    raise CompileError(
        f"no C++ compiler for host devices: looked for {tried} on PATH and found none. "
        "Install one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: "
        "conda install cxx-compiler), or set CXX to the compiler's command"
    )


@functools.cache
def cpu_identity() -> str:
    """The machine's instruction sets: ``-march=native`` code must not move to a lesser machine."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return platform.machine() + line
    except OSError:
        pass
    return platform.machine() + platform.processor()


def _store(path: Path, content: bytes) -> None:
    """Writes an entry whole: under a temporary name, then renamed, so that racing processes both
    succeed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    except OSError as error:
        raise CompileError(
            f"the cache folder {path.parent} cannot be written ({error}); set "
            "GPUALLREDUCE_CACHE to a folder that can"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _is_whole(path: Path) -> bool:
    """True if the entry exists and its bytes are those that were stored (the digest stands at its
    end).
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(
            f"{what} did not compile (exit status {done.returncode}):\n  {shlex.join(command)}\n"
            f"{done.stderr.strip()}"
        )


def _options(flags: Sequence[str]) -> tuple[str, ...]:
    return (*COMMON_FLAGS, "-march=native", *flags)


def _entry(name: str, source: str, flags: Sequence[str], sources: Sequence[str]) -> Path:
    """Where a host object lies in the cache: elsewhere once anything that made it changes."""
    key = hashlib.sha256()
    options = shlex.join(_options(flags))
    parts = (host_compiler().identity, cpu_identity(), options, source, *sources)
    for part in parts:
        key.update(part.encode() + b"\0")
    key.update(sources_digest(kernels_folder()))
    return cache_folder() / f"{name}-{key.hexdigest()[:32]}.so"


def _build(name: str, source: str, flags: Sequence[str], sources: Sequence[str]) -> bytes:
    """Compiles a text, or files of ``kernels/``, to a shared object."""
    folder = kernels_folder()
    with tempfile.TemporaryDirectory(prefix="gpuallreduce-") as work:
        text, result = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
        text.write_text(source, encoding="utf-8")
        inputs = [str(folder / file) for file in sources] or [str(text)]
        command = [*host_compiler().command, *_options(flags), f"-I{folder}", *inputs]
        _run([*command, "-o", str(result)], name)
        return result.read_bytes()


def cached(path: Path, build: Callable[[], bytes]) -> Path:
    """A cache entry, built if it is not there or not whole. See ``content_of``."""
    if not _is_whole(path):
        _store(path, build())
    return path


def content_of(entry: Path) -> bytes:
    """What was stored in a cache entry: all but the digest at its end."""
    return entry.read_bytes()[:-DIGEST_BYTES]


def _host_object(name: str, source: str, flags: Sequence[str], sources: Sequence[str]) -> Path:
    path = _entry(name, source, flags, sources)
    return cached(path, lambda: _build(name, source, flags, sources))


def _kernel_flags(defines: Sequence[str]) -> tuple[str, ...]:
    return (*KERNEL_FLAGS, *(f"-D{name}" for name in defines))


def compile_host(kernel: Kernel, *, defines: Sequence[str] = ()) -> Path:
    """The shared object of a kernel for host devices.

    Args:
        kernel: what to compile.
        defines: macros that choose another target than host devices.

    Raises:
        CompileError: there is no compiler, or it refused; with its own message.
    """
    return _host_object(kernel.symbol, kernel.source, _kernel_flags(defines), ())


def compile_host_together(kernels: Sequence[Kernel], *, defines: Sequence[str] = ()) -> list[Path]:
    """Compiles kernels in one go, a quarter faster than one by one where they share their loops.

    Each has the cache entry that ``compile_host`` looks for; a new entry holds all of them.

    Args:
        kernels: what to compile.
        defines: as in ``compile_host``.

    Raises:
        CompileError: there is no compiler, or it refused one of them.
    """
    flags = _kernel_flags(defines)
    paths = [_entry(kernel.symbol, kernel.source, flags, ()) for kernel in kernels]
    missing = [i for i, path in enumerate(paths) if not _is_whole(path)]
    if missing:
        source = "".join(kernels[i].source for i in missing)
        content = _build(kernels[missing[0]].symbol, source, flags, ())
        for i in missing:
            _store(paths[i], content)
    return paths


def compile_host_runtime() -> Path:
    """The shared object that launches kernels on host devices."""
    return _host_object("runtime", "", RUNTIME_FLAGS, RUNTIME_SOURCES)
