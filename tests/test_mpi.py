"""The MPI engine under a real mpirun: every check of ``mpi_ranks`` on four processes."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpuallreduce import reference
from gpuallreduce.fabric.mpi_reductions import one_nan
from gpuallreduce.types import DTYPES

HERE = Path(__file__).parent
RANKS = HERE / "mpi_ranks.py"
NOT_CHECKS = {"exchange", "join", "raised", "pairs", "bits", "reduced", "expected_of", "main"}
# Read, not imported: importing it would start MPI in this process.
CHECKS = [
    node.name
    for node in ast.parse(RANKS.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name not in NOT_CHECKS
]
ENVIRON = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def mpirun(nranks: int, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun (Debian and Ubuntu: apt install openmpi-bin)")
    whole = ["mpirun", "-n", str(nranks), "--oversubscribe", sys.executable, *command]
    return subprocess.run(
        whole, env={**ENVIRON, **environ}, capture_output=True, text=True, cwd="/", timeout=100
    )


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str | None]]:
    """What each rank found, by check."""
    folder = tmp_path_factory.mktemp("mpi")
    done = mpirun(4, str(RANKS), str(folder), *CHECKS)
    found: dict[str, dict[int, str | None]] = {name: {} for name in CHECKS}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            name, error = json.loads(line)
            found[name][int(path.name)] = error
    assert done.returncode == 0, (done.stderr, found)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_on_four_ranks(check: str, findings: dict[str, dict[int, str | None]]) -> None:
    assert findings[check] == dict.fromkeys(range(4))


AVAILABLE = "from gpuallreduce.fabric.mpi import Mpi; print(Mpi.available())"


def test_without_mpirun_it_says_what_to_start() -> None:
    hidden = ("OMPI_", "PMI", "MPI_")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    code = AVAILABLE + "; import sys; assert 'mpi4py.MPI' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "was not started by an MPI launcher" in done.stdout
    assert "mpirun" in done.stdout


def test_without_mpi4py_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; " + AVAILABLE
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert "mpi4py is not installed: pip install 'gpuallreduce[mpi]'" in done.stdout


@pytest.mark.parametrize(
    ("level", "concurrent", "reason"),
    [
        ("single", False, "MPI_THREAD_SERIALIZED is needed"),
        ("funneled", False, "MPI_THREAD_SERIALIZED is needed"),
        ("serialized", False, None),
        ("serialized", True, "MPI_THREAD_MULTIPLE is needed"),
    ],
)
def test_a_thread_level_that_is_too_low_is_refused(
    level: str, concurrent: bool, reason: str | None
) -> None:
    code = f"""
import mpi4py
mpi4py.rc.thread_level = {level!r}
from gpuallreduce.fabric.mpi import Mpi
print(Mpi.available(concurrent={concurrent}))
"""
    done = mpirun(1, "-c", code)
    assert done.returncode == 0, done.stderr
    assert (reason or "None") in done.stdout


@pytest.mark.parametrize("name", [*reference.NAN_BITS, "complex64", "complex128"])
def test_nans_become_the_one_of_the_contract(name: str) -> None:
    dtype = DTYPES[name]
    part = reference.part_of(dtype)
    unsigned = np.dtype(f"u{part.itemsize}")
    rng = np.random.default_rng(3)
    # Random bits: NaNs of every kind between numbers.
    x = rng.integers(0, np.iinfo(unsigned).max, 40_000, unsigned, endpoint=True)
    x[:7] |= 0x7F if part.itemsize == 1 else np.iinfo(unsigned).max  # some, in any case
    before = x.copy()
    with np.errstate(invalid="ignore"):
        nan = np.isnan(before.view(part.numpy))
    one_nan(x.view(dtype.numpy), dtype)
    assert nan[:7].all()
    assert (x[nan] == reference.NAN_BITS[part.name]).all()
    assert (x[~nan] == before[~nan]).all()
