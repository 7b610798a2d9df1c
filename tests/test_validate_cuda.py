"""Validation on CUDA devices: every case passes there with the bits of host devices, and what goes
wrong on a GPU is seen.

Knows nothing of how GPUs run kernels; without a GPU they are emulated ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpus
import numpy as np
import pytest

from gpuallreduce import jit
from gpuallreduce.cli import main
from gpuallreduce.types import DTYPES
from gpuallreduce.validation import against, places
from gpuallreduce.validation.build import kernel_of
from gpuallreduce.validation.cases import VARIANTS, Case, enumerate_cases
from gpuallreduce.validation.oracle import Oracle
from gpuallreduce.validation.run import run_case
from gpuallreduce.validation.runners import CudaRunner, ThreadRunner

pytest.importorskip("cupy_backends", reason="CUDA devices need CuPy: install .[test,cuda13]")

LIMIT_S = 900
# Of each kind of element one, and of each width.
KINDS = "bool,int16,float8_e5m2,float32,complex64"
SAMPLE = "bool,int8,uint16,int64,float8_e5m2,bfloat16,float32,complex64,complex128"


def validate(*options: str, **settings: object) -> dict[str, Any]:
    """What the command finds, in a process of its own."""
    return found_by([sys.executable, "-m", "gpuallreduce"], *options, **settings)


def found_by(program: list[str], *options: str, **settings: object) -> dict[str, Any]:
    """The same, of a program that passes options on."""
    done = subprocess.run(
        [*program, "validate", "--json", "-", *options],
        env={**os.environ, **gpus.variables(**{"seed": 0, **settings})},
        capture_output=True,
        cwd="/",
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == [], found["failures"]
    assert (done.returncode, found["succeeded"], found["not_run"]) == (0, True, 0)
    return found


# ---- the cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nranks", "level", "dtypes"),
    [(2, "default", ""), (4, "default", KINDS), (8, "quick", SAMPLE)],
    ids=["2", "4", "8"],
)
def test_cases_pass_on_the_gpus_of_one_process(nranks, level, dtypes):
    options = ["--quick"] if level == "quick" else []
    options += ["-d", dtypes] if dtypes else []
    found = validate("--device", "cuda", "-g", str(nranks), *options)
    names = dtypes.split(",") if dtypes else ()
    assert found["cases"] == len(enumerate_cases(nranks, level, dtypes=names))
    assert found["left_out"] == 0


@pytest.mark.parametrize(
    ("nranks", "options"),
    [(2, ("--quick",)), (4, ("-d", KINDS, "--quick"))],
    ids=["2", "4"],
)
def test_cases_pass_with_a_process_for_each_gpu(nranks, options):
    assert validate("--device", "cuda", "--processes", str(nranks), *options)["left_out"] == 0


def test_cases_pass_where_a_launcher_started_a_process_for_each_gpu():
    program = [sys.executable, "-m", "gpuallreduce"]
    job = [*program, "run", "-n", "2", "--no-prefix", *program]
    found = found_by(job, "--device", "cuda", "--quick", "-d", "bfloat16", "-o", "sum")
    assert found["ranks"] == "2 CUDA ranks, a process each"
    assert {"two_shot", "auto"} <= set(found["variants"])


def test_cases_pass_with_ranks_that_share_a_gpu():
    validate("--devices", "cuda:0,cuda:0,cuda:1", "-d", "float16", "-o", "sum,max")


@pytest.mark.skipif(gpus.are_real(), reason="real GPUs cannot be told how they are linked")
@pytest.mark.parametrize("topology", ["partial", "islands2"])
def test_cases_pass_where_gpus_do_not_reach_each_other(topology):
    options = ("--device", "cuda", "-g", "4", "-d", "bfloat16,float32", "-o", "sum,max")
    found = validate(*options, topology=topology)
    # No rank can address another's arrays, so those cases are not possible; they are counted.
    cases = enumerate_cases(4, dtypes=["bfloat16", "float32"], ops=["sum", "max"])
    direct = [case for case in cases if VARIANTS[case.variant].access == "direct"]
    assert found["left_out"] in (0, len(direct))


@pytest.mark.skipif(gpus.are_real(), reason="a real driver cannot be told to refuse")
def test_cases_pass_between_processes_without_ipc():
    options = ("--device", "cuda", "--processes", "2", "-d", "bfloat16,float32", "-o", "sum,max")
    assert validate(*options, ipc=False)["left_out"] == 0


@pytest.mark.skipif(gpus.are_real(), reason="real streams cannot be told to be late")
def test_cases_pass_when_streams_are_late():
    options = ("--device", "cuda", "-g", "4", "-d", "bfloat16", "-o", "sum,max")
    validate(*options, seed=7, delay_us=200)


def test_results_have_the_bits_of_host_devices():
    devices = gpus.devices(2)
    cases = enumerate_cases(2, "quick", dtypes=SAMPLE.split(","))
    here = list(CudaRunner(devices, seed=5).run(cases))
    there = list(ThreadRunner(2, seed=5).run(cases))
    compared = 0
    for case, one, other in zip(cases, here, there, strict=True):
        assert (one.findings, other.findings) == ([], []), case
        rounds = DTYPES[case.dtype].kind in ("float", "complex")
        if VARIANTS[case.variant].order == "any" and rounds:
            continue  # the order of the fold follows the chunks, which the tuner chooses
        assert one.digest == other.digest, case
        compared += one.digest is not None
    assert compared > 500


def test_kernels_are_those_that_calls_run(cuda_ranks):
    communicator = cuda_ranks(3)
    place = places.place_of(communicator, shared=False)
    for case in enumerate_cases(3, dtypes=["int16"], ops=["sum"]):
        if case.collective == "allreduce" and case.in_place:
            arrays = [place.blank(i, case.count, np.dtype(np.int16)) for i in range(3)]
            variant = dataclasses.asdict(VARIANTS[case.variant])
            plan = communicator.plan(arrays, chunk_bytes=case.chunk_bytes, **variant)
            assert plan.kernel == kernel_of(case, communicator.topology), case


# ---- what goes wrong is seen ---------------------------------------------------------------------


CASE = Case("allreduce", "float32", "sum", 61, "one_shot", in_place=False, offset=1)


class Faulty:
    """A communicator whose all-reduces are right but for one thing that happens on a GPU after."""

    def __init__(self, communicator, fault):
        self.inner, self.fault = communicator, fault

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def allreduce(self, arrays, out=None, **keywords):
        self.inner.allreduce(arrays, out, **keywords)
        self.inner.synchronize()
        self.fault(arrays, arrays if out is None else out)


def poke(array, place):
    """Flips a bit of the byte at a place before or behind an array's start."""
    cupy = gpus.start()
    with array.device:
        byte = cupy.ndarray((1,), np.uint8, array.data + place)
        byte.set(byte.get() ^ 1)
        cupy.cuda.get_current_stream().synchronize()


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        (lambda arrays, outs: poke(outs[1], outs[1].nbytes - 4), {"exact", "reference", "ranks"}),
        (lambda arrays, outs: poke(outs[1], outs[1].nbytes), {"guard"}),
        (lambda arrays, outs: poke(arrays[0], -1), {"guard"}),
        (lambda arrays, outs: poke(arrays[2], 0), {"input"}),
    ],
    ids=["result", "behind", "before", "input"],
)
def test_faults_in_gpu_memory_are_seen(cuda_ranks, fault, checks):
    communicator, oracle = cuda_ranks(3), Oracle(3, seed=1)
    place = places.place_of(communicator, shared=False)
    assert run_case(communicator, CASE, oracle, place).findings == []
    outcome = run_case(Faulty(communicator, fault), CASE, oracle, place)
    found = {finding.check for finding in outcome.findings}
    assert found - {"error"} == checks  # one flipped bit may exceed the bound, or not


def mutated_kernels(tmp_path: Path, file: str, pattern: str, replacement: str) -> Path:
    """A copy of the kernel sources with one thing changed."""
    folder = tmp_path / "kernels"
    shutil.copytree(jit.kernels_folder(), folder)
    text = (folder / file).read_text()
    changed, count = re.subn(pattern, replacement, text, count=1, flags=re.DOTALL)
    assert count == 1, f"{file} has no {pattern}"
    (folder / file).write_text(changed)
    return folder


def test_a_wrong_kernel_is_seen(monkeypatch, tmp_path):
    folder = mutated_kernels(tmp_path, "ops.cuh", r"(struct Sum .*?)a \+ b", r"\1a - b")
    monkeypatch.setattr(jit, "kernels_folder", lambda: folder)
    monkeypatch.setattr("gpuallreduce.jit_cuda.kernels_folder", lambda: folder)
    monkeypatch.setattr("gpuallreduce.devices.cuda._loaded", {})
    cases = [
        Case("allreduce", "int16", op, 100, variant, in_place=False)
        for op in ("sum", "max")
        for variant in ("one_shot", "ring")
    ]
    outcomes = list(CudaRunner(gpus.devices(2), seed=0).run(cases))
    found = [{finding.check for finding in outcome.findings} for outcome in outcomes]
    assert found == [{"exact", "reference", "error"}] * 2 + [set()] * 2


def test_a_broken_communicator_costs_one_case(monkeypatch):
    cases = [dataclasses.replace(CASE, count=count) for count in (5, 6, 7)]

    runner = CudaRunner(gpus.devices(2), seed=0)
    opened = []
    real = CudaRunner._open

    def open_(self):
        communicator = real(self)
        opened.append(communicator)
        return communicator

    monkeypatch.setattr(CudaRunner, "_open", open_)
    outcomes = runner.run(cases)
    assert next(outcomes).findings == []
    opened[-1].abort()
    second, third = outcomes
    assert [finding.check for finding in second.findings] == ["raised"]
    assert second.broken
    assert third.findings == []


# ---- NCCL ----------------------------------------------------------------------------------------

FEW_GPUS = pytest.mark.skipif(
    gpus.are_real() and len(set(gpus.devices(3))) < 3, reason="NCCL wants a GPU for each rank"
)


@FEW_GPUS
def test_nccl_is_given_the_same_inputs(cuda_ranks):
    communicator = cuda_ranks(3)
    place = places.place_of(communicator, shared=False)
    names = ["bool", "int16", "int32", "float16", "complex64"]
    cases = against.comparable(enumerate_cases(3, "quick", dtypes=names))
    found = against.compare(communicator, place, cases, seed=2)
    assert found.succeeded
    assert set(found.rows) == {"int32", "float16", "complex64"}
    assert set(found.lacking) == {"bool", "int16", "int32", "complex64"}
    assert found.lacking["int32"] == ["band", "bor", "bxor"]
    half = found.rows["float16"]
    # NCCL rounds partial sums, and divides before it adds, so means are not compared on 3 ranks.
    assert 0 < half.exact < half.cases
    assert half.ours.fraction <= 1 < half.theirs.fraction
    assert half.agree
    assert half.repeats
    text = against.as_text(found)
    assert "bool (sum prod max min band bor bxor)" in text
    assert len([line for line in text.splitlines() if "NCCL lacks" in line]) == 1
    json.dumps(against.as_json(found), allow_nan=False)


@FEW_GPUS
def test_results_that_nccl_does_not_give_are_told(cuda_ranks):
    communicator = cuda_ranks(2)
    place = places.place_of(communicator, shared=False)

    class Other(Faulty):
        """Whose own results are wrong, not NCCL's."""

        def allreduce(self, arrays, out=None, *, algorithm=None, **keywords):
            self.inner.allreduce(arrays, out, algorithm=algorithm, **keywords)
            self.inner.synchronize()
            if algorithm is None:
                poke(out[1], 0)

    cases = [Case("allreduce", "int32", "sum", 9, in_place=False)]
    found = against.compare(Other(communicator, None), place, cases, seed=0)
    assert not found.succeeded
    assert "FAIL int32: 1 unequal; sum, 9 elements: element 0" in against.as_text(found)


@pytest.mark.skipif(gpus.are_real(), reason="needs an NCCL that is too old")
def test_without_a_usable_nccl_it_says_what_to_install():
    command = [sys.executable, "-m", "gpuallreduce", "validate", "--device", "cuda"]
    done = subprocess.run(
        [*command, "--against", "nccl"],
        env={**os.environ, **gpus.variables(), "EMULATED_NCCL_VERSION": "21703"},
        capture_output=True,
        cwd="/",
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "NCCL 2.18 or later is needed, and 2.17.3 is installed" in done.stderr
    assert "pip install nvidia-nccl-cu13" in done.stderr


def test_nccl_is_compared_on_gpus_of_one_process_only(capsys):
    for options in ([], ["--processes", "2", "--device", "cuda"], ["--devices", "host,host"]):
        assert main(["validate", "--against", "nccl", *options]) == 2
        assert "GPUs" in capsys.readouterr().err
