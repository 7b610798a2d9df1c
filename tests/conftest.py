"""Fixtures that all tests share: communicators of this process, and jobs of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import gpuallreduce as gar

TIMEOUT_S = 30.0


@pytest.fixture
def ranks() -> Iterator[Callable[..., gar.Communicator]]:
    """``ranks(n)`` makes a communicator of n ranks in this process; all are closed at the end."""
    with ExitStack() as stack:

        def make(nranks: int, *, timeout: float = TIMEOUT_S) -> gar.Communicator:
            return stack.enter_context(gar.Communicator(["host"] * nranks, timeout=timeout))

        yield make
