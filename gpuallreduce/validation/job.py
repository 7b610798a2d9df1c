"""A validation run whose ranks a launcher started, on one node or several: each process is a rank,
makes the same calls, and learns what all ranks saw.

Knows nothing of which cases there are, of command lines, nor of how a summary is shown.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuallreduce.api import init
from gpuallreduce.bootstrap.environment import Identity, identify
from gpuallreduce.bootstrap.launchers import launched_by
from gpuallreduce.bootstrap.nodes import Nodes, meet
from gpuallreduce.communicator import Communicator
from gpuallreduce.errors import Error, MismatchError
from gpuallreduce.validation.build import (
    compile_share,
    kernels_between,
    kernels_of,
    target_of_gpu,
)
from gpuallreduce.validation.cases import VARIANTS, Case
from gpuallreduce.validation.places import Place, needs_shared, place_of
from gpuallreduce.validation.run import Finding, Outcome, refused_because
from gpuallreduce.validation.runners import CALL_TIMEOUT_S, decode, encode, merged
from gpuallreduce.validation.session import run_cases

__all__ = ["JobRunner", "this_rank"]

COMPILE_TIMEOUT_S = 3600.0
START_TIMEOUT_S = 120.0  # many processes may load their modules from one slow disk
OUTCOMES_TIMEOUT_S = 600.0  # a rank may have waited for several calls that do not end
BATCH = 32  # cases between two exchanges
BREAKS_LIMIT = 5  # each may have cost a whole time limit
# No communicator of these processes has this number, so they cannot be met at the same address.
_INSTANCE = 1 << 30


def this_rank(environ: Mapping[str, str]) -> Identity | None:
    """Who this process is in a launcher's job; None if it is alone.

    Raises:
        InvalidArgument, NotSupported: there is a job, and how its ranks meet is not said.
    """
    launcher = launched_by(environ)
    if launcher is None or environ.get(launcher.nranks, "1") == "1":
        return None
    return identify(environ, instance=_INSTANCE, across=True)


class JobRunner:
    """One rank's part in a run of all. A Runner: every rank yields the same outcomes of all ranks,
    so all sum up alike, and look for the same smaller cases. Use it as a context manager.

    Ranks talk about cases by a rendezvous of their own, never by the calls that they check.

    Attributes:
        rank, nranks: this process's place.
        nodes: ranks of each node.
        ended: why no more cases can be run; empty while they can.
    """

    def __init__(
        self, identity: Identity, *, device: str, seed: int, asked: Mapping[str, Any]
    ) -> None:
        """Meets the other ranks; a collective.

        Args:
            identity: see ``this_rank``.
            device: what ranks run on.
            seed: of the inputs.
            asked: what all ranks must have been asked for, as JSON can hold it.

        Raises:
            MismatchError: ranks were asked for different things; on every rank.
            Timeout, DeviceError, InvalidArgument: as ``gpuallreduce.init``.
        """
        self.rank, self.nranks, self.ended = identity.rank, identity.nranks, ""
        self._device, self._seed, self._prepared = device, seed, False
        self._nodes: Nodes = meet(identity, timeout=START_TIMEOUT_S)
        self.nodes = self._nodes.sizes
        try:
            self._compare(asked)
        except BaseException:
            self._nodes.close()
            raise

    def _compare(self, asked: Mapping[str, Any]) -> None:
        mine = {"asked": dict(asked), "machine": _machine()}
        parts = [part.payload for part in self._nodes.everyone.exchange("options", mine)]
        for rank, part in enumerate(parts):
            if part["asked"] != parts[0]["asked"]:
                differing = {
                    name: (parts[0]["asked"].get(name), value)
                    for name, value in part["asked"].items()
                    if parts[0]["asked"].get(name) != value
                }
                first, other = (
                    ", ".join(f"{name} {pair[side]}" for name, pair in differing.items())
                    for side in (0, 1)
                )
                raise MismatchError(
                    f"the ranks were not asked to validate the same: rank 0 has {first}, rank "
                    f"{rank} has {other}; start all with the same options"
                )
        # Ranks of one machine share its cache of kernels.
        self._near = [r for r, part in enumerate(parts) if part["machine"] == mine["machine"]]

    def __enter__(self) -> JobRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.close()

    def describe(self) -> str:
        """See Runner."""
        kind = "host" if self._device == "host" else "CUDA"
        text = f"{self.nranks} {kind} ranks, a process each"
        if len(self.nodes) > 1:
            text += f", on {len(self.nodes)} nodes ({' + '.join(map(str, self.nodes))})"
        return text

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """See Runner. A collective: every rank runs the same cases, and stops at the same."""
        if self.ended or not cases:
            return
        try:
            reasons = self._prepare(cases)
        except Error as error:
            if not self._prepared:
                raise
            self.ended = str(error)  # there are outcomes to tell
            return
        self._prepared, shared = True, needs_shared(cases)
        done = breaks = 0
        while done < len(cases) and not self.ended:
            outcomes = run_cases(
                cases[done:],
                self._open,
                seed=self._seed,
                make_place=lambda communicator: place_of(communicator, shared=shared),
                left_out=lambda case: reasons.get(_feature(case, self._device), ""),
            )
            for found in self._batches(outcomes):
                yield from found
                done += len(found)
            breaks += done < len(cases)
            if breaks == BREAKS_LIMIT:
                self.ended = "too many cases left the ranks out of step"
        if self.ended:
            yield Outcome([Finding("raised", f"the job ended here: {self.ended}")])

    def finish(self) -> None:
        """Waits until rank 0 has shown the result: the first process that ends with a status other
        than 0 makes some launchers end all.
        """
        with contextlib.suppress(Error):
            self._nodes.everyone.exchange("report", timeout=OUTCOMES_TIMEOUT_S)

    @property
    def alone(self) -> bool:
        """Whether nobody is left who could show the result."""
        return self.rank != 0 and 0 in self._nodes.everyone.lost()

    def _open(self) -> Communicator:
        # Finds out sooner than the ranks' own meeting whether one has ended.
        self._nodes.everyone.exchange("a communicator", timeout=OUTCOMES_TIMEOUT_S)
        return init(device=self._device, timeout=CALL_TIMEOUT_S)

    def _batches(self, outcomes: Generator[Outcome]) -> Iterator[list[Outcome]]:
        """The outcomes of all ranks together, until there are no more or a case broke some rank's
        communicator. Then ranks may have come to different cases, and all go on after the last.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(Error))  # of a broken communicator's end
            stack.callback(outcomes.close)
            more = True
            while more and not self.ended:
                lines, mine = self._next(outcomes)
                parts = self._exchange({"lines": lines, **mine})
                more = all(part["more"] for part in parts)
                rows = itertools.zip_longest(*(part["lines"] for part in parts))
                yield [merged([decode(line) if line else None for line in row]) for row in rows]

    def _next(self, outcomes: Iterator[Outcome]) -> tuple[list[str], dict[str, Any]]:
        """This rank's next lines; whether more can follow; and why its part has ended."""
        lines: list[str] = []
        try:
            for outcome in itertools.islice(outcomes, BATCH):
                lines.append(encode(outcome))
                if outcome.broken:
                    return lines, {"more": False, "ended": ""}
        except Error as error:
            return lines, {"more": False, "ended": f"{type(error).__name__}: {error}"}
        return lines, {"more": len(lines) == BATCH, "ended": ""}

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What all ranks bring; nothing once a rank is lost. Notes why the job has ended."""
        try:
            found = self._nodes.everyone.exchange("outcomes", mine, timeout=OUTCOMES_TIMEOUT_S)
        except Error as error:
            self.ended = mine["ended"] or str(error)
            return []
        parts = [part.payload for part in found]
        why = [f"rank {rank}: {part['ended']}" for rank, part in enumerate(parts) if part["ended"]]
        self.ended = why[0] if why else ""
        return parts

    def _prepare(self, cases: Sequence[Case]) -> dict[tuple[Any, ...], str]:
        """Compiles what the cases need, and finds out what these ranks do not offer."""
        with init(device=self._device, timeout=COMPILE_TIMEOUT_S) as communicator:
            self._compile(communicator, cases)
            self._nodes.everyone.exchange("compiling", timeout=COMPILE_TIMEOUT_S)
            if len(self.nodes) == 1:
                return {}
            first: dict[tuple[Any, ...], Case] = {}
            for case in cases:
                first.setdefault(_feature(case, self._device), case)
            return _not_offered(communicator, place_of(communicator, shared=False), first)

    def _compile(self, communicator: Communicator, cases: Sequence[Case]) -> None:
        topology, near = communicator.topology, self._near
        if len(self.nodes) == 1:
            kernels = kernels_of(cases, topology)
        else:
            here = sorted({self._nodes.node_of[rank] for rank in near})
            kernels = kernels_between(cases, self.nodes, here, topology)
        target = None if self._device == "host" else target_of_gpu("cuda")
        compile_share(kernels, near.index(self.rank), len(near), target=target)


def _machine() -> str:
    """The same text for processes of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else os.uname()}"


def _feature(case: Case, device: str) -> tuple[Any, ...]:
    """What ranks on several nodes offer or not, whatever the size; on GPUs, where another library
    adds up in the free order, pair by pair.
    """
    free = device != "host" and VARIANTS[case.variant].order == "any"
    pair = (case.dtype, case.op) if free else ()
    return case.collective, case.variant, case.chunk_bytes is not None, *pair


def _not_offered(
    communicator: Communicator, place: Place, first: Mapping[tuple[Any, ...], Case]
) -> dict[tuple[Any, ...], str]:
    """Why cases cannot be run, by what ranks do not offer. A collective.

    Args:
        communicator: of all ranks.
        place: where its arrays lie.
        first: a case for each thing that ranks may not offer.
    """
    found = {}
    for feature, case in first.items():
        if case.collective == "barrier":
            continue
        defined = replace(case, dtype="int32", op="sum") if case.refused else case
        reason = refused_because(communicator, replace(defined, count=1, in_place=True), place)
        if reason:
            found[feature] = reason
    return found
