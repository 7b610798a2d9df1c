"""The verdict of a probe of peer access, and where it is kept: once for a set of GPUs, a driver and
a boot of the machine.

Knows nothing of CUDA or of how the verdict was found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpuallreduce.jit import cache_folder, kernels_folder, sources_digest

__all__ = ["Failure", "Verdict", "from_plain", "keep", "kept", "path_of"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # a new one after firmware settings can change


@dataclass(frozen=True)
class Failure:
    """What is wrong between two GPUs, by their UUIDs.

    Attributes:
        accessing: the GPU whose kernels store and load.
        owner: the GPU whose memory they mean.
        what: happens.
    """

    accessing: str
    owner: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """What a probe found out.

    Attributes:
        gpus: UUIDs of the GPUs that took part.
        failures: an empty tuple lets CUDA's word stand.
        elapsed_ms: how long it took.
        is_final: another probe would find the same: it was no mere wait that took too long.
        is_fatal: CUDA is of no more use in a process that took part.
    """

    gpus: tuple[str, ...]
    failures: tuple[Failure, ...] = ()
    elapsed_ms: float = 0.0
    is_final: bool = True
    is_fatal: bool = False

    def reason(self, names: Mapping[str, str]) -> str | None:
        """None if all GPUs reach each other, else what is wrong with the first two that do not.

        Args:
            names: of GPUs, by their UUIDs.
        """
        if not self.failures:
            return None
        first = self.failures[0]
        pair = f"{names[first.accessing]} on memory of {names[first.owner]}"
        others = len(self.failures) - 1
        more = f", and {others} more" if others else ""
        return f"CUDA grants access, but a probe found: {pair}: {first.what}{more}"

    def as_plain(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


def from_plain(found: Any) -> Verdict:
    """The verdict that ``as_plain`` turned into plain data.

    Raises:
        TypeError, KeyError, ValueError: it is something else.
    """
    failures = tuple(Failure(**each) for each in found["failures"])
    return Verdict(**{**found, "gpus": tuple(found["gpus"]), "failures": failures})


def path_of(uuids: Sequence[str], *, way: str, driver: str) -> Path:
    """Where the verdict on a set of GPUs is kept.

    Args:
        uuids: of the GPUs, in any order.
        way: by which they address each other's memory.
        driver: its version.
    """
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    key = hashlib.sha256(sources_digest(kernels_folder()))
    for part in (*sorted(set(uuids)), way, driver, boot):
        key.update(part.encode() + b"\0")
    return cache_folder() / f"probe-{key.hexdigest()[:32]}.json"


def kept(path: Path) -> Verdict | None:
    """The verdict that was kept there, if there is one."""
    try:
        return from_plain(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(path: Path, verdict: Verdict) -> None:
    """Keeps a verdict, if it is final, for processes to come, to which it is not fatal.

    Where that is not possible the next process probes again.
    """
    if not verdict.is_final:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(replace(verdict, is_fatal=False).as_plain(), file, indent=2)
        os.replace(temporary, path)
