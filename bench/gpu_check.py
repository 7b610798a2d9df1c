"""Checks and measures everything on a machine with GPUs, within a few minutes, in one command.

    python bench/gpu_check.py --seconds 300

Knows nothing itself: it is the script's name for ``check.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it with command line arguments; returns the exit status."""
    # By name: a script's folder is no package.
    return int(import_module("gpuallreduce.bench.check").main(argv))


if __name__ == "__main__":
    sys.exit(main())
