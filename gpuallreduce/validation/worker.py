"""One rank of a validation run whose ranks are processes; started with ``python -m``.

Knows nothing of the other ranks' outcomes: whoever launched it compares them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpuallreduce.api import init
from gpuallreduce.bootstrap.environment import RANK
from gpuallreduce.validation.cases import VARIANTS, Case
from gpuallreduce.validation.runners import CALL_TIMEOUT_S, encode
from gpuallreduce.validation.session import run_cases

__all__ = ["main"]


def main(folder: Path, rank: str) -> int:
    """Runs the cases in a folder and writes a line for each as soon as it is done."""
    task = json.loads((folder / "cases.json").read_text())
    cases = [Case(**row) for row in task["cases"]]
    direct = any(VARIANTS[case.variant].access == "direct" for case in cases)
    outcomes = run_cases(
        cases, lambda: init(timeout=CALL_TIMEOUT_S), seed=task["seed"], with_arena=direct
    )
    with (folder / f"rank-{rank}.jsonl").open("w") as file:
        for outcome in outcomes:
            file.write(encode(outcome) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), os.environ[RANK]))
