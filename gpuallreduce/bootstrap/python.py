"""The command line that runs a module of this very installation in another process.

Knows nothing of ranks or of what the module does.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["module_command"]


def module_command(module: str, *arguments: str) -> list[str]:
    """A command that runs a module as ``python -m`` does, but of the package that runs now.

    ``python -m`` looks in the working folder first, so that in a checkout a child would import the
    checkout where its parent uses what is installed.

    Args:
        module: its full name, such as ``gpuallreduce.validation.worker``.
        arguments: the program's arguments.
    """
    root = str(Path(__file__).parents[2])
    code = (
        f"import runpy, sys; sys.path[0] = {root!r}; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, *arguments]
