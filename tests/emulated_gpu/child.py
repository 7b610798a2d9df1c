"""Runs a test's body in a Python process of its own that is on the emulated GPUs.

Knows nothing of what is tested: each process has one set of GPUs, so each body gets a process.
"""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .activate import environment

__all__ = ["in_child", "run_in_child"]

LIMIT_S = 120
SCRIPT = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
body = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
body = getattr(body, "__wrapped__", body)  # what in_child decorated
body(**json.loads(sys.argv[4]))
"""


def run_in_child(body: Callable[..., None], arguments: dict[str, Any], **settings: object) -> None:
    """Runs a function of a module in a new process under ``environment(**settings)``.

    Raises:
        AssertionError: the process failed; with all it wrote.
    """
    file = Path(inspect.getfile(body))
    command = [sys.executable, "-c", SCRIPT, str(file.parent), file.stem, body.__name__]
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        env=environment(**settings),
        capture_output=True,
        cwd="/",
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"


def in_child(**settings: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test function's body run in a process with these settings."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            run_in_child(body, arguments, **settings)

        return test

    return decorate
