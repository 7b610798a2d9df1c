"""What a library that moves data between ranks must offer, whichever it is.

Knows nothing of arrays, plans or our kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Engine"]


class Engine(Protocol):
    """Collectives on addresses, ordered on streams. One entry per local rank in each sequence."""

    def check_pair(self, dtype: Any, op: Any) -> None:
        """Raises NotSupported if the library lacks an element type or operator."""

    def all_reduce(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        count: int,
        *,
        dtype: Any,
        op: Any,
        streams: Sequence[int],
    ) -> None:
        """Every output becomes the fold over all inputs."""

    def check(self) -> None:
        """Raises DeviceError if work that was enqueued has failed; does not wait."""

    def abort(self) -> None:
        """Ends all work that is enqueued, without waiting for peers; from any thread."""

    def close(self) -> None:
        """Gives everything back. Idempotent."""
