"""Activates the emulated GPUs in a Python process started under ``environment()``.

Knows nothing else: another sitecustomize that this one hides runs first.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_hidden() -> None:
    others = [path for path in sys.path if Path(path).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _activate() -> None:
    tests = str(_HERE.parent.parent)
    sys.path.insert(0, tests)
    try:
        from emulated_gpu.activate import activate
    finally:
        sys.path.remove(tests)
    try:
        activate()
    except Exception as error:  # Python would go on after a word on stderr
        raise SystemExit(f"the emulated GPUs cannot be used: {error}") from error


_run_hidden()
if os.environ.get("EMULATED_GPU_FOLDER"):
    _activate()
