"""What the check of a machine with GPUs says: its first lines, its table, and where JSON goes.

Knows nothing of how parts are run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpuallreduce

__all__ = ["Result", "default_path", "heading", "table"]


@dataclass(frozen=True)
class Result:
    """How a part ended.

    Attributes:
        name: of the part.
        status: passed, failed, out of time or left out.
        seconds, limit_s: how long it took and might have taken.
        text: what it found or why it did not, in a line.
        figures: what it measured.
        exit_status: of its command.
        output_tail: what it said last.
    """

    name: str
    status: str
    seconds: float
    limit_s: float
    text: str
    figures: Any = None
    exit_status: int | None = None
    output_tail: str = ""

    @property
    def bad(self) -> bool:
        """Whether the whole has failed with it."""
        return self.status in ("failed", "out of time")


def heading(facts: Mapping[str, Any], seconds: float) -> list[str]:
    """The machine, in a few lines."""
    gpus = facts["gpus"]
    nccl = f"NCCL {facts['nccl']}" if facts["nccl"] else "no NCCL"
    return [
        f"# gpuallreduce {gpuallreduce.__version__}, check of {_device_text(facts)}, at most "
        f"{seconds:.0f} s",
        *(f"# cuda:{gpu['ordinal']} [{gpu['bus_id']}] {gpu['name']}" for gpu in gpus),
        f"# driver {facts['driver_version']}, CUDA {facts['cuda_driver']}, runtime "
        f"{facts['cuda_runtime']}, CuPy {facts['cupy']}, {nccl}",
    ]


def _device_text(facts: Mapping[str, Any]) -> str:
    gpus = facts["gpus"]
    name = str(gpus[0]["name"])
    return name if len(gpus) == 1 else f"{len(gpus)}x {name}"


def default_path(facts: Mapping[str, Any]) -> str:
    """Named by device and date; in a checkout beside the other results, else here."""
    slug = re.sub(r"[^a-z0-9]+", "-", _device_text(facts).lower()).strip("-")
    folder = Path(__file__).parent / "results"
    name = f"{slug}-{time.strftime('%Y-%m-%d')}.json"
    return str(folder / name if folder.is_dir() and os.access(folder, os.W_OK) else name)


def table(results: Sequence[Result]) -> list[str]:
    """A line for each part."""
    width = max((len(result.name) for result in results), default=0)
    lines = [f"# {'part':<{width}}  {'status':<11}  {'seconds':>7}  result"]
    for result in results:
        lines.append(
            f"  {result.name:<{width}}  {result.status:<11}  {result.seconds:7.1f}  {result.text}"
        )
    return ["#", *lines]
