"""Facts about this machine and this installation.

Knows nothing of algorithms. Nothing here fails: what cannot be found is said in its place.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuallreduce import jit
from gpuallreduce.bootstrap.environment import identify
from gpuallreduce.errors import Error
from gpuallreduce.topology import available_cores
from gpuallreduce.version import VERSION

__all__ = ["as_text", "facts"]

_COMPILER_TIMEOUT_S = 10.0


def facts() -> dict[str, Any]:
    """All of them, as plain data."""
    name, flags = _cpu()
    return {
        "version": VERSION,
        "python": platform.python_version(),
        "devices": ["host"],
        "cores": {"available": available_cores(), "total": os.cpu_count() or available_cores()},
        "cpu": name,
        "pack_bytes": _pack_bytes(flags),
        "compiler": _compiler(),
        "cache": _cache(),
        "launcher": _launcher(),
    }


def as_text(found: dict[str, Any]) -> str:
    """Facts for people."""
    cores, compiler, cache = found["cores"], found["compiler"], found["cache"]
    launcher = found["launcher"]
    contents = f"{cache['entries']} entries, {cache['bytes']} bytes"
    rows = [
        ("version", f"gpuallreduce {found['version']}, Python {found['python']}"),
        ("devices", ", ".join(found["devices"])),
        ("processor", f"{found['cpu']}; {cores['available']} of {cores['total']} cores available"),
        ("pack", f"{found['pack_bytes']} bytes, one register of accumulators"),
        ("compiler", compiler["error"] or f"{compiler['command']}: {compiler['version']}"),
        ("cache", f"{cache['folder']}: {cache['error'] or contents}"),
        ("launcher", launcher["error"] or _place(launcher)),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _place(launcher: dict[str, Any]) -> str:
    if launcher["source"] == "single process":
        return "none: gpuallreduce.init() makes rank 0 of 1"
    return f"{launcher['source']}: rank {launcher['rank']} of {launcher['nranks']}"


def _cpu() -> tuple[str, frozenset[str]]:
    """The processor's name and its features."""
    name, flags = "", frozenset[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = name or value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = flags or frozenset(value.split())
    return name or platform.processor() or platform.machine() or "unknown", flags


def _pack_bytes(flags: frozenset[str]) -> int:
    """As kPackBytes of kernels/platform_host.cuh, whose compiler looks at the same features."""
    return 64 if "avx512f" in flags else 32 if "avx" in flags else 16


def _compiler() -> dict[str, str | None]:
    try:
        command: Sequence[str] = jit.host_compiler().command
    except Error as error:
        return {"command": None, "version": None, "error": str(error)}
    version = "its version cannot be found out"
    try:
        done = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILER_TIMEOUT_S,
            check=False,
        )
        version = (done.stdout or done.stderr).strip().partition("\n")[0] or version
    except (OSError, subprocess.SubprocessError) as error:
        version = f"{version} ({error})"
    return {"command": " ".join(command), "version": version, "error": None}


def _cache() -> dict[str, Any]:
    found: dict[str, Any] = {"folder": None, "entries": 0, "bytes": 0, "error": None}
    try:
        folder = jit.cache_folder()
        found["folder"] = str(folder)
        sizes = [each.stat().st_size for each in folder.iterdir() if not each.name.startswith(".")]
        found["entries"], found["bytes"] = len(sizes), sum(sizes)
    except FileNotFoundError:
        found["error"] = "not there yet; made when the first kernel is compiled"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        found["error"] = f"cannot be read ({error})"
    return found


def _launcher() -> dict[str, Any]:
    try:
        identity = identify(os.environ)
    except Error as error:
        return {"source": None, "rank": None, "nranks": None, "error": str(error)}
    place = {"source": identity.source, "rank": identity.rank, "nranks": identity.nranks}
    return {**place, "error": None}
