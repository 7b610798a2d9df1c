"""Bandwidth and latency between GPUs, and between GPUs and the host: nvbandwidth's tests.

    python bench/p2p_bandwidth.py -t device_to_device_memcpy_write_sm --plot bandwidth.png

Knows nothing itself: it is the script's name for ``gpuallreduce bandwidth``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it with command line arguments; returns the exit status."""
    # By name: a script's folder is no package.
    return int(import_module("gpuallreduce.bench.bandwidth").main(argv))


if __name__ == "__main__":
    sys.exit(main())
