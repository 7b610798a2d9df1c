"""How the ranks of a benchmark meet and compare notes, beside the calls that it times.

Knows nothing of what is measured.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from gpuallreduce.communicator import Communicator

from .places import Place, place_of

__all__ = ["Ranks", "given"]

Array = np.ndarray[Any, Any]


class Ranks:
    """The processes behind a communicator.

    Attributes:
        comm: the communicator.
        nranks: its ranks.
        local: those of this process.
        together: all ranks live in this process.
        leads: this process holds rank 0, and does the talking.
        layout: name and number of ranks of every node.
        place: the devices of the local ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.nranks: int = comm.nranks
        self.local = tuple(comm.ranks)
        self.together = len(self.local) == self.nranks
        self.leads = 0 in self.local
        self.layout = comm.layout
        self.place: Place = place_of(comm)

    def barrier(self) -> None:
        """Meets the other processes. Ranks of one process always start together."""
        if not self.together:
            self.comm.barrier()

    def gather(self, values: Array) -> Array:
        """Every process's values, one row each; the same array on all of them."""
        row = np.ascontiguousarray(values).reshape(-1)
        if self.together:
            return row[np.newaxis]
        return self.place.gather(row).reshape(self.nranks, -1)

    def exchange(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """What every process brought, in the order of ranks: anything that JSON can hold."""
        text = np.frombuffer(json.dumps(payload).encode(), np.uint8)
        length = int(self.slowest(np.array([text.size], np.int64))[0])
        rows = self.gather(np.pad(text, (0, length - text.size), constant_values=ord(" ")))
        return [json.loads(row.tobytes()) for row in rows]

    def slowest(self, values: Array) -> Array:
        """The largest over the processes, for each value."""
        return np.asarray(self.gather(values).max(axis=0))

    def total(self, count: int) -> int:
        """The sum over the processes."""
        return int(self.gather(np.array([count], np.int64)).sum())


def given(arrays: list[Array]) -> Any:
    """Arrays of the local ranks as calls take them: one rank brings its array, several a list."""
    return arrays[0] if len(arrays) == 1 else arrays
