"""Fixtures that all tests share: communicators of this process, and jobs of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import gpus
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


@pytest.fixture
def cuda_ranks() -> Iterator[Callable[..., gar.Communicator]]:
    """``cuda_ranks(n)``, or ``cuda_ranks(devices=[...])``, the same on GPUs."""
    gpus.start()
    with ExitStack() as stack:

        def make(
            nranks: int = 0, *, devices: list[str] | None = None, timeout: float = TIMEOUT_S
        ) -> gar.Communicator:
            names = gpus.devices(nranks) if devices is None else devices
            return stack.enter_context(gar.Communicator(names, timeout=timeout))

        yield make
