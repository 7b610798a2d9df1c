"""How processes get onto the emulated GPUs, and how their libraries are built.

Knows nothing of what runs there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_gpu.activate import FOLDER_VARIABLE, activate, environment
from emulated_gpu.build import build, cache_folder
from emulated_gpu.child import in_child

pytest.importorskip("cupy_backends", reason="the emulated GPUs run CuPy: install .[test,cuda13]")

TESTS = Path(__file__).resolve().parent
BUILD = TESTS / "emulated_gpu" / "build.py"


def python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=env, cwd=TESTS, capture_output=True, text=True, timeout=60, check=False
    )


@in_child()
def test_only_the_runtime_module_of_cupy_is_replaced() -> None:
    import cupy

    wheel = Path(cupy.__file__).parents[1]
    outside = {
        name
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in ("cupy", "cupy_backends", "cupyx")
        and getattr(module, "__file__", None)
        and wheel not in Path(module.__file__).parents
    }
    assert outside == {"cupy_backends.cuda.api.runtime"}
    assert Path(cupy.cuda.runtime.__file__).parent == build()


@in_child()
def test_libraries_are_the_stand_ins_whoever_loads_them() -> None:
    import pynvml
    from cuda.core import Device
    from cupy.cuda import nccl
    from numba import cuda

    pynvml.nvmlInit()
    assert nccl.available
    assert nccl.get_version() > 0
    assert Device(0).name == cuda.get_current_device().name
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for name in ("libcuda.so", "libnvidia-ml.so", "libnccl.so"):
        assert {Path(file).parent for file in mapped if name in file} == {build()}


@in_child()
def test_nvidias_runtime_in_the_process_is_not_called() -> None:
    import ctypes

    from cuda.pathfinder import load_nvidia_dynamic_lib

    ctypes.CDLL(load_nvidia_dynamic_lib("cudart").abs_path, ctypes.RTLD_GLOBAL)
    import cupy

    assert cupy.cuda.runtime.getDeviceCount() == 8
    assert cupy.zeros(3).get().tolist() == [0, 0, 0]


@in_child(gpus=2, topology="pcie4")
def test_processes_of_the_process_are_on_the_same_gpus() -> None:
    done = python("import cupy; print(cupy.cuda.runtime.getDeviceCount())", dict(os.environ))
    assert done.stdout == "2\n", done.stderr


@in_child(gpus=2)
def test_a_second_activation_does_nothing_and_other_settings_are_refused() -> None:
    import cupy

    activate()
    activate(gpus=2)
    with pytest.raises(RuntimeError, match="EMULATED_GPUS"):
        activate(gpus=4)
    assert cupy.cuda.runtime.getDeviceCount() == 2


ACTIVATE = "from emulated_gpu.activate import activate; activate(gpus=3); "
COUNT = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"


def test_a_process_can_activate_itself() -> None:
    done = python(ACTIVATE + COUNT, dict(os.environ))
    assert done.stdout == "3\n", done.stderr


def test_activation_after_cupy_is_refused() -> None:
    done = python("import cupy; " + ACTIVATE, dict(os.environ))
    assert "cupy was imported before activate()" in done.stderr


def test_activation_after_another_driver_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "libcuda.so.1"
    shutil.copy(build() / other.name, other)
    load = f"import ctypes; ctypes.CDLL({str(other)!r}); "
    done = python(load + ACTIVATE, dict(os.environ))
    assert "was loaded after another library of that name" in done.stderr


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="no such setting: gpu; there are gpus, topology"):
        environment(gpu=3)


def test_pythonpath_is_kept_and_a_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.hidden_one_ran = True\n")
    (tmp_path / "neighbour.py").write_text("")
    inherited = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ask = "from emulated_gpu.activate import environment; print(environment()['PYTHONPATH'])"
    path = python(ask, inherited).stdout.strip()
    assert path.split(os.pathsep)[1:] == [str(tmp_path)]
    env = {**environment(gpus=1), "PYTHONPATH": path}
    done = python("import sys, neighbour; print(sys.hidden_one_ran); " + COUNT, env)
    assert done.stdout == "True\n1\n", done.stderr


def test_a_process_that_cannot_be_activated_does_not_start() -> None:
    done = python("print('started')", {**environment(), FOLDER_VARIABLE: "/nowhere"})
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "the emulated GPUs cannot be used: " in done.stderr


def run_build(cache: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(BUILD)],
        env={**os.environ, "GPUALLREDUCE_TEST_CACHE": str(cache), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def copy_archive(cache: Path) -> None:
    """Spares a build the download, which is not what the test is about."""
    build()
    for archive in cache_folder().glob("cupy-*.tar.gz"):
        shutil.copy(archive, cache)


COMPILER = """#!/bin/sh
for last; do :; done  # the output comes last
echo "$last" >>"$(dirname "$0")/outputs"
: >"$last"
"""


def test_processes_that_build_at_once_share_one_build(tmp_path: Path) -> None:
    cache, compiler = tmp_path / "cache", tmp_path / "compiler"
    cache.mkdir()
    copy_archive(cache)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    builders = [run_build(cache, CXX=str(compiler)) for _ in range(3)]
    results = [builder.communicate(timeout=120) for builder in builders]
    folders = {stdout.strip() for stdout, _ in results}
    assert len(folders) == 1, results
    assert [path for path in cache.iterdir() if path.is_dir()] == [Path(folders.pop())]
    outputs = (tmp_path / "outputs").read_text().splitlines()
    assert len(outputs) == len(set(outputs))
    assert "libcuda.so.1" in {Path(output).name for output in outputs}


def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    _, words = run_build(tmp_path, CXX="true", **nowhere).communicate(timeout=60)
    assert "did not download" in words
    assert "READTHEDOCS=True" in words
    copy_archive(tmp_path)
    _, words = run_build(tmp_path, CXX="no-such-compiler").communicate(timeout=60)
    assert "looked for no-such-compiler" in words
    _, words = run_build(tmp_path, CXX="false").communicate(timeout=60)
    assert "failed (exit status 1)" in words
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
