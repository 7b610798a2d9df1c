"""Without CuPy, without a GPU, or without NCCL: one clear error each, and nothing of CUDA is loaded
before it is asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys

import gpus
import pytest

PROLOGUE = """
import sys
import gpuallreduce as gar
def refused(call):
    try:
        call()
    except gar.NotSupported as error:
        print(error)
    else:
        raise SystemExit("it was not refused")
"""


def run(body: str, **variables: str) -> str:
    """What a process that sees no GPU prints."""
    unwanted = ("EMULATED_GPU", "GPUALLREDUCE_EMULATED", "PYTHONPATH")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + body],
        env={**environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_of_cuda_is_imported_for_host_ranks():
    body = """
import numpy as np
with gar.Communicator(["host"] * 2) as comm:
    comm.allreduce([np.ones(3), np.ones(3)])
gar.allreduce([np.ones(3), np.ones(3)])
print([name for name in sys.modules if name.split(".")[0] in ("cupy", "cuda", "pynvml", "numba")])
"""
    assert run(body).strip() == "[]"


def test_without_cupy_the_error_says_what_to_install():
    body = """
sys.modules["cupy"] = None
refused(lambda: gar.Communicator(["cuda:0"]))
refused(lambda: gar.init(device="cuda"))
"""
    for line in run(body).splitlines():
        assert line.startswith("CUDA devices need CuPy, and it cannot be imported")
        assert "pip install 'gpuallreduce[cuda13]' for drivers of CUDA 13, '[cuda12]'" in line


def test_without_a_gpu_the_error_says_so():
    body = """
refused(lambda: gar.Communicator(["cuda:0"] * 2))
refused(lambda: gar.Communicator(["cuda"]))
refused(lambda: gar.init(device="cuda:3"))
"""
    lines = run(body).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("CUDA devices need an NVIDIA GPU")
        assert "nvidia-smi" in line


@pytest.mark.skipif(gpus.are_real(), reason="the machine's driver would be found")
def test_gpus_that_a_process_may_not_see_do_not_exist_for_it():
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + "refused(lambda: gar.Communicator(['cuda:0']))"],
        env=gpus.variables(visible=""),
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert "sees none" in done.stdout or "CUDA says" in done.stdout
