"""Short texts that a rank tells others out of turn, such as why it gave up.

Knows nothing of what they mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from gpuallreduce.fabric.mpi_requests import LOCK

__all__ = ["Words"]

LONGEST_BYTES = 3000  # MPI sends as much at once, so nobody waits for a rank that does not listen


class Words:
    """The way of such texts. Its communicator carries nothing else, and is never freed: MPI could
    give a text that is late to another communicator that has the number of this one.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        """Internal: use ``Mpi.words``."""
        self._mpi, self._comm = mpi, comm
        self._sent: list[Any] = []

    def tell(self, ranks: Sequence[int], text: str) -> None:
        """Starts to send a text; what MPI cannot deliver is nobody's failure.

        Open MPI connects two processes at their first message, and ends the process where it
        cannot: so tell ranks that messages have gone to before.
        """
        data = bytearray(text.encode()[:LONGEST_BYTES])
        for rank in ranks:
            with LOCK, contextlib.suppress(self._mpi.Exception):
                request = self._comm.Isend([data, self._mpi.BYTE], rank)
                self._sent.append((request, data))  # MPI reads it until the request is done

    def heard(self) -> str | None:
        """A text that has come. Never waits."""
        with LOCK, contextlib.suppress(self._mpi.Exception):
            self._sent = [each for each in self._sent if not each[0].Test()]
            status = self._mpi.Status()
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, status=status)
            if message is not None:
                data = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv([data, self._mpi.BYTE])
                return data.decode(errors="ignore")
        return None
