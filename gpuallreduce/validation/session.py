"""Runs cases one after the other, on a new communicator where a case broke the last.

Knows nothing of how a communicator comes to be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable

from gpuallreduce.communicator import Communicator
from gpuallreduce.errors import CompileError, Error
from gpuallreduce.validation.cases import Case
from gpuallreduce.validation.oracle import Oracle
from gpuallreduce.validation.places import HostPlace, Place
from gpuallreduce.validation.run import Finding, Outcome, run_case

__all__ = ["run_cases"]

_BROKEN_LIMIT = 5  # each may have cost a whole time limit


def run_cases(
    cases: Iterable[Case],
    open_communicator: Callable[[], Communicator],
    *,
    seed: int,
    make_place: Callable[[Communicator], Place] = lambda communicator: HostPlace(
        communicator, shared=False
    ),
    before: Callable[[Case], None] | None = None,
    left_out: Callable[[Case], str] = lambda case: "",
) -> Generator[Outcome]:
    """Yields the outcome of each case, as soon as it is there; ends early if too many broke.

    Args:
        cases: on every rank the same.
        open_communicator: makes the first communicator, and another after each case that broke it.
        seed: of the inputs.
        make_place: makes the memory of a communicator's arrays.
        before: called before each case; a CompileError of it becomes the case's outcome.
        left_out: says of each case why it cannot be run on these ranks; empty if it can.
    """
    communicator = open_communicator()
    broken = 0
    try:
        place = make_place(communicator)
        oracle = Oracle(communicator.nranks, seed)
        for case in cases:
            reason = left_out(case)
            ready = Outcome(left_out=reason) if reason else _prepared(case, before)
            outcome = ready or run_case(communicator, case, oracle, place)
            broken += outcome.broken
            yield outcome
            if broken == _BROKEN_LIMIT:
                return
            if outcome.broken:
                with contextlib.suppress(Error):  # the outcome says more
                    communicator.close()
                communicator = open_communicator()
                place = make_place(communicator)
    finally:
        communicator.close()


def _prepared(case: Case, before: Callable[[Case], None] | None) -> Outcome | None:
    """None if the case can run, else why not."""
    try:
        if before is not None:
            before(case)
    except CompileError as error:
        return Outcome([Finding("raised", f"CompileError: {error}")])
    return None
