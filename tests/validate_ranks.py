"""One rank of a job that validates, in the tests of such jobs: the command itself, with a fault.

Run by a launcher as ``validate_ranks.py FOLDER LAYOUT FAULT OPTION...``, where LAYOUT is the ranks
of each node (``3,1``). The last rank has the fault. Each rank writes its exit status to FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

FOLDER, SIZES, FAULT = (
    Path(sys.argv[1]),
    [int(size) for size in sys.argv[2].split(",")],
    sys.argv[3],
)
NODE_OF = [f"node{node}" for node, size in enumerate(SIZES) for _ in range(size)]
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
os.environ["GPUALLREDUCE_NODE"] = NODE_OF[RANK]

import gpuallreduce as gar  # noqa: E402
from gpuallreduce.cli import main  # noqa: E402
from gpuallreduce.validation import job  # noqa: E402

RIGHT = gar.Communicator.allreduce
calls = 0


def one_bit_is_flipped(arrays: Any, out: Any) -> None:
    result = arrays if out is None else out
    if result.size > 20:
        result[7:8].view(np.uint8)[0] ^= 1


def it_dies(arrays: Any, out: Any) -> None:
    if calls == 12:
        os.kill(os.getpid(), signal.SIGKILL)


def it_refuses(arrays: Any, out: Any) -> None:
    if calls == 12:
        raise gar.NotSupported("of a test")


def it_fails(arrays: Any, out: Any) -> None:
    if calls == 12:
        raise ZeroDivisionError("of a test")


def nothing(arrays: Any, out: Any) -> None:
    """Right ranks."""


def faulty(self: gar.Communicator, arrays: Any, out: Any = None, **keywords: Any) -> Any:
    """An all-reduce, and then the fault."""
    global calls
    calls += 1
    result = RIGHT(self, arrays, out, **keywords)
    globals()[FAULT](arrays, out)
    return result


if __name__ == "__main__":
    options = sys.argv[4:]
    if FAULT == "it_refuses":
        job.CALL_TIMEOUT_S = 5.0
    if len(NODE_OF) - 1 == RANK:
        if FAULT == "other_options":
            options += ["--seed", "5"]
        elif FAULT != "nothing":
            gar.Communicator.allreduce = faulty  # type: ignore[method-assign]
    status = main(["validate", *options])
    (FOLDER / f"status{RANK}").write_text(str(status))
    sys.exit(status)
