"""One rank of a validation run whose ranks are processes; started with ``python -m``.

Knows nothing of the other ranks' outcomes: whoever launched it compares them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpuallreduce.api import init
from gpuallreduce.bootstrap.environment import RANK
from gpuallreduce.communicator import Communicator
from gpuallreduce.validation.build import compile_share, kernels_of, target_of_gpu
from gpuallreduce.validation.cases import Case
from gpuallreduce.validation.places import needs_shared, place_of
from gpuallreduce.validation.runners import CALL_TIMEOUT_S, encode
from gpuallreduce.validation.session import run_cases

__all__ = ["main"]

COMPILE_TIMEOUT_S = 3600.0


def main(folder: Path, rank: str) -> int:
    """Runs the cases in a folder and writes a line for each as soon as it is done."""
    task = json.loads((folder / "cases.json").read_text())
    cases = [Case(**row) for row in task["cases"]]
    shared = needs_shared(cases)
    if task["device"] == "cuda":
        with init(device="cuda", timeout=COMPILE_TIMEOUT_S) as communicator:
            _compile(communicator, cases)
    outcomes = run_cases(
        cases,
        lambda: init(device=task["device"], timeout=CALL_TIMEOUT_S),
        seed=task["seed"],
        make_place=lambda communicator: place_of(communicator, shared=shared),
    )
    with (folder / f"rank-{rank}.jsonl").open("w") as file:
        for outcome in outcomes:
            file.write(encode(outcome) + "\n")
            file.flush()
    return 0


def _compile(communicator: Communicator, cases: Sequence[Case]) -> None:
    """Compiles this rank's share, and returns when all ranks have done so. A collective."""
    kernels = kernels_of(cases, communicator.topology)
    target = target_of_gpu("cuda")
    compile_share(kernels, communicator.rank, communicator.nranks, target=target)
    communicator.barrier()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), os.environ[RANK]))
