"""Where cases run: ranks that are threads of this process, GPUs of this process, or a process each.

Knows nothing of what cases check or of how outcomes are shown.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from gpuallreduce.bootstrap.launch import launch
from gpuallreduce.bootstrap.python import module_command
from gpuallreduce.checks import Deviation
from gpuallreduce.communicator import Communicator
from gpuallreduce.devices.cuda_runtime import find_gpu
from gpuallreduce.jit_cuda import Target
from gpuallreduce.topology import Topology, available_cores, host_topology
from gpuallreduce.validation.build import Builder, kernel_of, kernels_of, target_of_gpu
from gpuallreduce.validation.cases import Case
from gpuallreduce.validation.places import needs_shared, place_of
from gpuallreduce.validation.run import Finding, Outcome
from gpuallreduce.validation.session import run_cases

__all__ = [
    "CALL_TIMEOUT_S",
    "CudaProcessRunner",
    "CudaRunner",
    "ProcessRunner",
    "Runner",
    "ThreadRunner",
    "decode",
    "encode",
    "merged",
]

CALL_TIMEOUT_S = 30.0


class Runner(Protocol):
    """Somewhere to run cases."""

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """The outcomes of cases in their order; fewer if the ranks ended before the last."""

    def describe(self) -> str:
        """A few words on what the ranks are."""


class _Base:
    """What all have: how many ranks, which seed, and how many kernels were needed."""

    def __init__(self, nranks: int, seed: int) -> None:
        self.nranks, self.seed = nranks, seed
        self.kernels = 0

    def _builder(
        self, cases: Sequence[Case], topology: Topology, target: Target | None = None
    ) -> Builder:
        builder = Builder(kernels_of(cases, topology), available_cores(), target=target)
        self.kernels = max(self.kernels, len(builder))
        return builder


class ThreadRunner(_Base):
    """Ranks as threads of this process; cases run while later kernels compile."""

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """See Runner."""
        topology = host_topology(self.nranks, cores=available_cores(), one_process=True)
        with self._builder(cases, topology) as builder:
            yield from run_cases(
                cases,
                lambda: Communicator(["host"] * self.nranks, timeout=CALL_TIMEOUT_S),
                seed=self.seed,
                before=lambda case: builder.wait(kernel_of(case, topology)),
            )

    def describe(self) -> str:
        """See Runner."""
        return f"{self.nranks} host ranks, threads of one process"


class CudaRunner(_Base):
    """A GPU of this process for each rank; cases run while later kernels compile."""

    def __init__(self, devices: Sequence[str], seed: int) -> None:
        """With the name of each rank's GPU."""
        super().__init__(len(devices), seed)
        self.devices = list(devices)

    def _open(self) -> Communicator:
        return Communicator(self.devices, timeout=CALL_TIMEOUT_S)

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """See Runner."""
        with self._open() as communicator:
            topology = communicator.topology
        with self._builder(cases, topology, target_of_gpu(self.devices[0])) as builder:
            yield from run_cases(
                cases,
                self._open,
                seed=self.seed,
                make_place=lambda communicator: place_of(communicator, shared=needs_shared(cases)),
                before=lambda case: builder.wait(kernel_of(case, topology)),
            )

    def describe(self) -> str:
        """See Runner."""
        kinds = dict.fromkeys(find_gpu(name).name for name in self.devices)
        return f"ranks on {', '.join(self.devices)} ({', '.join(kinds)}), one process"


class ProcessRunner(_Base):
    """A process for each rank; all kernels compile first, so that no two ranks compile one."""

    device = "host"

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """See Runner."""
        self._prepare(cases)
        with tempfile.TemporaryDirectory(prefix="gpuallreduce-validate-") as name:
            folder = Path(name)
            task = {
                "seed": self.seed,
                "device": self.device,
                "cases": [dataclasses.asdict(case) for case in cases],
            }
            (folder / "cases.json").write_text(json.dumps(task))
            command = module_command("gpuallreduce.validation.worker", name)
            status = launch(self.nranks, command, stdout=2)
            if status >= 128 and status - 128 == 2:
                raise KeyboardInterrupt
            yield from self._gathered(folder, len(cases), status)

    def _prepare(self, cases: Sequence[Case]) -> None:
        topology = host_topology(self.nranks, cores=available_cores(), one_process=False)
        with self._builder(cases, topology) as builder:
            for case in cases:
                builder.wait(kernel_of(case, topology))

    def describe(self) -> str:
        """See Runner."""
        return f"{self.nranks} host ranks, a process each"

    def _gathered(self, folder: Path, ncases: int, status: int) -> Iterator[Outcome]:
        ranks = [_lines(folder / f"rank-{rank}.jsonl") for rank in range(self.nranks)]
        done = min(len(lines) for lines in ranks)
        for index in range(done):
            yield merged([decode(lines[index]) for lines in ranks])
        if done < ncases:
            late = [rank for rank, lines in enumerate(ranks) if len(lines) == done]
            what = f"the job ended here with exit status {status}; ranks {late} had not finished"
            yield Outcome([Finding("raised", what)])


class CudaProcessRunner(ProcessRunner):
    """A process with a GPU for each rank. They share out the kernels to compile among themselves:
    only they know how their GPUs reach each other, which decides what runs.
    """

    device = "cuda"

    def _prepare(self, cases: Sequence[Case]) -> None:
        """The ranks do."""

    def describe(self) -> str:
        """See Runner."""
        return f"{self.nranks} CUDA ranks, a process each"


def encode(outcome: Outcome) -> str:
    """An outcome as one line of text."""
    return json.dumps(dataclasses.asdict(outcome))


def decode(line: str) -> Outcome:
    """The outcome that a line stands for."""
    fields = json.loads(line)
    findings = [Finding(**finding) for finding in fields.pop("findings")]
    return Outcome(findings, Deviation(*fields.pop("deviation")), **fields)


def _lines(path: Path) -> list[str]:
    """The complete lines of a file that may not be there."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def merged(outcomes: Sequence[Outcome | None]) -> Outcome:
    """One outcome out of those of all ranks, whose results must be equal; None: of a rank that did
    not come to the case.
    """
    ranks = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
    first_rank, first = ranks[0]
    whole = Outcome(digest=first.digest, left_out=first.left_out)
    # A check has one finding, and that should not be the others' wait for the rank that failed.
    for rank, outcome in sorted(ranks, key=lambda each: _waited(each[1])):
        for finding in outcome.findings:
            by = "" if finding.message.startswith("rank ") else f"rank {rank}: "
            whole.note(finding.check, by + finding.message)
        if outcome.deviation.fraction >= whole.deviation.fraction:
            whole.deviation = outcome.deviation
        if outcome.digest != whole.digest:
            message = f"its result has other bits than rank {first_rank}'s"
            whole.note("ranks", message, rank=rank)
    return whole


def _waited(outcome: Outcome) -> bool:
    """Whether all that went wrong is that other ranks did not come."""
    return any(finding.message.startswith(("Timeout:", "Aborted:")) for finding in outcome.findings)
